"""Files next to the weights: each that alters vectors is read or refused by name, and each cure is carried out."""

import json
import shutil
from pathlib import Path

import library_checkpoints as checkpoints
import pytest
import torch
from safetensors.torch import load_file
from sentence_folders import save_sentence_model, write_json
from tower_checkpoints import edit_json
from tower_checks import embed_whole, make_batch, randomise

import embedder
from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_checkpoint, import_timm_and_text
from shards.convert.known_files import KNOWN_FILES
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_summary import read_import_record

DEMO = Path(embedder.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert") / "own"
    checkpoints.bert(folder)
    return folder


@pytest.fixture
def own(bert, tmp_path):
    return shutil.copytree(bert, tmp_path / "own")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "clip"
    checkpoints.clip(folder)
    return folder


def refusal(source, tmp_path):
    with pytest.raises(ModelError) as caught:
        import_checkpoint(source, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()
    return str(caught.value)


def uses(folder):
    return {each["file"]: (each["use"], each["what"]) for each in read_import_record(folder)["files"]}


def test_the_record_says_of_each_known_file_whether_it_was_read(tmp_path):
    own = tmp_path / "own"
    save_sentence_model(own, "mean", version=3, limits={"max_seq_length": 9}, settings={"similarity_fn_name": "dot"})
    for name in ("generation_config.json", "preprocessor_config.json", "trainer_state.json", "vocab.txt", "README.md"):
        (own / name).write_text("{}")
    torch.save({}, own / "pytorch_model.bin")
    import_checkpoint(own, tmp_path / "model")
    found = uses(tmp_path / "model")
    assert found == {
        "modules.json": ("read", "Transformer + Pooling + Normalize"),
        "config_sentence_transformers.json": (
            "read",
            "similarity dot: here vectors have length 1 and are ranked by cosine",
        ),
        "sentence_bert_config.json": ("read", "up to 9 tokens"),
        "1_Pooling/config.json": ("read", "pooling: mean of the tokens"),
        "config.json": ("read", "towers"),
        "model.safetensors": ("read", "weights"),
        "tokenizer.json": ("read", "tokeniser"),
        "tokenizer_config.json": ("read", "tokeniser"),
        "vocab.txt": ("no influence", "tokeniser; tokenizer.json wins"),
        "pytorch_model.bin": ("no influence", "weights; model.safetensors wins"),
        "preprocessor_config.json": ("no influence", "image processing; the model has no vision tower"),
        "generation_config.json": ("no influence", "how text is generated"),
        "trainer_state.json": ("no influence", "a file that is not known here"),
    }


def test_files_that_are_said_to_have_no_influence_have_none(own, tmp_path):
    import_checkpoint(own, tmp_path / "before")
    names = ("generation_config.json", "preprocessor_config.json", "sentence_bert_config.json", "chat_template.json")
    for name in (*names, "config_sentence_transformers.json", "video_preprocessor_config.json"):
        write_json(own / name, {"max_seq_length": 5, "do_lower_case": False, "prompts": {"query": "x"}})
    (own / "vocab.txt").write_text("[UNK]\na\nb\n")
    (own / "pytorch_model.bin").write_bytes(b"no weights")
    import_checkpoint(own, tmp_path / "after")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert {use for use, _ in uses(tmp_path / "after").values()} == {"read", "no influence"}


def test_the_files_that_are_said_to_be_read_are(clip, tmp_path):
    """Each is damaged, and the import refuses or gives another model."""
    import_checkpoint(clip, tmp_path / "model")
    read = [name for name, (use, _) in uses(tmp_path / "model").items() if use == "read"]
    assert {"config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"} <= {*read}
    for name in set(read) - {"tokenizer_config.json", "special_tokens_map.json"}:
        own = shutil.copytree(clip, tmp_path / f"own-{name}")
        (own / name).write_text("{}")
        with pytest.raises(ModelError):
            import_checkpoint(own, tmp_path / f"model-{name}")
    own = shutil.copytree(clip, tmp_path / "own")
    edit_json(own / "tokenizer_config.json", model_max_length=7)
    assert import_checkpoint(own, tmp_path / "shorter").preprocess.max_caption_tokens == 7


def test_where_parts_disagree_one_line_says_which_won(tmp_path):
    checkpoints.dinov2(tmp_path / "dino")
    import_checkpoint(tmp_path / "dino", tmp_path / "vision")
    won = f"image size: {checkpoints.SIZE} px of the image processor wins over 56 of config.json"
    assert read_import_record(tmp_path / "vision")["decisions"] == [won]
    checkpoints.timm_vit(tmp_path / "vit")
    checkpoints.bert(tmp_path / "bert")
    edit_json(tmp_path / "bert/tokenizer_config.json", model_max_length=512)
    edit_json(tmp_path / "bert/config.json", auto_map={"AutoModel": "own--modeling.OwnModel"})
    import_timm_and_text(tmp_path / "vit", tmp_path / "bert", tmp_path / "joined", 8)
    assert read_import_record(tmp_path / "joined")["decisions"] == [
        "config.json names its own code (own--modeling.OwnModel), which isn't run: transformers' class wins",
        "captions up to 40 tokens: the tower's positions wins over 512 of tokenizer_config.json",
    ]


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({"files": 3, "decisions": []}, "files: Input should be a valid list"),
        ({"files": [{"file": "config.json"}], "decisions": []}, "files.0.use: Field required"),
        ({"decisions": []}, "files: Field required"),
    ],
)
def test_a_record_that_is_none_is_one_line(tmp_path, record, rule):
    write_json(tmp_path / "import.json", record)
    with pytest.raises(ModelError, match=r"import\.json: [^\n]*delete it, or import again$") as caught:
        read_import_record(tmp_path)
    assert rule in str(caught.value)


@pytest.mark.parametrize("limit", [0, 1, float("inf")])
def test_a_limit_that_leaves_no_caption_or_is_none_is_the_towers(own, tmp_path, limit):
    edit_json(own / "tokenizer_config.json", model_max_length=limit, truncation_side="left")
    config = import_checkpoint(own, tmp_path / "model")
    assert config.preprocess.max_caption_tokens == config.text.max_tokens
    assert (
        "longer captions lose their end: truncation_side = left of tokenizer_config.json isn't followed"
        in (read_import_record(tmp_path / "model")["decisions"])
    )


def test_a_setting_of_special_tokens_that_no_tokenizer_json_can_hold_is_reported(own, tmp_path):
    for is_split in (False, True):
        edit_json(own / "tokenizer_config.json", split_special_tokens=is_split)
        import_checkpoint(own, tmp_path / f"model-{is_split}")
        lines = [each for each in read_import_record(tmp_path / f"model-{is_split}")["decisions"] if "special" in each]
        note = "a special token's name in a caption is that token: split_special_tokens of tokenizer_config.json"
        assert lines == [f"{note} isn't followed"] * is_split


def test_patterns_of_known_files_are_unique():
    assert len({each.pattern for each in KNOWN_FILES}) == len(KNOWN_FILES)


def test_an_adapter_is_refused_and_its_cure_gives_the_merged_vectors(own, tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(own)}
    write_json(tmp_path / "adapter/adapter_config.json", adapter)
    assert f"this is a LORA adapter over {own}" in refusal(tmp_path / "adapter", tmp_path)
    write_json(own / "adapter_config.json", adapter)  # transformers would load the base and the adapter
    assert "adapter_config.json: this is a LORA adapter" in refusal(own, tmp_path)
    (own / "adapter_config.json").unlink()
    peft = pytest.importorskip("peft")
    from transformers import AutoModel

    config = peft.LoraConfig(r=4, target_modules=["query", "value"])
    tuned = randomise(peft.get_peft_model(AutoModel.from_pretrained(own), config))
    tuned.save_pretrained(tmp_path / "adapter")
    message = refusal(tmp_path / "adapter", tmp_path)
    code = message.partition("merge it with PEFT: ")[2].partition(", put the base's")[0]
    merged = tmp_path / "merged"
    eval(code, {"PeftModel": peft.PeftModel, "AutoModel": AutoModel, "DIR": str(merged)})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(own / name, merged)
    import_checkpoint(merged, tmp_path / "model")
    query = load_file(tmp_path / "model/model.safetensors")["text.encoder.layer.0.attention.self.query.weight"]
    assert (
        query - load_file(own / "model.safetensors")["encoder.layer.0.attention.self.query.weight"]
    ).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "weights are quantised .bitsandbytes.; give the model",
        ),
        ({"quantization_config": {}}, "weights are quantised"),
        ({"sentence_transformers": {"version": "4"}}, "a CrossEncoder of sentence-transformers: it scores pairs"),
        ({"sbert_ce_default_activation_function": "x"}, "a CrossEncoder"),
    ],
)
def test_quantised_weights_and_cross_encoders_are_refused_and_what_is_named_is_taken(change, message, own, tmp_path):
    plain = shutil.copytree(own, tmp_path / "plain")
    edit_json(own / "config.json", **change)
    with pytest.raises(ModelError, match=message):
        import_checkpoint(own, tmp_path / "model")
    import_checkpoint(plain, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.gguf", "a GGUF of llama.cpp"),
        ("tf_model.h5", "weights for TensorFlow"),
        ("flax_model.msgpack", "weights for Flax"),
        ("model.onnx", "an ONNX program"),
        ("model.tflite", "a program of TensorFlow Lite"),
        ("big_vision.npz", "arrays of NumPy or JAX"),
    ],
)
def test_weights_of_other_programs_are_named_and_their_cure_is_taken(name, kind, own, tmp_path):
    said = f"{name} is {kind}, which can't be imported; give the folder with the safetensors"
    other = tmp_path / "other"
    other.mkdir()
    (other / name).write_bytes(b"GGUF\3")
    assert said in refusal(other / name, tmp_path)
    assert said in refusal(other, tmp_path)
    shutil.move(own / "model.safetensors", tmp_path / "model.safetensors")
    (own / name).touch()
    assert said in refusal(own, tmp_path)
    shutil.move(tmp_path / "model.safetensors", own)
    import_checkpoint(own, tmp_path / "model")


def test_the_cure_of_a_token_that_was_added_behind_the_end_gives_the_librarys_vectors(clip, tmp_path):
    from transformers import AutoModel, AutoTokenizer, CLIPModel

    own = tmp_path / "own"
    shutil.copytree(clip, own)
    model, tokens = CLIPModel.from_pretrained(own), AutoTokenizer.from_pretrained(own)
    end = tokens.eos_token_id
    tokens.add_tokens(["<my-toy>"])
    model.text_model.resize_token_embeddings(len(tokens))
    model.save_pretrained(own)
    tokens.save_pretrained(own)
    text = json.loads((own / "config.json").read_text())["text_config"]
    edit_json(own / "config.json", text_config=text | {"eos_token_id": 2})  # as OpenAI's published configuration has it
    message = refusal(own, tmp_path)
    cure = f"if '<my-toy>' was added behind the end token, write eos_token_id = {end} into config.json"
    assert message.endswith(cure)
    edit_json(own / "config.json", text_config=text | {"eos_token_id": end})
    config = import_checkpoint(own, tmp_path / "model")
    encoder = CaptionEncoder(
        (tmp_path / "model/tokenizer.json").read_text(), config.preprocess.max_caption_tokens, config.text.end_id
    )
    theirs, captions = AutoModel.from_pretrained(own).eval(), ["a red car", "a <my-toy> in the car"]
    found = embed_whole(tmp_path / "model", make_batch(config, [encoder.encode(each).tolist() for each in captions], 2))
    with torch.no_grad():
        expected = theirs.get_text_features(**tokens(captions, padding=True, return_tensors="pt")).pooler_output
    assert (found["text"] - torch.nn.functional.normalize(expected, dim=1)).abs().max() < 1e-5


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_the_cure_of_a_training_checkpoint_gives_the_same_model(prefix, clip, tmp_path):
    state = load_file(clip / "model.safetensors")
    path = tmp_path / "epoch_3.pt"
    torch.save({"epoch": 3, "state_dict": {prefix + name: each for name, each in state.items()}}, path)
    message = refusal(path, tmp_path)
    assert "put only its state dict " in message
    assert (f"without {prefix!r} before its names" in message) == bool(prefix)
    own = tmp_path / "own"
    shutil.copytree(clip, own)
    (own / "model.safetensors").unlink()
    alone = {name.removeprefix(prefix): each for name, each in torch.load(path)["state_dict"].items()}
    torch.save(alone, own / "pytorch_model.bin")
    import_checkpoint(own, tmp_path / "model")
    import_checkpoint(clip, tmp_path / "expected")
    assert model_fingerprint(tmp_path / "model") == model_fingerprint(tmp_path / "expected")


def test_a_model_folder_without_a_record_has_none():
    assert read_import_record(DEMO) == {}
    assert load_model_config(DEMO).preprocess.caption_prompt == ""
