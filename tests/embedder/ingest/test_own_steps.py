"""Steps of the user's own in a run of the local engine: what they add, what they reject, what a change of them does."""

import re
from pathlib import Path

import numpy as np
import pytest
import samples
from embedding_runs import embedded
from model_runs import classifier, model_rows, table_hashes
from own_steps import STEPS, steps_file
from refresh_runs import items_of, refreshed, rows_of
from rollback_runs import back, let_go

import embedder
from embedder.config import load_config
from embedder.errors import EmbedderError, StoreError
from embedder.ingest.dry_run import forecast
from embedder.ingest.embed import embed
from embedder.ingest.work import IngestOptions
from embedder.user_steps import written_rows

BRIGHT = {"name": "bright", "inputs": ["image"], "outputs": {"brightness": "float32"}}
NORM = {"name": "norm", "where": "before_write", "inputs": ["image_embedding"], "outputs": {"norm": "float64"}}
HALVES = {
    "name": "halves",
    "inputs": ["image"],
    "outputs": {"region": "region", "side": "string"},
    "one_to_many": True,
}


def step(file, function, **keys):
    return {"callable": f"{file}:{function}", **keys}


@pytest.mark.medium
def test_columns_of_steps_stand_beside_vectors_that_no_step_has_changed(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=4, num_clips=1)
    file = steps_file(tmp_path)
    _, expected = embedded(make_run(source, store=str(tmp_path / "without")))
    config = make_run(source, step=[step(file, "brightness", **BRIGHT), step(file, "norm", **NORM)])
    report, rows = embedded(config)
    assert (report.num_items, report.num_rejected) == (5, 0)
    assert rows.keys() == expected.keys()
    for (item_id, segment), row in rows.items():
        np.testing.assert_array_equal(row["image_embedding"], expected[item_id, segment]["image_embedding"])
        assert row["text_embedding"] == expected[item_id, segment]["text_embedding"]
        assert row["norm"] == pytest.approx(np.linalg.norm(row["image_embedding"]))
        if item_id.endswith(".png"):
            pixels = np.asarray(samples.make_image(int(item_id[-8:-4])))
            assert row["brightness"] == pytest.approx(pixels.mean(), abs=1e-3)
    assert all(row["brightness"] is not None for row in rows.values()), "of a clip, its middle frame"


@pytest.mark.medium
def test_a_row_becomes_several_that_are_numbered_and_know_their_part_of_the_image(make_run, tmp_path):
    source, file = samples.folder(tmp_path / "in", num_images=3), steps_file(tmp_path)
    config = make_run(source, step=[step(file, "quarters", **HALVES)])
    report, rows = embedded(config)
    assert report.num_items == 3
    assert sorted(rows) == [(f"pictures/{number:04d}.png", side) for number in range(3) for side in (0, 1)]
    store = embedder.open_store(config.store)
    for (item_id, segment), row in rows.items():
        x = 20 * segment
        region = {"x": x, "y": 0, "width": 20, "height": 30, "image_width": 40, "image_height": 30}
        assert (row["region"], row["side"]) == (region, ("left", "right")[segment])
        part = samples.make_image(int(item_id[-8:-4])).crop((x, 0, x + 20, 30))
        np.testing.assert_allclose(row["image_embedding"], store.encode_image([part])[0], atol=1e-5)
        is_pair = item_id[-5] in "02"
        assert row["modality"] == ("pair" if is_pair else "image")
        assert (row["text_embedding"] is not None) == (is_pair and segment == 0), "the caption belongs to the first one"
    assert all(item["num_vectors"] == 2 for item in items_of(config).values())


@pytest.mark.medium
def test_windows_of_a_text_have_a_caption_each(make_run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "story.txt").write_text("two cats sleep in the sun on the road")
    file = steps_file(tmp_path)
    windows = {"name": "windows", "inputs": ["caption"], "outputs": {"caption": "string"}, "one_to_many": True}
    steps = [step(file, "windows", settings={"num_words": 4}, **windows)]
    config = make_run(tmp_path / "in", step=steps, captions={"alone": True})
    _, rows = embedded(config)
    texts = ["two cats sleep in", "the sun on the", "road"]
    assert [rows["story.txt", number]["caption"] for number in range(3)] == texts
    vectors = embedder.open_store(config.store).encode_text(texts)
    for number in range(3):
        assert rows["story.txt", number]["modality"] == "text"
        np.testing.assert_allclose(rows["story.txt", number]["text_embedding"], vectors[number], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_caption_of_a_step_is_none(make_run, tmp_path, blank):
    source = samples.folder(tmp_path / "in", num_images=1)
    file = steps_file(tmp_path, f"def blank(batch):\n    return {{'caption': [{blank!r}] * batch.num_rows}}\n")
    keys = {"name": "blank", "inputs": ["caption"], "outputs": {"caption": "string"}}
    _, rows = embedded(make_run(source, step=[step(file, "blank", **keys)]))
    (row,) = rows.values()
    assert (row["modality"], row["caption"], row["text_embedding"]) == ("image", None, None)


@pytest.mark.slow
def test_a_row_that_raises_hangs_kills_or_gives_too_much_is_a_reject_of_that_row_alone(
    make_run, tmp_path, run_embedder
):
    source, file = samples.folder(tmp_path / "in", num_images=8), steps_file(tmp_path)
    troubled = {"name": "lengths", "inputs": ["item_id"], "outputs": {"length": "int64"}, "timeout_s": 5.0}
    config = make_run(source, step=[step(file, "troubled", **troubled)], max_reject_fraction=1)
    report, rows = embedded(config)
    assert (report.num_items, report.num_rejected) == (8, 4)
    assert {item_id for item_id, _ in rows} == {f"pictures/{number:04d}.png" for number in (0, 5, 6, 7)}
    assert all(row["length"] == len("pictures/0000.png") for row in rows.values())
    items = [items_of(config)[f"pictures/{number:04d}.png"] for number in range(1, 5)]
    assert {item["step"] for item in items} == {"lengths"}
    found = [(item["error_type"], item["transient"]) for item in items]
    assert found == [("KeyError", False), ("StepTimeout", True), ("StepDied", False), ("WrongOutput", False)]
    assert items[0]["error"] == "'no price'"
    assert "longer than 5 s" in items[1]["error"]
    assert "SIGKILL" in items[2]["error"]
    assert "2 rows for 1" in items[3]["error"] and "one_to_many" in items[3]["error"]
    code, listed, _ = run_embedder("rejects", "--store", config.store, "--step", "lengths", "--json")
    assert code == 0 and len(listed["rejects"]) == 4

    steps_file(tmp_path, STEPS.replace('"0001" in', '"none" in'))
    fixed = make_run(source, step=[step(file, "troubled", **troubled)], max_reject_fraction=1)
    assert refreshed(fixed)[0].reasons == {"step lengths changed": 8}


@pytest.mark.medium
def test_rejects_of_a_step_are_tried_again_on_demand(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=3)
    file = steps_file(tmp_path, "def own(batch, path):\n    open(path)\n    return {'size': [1] * batch.num_rows}\n")
    needs = {"name": "needs", "inputs": ["uri"], "outputs": {"size": "int32"}}
    needs["settings"] = {"path": str(tmp_path / "late.txt")}
    config = make_run(source, step=[step(file, "own", **needs)], max_reject_fraction=1)
    (tmp_path / "late.txt").touch()
    embedded(config)
    (source / "pictures" / "new.png").write_bytes(samples.image_bytes(7))
    (tmp_path / "late.txt").unlink()
    report, _ = refreshed(config)
    assert (report.num_items, report.num_rejected, report.num_unchanged) == (1, 1, 3)
    assert refreshed(config)[0].outcome == "nothing to do"
    (tmp_path / "late.txt").touch()
    report, rows = refreshed(config, retry_rejects=True)
    assert (report.reasons, report.num_rejected) == ({"rejected before": 1}, 0)
    assert rows["pictures/new.png", 0]["size"] == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_that_name\ndef own(batch): pass", "it imports 'nothing_of_that_name'"),
        ("def other(batch): pass", "has no class or function 'own'; it has other"),
        ("def own(batch: pass", "SyntaxError"),
        ("import time\ntime.sleep(0)\nraise RuntimeError('first line\\nsecond')", "RuntimeError: first line second"),
    ],
)
def test_a_function_that_cannot_be_imported_is_told_before_anything_is_done(make_run, tmp_path, source, said):
    file = steps_file(tmp_path, source)
    images = samples.folder(tmp_path / "in", num_images=2)
    config = make_run(images, step=[step(file, "own", name="own", inputs=["uri"], outputs={"size": "int64"})])
    with pytest.raises(EmbedderError) as raised:
        embed(config)
    assert said in str(raised.value)
    assert str(raised.value).startswith("step own (") and "\n" not in str(raised.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.medium
def test_a_refresh_says_which_step_changed_and_makes_all_rows_anew(make_run, tmp_path):
    source, file = samples.folder(tmp_path / "in", num_images=4), steps_file(tmp_path)
    plain = make_run(source)
    embedded(plain)
    config = make_run(source, step=[step(file, "quarters", **HALVES)])
    with pytest.raises(StoreError, match="step halves added since its rows were made"):
        embed(config)
    refresh = IngestOptions(kind="refresh")
    assert [(each.reason, each.num_items) for each in forecast(config, refresh).reasons] == [("step halves added", 4)]
    report, rows = refreshed(config)
    assert report.reasons == {"step halves added": 4} and len(rows) == 8
    assert refreshed(config)[0].outcome == "nothing to do"

    steps_file(tmp_path, STEPS.replace('("left", "right")', '("west", "east")'))
    assert forecast(config, refresh).reasons[0].reason == "step halves changed"
    assert {row["side"] for row in refreshed(config)[1].values()} == {"west", "east"}

    report, rows = refreshed(plain)
    assert report.reasons == {"step halves removed": 4}
    assert {(row["side"], row["region"]) for row in rows.values()} == {(None, None)} and len(rows) == 4
    assert refreshed(plain)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_a_step_sees_a_carried_column_whose_value_is_content(make_run, tmp_path):
    table = tmp_path / "items.csv"
    table.write_text("id,caption,price\na,two cats,3.5\nb,a red car,\n")
    file = steps_file(
        tmp_path,
        "def cents(batch):\n    return {'cents': [round(100 * each) for each in batch['price'].to_pylist()]}\n",
    )
    source = [{"path": str(table), "columns": {"id": "id", "caption": "caption"}, "carryover": ["price"]}]
    cents = {"name": "cents", "inputs": ["price"], "outputs": {"cents": "int32"}}
    for where in ("after_decode", "before_write"):
        config = make_run(source, store=str(tmp_path / where), step=[step(file, "cents", where=where, **cents)])
        rows = refreshed(config)[1]
        assert {key[0]: (row["price"], row["cents"]) for key, row in rows.items()} == {
            "a": (3.5, 350),
            "b": (None, None),
        }
        assert written_rows._calls_of.cache_info().currsize == 0, "the step's process has ended"


@pytest.mark.medium
def test_search_finds_parts_of_images_and_filters_by_a_column_of_a_step(make_run, tmp_path):
    source, file = samples.folder(tmp_path / "in", num_images=6), steps_file(tmp_path)
    config = make_run(source, step=[step(file, "quarters", **HALVES)])
    embedded(config)
    store = embedder.open_store(config.store)
    part = samples.make_image(3).crop((20, 0, 40, 30))
    hits = store.search(store.encode_image([part])[0], k=3)
    assert (hits[0].item_id, hits[0].segment) == ("pictures/0003.png", 1)
    assert len({hit.item_id for hit in hits}) == 3
    only = store.search(store.encode_image([part])[0], k=3, where="side = 'left'")
    assert {hit.segment for hit in only} == {0}
    assert rows_of(config)[hits[0].item_id, 1]["side"] == "right"


@pytest.mark.medium
def test_the_example_of_the_documentation_runs(make_run, tmp_path):
    page = (Path(embedder.__file__).parents[1] / "docs" / "steps.md").read_text(encoding="utf-8")
    (run,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (entry_point,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    source = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (tmp_path / "run.toml").write_text(run)
    (tmp_path / "own_steps.py").write_text(source)
    plain = make_run(samples.folder(tmp_path / "pictures", num_images=2))
    config = load_config(tmp_path / "run.toml", {"model": plain.model, "engine": "local"})
    report, rows = embedded(config)
    assert (report.num_rejected, len(rows)) == (0, 4)
    assert all(row["norm"] > 0 and row["brightness"] > 0 and row["part"] in (0, 1) for row in rows.values())
    assert "embedder.steps" in entry_point


@pytest.mark.medium
def test_further_models_are_given_the_same_parts_and_kept_where_a_step_changes_none(make_run, tmp_path, tiny_model):
    source, file = samples.folder(tmp_path / "in", num_images=3), steps_file(tmp_path)
    models = [{"uri": str(tiny_model)}, classifier(tmp_path)]
    halves, bright = step(file, "quarters", **HALVES), step(file, "brightness", **BRIGHT)
    config = make_run(source, model=models, step=[halves, bright])
    embedded(config)
    main, shades = model_rows(config), model_rows(config, "shades")
    assert main.keys() == shades.keys() and len(main) == 6
    for (item_id, segment), row in shades.items():
        part = samples.make_image(int(item_id[-8:-4])).crop((20 * segment, 0, 20 * segment + 20, 30))
        assert row["scores"][0] * 255 == pytest.approx(np.asarray(part).mean(), abs=3)
        assert main[item_id, segment]["brightness"] == pytest.approx(np.asarray(part).mean(), abs=1e-3)
    before = table_hashes(config.store, "shades")
    report, _ = refreshed(make_run(source, model=models, step=[halves, bright | {"settings": {"scale": 2}}]))
    assert report.reasons == {"step bright changed": 3}
    assert table_hashes(config.store, "shades") == before


@pytest.mark.medium
def test_a_dry_run_tells_what_a_changed_step_before_writing_costs_and_which_models_it_leaves(
    make_run, tmp_path, tiny_model
):
    source, file = samples.folder(tmp_path / "in", num_images=4), steps_file(tmp_path)
    norm = {"name": "norm", "where": "before_write", "inputs": ["image_embedding"], "outputs": {"norm": "float64"}}
    models = [{"uri": str(tiny_model)}, classifier(tmp_path)]
    config = make_run(source, model=models, step=[step(file, "norm", **norm)])
    embedded(config)
    steps_file(tmp_path, STEPS.replace("float(np.linalg.norm(each))", "2 * float(np.linalg.norm(each))"))

    expected = forecast(config, IngestOptions(kind="refresh"))

    assert [(each.reason, each.num_items) for each in expected.reasons] == [("step norm changed", 4)]
    assert expected.replaces_all and expected.estimate.num_runs == 1 and expected.estimate.wall_s > 0
    assert expected.models["shades"].reasons == () and not expected.models["shades"].replaces_all


@pytest.mark.medium
def test_a_rollback_over_a_step_brings_back_rows_without_it_and_its_columns_are_null(make_run, tmp_path):
    source, file = samples.folder(tmp_path / "in", num_images=4), steps_file(tmp_path)
    plain, halved = make_run(source), make_run(source, step=[step(file, "quarters", **HALVES)])
    _, before = refreshed(plain)
    _, parts = refreshed(halved)
    back(plain)
    rows = rows_of(plain)
    assert rows.keys() == before.keys() and {row["side"] for row in rows.values()} == {None}
    assert {key: {name: row[name] for name in before[key]} for key, row in rows.items()} == before
    let_go(plain)
    assert refreshed(plain)[0].num_items == 0
    report, again = refreshed(halved)
    assert report.published and again.keys() == parts.keys()
    assert all(again[key]["region"] == parts[key]["region"] for key in parts)


@pytest.mark.medium
@pytest.mark.parametrize("is_published", [True, False])
def test_a_step_that_was_given_up_leaves_a_column_that_no_later_run_needs(make_run, tmp_path, is_published):
    source, file = samples.folder(tmp_path / "in", num_images=2), steps_file(tmp_path)
    plain, normed = make_run(source), make_run(source, step=[step(file, "norm", **NORM)])
    refreshed(plain)
    assert refreshed(normed, limit=2 if is_published else 1)[0].published == is_published
    if is_published:
        back(plain)
        let_go(plain)
    (source / "new.png").write_bytes(samples.image_bytes(50))
    report, rows = refreshed(plain)
    assert (report.num_new, report.num_changed) == (1, 0)
    assert {row["norm"] for row in rows.values()} == {None}


@pytest.mark.medium
def test_a_run_goes_on_with_the_same_steps_alone(make_run, tmp_path):
    source, file = samples.folder(tmp_path / "in", num_images=4), steps_file(tmp_path)
    plain, halved = make_run(source), make_run(source, step=[step(file, "quarters", **HALVES)])
    _, before = refreshed(plain)
    report, rows = refreshed(halved, limit=2)
    assert not report.published and rows == before
    report, rows = refreshed(halved, limit=1)
    assert (report.reasons, report.num_unchanged, rows == before) == ({"step halves added": 2}, 2, True)
    steps_file(tmp_path, STEPS.replace('("left", "right")', '("west", "east")'))
    report, rows = refreshed(halved)
    assert report.published and report.reasons == {"step halves added": 4}, "no row of the other source's is taken"
    assert [rows[key]["side"] for key in sorted(rows)] == ["west", "east"] * 4
