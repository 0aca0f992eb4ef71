"""The measurement of the light installation, on a store of a few images in this environment; no clock is judged."""

import sys
from pathlib import Path

import pytest
import samples
from measure_light import package_bytes
from script_runs import found_by

import embedder
from embedder.config import load_config
from embedder.ingest.embed import embed

MODEL = Path(embedder.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("light")
    source = [{"path": str(samples.folder(root / "images", num_images=2))}]
    settings = {"model": str(MODEL), "store": str(root / "store"), "source": source, "engine": "local"}
    embed(load_config(overrides=settings))
    return root / "store"


@pytest.mark.slow
def test_size_and_times_are_told_with_what_they_are_spent_on(store):
    found = found_by("measure_light.py", store, "--python", sys.executable, "--runs", "1", timeout_s=200)
    assert found["size"]["installation_mib"] > max(found["size"]["largest_mib"].values()) > 0
    assert found["search"]["cpu_s"] > 0
    first = found["first_search"]
    assert first["encoder"] == "onnx"
    steps = [first[name] for name in ("import_and_open_s", "encode_first_s", "search_s")]
    assert sum(steps) == pytest.approx(first["all_s"], abs=0.01)
    assert first["all_s"] < first["process_s"]
    assert {"numpy", "pyarrow", "embedder"} <= found["imports_ms"].keys()
    assert found["imports_ms"]["all"] > found["imports_ms"]["numpy"]
    assert found["serve"]["ready_s"] > 0
    assert found["serve"]["resident_mib"] > 50


def test_bytes_are_those_of_all_files_by_package():
    sizes = package_bytes(Path(sys.executable))
    numpy = Path(sys.modules["numpy"].__file__).parent
    on_disk = sum(path.lstat().st_blocks * 512 for path in numpy.rglob("*"))
    assert sizes["numpy"] >= on_disk > 1 << 20
