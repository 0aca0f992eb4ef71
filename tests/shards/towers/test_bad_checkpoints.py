"""Checkpoints that are broken, mixed up or hostile: each refused in one line, with nothing left behind; and pickles."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tower_checkpoints import NUM_TOKENS, SIZE, TEXT, VISION, byte_level_bpe, edit_json, save_clip
from tower_checks import randomise

from shards.convert import import_checkpoint
from shards.convert.pickled_weights import checkpoint_weights
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError

WEIGHTS, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
POSITIONS = "vision_model.embeddings.position_embedding.weight"
FC1 = "text_model.encoder.layers.1.mlp.fc1.weight"
NORM = "vision_model.post_layernorm.bias"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "checkpoint"
    save_clip(folder)
    return folder


@pytest.fixture
def own(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "own")


def change(**tensors):
    """Damage that sets tensors, `__` for the dots of their names; a function makes the new one of the old."""

    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        for name, new in tensors.items():
            if new is None:
                del weights[name]
            else:
                weights[name] = new(weights.get(name))
        save_file(weights, folder / WEIGHTS)

    return damage


def broken_value(value):
    def spoil(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3:5] = value
        return tensor

    return spoil


def edit(file="config.json", **changes):
    return lambda folder: edit_json(folder / file, **changes)


def cut_off(num_bytes):
    def damage(folder):
        os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - num_bytes if num_bytes > 0 else -num_bytes)

    return damage


def shard(weight_map=None, without=(), **files):
    """Damage that spreads weights over two files with an index, and then leaves out a file or changes the index."""

    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        sides = {"text": "model-00001-of-00002.safetensors", "rest": "model-00002-of-00002.safetensors"}
        names = {name: sides["text" if name.startswith("text_model") else "rest"] for name in weights}
        for file_name in sides.values():
            save_file({name: weights[name] for name in weights if names[name] == file_name}, folder / file_name)
        (folder / INDEX).write_text(json.dumps({"weight_map": names | (weight_map or {})}))
        for file_name in without:
            (folder / file_name).unlink()

    return damage


def hold_siglip(folder):
    """Keep the claim to be a CLIP over the weights of a SigLIP."""
    from transformers import SiglipConfig, SiglipModel

    text = {key: value for key, value in TEXT.items() if not key.endswith("token_id")}
    model = randomise(SiglipModel(SiglipConfig(text_config=text, vision_config=VISION)))
    save_file({name: each.clone() for name, each in model.state_dict().items()}, folder / WEIGHTS)


def write_tokenizer(num_tokens):
    return lambda folder: (folder / "tokenizer.json").write_text(byte_level_bpe(num_tokens).to_str())


def add_no_tokens(folder):
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": None}))


def give_a_far_id(folder):
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["vocab"]["far"] = NUM_TOKENS + 9
    (folder / "tokenizer.json").write_text(json.dumps(tree))


BAD = {
    "NaN": (change(**{FC1: broken_value(float("nan"))}), rf"own/{WEIGHTS}: the tensor {FC1} has 2 of 2048 .*NaN.*;"),
    "inf": (change(**{NORM: broken_value(-float("inf"))}), rf"{WEIGHTS}: the tensor {NORM} has 2 of 48 .*infinite"),
    "NaN in the scale": (change(logit_scale=lambda _: torch.tensor(float("nan"))), "logit_scale has 1 of 1 values"),
    "NaN in half precision": (
        change(**{FC1: lambda old: broken_value(float("nan"))(old.bfloat16())}),
        rf"the tensor {FC1} has 2 of 2048",
    ),
    "integers": (change(**{NORM: lambda old: old.to(torch.int8)}), rf"{NORM} has dtype int8, expected .*bfloat16"),
    "missing": (change(**{NORM: None}), rf"own: the weight files lack the tensor {NORM}, .*\[48\]; .*fetch both"),
    "extra": (
        change(**{"text_model.extra": lambda _: torch.ones(3)}),
        rf"own/{WEIGHTS}: found the tensor text_model.extra, which a clip_.* hasn't; .*fetch both",
    ),
    "misshapen": (
        change(**{FC1: lambda old: old.T.contiguous()}),
        rf"own/{WEIGHTS}: the tensor {FC1} has shape \[32, 64\], expected \[64, 32\]; .*fetch both",
    ),
    "positions of another image size": (
        edit(vision_config__image_size=SIZE + 8),
        "own/preprocessor_config.json: size = {'shortest_edge': 32}.*: expected.*as the model takes 40 px",
    ),
    "positions of another image size, processor too": (
        lambda folder: [
            edit(vision_config__image_size=40)(folder),
            edit("preprocessor_config.json", size={"shortest_edge": 40}, crop_size={"height": 40, "width": 40})(folder),
        ],
        rf"own/{WEIGHTS}: the tensor {POSITIONS} has shape \[17, 48\], expected \[26, 48\]; set the image size",
    ),
    "cut off": (cut_off(1000), rf"own/{WEIGHTS}: .*cut off, fetch it again"),
    "cut off in the header": (cut_off(-100), rf"own/{WEIGHTS}: 100 bytes hold no whole safetensors header; fetch"),
    "empty": (cut_off(-0), rf"own/{WEIGHTS}: 0 bytes hold no whole"),
    "a file is missing": (
        shard(without=["model-00001-of-00002.safetensors"]),
        rf"own/model-00001-of-00002.safetensors: there is no such file, but {INDEX} puts tensors there; fetch it, too",
    ),
    "an index that leaves the folder": (
        shard({NORM: "../secret.safetensors"}),
        rf"own/{INDEX}: names the file '../secret.safetensors'; expected the plain name",
    ),
    "an index of other files": (
        shard({NORM: "model-00001-of-00002.safetensors"}),
        rf"own/model-00001-of-00002.safetensors: lacks the tensor {NORM} that the index puts there; fetch both",
    ),
    "an index without a map": (
        lambda folder: [shard()(folder), (folder / INDEX).write_text("{}")],
        rf"own/{INDEX}: found no weight_map",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"own: found no weights; expected .*pytorch_model.bin"),
    "a larger vocabulary": (write_tokenizer(NUM_TOKENS + 2), r"own: the tokeniser has 302 tokens, .* knows 300; bring"),
    "a token behind the table": (give_a_far_id, "the tokeniser has 310 tokens, the text tower knows 300; bring"),
    "a smaller vocabulary, with another end": (
        write_tokenizer(NUM_TOKENS - 10),
        r"own: the tokeniser gives an empty caption the ids \[288, 289\], without the end token 299",
    ),
    "no tokens around a caption": (
        add_no_tokens,
        r"own: the tokeniser gives an empty caption the ids \[\], without the end token 299 .*; bring the tokeniser",
    ),
    "CLIP by name, SigLIP by weights": (hold_siglip, rf"own/{WEIGHTS}: found the tensor .* a clip_.* hasn't; .*fetch"),
    "SigLIP by name, CLIP by weights": (
        edit(
            model_type="siglip",
            vision_config__model_type="siglip_vision_model",
            text_config__model_type="siglip_text_model",
        ),
        rf"own/{WEIGHTS}: found the tensor .* a siglip_.* hasn't; .*fetch",
    ),
    "BERT's text tower by name": (
        edit(model_type="vision-text-dual-encoder", text_config__model_type="bert"),
        rf"own/{WEIGHTS}: found the tensor text_model.* a clip_vision_model \+ bert .* hasn't; .*fetch",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "own/config.json: this is no valid JSON"),
}


def refuse(folder, message):
    """Import, and expect one line, nothing next to the checkpoint, and nothing changed in it."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelError, match=message) as caught:
        import_checkpoint(folder, folder.parent / "deeper" / "out")
    assert "\n" not in str(caught.value)
    assert ".tmp" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert [path for path in folder.parent.rglob("*") if folder not in path.parents and path.is_file()] == []
    assert not (folder.parent / "deeper" / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_in_one_line_and_nothing_is_left(own, case):
    damage, message = BAD[case]
    damage(own)
    refuse(own, message)


def save_pickle(folder, **options):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / PICKLE, **options)


def split_pickles(folder, weight_map=None):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(weights)}
    for file_name in set(names.values()):
        torch.save({name: weights[name] for name in weights if names[name] == file_name}, folder / file_name)
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": names | (weight_map or {})}))


@pytest.mark.parametrize(
    "pickle",
    [save_pickle, lambda folder: save_pickle(folder, _use_new_zipfile_serialization=False), split_pickles],
    ids=["zip", "legacy", "several"],
)
def test_pickled_weights_become_the_same_model(checkpoint, own, tmp_path, pickle):
    import_checkpoint(checkpoint, tmp_path / "expected")
    pickle(own)
    import_checkpoint(own, tmp_path / "found")
    assert model_fingerprint(tmp_path / "found") == model_fingerprint(tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "found", "own"]


def test_safetensors_are_taken_where_there_are_both(own, tmp_path):
    (own / PICKLE).write_bytes(b"not to be opened")
    import_checkpoint(own, tmp_path / "out")


def test_half_precision_is_kept_in_either_format(own, tmp_path):
    weights = {name: each.bfloat16() for name, each in load_file(own / WEIGHTS).items()}
    save_file(weights, own / WEIGHTS)
    import_checkpoint(own, tmp_path / "safetensors")
    save_pickle(own)
    import_checkpoint(own, tmp_path / "pickle")
    for name in ("safetensors", "pickle"):
        assert {each.dtype for each in load_file(tmp_path / name / WEIGHTS).values()} == {torch.bfloat16}


def test_a_padded_vocabulary_is_fine(own, tmp_path):
    table = "text_model.embeddings.token_embedding.weight"
    change(**{table: lambda old: torch.cat([old, torch.zeros(20, old.shape[1])])})(own)
    edit(text_config__vocab_size=NUM_TOKENS + 20)(own)
    import_checkpoint(own, tmp_path / "out")
    assert load_model_config(tmp_path / "out").required_text.num_vocabulary == NUM_TOKENS + 20


def test_shared_and_sliced_tensors_of_a_pickle_come_out_whole(tmp_path):
    table = torch.arange(12.0).reshape(3, 4)
    state = {"a": table, "tied": table, "row": table[1], "turned": table.T, "ids": torch.arange(3).expand(1, -1)}
    state["parameter"] = torch.nn.Parameter(table[2:].clone())
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.save(state, folder / f"open_clip_{PICKLE}")
    with checkpoint_weights(folder, tmp_path / "deeper" / "out", "open_clip_") as files:
        found = {name: load_file(path)[name] for name, path in files.items()}
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled(change_state=None, **options):
    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        torch.save(change_state(weights, folder.parent) if change_state else weights, folder / PICKLE, **options)

    return damage


def replaced(name, value):
    return pickled(lambda weights, _: weights | {name: value})


def write_bytes(content):
    def damage(folder):
        save_pickle(folder)
        whole = (folder / PICKLE).read_bytes()
        (folder / PICKLE).write_bytes(content(whole) if callable(content) else content)

    return damage


REFUSED = r"torch's weights-only loader refuses it \(.*nothing else, fetch the file again, or save .* as safetensors"
BAD_PICKLES = {
    "code": (pickled(lambda _, tmp: {"a": Payload(tmp / "ran")}), r"it names the code posix.mkdir.*"),
    "code, legacy": (
        pickled(lambda _, tmp: {"a": Payload(tmp / "ran")}, _use_new_zipfile_serialization=False),
        "it names the code posix.mkdir",
    ),
    "a whole module": (pickled(lambda _, __: torch.nn.Linear(2, 2)), r"it names the code torch.nn.modules.linear"),
    "cut off": (write_bytes(lambda whole: whole[: len(whole) // 2]), REFUSED),
    "empty": (write_bytes(b""), REFUSED),
    "a pointer of git's large files": (write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), REFUSED),
    "no mapping": (pickled(lambda _, __: [torch.ones(3)]), "found one list, expected tensors by name"),
    "a state inside": (pickled(lambda weights, _: {"state_dict": weights}), "'state_dict': found .*dict, expected"),
    "a number": (replaced("epoch", 3), "'epoch': found int, expected a dense tensor"),
    "a numbered name": (replaced(3, torch.ones(3)), "found a name of type int"),
    "sparse": (replaced(NORM, torch.ones(48).to_sparse()), f"'{NORM}': found a torch.sparse_coo tensor"),
    "without values": (replaced(NORM, torch.ones(48, device="meta")), f"'{NORM}': found a tensor without values"),
    "one value for many": (
        replaced(NORM, torch.ones(1).expand(1 << 40)),
        f"'{NORM}': found a tensor of {1 << 42} bytes, of which 4 are stored",
    ),
    "NaN": (replaced(NORM, torch.full((48,), float("nan"))), f"the tensor {NORM} has 48 of 48 values"),
    "missing": (
        pickled(lambda weights, _: {name: each for name, each in weights.items() if name != NORM}),
        f"the weight files lack the tensor {NORM}",
    ),
    "misshapen": (replaced(NORM, torch.ones(47)), rf"the tensor {NORM} has shape \[47\], expected \[48\]"),
}


@pytest.mark.parametrize("case", BAD_PICKLES)
def test_a_bad_pickle_is_refused_by_name_and_never_executed(own, case, capfd):
    damage, message = BAD_PICKLES[case]
    damage(own)
    capfd.readouterr()
    line = refuse(own, message)
    assert line.startswith(str(own / PICKLE)), line
    assert "weights_only" not in line
    assert capfd.readouterr().err == ""
    assert not (own.parent / "ran").exists()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({NORM: "../secret.bin"}, r"names the file '../secret.bin'; expected the plain name of a .bin file"),
        ({NORM: "/etc/passwd"}, "expected the plain name"),
        ({NORM: "pytorch_model-00003-of-00003.bin"}, r"00003.bin: there is no such file, but pytorch_model.bin.index"),
        ({"other": "pytorch_model-00001-of-00002.bin"}, "00001-of-00002.bin: lacks the tensor other that the index"),
    ],
)
def test_a_bad_index_of_pickles_is_refused(own, weight_map, message):
    split_pickles(own, weight_map)
    refuse(own, message)


def test_the_message_of_a_broken_pickle_among_several_names_it(own):
    split_pickles(own)
    second = own / "pytorch_model-00002-of-00002.bin"
    weights = torch.load(second, weights_only=True)
    name = next(name for name in weights if name.endswith("weight"))
    torch.save(weights | {name: weights[name] * float("nan")}, second)
    assert refuse(own, name).startswith(f"{second}: the tensor {name}")
