"""Graphs of ONNX, .pt2 and TorchScript: what their files may be, and what they are given."""

import io
import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from exported_towers import SIDE_PX, export
from servable_runs import png, run_servables, vectors

from embedder.servables import make_servable
from embedder.servables.running_servable import RunningServable
from embedder.servables.servable_errors import ServableError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
WIDTH = 5
PIXELS = {"pixels": {"make": "pixels", "preprocess": {"image_size": SIDE_PX, "resize": "squash"}}}
VECTOR = {"image_embedding": {"shape": [WIDTH]}}
KINDS = {"torch_export": "tower.pt2", "torchscript": "tower.pt", "onnx": "tower.onnx"}


class Means(torch.nn.Module):
    """A few linear features of each image's mean colours."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, WIDTH)

    def forward(self, pixels):
        return self.linear(pixels.mean((2, 3)))


class Evil:
    """A pickle of it makes a file where it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    module = Means().eval()
    with warnings.catch_warnings(action="ignore"):
        export(module, folder)
    torch.save(module, folder / "whole.pt")
    torch.save(module.state_dict(), folder / "state.pt")
    from safetensors.torch import save_file

    save_file(module.state_dict(), str(folder / "model.safetensors"))
    (folder / "empty").write_bytes(b"")
    (folder / "text.onnx").write_text("this is no graph")
    return folder


def servable(kind, path, **keys):
    section = {"name": "s", "kind": kind, "uri": str(path), "inputs": PIXELS, "outputs": VECTOR}
    return make_servable(section | keys)


def refusal(servable):
    """The message with which loading it is refused."""
    with pytest.raises(ServableError) as refused:
        RunningServable(servable)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(servable.where())
    return str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_and_a_folder_are_refused(folder, kind):
    assert "there is no such file" in refusal(servable(kind, folder / "none"))
    assert "this is a folder" in refusal(servable(kind, folder))


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("onnx", "tower.pt2", "is a .pt2 of torch.export"),
        ("onnx", "text.onnx", "no ONNX graph"),
        ("onnx", "model.safetensors", "only weights"),
        ("torch_export", "tower.pt", 'kind = "torchscript" runs'),
        ("torch_export", "tower.onnx", "a file of an unknown kind"),
        ("torch_export", "whole.pt", "a pickle, which can run any code"),
        ("torch_export", "model.safetensors", "only weights"),
        ("torchscript", "tower.pt2", 'kind = "torch_export" runs'),
        ("torchscript", "whole.pt", "allow_pickle = true loads what you trust"),
        ("torchscript", "state.pt", "a pickle"),
        ("torchscript", "empty", "a file of an unknown kind"),
        ("onnx", "empty", "no ONNX graph"),
    ],
)
def test_a_file_of_another_framework_is_refused(folder, kind, file, message):
    assert message in refusal(servable(kind, folder / file))


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_file_is_refused(folder, kind, tmp_path):
    content = (folder / KINDS[kind]).read_bytes()
    (tmp_path / "half").write_bytes(content[: len(content) // 2])
    refusal(servable(kind, tmp_path / "half"))


def test_other_inputs_and_outputs_than_the_graphs_are_refused_with_its_own(folder):
    other = {"image": PIXELS["pixels"]}
    assert "its inputs are pixels, and declared are image" in refusal(
        servable("onnx", folder / "tower.onnx", inputs=other)
    )
    outputs = {"vector": {"shape": [WIDTH]}}
    assert "its outputs are image_embedding, and declared are vector" in refusal(
        servable("onnx", folder / "tower.onnx", outputs=outputs)
    )
    two = PIXELS | {"text": {"make": "text"}}
    assert "its inputs are pixels, and declared are pixels, text" in refusal(
        servable("torch_export", folder / "tower.pt2", inputs=two)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_another_width_than_declared_is_told_for_each_row(folder, kind):
    wrong = servable(kind, folder / KINDS[kind], outputs={"image_embedding": {"shape": [WIDTH + 1]}})
    found = run_servables(pa.table({"image": [png(0), png(1)]}), wrong)
    assert found["s.image_embedding"].to_pylist() == [None, None]
    assert all(f"found {WIDTH} values in a list of {WIDTH + 1}" in error for error in found["s.error"].to_pylist())


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_layout_are_those_that_the_graph_asks_for(folder, kind):
    """The features are linear in the mean colours, so that each form of the values is known."""
    image = png(3, (SIDE_PX, SIDE_PX))
    module = torch.load(folder / "whole.pt", weights_only=False)
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), np.float32)
    expected = {
        "unit": pixels / 255,
        "normalised": (pixels / 255 - np.array([0.4, 0.5, 0.6])) / np.array([0.2, 0.3, 0.4]),
    }
    for values, wanted in expected.items():
        rule = {"image_size": SIDE_PX, "resize": "squash", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
        inputs = {"pixels": {"make": "pixels", "values": values, "preprocess": rule}}
        found = run_servables(pa.table({"image": [image]}), servable(kind, folder / KINDS[kind], inputs=inputs))
        features = module.linear(torch.tensor(wanted.mean((0, 1)), dtype=torch.float32)).detach().numpy()
        assert np.abs(vectors(found, "s.image_embedding")[0] - features).max() < 1e-4


def test_a_whole_pickle_is_run_where_the_user_says_so(folder):
    by_pickle = servable("torchscript", folder / "whole.pt", allow_pickle=True)
    table = pa.table({"image": [png(0), png(1)]})
    found = vectors(run_servables(table, by_pickle), "s.image_embedding")
    other = vectors(run_servables(table, servable("onnx", folder / "tower.onnx")), "s.image_embedding")
    assert np.abs(found - other).max() < 1e-5
    assert "computes nothing" in refusal(servable("torchscript", folder / "state.pt", allow_pickle=True))


def rewritten(source: Path, target: Path, change) -> Path:
    """A copy of an archive whose files went through `change(name, content)`; several of one name are kept."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            for content in change(name, old.read(name)):
                new.writestr(name, content)
    return target


def test_no_pickle_hidden_in_a_pt2_is_run(folder, tmp_path):
    """Sample inputs are read by torch.load, which torch.export lets fall back to whole pickles."""
    mark = tmp_path / "ran"
    evil = tmp_path / "evil.bin"
    torch.save(Evil(mark), evil)

    def in_sample_inputs(name, content):
        return [evil.read_bytes() if "sample_inputs" in name else content]

    refusal(servable("torch_export", rewritten(folder / "tower.pt2", tmp_path / "a.pt2", in_sample_inputs)))
    assert not mark.exists()

    def as_weight(name, content):
        if name.endswith("weight_0"):
            return [evil.read_bytes()]
        return [
            content.replace(b'"use_pickle": false', b'"use_pickle": true') if name.endswith("config.json") else content
        ]

    message = refusal(servable("torch_export", rewritten(folder / "tower.pt2", tmp_path / "b.pt2", as_weight)))
    assert "it holds a pickle" in message
    assert "allow_pickle = true" in message

    def as_constant(name, content):
        payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
        config = json.dumps({"config": {"x": payload}})
        return [config if name.endswith("constants_config.json") else content]

    hidden = rewritten(folder / "tower.pt2", tmp_path / "c.pt2", as_constant)
    with zipfile.ZipFile(hidden, "a") as archive:
        archive.writestr("c/data/constants/opaque_obj_0", pickle.dumps(Evil(mark)))
    refusal(servable("torch_export", hidden))
    assert not mark.exists()

    def twice(name, content):
        return [content, content] if name.endswith("weights_config.json") else [content]

    with warnings.catch_warnings(action="ignore"):
        doubled = rewritten(folder / "tower.pt2", tmp_path / "d.pt2", twice)
    assert "one name twice" in refusal(servable("torch_export", doubled))
    assert not mark.exists()


def test_torch_load_is_as_before_after_an_export_was_read(folder):
    RunningServable(servable("torch_export", folder / "tower.pt2"))
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert isinstance(torch.load(folder / "whole.pt", weights_only=False), torch.nn.Module)


@pytest.mark.slow
def test_a_compiled_program_gives_what_it_gives_as_it_is_in_calls_of_one_size(folder):
    plain, compiled = (
        servable("torch_export", folder / "tower.pt2", batch_size=4, compiled=value) for value in (False, True)
    )
    images = pa.table({"image": [png(number) for number in range(7)]})
    expected, found = (run_servables(images, each)["s.image_embedding"].to_pylist() for each in (plain, compiled))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert plain.fingerprint() != compiled.fingerprint()


def test_without_a_compiler_a_compiled_program_is_refused(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "c++-of-another-machine")
    message = refusal(servable("torch_export", folder / "tower.pt2", compiled=True))
    assert "compiled = true needs a C++ compiler, and none of c++-of-another-machine, clang++ is here" in message


@pytest.mark.parametrize(("kind", "said"), [("torch_export", "version"), ("torchscript", "version"), ("onnx", "IR")])
def test_a_file_of_a_version_that_is_not_known_here_is_refused(folder, kind, said, tmp_path):
    def newer(name, content):
        if name.endswith(".json") and b'"schema_version"' in content:
            return [json.dumps(json.loads(content) | {"schema_version": {"major": 999, "minor": 0}})]
        return ["999" if name.endswith("/version") else content]

    source, target = folder / KINDS[kind], tmp_path / KINDS[kind]
    if kind == "onnx":
        import onnx

        graph = onnx.load(source)
        graph.ir_version = 999
        onnx.save(graph, target)
    else:
        rewritten(source, target, newer)
    message = refusal(servable(kind, target))
    assert said in message
    assert "check the file, its framework and that one's version" in message


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["torch_export", "onnx"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_graph_of_a_fixed_number_of_rows_gets_that_many(folder, kind, rows, tmp_path):
    module = Means().eval()
    pixels = torch.rand(rows, 3, SIDE_PX, SIDE_PX)
    program = torch.export.export(module, (pixels,))
    if kind == "onnx":
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                program,
                f=str(tmp_path / "fixed.onnx"),
                input_names=["pixels"],
                output_names=["image_embedding"],
                dynamo=True,
            )
    else:
        torch.export.save(program, tmp_path / "fixed.pt2")
    path = tmp_path / {"onnx": "fixed.onnx", "torch_export": "fixed.pt2"}[kind]
    images = [png(seed) for seed in range(6)]
    fixed = run_servables(pa.table({"image": images}), servable(kind, path))
    free = run_servables(pa.table({"image": images}), servable("onnx", folder / "tower.onnx"))
    assert np.abs(vectors(fixed, "s.image_embedding") - vectors(free, "s.image_embedding")).max() < 1e-5


class Bag(torch.nn.Module):
    """Mean of the embeddings of a caption's tokens, without those of the padding; and how many there are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(400, WIDTH)

    def forward(self, ids, mask):
        x_BTD = self.table(ids) * mask[..., None]
        return x_BTD.sum(1) / mask.sum(1, keepdim=True), mask.sum(1)


@pytest.mark.parametrize("kind", ["torch_export", "torchscript"])
def test_captions_are_padded_and_masked(kind, tmp_path, tiny_model):
    from embedder.steps.caption_encoder import CaptionEncoder

    module = Bag().eval()
    example = (torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64))
    if kind == "torch_export":
        dims = {0: torch.export.Dim("rows", max=64), 1: torch.export.Dim("tokens", max=64)}
        torch.export.save(torch.export.export(module, example, dynamic_shapes=(dims, dims)), tmp_path / "bag.pt2")
    else:
        torch.jit.script(module).save(str(tmp_path / "bag.pt"))
    section = {
        "name": "bag",
        "kind": kind,
        "uri": str(next(tmp_path.glob("bag*"))),
        "inputs": {
            "ids": {
                "make": "token_ids",
                "tokenizer": str(tiny_model),
                "max_tokens": 12,
                "mask": "mask",
                "padding_id": 7,
            }
        },
        "outputs": {"vector": {"shape": [WIDTH]}, "tokens": {"type": "int64"}},
    }
    captions = ["a red car", "two cats sleep on a sofa in the rain and a red car", None, "x"]
    found = run_servables(pa.table({"caption": captions}), section)
    encoder = CaptionEncoder((tiny_model / "tokenizer.json").read_text(), 12)
    for row, caption in enumerate(captions):
        if caption is None:
            assert found["bag.vector"][row].as_py() is None
            continue
        ids = encoder.encode(caption)
        assert found["bag.tokens"][row].as_py() == len(ids)
        expected = module.table(torch.tensor(ids)).mean(0).detach().numpy()
        assert np.abs(np.array(found["bag.vector"][row].as_py()) - expected).max() < 1e-5


def test_more_or_fewer_outputs_than_declared_are_told(tmp_path, tiny_model):
    torch.jit.script(Bag()).save(str(tmp_path / "bag.pt"))
    inputs = {"ids": {"make": "token_ids", "tokenizer": str(tiny_model), "mask": "mask"}}
    found = run_servables(
        pa.table({"caption": ["a"]}), servable("torchscript", tmp_path / "bag.pt", inputs=inputs, outputs=VECTOR)
    )
    assert "it returned 2 outputs, and 1 are declared" in found["s.error"][0].as_py()
