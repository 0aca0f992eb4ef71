"""Kind ocr: the words of pictures, their places, and what it refuses; searched for by a phrase."""

import io
import os
import time

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from servable_runs import run_servables
from text_pages import LINES, SPACES, WORDS, find_font, make_page

from embedder import installation
from embedder.ingest.embed import embed
from embedder.plugins.runners.programs.ocr_reader import may_hold_text
from embedder.retrieval.store_api import open_store
from embedder.servables import make_servable
from embedder.servables.servable_errors import ServableError

SECTION = {"name": "ocr", "kind": "ocr", "uri": "rapidocr"}
NUM_PAGES = int(os.environ.get("NUM_PAGES", "6"))  # of each language and look


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def share_found(text: str | None, lines: list[list[str]]) -> float:
    """Return the share of the words that stand in a text, where spaces make no difference."""
    words = [word for line in lines for word in line]
    return sum(word in (text or "").replace(" ", "").replace("\n", "") for word in words) / len(words)


@pytest.mark.medium
def test_lines_of_a_picture_are_read_with_their_places():
    page, lines = make_page("German", 0)
    smooth = Image.linear_gradient("L").convert("RGB")
    found = run_servables(pa.table({"image": [png(page), png(smooth), None, b"broken"]}), SECTION).to_pylist()
    assert share_found(found[0]["ocr.words"], lines) >= 0.95
    assert found[0]["ocr.words"].split("\n") == found[0]["ocr.lines"], "from top to bottom"
    boxes = np.array(found[0]["ocr.boxes"])
    assert boxes.shape == (len(lines), 4) and len(found[0]["ocr.scores"]) == len(lines)
    tops = (40 + 82 * np.arange(len(lines))) / page.height
    assert np.abs(boxes[:, 1] - tops).max() < 0.04, "parts of the sides"
    assert min(found[0]["ocr.scores"]) > 0.6
    assert (found[1]["ocr.words"], found[1]["ocr.lines"], found[1]["ocr.error"]) == (None, [], None)
    assert found[2]["ocr.lines"] is None and found[3]["ocr.lines"] is None


@pytest.mark.medium
def test_the_text_of_a_picture_depends_on_no_other():
    pages = [png(make_page("English", seed)[0]) for seed in range(2)]
    together = run_servables(pa.table({"image": pages}), SECTION)["ocr.words"].to_pylist()
    apart = [run_servables(pa.table({"image": [page]}), SECTION)["ocr.words"][0].as_py() for page in pages]
    assert together == apart


def test_a_picture_without_sharp_edges_is_not_read():
    assert not may_hold_text(Image.new("RGB", (300, 200), "grey"))
    assert not may_hold_text(Image.linear_gradient("L").convert("RGB"))
    assert may_hold_text(make_page("English", 1, as_seen=True)[0])
    assert may_hold_text(make_page("English", 1)[0].resize((300, 213)))
    assert not may_hold_text(Image.new("RGB", (1, 1)))


@pytest.mark.medium
def test_what_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ServableError, match="no such folder; uri = .rapidocr."):
        make_servable(SECTION | {"uri": str(tmp_path / "none")}).files()
    with pytest.raises(ServableError, match=r"has none; it needs one graph called \*_det_\*\.onnx"):
        make_servable(SECTION | {"uri": str(tmp_path)}).files()
    finder, reader = make_servable(SECTION).files()
    (tmp_path / finder.name).write_bytes(b"\x08broken")
    (tmp_path / reader.name).symlink_to(reader)
    broken = make_servable(SECTION | {"uri": str(tmp_path)})
    assert broken.fingerprint() != make_servable(SECTION).fingerprint()
    with pytest.raises(ServableError, match="can't be loaded"):
        broken.load()


def test_without_its_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(installation, "missing", lambda extra: ("rapidocr",))
    with pytest.raises(installation.InstallationError, match="embedder\\[ocr\\]"):
        make_servable(SECTION).files()


@pytest.mark.slow
@pytest.mark.parametrize("as_seen", [False, True], ids=["clean", "photographed"])
@pytest.mark.parametrize("language", WORDS)
def test_a_phrase_in_a_picture_finds_it(language, as_seen, make_run, tiny_model, tmp_path, capsys):
    if find_font(language) is None:
        pytest.skip(f"no font for {language} here; on Debian, fonts-wqy-microhei has one")
    source = tmp_path / "in"
    source.mkdir()
    pages = {}
    for number in range(NUM_PAGES):
        page, pages[f"{number:03d}.png"] = make_page(language, number, as_seen=as_seen)
        page.save(source / f"{number:03d}.png")
    started = time.process_time()
    config = make_run(source, model=[{"uri": str(tiny_model)}, SECTION])
    assert embed(config).published
    spent_ms = 1000 * (time.process_time() - started) / NUM_PAGES
    store = open_store(config.store)
    read = {row["item_id"]: row["ocr.words"] for row in store.to_arrow().to_pylist()}
    words = np.mean([share_found(read[name], lines) for name, lines in pages.items()])
    space = SPACES[language]
    queries = {space.join(lines[number % LINES][1:3]): name for number, (name, lines) in enumerate(pages.items())}
    first = [store.search(query, k=1, hybrid=True)[0].item_id for query in queries]
    found = [query in (read[name] or "").replace("\n", " ") for name, query in zip(first, queries, strict=True)]
    with capsys.disabled():
        look = "photographed" if as_seen else "clean"
        print(
            f"\n{language}, {look}: words {words:.3f}, first {np.mean(found):.3f}, {spent_ms:.0f} ms of CPU a picture"
        )
    assert words >= (0.8 if as_seen else 0.9)
    assert np.mean(found) >= (0.8 if as_seen else 0.9)
