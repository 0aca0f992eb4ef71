"""`embedder compare`: groups that lost are found, equal models pass, graded answers, clicks, a report to look at."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from model_stores import add_model, code_section
from PIL import Image
from playwright.sync_api import sync_playwright
from store_samples import begin, row, table
from store_states import new_store
from typer.testing import CliRunner

from embedder.cli import app
from embedder.config_toml.sections import CompareConfig
from embedder.errors import ConfigError, StoreError
from embedder.plugins.evaluate.clicks import corrected_rates, grades_of_clicks, linked_positions, propensities
from embedder.plugins.evaluate.common_images import ndcg
from embedder.plugins.evaluate.compare import compare
from embedder.plugins.evaluate.comparison_page import page, page_content, thumbnails
from embedder.plugins.evaluate.query_sets import read_query_file
from embedder.plugins.evaluate.sides import open_side
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish

NUM, WIDTH = 400, 16
KINDS = ("cat", "dog", "fish", "bird")


def unit(rng, num, width=WIDTH):
    vectors = rng.normal(size=(num, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(seed=0, noise=None, num=NUM, width=WIDTH, uri="/pictures/{}"):
    """Pairs whose captions lie near their images; noise is added to the captions of some kinds."""
    rng = np.random.default_rng(seed)
    images, away = unit(rng, num, width), unit(rng, num, width)
    found = []
    for number in range(num):
        text = images[number] + (noise or {}).get(KINDS[number % 4], 0) * away[number]
        found.append(
            row(
                f"p{number:04d}",
                uri=uri.format(number),
                modality="pair",
                caption=f"caption {number}",
                image_embedding=list(map(float, images[number])),
                text_embedding=list(map(float, text / np.linalg.norm(text))),
            )
        )
    return found


@pytest.fixture
def make_store(tmp_path):
    """Makes a store of some rows, with the column `kind` carried, and gives its folder."""

    def make(name, *own):
        files = new_store(tmp_path / name)
        carried = pa.array([KINDS[int(each["item_id"][1:]) % 4] for each in own], pa.string())
        run, metadata = begin(files, pa.schema({"kind": pa.string()}))
        write_part(files, metadata, 0, table(*own, kind=carried))
        publish([ModelWork(run, metadata)])
        return str(tmp_path / name)

    return make


def by_name(rows):
    return {row.name: row for row in rows}


def test_noise_in_the_vectors_of_one_group_is_found_in_that_group(make_store):
    one, other = make_store("one", *rows()), make_store("two", *rows(1, {"fish": 2.0}))
    found = compare(one, other, group="kind")
    groups = by_name(found.groups)
    assert not found.passed and found.verdict.startswith("R@10, shown to have lost more")
    assert (groups["fish"].verdict, groups["fish"].fails) == ("worse", True)
    assert {groups[kind].verdict for kind in ("cat", "dog", "bird")} == {"equal"}
    assert all(loss.rank_after > loss.rank_before for loss in found.losses) and len(found.losses) == 12
    assert {int(loss.query.split()[1]) % 4 for loss in found.losses} == {2}
    assert not found.wins


def test_models_of_another_width_that_find_the_same_are_equal(make_store):
    found = compare(make_store("one", *rows()), make_store("two", *rows(1, width=24)), group="kind")
    assert found.passed and {each.verdict for each in (*found.groups, *found.metrics)} == {"equal"}
    assert (found.before.vector_width, found.after.vector_width) == (WIDTH, 24)
    assert (found.same_first, found.num_queries) == (1, NUM)
    assert found.kept_of_top_ten < 0.3, "only the right item is the same, by vectors drawn again"
    assert "would be seen with a probability of" in found.verdict


def test_a_store_against_itself_keeps_all(make_store):
    one = make_store("one", *rows(noise={"cat": 2.0}))
    found = compare(one, open_store(one))
    assert (found.kept_of_top_ten, found.same_first, found.wins, found.losses) == (1, 1, [], [])
    assert all(each.difference == 0 for each in found.metrics)
    assert found.hard and all(query.rank_before > 10 for query in found.hard)


def test_only_items_and_captions_of_both_count_and_the_rest_is_told(make_store):
    found = compare(make_store("one", *rows()), make_store("two", *rows(num=300)))
    assert (found.num_items, found.num_queries) == (300, 300)
    assert any(note.startswith("100 queries of 400 left out") for note in found.notes)
    assert any(note.startswith("100 items only of the first side") for note in found.notes)


def test_sides_are_stores_publications_and_models(make_store):
    one = make_store("a@b", *rows())
    first = open_store(one).publication.run_id
    add_model(StoreFiles(one), "small", *rows(2))
    assert open_side(one).publication.run_id != first
    assert open_side(f"{one}@{first}").publication.run_id == first
    assert open_side(f"{one}#small").model == "small"
    found = compare(one, f"{one}#small")
    assert (found.before.model, found.after.model) == ("m", "/models/small")
    with pytest.raises(StoreError):
        open_side(f"{one}#large")
    with pytest.raises(ConfigError, match="a side is empty"):
        open_side("")


def test_a_side_runs_no_code_of_its_store_but_with_leave(make_store, tmp_path):
    one = make_store("one", *rows(2))
    add_model(StoreFiles(one), "own", *rows(2), section=code_section(tmp_path))
    with pytest.raises(StoreError, match="model own of the store: it is of the kind python"):
        _ = open_side(f"{one}#own").encoder
    assert not (tmp_path / "ran").exists()
    assert open_side(f"{one}#own", allow_store_code=True).encoder.encode_text(["upwards"]).tolist() == [[0, 1]]


def test_nothing_in_common_is_refused(make_store):
    others = [each | {"item_id": f"q{number}"} for number, each in enumerate(rows(num=20))]
    with pytest.raises(ConfigError, match="have no item in common"):
        compare(make_store("one", *rows(num=20)), make_store("two", *others))


def test_what_must_be_proven_fails_where_queries_are_few(make_store):
    one = make_store("one", *rows(num=40))
    assert compare(one, one, group="kind").passed
    found = compare(one, one, group="kind", rule=CompareConfig(prove=True))
    assert not found.passed and "it is not shown that no group lost more" in found.verdict


def test_ndcg_is_what_the_formula_gives():
    right = (np.array([0, 0, 1]), np.array([3, 5, 2]))
    items = np.array([[5, 1, 3], [0, 1, 2]])
    gains = np.array([2.0, 1.0, 1.0])
    found = ndcg(items, right, gains, 6, 3)
    best = 3 + 1 / np.log2(3)
    assert found.tolist() == pytest.approx([(1 + 3 / 2) / best, 1 / 2])
    assert ndcg(items, right, gains, 6, 1).tolist() == pytest.approx([1 / 3, 0])


def test_grades_of_a_file_weigh_in_ndcg_and_an_item_graded_zero_is_not_right(make_store, tmp_path, monkeypatch):
    pq.write_table(
        pa.table({"query": ["a", "a", "b"], "item_id": ["p0001", "p0002", "p0003"], "relevance": [3, 1, 0]}),
        tmp_path / "judged.parquet",
    )
    read = read_query_file(str(tmp_path / "judged.parquet"))
    assert read.rows["relevance"].to_pylist() == [3, 1] and read.num_irrelevant == 1
    one = open_store(make_store("one", *rows()))
    vectors = one.to_arrow(["image_embedding"])["image_embedding"]
    second = np.array(vectors[2].as_py(), np.float32)
    monkeypatch.setattr(type(one), "encode_text", lambda self, texts: np.stack([second] * len(texts)))
    found = compare(one, one, queries=str(tmp_path / "judged.parquet"))
    metrics = by_name(found.metrics)
    assert (found.num_queries, found.num_answers, metrics["R@1"].before) == (1, 2, 1)
    assert metrics["nDCG@10"].before < 0.6, "the better answer comes late"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"relevance": [-1.0]}, "row 1: relevance is '-1.0'; write a number from 0 to 10"),
        ({"relevance": [float("nan")]}, "relevance is 'nan'"),
        ({"relevance": [0]}, "no item is right for any query"),
        ({"position": [0], "clicked": [1]}, "position is '0'"),
        ({"position": [1.5], "clicked": [1]}, "position is 1.5; write a whole number"),
        ({"position": [1], "clicked": ["yes"]}, "clicked is 'yes'"),
    ],
)
def test_broken_judgements_are_refused_with_their_row(tmp_path, columns, message):
    pq.write_table(pa.table({"query": ["a"], "item_id": ["p1"]} | columns), tmp_path / "file.parquet")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_query_file(str(tmp_path / "file.parquet"))


def clicks(num=60_000, seed=0):
    """A log in which the place is looked at with 1 / position, and the worth of five items is known."""
    rng = np.random.default_rng(seed)
    worth, looked = np.array([0.8, 0.6, 0.4, 0.2, 0.02]), 1 / np.arange(1, 6)
    item, position = rng.integers(0, 5, num), rng.integers(0, 5, num)
    is_shown = rng.random(num) < np.where(item == 4 - position, 1.0, 0.3)  # the worst item comes first most often
    item, position = item[is_shown], position[is_shown]
    clicked = (rng.random(len(item)) < worth[item] * looked[position]).astype(float)
    return item, position, clicked, worth, looked


def test_position_bias_is_estimated_and_taken_out():
    item, position, clicked, worth, looked = clicks()
    assert propensities(item, position, clicked) == pytest.approx(looked, abs=0.03)
    rates, _ = corrected_rates(item, position, clicked)
    assert rates == pytest.approx(worth, abs=0.04)
    plain = np.bincount(item, clicked) / np.bincount(item)
    assert abs(plain - worth).max() > 0.3, "without a correction the best item seems poor"


def test_clicks_become_grades_one_click_makes_nothing_right_and_what_nothing_links_is_left_out_and_told(caplog):
    item, position, clicked, worth, _ = clicks(20_000)
    log = [
        {"query": "q", "item_id": f"i{i}", "position": int(p) + 1, "clicked": bool(c)}
        for i, p, c in zip(item, position, clicked, strict=True)
    ]
    log.append({"query": "q", "item_id": "slip", "position": 1, "clicked": True})
    deep = [{"query": "q", "item_id": "deep", "position": 40, "clicked": True}] * 30
    assert linked_positions(np.array([0, 0, 1, 1, 2]), np.array([0, 2, 2, 3, 1])).tolist() == [0, 1, 0, 0]
    grades = {each["item_id"]: each["relevance"] for each in grades_of_clicks(log + deep)}
    assert "deep" not in grades and grades["slip"] == 0 and grades["i4"] == 0
    assert [grades[f"i{number}"] for number in range(4)] == pytest.approx(3 * worth[:4], abs=0.25)
    assert any(message.startswith(f"30 rows of {len(log) + 30:,} left out of the log") for message in caplog.messages)


def test_a_log_in_which_place_and_worth_cannot_be_told_apart_is_refused(tmp_path):
    columns = {"query": ["a"] * 4, "item_id": ["p1", "p2"] * 2, "position": [1, 2] * 2, "clicked": [1, 1, 1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(ConfigError, match="log.parquet: the log shows each item of a query at only one position"):
        read_query_file(str(tmp_path / "log.parquet"))
    columns["position"] = [1] * 4  # nothing to correct
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    assert read_query_file(str(tmp_path / "log.parquet")).rows["relevance"].to_pylist() == [3]


def test_the_page_shows_images_names_nothing_elsewhere_and_escapes_what_it_shows(make_store, tmp_path):
    for number in range(40):
        Image.new("RGB", (8, 8), (6 * number, 30, 30)).save(tmp_path / f"{number}.png")
    uri = f"{tmp_path}/{{}}.png"
    new = rows(1, {"fish": 3.0}, num=40, uri=uri)
    old = rows(num=40, uri=uri)
    for each in (*old, *new):
        each["caption"] = f"<script>alert({each['item_id']})</script>"
    found = compare(make_store("one", *old), make_store("two", *new), group="kind")
    images = thumbnails(found.losses)
    text = page(found, images)
    assert found.losses and all(data.startswith("data:image/webp;base64,") for data in images.values())
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "http-equiv" in text
    assert text.count("<figure") == sum(len((*q.right, *q.before, *q.after)) for q in (*found.losses, *found.hard))


def test_the_command_writes_both_reports_and_exits_with_1_where_a_group_lost(make_store, tmp_path):
    one, other = make_store("one", *rows()), make_store("two", *rows(1, {"fish": 2.0}))
    done = CliRunner().invoke(app, ["compare", one, other, "--group", "kind", "--out", str(tmp_path / "out")])
    assert "REFUSED: R@10" in done.output and "fish" in done.output
    assert type(done.exception).__name__ == "RunFailedError"
    saved = json.loads((tmp_path / "out/comparison.json").read_text())
    assert saved["passed"] is False and (tmp_path / "out/comparison.html").stat().st_size > 1000
    allowed = ["compare", one, other, "--group", "kind", "--set", "compare.max_drop=1", "--json"]
    done = CliRunner().invoke(app, allowed)
    assert done.exit_code == 0 and json.loads(done.stdout)["passed"]


@pytest.mark.parametrize("words", [["compare", "none", "none"], ["evaluate", "--store", "{store}"]])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(words, make_store, tmp_path):
    store = make_store("one", row("i0", caption="of a picture without a vector"))
    (tmp_path / "file").write_text("mine")
    given = [word.format(store=store) for word in words]
    done = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "file")])
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith("--out ")


@pytest.mark.slow
def test_the_page_in_a_browser_overflows_nowhere_and_axe_finds_no_violation(make_store, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: install Debian's package (apt-get install chromium) to test the page")
    for number in range(60):
        Image.new("RGB", (64, 64), (4 * number, 90, 120)).save(tmp_path / f"{number}.png")
    uri = f"{tmp_path}/{{}}.png"
    one = make_store("one", *rows(num=60, uri=uri))
    found = compare(one, make_store("two", *rows(1, {"fish": 3.0}, num=60, uri=uri)), group="kind")
    (tmp_path / "comparison.html").write_bytes(page_content(found))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
            page.goto((tmp_path / "comparison.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            shown = page.evaluate("[...document.images].map(each => [each.naturalWidth, each.width, each.height])")
            assert shown and all(natural == 160 and wide == high > 40 for natural, wide, high in shown)
            assert page.locator("th[scope=col]").count() > 20 and page.locator("h3").count() == len(found.losses)
            violations = Axe().run(page).response["violations"]
            assert not violations, [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations]
        browser.close()
