"""Models of transformers by their task: what they give is what the library gives, and bad folders are refused."""

import io
import json
import shutil

import hf_checkpoints
import library_checkpoints as checkpoints
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from servable_runs import png, run_servables, vectors

from embedder.servables import make_servable
from embedder.servables.running_servable import RunningServable
from embedder.servables.servable_errors import ServableError

SIZES = [(32, 32), (90, 60), (60, 90), (47, 100)]
IMAGES = [png(seed, size) for seed, size in enumerate(SIZES)]
CAPTIONS = ["A red car", "two cats sleep on a sofa in the rain", "fruit", "Émile's café, 2 €"]
TABLE = pa.table({"image": [*IMAGES, None], "caption": [*CAPTIONS, None]})


def section(folder, task, **keys):
    return {"name": "s", "kind": "hf", "uri": str(folder), "task": task} | keys


def pillow():
    return [Image.open(io.BytesIO(image)).convert("RGB") for image in IMAGES]


def check_last_is_null(found):
    for name in found.column_names:
        if name.startswith("s."):
            assert found[name][-1].as_py() is None
            assert name == "s.error" or found[name].null_count == 1, found["s.error"].to_pylist()


@pytest.mark.parametrize("save", [checkpoints.clip, checkpoints.siglip, checkpoints.vit, checkpoints.dinov2])
def test_features_of_images_are_the_librarys(save, tmp_path):
    library = save(tmp_path / "model")
    found = run_servables(TABLE, section(tmp_path / "model", "image-feature-extraction"))
    check_last_is_null(found)
    with torch.no_grad():
        expected = torch.nn.functional.normalize(library.images(pillow()), dim=-1).numpy()
    assert np.abs(vectors(found.slice(0, 4), "s.embedding") - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("save", "keys"),
    [
        (checkpoints.clip, {}),
        (checkpoints.bert, {}),
        (checkpoints.distilbert, {}),
        (checkpoints.siglip, {"padding": "max_length", "max_tokens": checkpoints.LENGTH}),  # as it was trained
    ],
)
def test_features_of_texts_are_the_librarys(save, keys, tmp_path):
    library = save(tmp_path / "model")
    settings = {"normalise": False, "batch_size": 3} | keys
    found = run_servables(TABLE, section(tmp_path / "model", "feature-extraction", **settings))
    check_last_is_null(found)
    with torch.no_grad():
        expected = library.texts(CAPTIONS).numpy()
    assert np.abs(vectors(found.slice(0, 4), "s.embedding") - expected).max() < 1e-5


def test_pooling_is_as_asked(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    checkpoints.bert(tmp_path / "model")
    kinds = ("cls", "mean", "pooler")
    keys = {"normalise": False}
    found = run_servables(
        TABLE, *(section(tmp_path / "model", "feature-extraction", name=each, pooling=each, **keys) for each in kinds)
    )
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = AutoModel.from_pretrained(tmp_path / "model").eval()(**tokens)
    lengths = tokens["attention_mask"].sum(1).tolist()
    states = out.last_hidden_state
    means = torch.stack([states[row, :length].mean(0) for row, length in enumerate(lengths)])
    for name, expected in zip(kinds, (states[:, 0], means, out.pooler_output), strict=True):
        assert np.abs(vectors(found.slice(0, 4), f"{name}.embedding") - expected.numpy()).max() < 1e-5
    assert (states[:, 0] - means).abs().max() > 1e-3


OWN_RULE = {"image_size": checkpoints.SIZE, "resize": "squash", "interpolation": "bilinear"}
OWN_RULE |= {"resampler": "torchvision", "reduced_decode": False}


@pytest.mark.parametrize(
    ("save", "task", "top_k", "keys"),
    [
        (hf_checkpoints.image_classifier, "image-classification", 2, {}),
        (hf_checkpoints.image_classifier, "image-classification", 2, {"preprocess": OWN_RULE}),
        (hf_checkpoints.text_classifier, "text-classification", 3, {}),
    ],
)
def test_classes_are_the_librarys(tmp_path, save, task, top_k, keys):
    from transformers import pipeline

    save(tmp_path / "model")
    found = run_servables(TABLE, section(tmp_path / "model", task, top_k=top_k, **keys))
    check_last_is_null(found)
    given = CAPTIONS if task.startswith("text") else pillow()
    expected = pipeline(task, model=str(tmp_path / "model"), device="cpu")(given, top_k=top_k)
    for row, answer in enumerate(expected):
        assert found["s.labels"][row].as_py() == [each["label"] for each in answer]
        assert found["s.scores"][row].as_py() == pytest.approx([each["score"] for each in answer], abs=1e-5)


def test_classes_of_ones_own_are_ranked_for_texts_and_images(tmp_path):
    hf_checkpoints.entailment(tmp_path / "texts")
    checkpoints.clip(tmp_path / "images")
    labels = ["red car", "fruit", "cat"]
    found = run_servables(
        TABLE,
        section(tmp_path / "texts", "zero-shot-classification", labels=labels),
        section(tmp_path / "images", "zero-shot-image-classification", labels=labels, name="i", top_k=2),
    )
    check_last_is_null(found)
    for row in range(4):
        assert sorted(found["s.labels"][row].as_py()) == sorted(labels)
        scores = found["s.scores"][row].as_py()
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-4)
        assert len(found["i.labels"][row].as_py()) == 2


def test_objects_have_boxes_as_parts_of_the_image(tmp_path):
    from transformers import pipeline

    hf_checkpoints.detector(tmp_path / "model")
    found = run_servables(TABLE, section(tmp_path / "model", "object-detection", threshold=0.0))
    check_last_is_null(found)
    detect = pipeline("object-detection", model=str(tmp_path / "model"), device="cpu", threshold=0.0)
    num_objects = 0
    for row, image in enumerate(pillow()):
        answer = sorted(detect(image), key=lambda each: -each["score"])
        assert found["s.labels"][row].as_py() == [each["label"] for each in answer]
        assert found["s.scores"][row].as_py() == pytest.approx([each["score"] for each in answer], abs=1e-4)
        num_objects += len(answer)
        for box, each in zip(found["s.boxes"][row].as_py(), answer, strict=True):
            width, height = image.size
            corners = [each["box"][key] for key in ("xmin", "ymin", "xmax", "ymax")]
            assert np.array(box) * [width, height, width, height] == pytest.approx(corners, abs=1.01)
    assert num_objects > 0


def test_nothing_found_is_an_empty_list_and_no_error(tmp_path):
    hf_checkpoints.detector(tmp_path / "model")
    found = run_servables(TABLE, section(tmp_path / "model", "object-detection", threshold=1.0))
    assert found["s.boxes"].to_pylist() == [[], [], [], [], None]
    assert found["s.error"].to_pylist() == [None] * 5


def test_captions_are_written_and_embedded_in_the_same_run(tmp_path, tiny_model):
    hf_checkpoints.captioner(tmp_path / "model")
    captioner = section(tmp_path / "model", "image-to-text", name="captioner", max_new_tokens=6)
    tower = {"name": "tower", "kind": "towers", "uri": str(tiny_model), "sides": ["text"], "text_of": "captioner.text"}
    found = run_servables(TABLE, tower, captioner)
    texts = found["captioner.text"].to_pylist()
    assert texts[-1] is None
    assert any(texts[:4])
    from embedder.encoders.query_encoder import QueryEncoder
    from embedder.models.model_folder import open_model

    written = [row for row in range(4) if texts[row]]
    expected = QueryEncoder(open_model(str(tiny_model))).encode_text([texts[row] for row in written])
    embedded = np.array([found["tower.text_embedding"][row].as_py() for row in written], np.float32)
    assert np.abs(embedded - expected).max() < 1e-6


def test_texts_go_on_the_same_in_every_batch(tmp_path):
    hf_checkpoints.writer(tmp_path / "model")
    one, all_at_once = (
        run_servables(TABLE, section(tmp_path / "model", "text-generation", max_new_tokens=5, batch_size=size))
        for size in (1, 4)
    )
    check_last_is_null(one)
    assert one["s.text"].to_pylist() == all_at_once["s.text"].to_pylist()
    assert len(set(one["s.text"].to_pylist())) > 1


def refusal(settings):
    with pytest.raises(Exception, match=".") as refused:
        RunningServable(make_servable(settings))
    assert isinstance(refused.value, ValueError)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_pickled_weights_are_refused_unless_the_user_says_so(tmp_path):
    checkpoints.vit(tmp_path / "model")
    from safetensors.torch import load_file

    state = load_file(tmp_path / "model/model.safetensors")
    torch.save(state, tmp_path / "model/pytorch_model.bin")
    plain = section(tmp_path / "model", "image-feature-extraction")
    expected = vectors(run_servables(TABLE.slice(0, 4), plain), "s.embedding")
    (tmp_path / "model/model.safetensors").unlink()
    assert "pytorch_model.bin is a pickle, which can run any code" in refusal(plain)
    allowed = run_servables(TABLE.slice(0, 4), plain | {"allow_pickle": True})
    assert np.array_equal(vectors(allowed, "s.embedding"), expected)


def test_folders_that_hold_no_such_model_are_refused(tmp_path, tiny_model):
    checkpoints.vit(tmp_path / "model")
    task = "image-feature-extraction"
    assert "no such folder" in refusal(section(tmp_path / "none", task))
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(section(tmp_path / "empty", task))
    assert 'kind = "towers"' in refusal(section(tiny_model, task))
    shutil.copytree(tmp_path / "model", tmp_path / "unknown")
    config = json.loads((tmp_path / "unknown/config.json").read_text())
    (tmp_path / "unknown/config.json").write_text(json.dumps(config | {"model_type": "model_of_next_year"}))
    assert "model_of_next_year" in refusal(section(tmp_path / "unknown", task))
    (tmp_path / "unknown/config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "code.Model"}, "model_type": "own"})
    )
    (tmp_path / "unknown/code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refusal(section(tmp_path / "unknown", task))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "model/model.safetensors").unlink()
    assert "no safetensors there" in refusal(section(tmp_path / "model", task))


@pytest.mark.parametrize(
    ("task", "keys", "message"),
    [
        ("image-magic", {}, "image-magic"),
        ("zero-shot-classification", {}, "needs labels"),
        ("image-classification", {"labels": ["a"]}, "takes no labels"),
        ("object-detection", {"preprocess": {}}, "takes whole images or texts"),
        ("feature-extraction", {"padding": "max_length"}, "write max_tokens"),
        ("feature-extraction", {"of": "a b"}, "of"),
    ],
)
def test_a_wrong_section_is_refused(task, keys, message):
    with pytest.raises(ServableError, match=message):
        make_servable(section("m", task, **keys))
