"""The notebook runs from top to bottom on a small store, and shows what that store holds."""

import re
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
import samples
from embedding_runs import embedded
from nbclient import NotebookClient

import embedder
from embedder.plugins.evaluate.evaluate import EvaluationOptions, evaluate

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "scripts" / "explore.ipynb"
WHERE_AM_I = "import sys, embedder\nprint(sys.executable, embedder.__file__)"


@pytest.fixture
def store(make_run, tmp_path):
    """Twelve pictures, six with captions, a clip, and a file that is no picture."""
    folder = samples.folder(tmp_path / "in", num_images=12, num_clips=1)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    config = make_run(folder, max_reject_fraction=0.5)
    embedded(config)
    return embedder.open_store(config.store)


def execute(notebook, store, folder, monkeypatch):
    """Run all cells in a kernel that finds this checkout and no settings of a user's; gives the cells by name."""
    notebook.cells.append(nbformat.v4.new_code_cell(WHERE_AM_I, id="where"))
    for name, value in {
        "EMBEDDER_STORE": str(store.files.address),
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {cell.id: cell for cell in notebook.cells}


def text_of(cell):
    """What the cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def shown(cell, kind):
    """What the cell shows of a MIME type."""
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_the_store_holds(store, tmp_path, monkeypatch):
    before = set(psutil.Process().children(recursive=True))
    cells = execute(nbformat.read(NOTEBOOK, as_version=4), store, tmp_path, monkeypatch)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if "ipykernel" in " ".join(process.cmdline())]
    assert str(ROOT / "embedder") in text_of(cells["where"])

    assert "13 images and video segments, 6 captions" in text_of(cells["open"])
    assert re.search(r"1 video$", text_of(cells["open"]), re.MULTILINE)
    (pictures,) = shown(cells["search"], "text/html")
    assert pictures.count("<figure") == 10
    assert 'src="data:image/png;base64,iVBOR' in pictures
    expected = store.search("cat with heart eyes", k=10)
    assert [line.split()[2] for line in text_of(cells["hits"]).splitlines()] == [hit.item_id for hit in expected]
    itself = re.search(r"(\S+) finds (\S+) first, with (\S+)\n", text_of(cells["picture"]))
    assert itself[1] == itself[2]
    assert float(itself[3]) == pytest.approx(1, abs=1e-3)
    filtered = [line.split()[2] for line in text_of(cells["filter"]).splitlines()]
    assert len(filtered) == 5
    assert set(filtered) < {f"pictures/{number:04d}.png" for number in range(0, 12, 2)}
    assert text_of(cells["rejects"]).startswith("1 of 14 items were rejected\n")
    assert re.search(r"^'broken\.png': ", text_of(cells["rejects"]), re.MULTILINE)

    rows = store.to_arrow().to_pylist()
    pairs = [row for row in rows if row["image_embedding"] and row["text_embedding"]]
    images, texts = (np.array([row[f"{tower}_embedding"] for row in pairs]) for tower in ("image", "text"))
    gap = np.linalg.norm(images.mean(axis=0) - texts.mean(axis=0))
    assert float(re.search(r"gap (\S+) between 6 images", text_of(cells["modalities"]))[1]) == pytest.approx(
        gap, abs=1e-3
    )
    right = float(re.search(r"mean (\S+) with the own", text_of(cells["scores"]))[1])
    assert right == pytest.approx((images * texts).sum(axis=1).mean(), abs=1e-3)
    for name in ("modalities", "scores"):
        assert shown(cells[name], "image/png"), name

    found = evaluate(store, EvaluationOptions(num_queries=500))
    r_at_10 = found.model.r_at[10]
    assert f"{r_at_10.value:.3f} ({r_at_10.low:.3f}-{r_at_10.high:.3f})" in text_of(cells["evaluate"])
    assert found.index is not None
    assert "there is no index" not in text_of(cells["evaluate"])


def test_the_notebook_ships_with_the_outputs_of_the_demo_and_no_trace_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    kinds = {output.output_type for cell in cells.values() for output in cell.outputs}
    assert all(cell.outputs for cell in cells.values())
    assert "error" not in kinds
    for name in ("search", "picture"):
        (images,) = shown(cells[name], "text/html")
        assert images.count('src="data:image/png;base64,iVBOR') == 10
    assert all(shown(cells[name], "image/png") for name in ("picture", "modalities", "scores"))
    assert "1,911 images and video segments, 1,911 captions" in text_of(cells["open"])
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|Users|work)/", NOTEBOOK.read_text(encoding="utf-8"))
    assert NOTEBOOK.stat().st_size < 1_000_000


def test_the_notebook_uses_public_names_alone():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    code = "\n".join(cells)
    assert re.findall(r"^(?:from|import) embedder.*$", code, re.MULTILINE) == ["import embedder"]
    assert set(re.findall(r"\bembedder\.(\w+)", code)) <= set(embedder.__all__)
