"""`embedder model import`: towers joined by `--text`, hints for what is no checkpoint, and random weights."""

import json
import re

import pytest
import samples
import torch
from command_runs import run_here
from library_checkpoints import save_timm
from sentence_folders import save_sentence_model
from tiny_models import tiny_config
from tiny_tokenizers import NUM_TOKENS, wordpiece
from tower_checkpoints import save_clip
from tower_checks import randomise

from shards.convert import import_checkpoint
from shards.fresh import init_model
from shards.model_config import load_model_config
from shards.model_summary import fresh_towers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a timm ViT, of transformers' ViT and CLIP, and of a BERT."""
    import timm
    from transformers import BertConfig, BertModel, ViTConfig, ViTImageProcessor, ViTModel

    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    vit = timm.create_model("vit_small_patch16_224", num_classes=7, **sizes)
    save_timm(vit, folder / "vit", **sizes)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    randomise(BertModel(BertConfig(vocab_size=NUM_TOKENS, **sizes))).save_pretrained(folder / "bert")
    wordpiece().save_pretrained(folder / "bert")
    sizes |= {"image_size": 32, "patch_size": 8}
    randomise(ViTModel(ViTConfig(**sizes))).save_pretrained(folder / "hf-vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "hf-vit")
    save_clip(folder / "clip")
    return folder


@pytest.mark.parametrize("option", ["--text", "--albert"])
def test_a_text_tower_joins_a_timm_checkpoint(checkpoints, tmp_path, option):
    out = tmp_path / "joined"
    ended = run_here(
        "model", "import", checkpoints / "vit", option, checkpoints / "bert", "--embedding-dim", 24, "--out", out
    )
    assert ended.code == 0, ended.stderr
    assert ("--albert is called --text now" in ended.stdout) == (option == "--albert")
    assert "its projections are fresh" in ended.stdout
    config = load_model_config(out)
    assert (config.text.family, config.embedding_dim, config.trained) == ("bert", 24, False)


def test_both_names_of_the_option_are_refused(checkpoints, tmp_path):
    texts = [argument for option in ("--text", "--albert") for argument in (option, checkpoints / "bert")]
    ended = run_here("model", "import", checkpoints / "vit", *texts, "--out", tmp_path / "out")
    assert ended.code == 2
    assert "--albert is the old name of --text; give only --text" in ended.stderr


def refused(*arguments, out):
    """The one line that a refused import says."""
    ended = run_here("model", "import", *arguments, "--out", out)
    assert ended.code == 2, ended.stderr
    assert not out.exists()
    (line,) = ended.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("source", "text", "hint"),
    [
        ("hf-vit", "bert", r"saved by transformers, and --text joins one that timm saved; .*from_vision_text_pre"),
        ("clip", "bert", "this model has a text tower already; import it without --text"),
        ("bert", "vit", "this is the text tower, and .* the one for images; change their places"),
        ("bert", "hf-vit", "this is the text tower, and .* the one for images; change their places"),
        ("bert", "bert", "this is a text tower; SRC of an import with --text is a vision tower that timm saved"),
        ("vit", "hf-vit", "hf-vit: --text takes a text tower, and this is one for images"),
        ("vit", "clip", "clip: --text takes only a text tower, and this model has two"),
    ],
)  # fmt: skip
def test_a_tower_on_the_wrong_side_gets_its_own_hint(checkpoints, tmp_path, source, text, hint):
    line = refused(checkpoints / source, "--text", checkpoints / text, out=tmp_path / "out")
    assert re.search(hint, line)


@pytest.mark.parametrize(
    ("source", "trained", "notes"),
    [
        ("vit", False, ["its vision tower has random weights", "it has only a vision tower: .*--text DIR joins"]),
        ("hf-vit", True, ["it has only a vision tower"]),
        ("bert", True, ["it has only a text tower"]),
        ("clip", True, []),
    ],
)  # fmt: skip
def test_an_import_says_what_the_model_can_not_do(checkpoints, tmp_path, source, trained, notes):
    ended = run_here("model", "import", checkpoints / source, "--out", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    _, *lines = ended.stdout.strip().replace("\n  ", " ").splitlines()
    text = " ".join(lines)
    assert all(re.search(note, text) for note in notes)
    assert bool(text) == bool(notes)
    assert load_model_config(tmp_path / "out").trained is trained


STATES = {
    "timm": {"patch_embed.proj.weight": 0, "blocks.0.norm1.weight": 0},
    "open_clip": {"visual.conv1.weight": 0, "transformer.resblocks.0.ln_1.weight": 0},
    "transformers": {"vision_model.embeddings.class_embedding": 0, "text_model.embeddings.token_embedding.weight": 0},
    "unknown": {"a.b": 0, "c": 0},
}
CURES = {
    "timm": r"those of timm: .*save_for_hf\(timm\.create_model\(NAME, checkpoint_path='.*weights\.pth'",
    "open_clip": r"those of open_clip: put it as open_clip_pytorch_model\.bin into a folder with the open_clip_config",
    "transformers": r"those of transformers: put it as pytorch_model\.bin into a folder with the config\.json",
    "unknown": r"its names \(a\.b, c, \.\.\.\) are those of no library",
}


def tensors(library, prefix=""):
    return {prefix + name: torch.ones(2) for name in STATES[library]}


@pytest.mark.parametrize("library", STATES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_is_called_so_and_its_library_named(tmp_path, library, prefix):
    path = tmp_path / "weights.pth"
    torch.save(tensors(library, prefix), path)
    line = refused(path, out=tmp_path / "out")
    assert f"{path}: this is a state dict (2 tensors) without its configuration; " in line
    cure = CURES[library]
    if prefix:
        cure = cure.replace("a\\.b, c", "module.a.b, module.c")
        cure = cure.replace("put it", "put only its state dict without 'module.' before its names")
    assert re.search(cure, line)
    assert re.search("no config.json: this is a state dict", refused(tmp_path, out=tmp_path / "out"))
    assert "this is a state dict" in refused(path, "--text", tmp_path, out=tmp_path / "out")


def test_a_state_dict_inside_a_training_checkpoint_is_found(tmp_path):
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": tensors("timm")}, tmp_path / "last.ckpt")
    line = refused(tmp_path / "last.ckpt", out=tmp_path / "out")
    assert "a state dict (2 tensors under 'state_dict') without its configuration; its names are those of timm" in line


class Evil:
    def __reduce__(self):
        return exec, ("print('code of the file ran')",)  # Ray 2.52 replaces `print` itself


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "hint"),
    [
        (lambda path: path.write_bytes(b"PK\x03\x04 cut off"), "loader refuses it .*no whole file of torch"),
        (lambda path: torch.save(Evil(), path), "loader refuses it .*it names the code exec"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "loader refuses it .*it names the code torch"),
        (lambda path: torch.save({"epoch": 3}, path), "this file holds no tensors by name"),
        (lambda path: torch.save([1], path), "this file holds no tensors by name"),
        (lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path), "this is a TorchScript program"),
    ],
)  # fmt: skip
def test_other_files_of_weights_are_named_and_run_no_code(tmp_path, capfd, write, hint):
    write(tmp_path / "model.pt")
    assert re.search(hint, refused(tmp_path / "model.pt", out=tmp_path / "out"))
    assert "code of the file ran" not in capfd.readouterr().out


def test_a_file_that_is_no_weights_is_a_file(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    assert "this is a file; give the model folder" in refused(tmp_path / "a.pdf", out=tmp_path / "out")


def test_the_hint_for_timm_makes_a_checkpoint_that_is_taken(tmp_path):
    import timm

    model = randomise(timm.create_model("vit_tiny_patch16_224", depth=1))
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    again = timm.create_model("vit_tiny_patch16_224", depth=1, checkpoint_path=str(tmp_path / "weights.pth"))
    save_timm(again, tmp_path / "saved", depth=1)
    assert import_checkpoint(tmp_path / "saved", tmp_path / "out").trained


def test_random_weights_are_not_called_trained(checkpoints, tmp_path, tiny_model):
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    assert import_checkpoint(tmp_path / "vit", tmp_path / "fresh").trained is False
    assert load_model_config(tmp_path / "fresh").trained is False
    half = json.loads((tmp_path / "fresh/config.json").read_text()) | {"trained": True}  # as it was imported before
    (tmp_path / "fresh/config.json").write_text(json.dumps(half))
    shown = run_here("model", "info", tmp_path / "fresh").stdout
    assert "untrained: its vision tower has random weights, as before any training" in shown
    assert fresh_towers(tiny_model) == ("vision", "text")
    claimed = tiny_config().model_copy(update={"trained": True})
    assert load_model_config(init_model(claimed, tmp_path / "claimed", seed=0)).trained is False
    doctor = run_here("doctor", "--set", f"model={tiny_model}", "--json").found
    assert doctor["model"] == "tiny, untrained: its vision and text towers have random weights, as before any training"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_norm_that_has_learnt_makes_a_tower_a_trained_one(tiny_model, tmp_path, dtype):
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.to(dtype) for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert fresh_towers(tmp_path) == ("vision", "text")
    weights["vision.blocks.3.norm2.weight"][5] = 1.01
    save_file(weights, tmp_path / "model.safetensors")
    assert fresh_towers(tmp_path) == ("text",)


def test_towers_that_were_joined_and_never_trained_have_fresh_projections(checkpoints, tmp_path):
    from transformers import AutoTokenizer, VisionTextDualEncoderModel, ViTImageProcessor

    model = VisionTextDualEncoderModel.from_vision_text_pretrained(
        str(checkpoints / "hf-vit"), str(checkpoints / "bert")
    )
    for name, scale in (("new", None), ("trained", 3.0)):
        if scale is not None:
            model.logit_scale.data.fill_(scale)
        model.save_pretrained(tmp_path / name)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(checkpoints / "bert").save_pretrained(tmp_path / name)
        assert import_checkpoint(tmp_path / name, tmp_path / f"{name} out").trained is (scale is not None)


def test_the_first_line_of_a_run_says_that_its_model_is_untrained(tiny_model, tmp_path):
    samples.folder(tmp_path / "in", num_images=2)
    ended = run_here(
        "embed", tmp_path / "in", "--model", tiny_model, "--store", tmp_path / "store", "--engine", "local"
    )
    assert ended.code == 0, ended.stderr
    assert "model tiny is untrained: its vision and text towers have random weights" in ended.stderr.splitlines()[0]


def test_info_shows_what_an_import_did_with_each_file(tmp_path):
    save_sentence_model(tmp_path / "own", "max", version=3, limits={"max_seq_length": 9, "do_lower_case": False})
    ended = run_here("model", "import", tmp_path / "own", "--out", tmp_path / "out")
    line = "captions up to 9 tokens: sentence_bert_config.json wins over 24 of tokenizer_config.json"
    assert line in ended.stdout
    shown = run_here("model", "info", tmp_path / "out").stdout
    assert line in shown
    assert re.search(r"imported from +use +what", shown)
    assert re.search(r"1_Pooling/config.json +read +pooling: max of the tokens", shown)
    found = run_here("model", "info", tmp_path / "out", "--json").found["import"]
    assert {"file": "model.safetensors", "use": "read", "what": "weights"} in found["files"]
    (tmp_path / "out/import.json").unlink()  # as of a folder that an older version made
    assert "imported from" not in run_here("model", "info", tmp_path / "out").stdout
