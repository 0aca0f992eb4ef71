"""Compute dtype of stores: chosen once by the devices, recorded, and kept by whoever continues."""

import json
import logging
from pathlib import Path

import pytest
import samples
from embedding_runs import embedded
from gpu_simulation import MODELS
from PIL import Image

from embedder import installation
from embedder.errors import ConfigError
from embedder.executors import job
from embedder.ingest.embed import embed, refresh
from embedder.ingest.inputs import _first_dtype, open_inputs
from embedder.placement import hardware
from embedder.placement.compute_dtype import Gpu
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from shards.plan import plan_shards


def recorded(config):
    texts = [Path(config.store, f"{name}.json").read_text() for name in ("store", "CURRENT")]
    store, current = map(json.loads, texts)
    return store["dtype"], current["dtype"]


def added(source):
    (source / "more.png").write_bytes(samples.image_bytes(77))
    (source / "more.txt").write_text("nine green birds")


def test_a_new_store_on_cpus_is_of_float32_to_the_bit(make_run, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source = samples.folder(tmp_path / "in", num_images=3)
    config = make_run(source)
    assert config.dtype == "auto"
    _, rows = embedded(config)
    assert recorded(config) == ("float32", "float32")
    lines = [line for line in caplog.messages if line.startswith("dtype ")]
    assert lines == ['dtype float32 (dtype = "auto"): the stages compute on CPUs']
    _, named = embedded(make_run(source, store=str(tmp_path / "named"), dtype="float32"))
    for key, row in named.items():
        assert all(row[name] == rows[key][name] for name in ("image_embedding", "text_embedding"))


@pytest.mark.medium
def test_a_store_goes_on_in_its_own_dtype(make_run, tmp_path, caplog):
    source = samples.folder(tmp_path / "in", num_images=2)
    stores = {dtype: str(tmp_path / dtype) for dtype in ("float32", "bfloat16", "auto")}
    for dtype, store in stores.items():
        embedded(make_run(source, store=store, dtype="float32" if dtype == "float32" else "bfloat16"))
    added(source)
    caplog.set_level(logging.INFO)
    runs = {dtype: make_run(source, store=store, dtype=dtype) for dtype, store in stores.items()}
    found = {dtype: embedded(config)[1]["more.png", 0]["text_embedding"] for dtype, config in runs.items()}
    assert found["auto"] == found["bfloat16"] != found["float32"]
    assert recorded(runs["auto"]) == ("bfloat16", "bfloat16")
    assert [line for line in caplog.messages if line.startswith("dtype ")] == [
        f'dtype bfloat16 (dtype = "auto"): store {stores["auto"]} is computed in it'
    ]


@pytest.mark.medium
def test_a_store_in_float16_is_not_continued_on_cpus_unless_a_dtype_is_named(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=2)
    embedded(make_run(source, dtype="float16"))
    embed(make_run(source))  # nothing to do, so no device is asked for anything
    added(source)
    with pytest.raises(ConfigError, match="are computed in float16, and CPUs.* give --dtype float32"):
        embed(make_run(source, device="cpu"))
    assert embed(make_run(source, dtype="float32")).published


@pytest.mark.parametrize(
    ("options", "gpus", "dtype"),
    [
        ({"engine": "ray"}, [Gpu("NVIDIA H100 80GB HBM3", (9, 0))], "bfloat16"),
        ({"engine": "ray"}, [Gpu("Tesla T4", (7, 5))], "float16"),
        ({"engine": "ray"}, [], "float32"),
        ({"engine": "ray", "device": "cpu"}, [Gpu("H100")], "float32"),
        ({"engine": "auto"}, [Gpu("H100")], "float32"),  # so few items are embedded in this process
        ({"engine": "auto", "ray_address": "10.0.0.1:6379"}, [Gpu("L4"), Gpu("A10G")], "bfloat16"),
        ({"engine": "auto", "ray_address": "10.0.0.1:6379"}, None, "float32"),
        ({"engine": "ray", "dtype": "int8"}, [Gpu("H100")], "int8"),
    ],
)
def test_a_new_store_gets_the_dtype_of_the_devices(options, gpus, dtype, make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=2), **options)
    inputs = open_inputs(config, find=lambda config: gpus if config.may_use_gpus else ())
    assert {inputs.config.dtype, inputs.plan.dtype, inputs.info.dtype, inputs.dtype.dtype} == {dtype}


def test_a_run_that_is_worth_its_gpu_by_its_type_alone_gets_the_dtype_of_it(make_run, tmp_path, monkeypatch):
    """Taken for a small one, it would lose to 64 cores, and the store would begin in float32; the run then takes it."""
    gpu = ("NVIDIA H200", (9, 0))
    monkeypatch.setattr(hardware, "num_cpus", lambda: 64)
    monkeypatch.setattr(hardware, "num_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu,))
    config = make_run(tmp_path, engine="auto")
    plan = plan_shards(MODELS["vit-b-32"](), 1)
    choice = _first_dtype(config.compute, plan, "of the model", 3_000, lambda compute: (Gpu(*gpu),))
    assert choice.dtype == "bfloat16"


@pytest.mark.medium
def test_rows_of_other_versions_of_libraries_are_named_once(make_run, tmp_path, monkeypatch, said):
    source = samples.folder(tmp_path / "in", num_images=3, num_clips=0)
    now = dict(installation.vector_libraries())
    monkeypatch.setattr(job, "vector_libraries", lambda: now | {"torch": "2.8.0", "timm": "1.0.26"})
    assert embed(make_run(source)).published
    monkeypatch.undo()

    for number, colour in enumerate(["red", "blue"]):
        Image.new("RGB", (40, 40), colour).save(source / f"new-{number}.png")
        assert refresh(make_run(source)).published
    (line,) = [line for line in said if "its rows were made with" in line]
    assert f"torch 2.8.0 (now {now['torch']}), timm 1.0.26 (now {now['timm']})" in line
    assert line.endswith(f"`embedder verify SOURCE --store {tmp_path / 'store'}` says by how much")
    assert read_current(StoreFiles(str(tmp_path / "store"))).libraries == now
