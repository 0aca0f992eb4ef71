"""Several models in one run: one read, a plan for each, one publication; and each model's own failures."""

import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import samples
from embedding_runs import assert_same_vectors, embedded
from model_runs import classifier, detector, model_rows, other_towers, table_hashes
from PIL import Image
from refresh_runs import interrupted

from embedder.config_toml.values import toml
from embedder.errors import RunFailedError, StoreError
from embedder.ingest import retrieval_check
from embedder.ingest.dry_run import forecast
from embedder.ingest.embed import embed, refresh
from embedder.ingest.work import IngestOptions
from embedder.media.sandbox import SandboxedDecoder
from embedder.sources.fetch import Fetcher
from embedder.store.backends import DiskBackend
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, PAIRS_FILE, read_current
from embedder.store.publish.publication import INTENT_FILE

pytestmark = pytest.mark.medium

REFRESH = IngestOptions(kind="refresh")


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=12, num_clips=1)


@pytest.fixture
def counts(monkeypatch):
    """Items that were fetched, and sizes that images were decoded to."""
    counts = {"fetched": [], "decoded": []}
    fetch, images = Fetcher.fetch, SandboxedDecoder.images

    def counting_fetch(self, uri, *arguments, **options):
        counts["fetched"].append(uri)
        return fetch(self, uri, *arguments, **options)

    def counting_images(self, requests):
        counts["decoded"] += [resize.image_size for _, resize in requests]
        return images(self, requests)

    monkeypatch.setattr(Fetcher, "fetch", counting_fetch)
    monkeypatch.setattr(SandboxedDecoder, "images", counting_images)
    return counts


def test_one_fetch_and_one_decode_for_each_preprocessing_and_the_vectors_of_separate_runs(
    make_run, tmp_path, source, tiny_model, other_model, counts
):
    folders = {"first": str(tiny_model), "other": other_model}
    expected = {}
    for name, folder in folders.items():
        alone = make_run(source, model=folder, store=str(tmp_path / name), segment_s=1.0)
        expected[name] = embedded(alone)[1]
    counts["fetched"].clear()
    counts["decoded"].clear()

    models = [{"uri": str(tiny_model)}, {"name": "other", "uri": other_model, "stages": 3}, classifier(tmp_path)]
    config = make_run(source, model=models, segment_s=1.0)
    report = embed(config)

    assert report.published, report.outcome
    assert len(counts["fetched"]) == len(set(counts["fetched"])) == report.num_items
    assert sorted(counts["decoded"]) == [8] * 12 + [32] * 12
    assert_same_vectors(model_rows(config), expected["first"])
    assert_same_vectors(model_rows(config, "other"), expected["other"])
    shades = model_rows(config, "shades")
    assert shades.keys() == expected["first"].keys()
    for key, row in shades.items():
        has_image = expected["first"][key]["image_embedding"] is not None
        assert row["image_embedding"] is None
        assert row["top"] in (("bright", "dark") if has_image else (None,))
        assert not has_image or abs(sum(row["scores"]) - 1) < 1e-5
    current = read_current(StoreFiles(config.store))
    assert (current.models["other"].index, current.models["other"].has_vectors) == (1, True)
    assert (current.models["shades"].index, current.models["shades"].has_vectors) == (None, False)
    assert set(current.models["shades"].outputs) == {"top", "scores"}
    assert {name: each.num_items for name, each in report.models.items()} == dict.fromkeys(
        ("other", "shades"), report.num_items
    )


def test_a_model_added_to_a_store_leaves_the_others_to_the_byte_and_computes_alone(
    make_run, tmp_path, source, tiny_model, other_model, counts
):
    main = {"uri": str(tiny_model)}
    config = make_run(source, model=[main, {"name": "other", "uri": other_model}])
    embed(config)
    before, others = table_hashes(config.store), table_hashes(config.store, "other")
    counts["decoded"].clear()
    done: list[int] = []
    changed = make_run(source, model=[main, {"name": "other", "uri": other_model}, classifier(tmp_path)])

    report = embed(changed, show_progress=lambda num_items: nullcontext(done.append))

    assert report.published
    assert done[-1] == 13, "the progress counts what the added model did"
    assert set(counts["decoded"]) == {8}
    assert (table_hashes(config.store), table_hashes(config.store, "other")) == (before, others)
    assert {name: each.num_items for name, each in report.models.items()} == {"other": 0, "shades": 13}
    assert (
        embed(make_run(source, model=[main, {"name": "other", "uri": other_model}, classifier(tmp_path)])).run_id
        is None
    )


def test_a_changed_main_model_leaves_the_others_vectors(make_run, tmp_path, source, tiny_model, other_model):
    further = [{"name": "other", "uri": other_model}, classifier(tmp_path)]
    config = make_run(source, model=[{"uri": str(tiny_model)}, *further])
    embed(config)
    kept = [table_hashes(config.store, name) for name in ("other", "shades")]
    rows = model_rows(config)

    report = refresh(make_run(source, model=[{"uri": other_towers(tmp_path, 2)}, *further]))

    assert report.published
    assert report.reasons == {"model changed": 13}
    assert [table_hashes(config.store, name) for name in ("other", "shades")] == kept
    changed = model_rows(config)
    assert all(
        changed[key]["image_embedding"] != row["image_embedding"] for key, row in rows.items() if row["image_embedding"]
    )


def test_a_changed_model_alone_is_computed_anew_and_a_removed_one_leaves_with_a_refresh(
    make_run, tmp_path, source, tiny_model, other_model, said
):
    main, other = {"uri": str(tiny_model)}, {"name": "other", "uri": other_model}
    config = make_run(source, model=[main, other, classifier(tmp_path)])
    embed(config)
    before = table_hashes(config.store)
    changed = make_run(source, model=[main, classifier(tmp_path, side_px=16)])

    expected = forecast(changed, REFRESH)
    assert expected.num_to_embed == 0
    assert [(each.reason, each.num_items) for each in expected.models["shades"].reasons] == [("model changed", 13)]
    assert expected.removed_models == ("other",)
    with pytest.raises(StoreError, match="models/shades: its model fingerprint is"):
        embed(changed)
    report = refresh(changed)

    assert report.published
    assert report.removed_models == ("other",)
    assert list(read_current(StoreFiles(config.store)).models) == ["shades"]
    assert table_hashes(config.store) == before
    assert sum("model other: not in the configuration any more: it leaves" in line for line in said) == 1


def test_what_a_model_cannot_compute_is_a_reject_of_that_model_alone(make_run, tmp_path, tiny_model):
    source = samples.folder(tmp_path / "in", num_images=4)
    for name, value in (("seven", 7), ("light", 200)):
        Image.new("RGB", (20, 20), (value,) * 3).save(source / f"{name}.png")
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    models = [{"uri": str(tiny_model)}, classifier(tmp_path, poison=[7])]
    config = make_run(source, model=models, max_reject_fraction=0.5)

    embed(config)

    main, shades = model_rows(config, table="items"), model_rows(config, "shades", "items")
    assert {name for name, item in main.items() if item["state"] == "rejected"} == {"broken.png"}
    assert {name: item["step"] for name, item in shades.items() if item["state"] == "rejected"} == {
        "broken.png": "decode",
        "seven.png": "model shades",
    }
    assert "ValueError: this image hurts" in shades["seven.png"]["error"]
    assert model_rows(config)["seven.png", 0]["image_embedding"] is not None


def test_the_guard_of_one_model_keeps_the_run_from_publishing_and_names_it(make_run, tmp_path, source, tiny_model):
    wrong = classifier(tmp_path)
    wrong["outputs"]["top"] = {"type": "int64"}
    named = r"guard rejects: model shades: 13 of 13 .* 13 x model shades ModelFailed .*--model shades .*--force rejects"
    with pytest.raises(RunFailedError, match=named):
        embed(make_run(source, model=[{"uri": str(tiny_model)}, wrong]))


def test_changed_items_are_changed_in_each_model_and_equal_contents_in_none(make_run, tmp_path, tiny_model):
    source = samples.folder(tmp_path / "in", num_images=5)
    models = [{"uri": str(tiny_model)}, classifier(tmp_path)]
    config = make_run(source, model=models)
    embed(config)
    rows = model_rows(config, "shades")
    paths = sorted((source / "pictures").glob("*.png"))
    paths[0].write_bytes(paths[0].read_bytes())
    Image.new("RGB", (20, 20), (250,) * 3).save(paths[1])
    paths[2].unlink()

    report = refresh(make_run(source, model=models, max_retire_fraction=1))

    assert (report.num_equal, report.models["shades"].num_equal, report.models["shades"].num_retired) == (1, 1, 1)
    found = model_rows(config, "shades")
    keys = [(str(path.relative_to(source)), 0) for path in paths]
    assert keys[2] not in found and keys[2] not in model_rows(config)
    assert found[keys[1]]["top"] == "bright"
    for key in keys[3:] + keys[:1]:
        assert found[key] == rows[key], "nothing of it is rewritten, its outputs least of all"


def test_a_run_that_died_goes_on_for_each_model(make_run, tmp_path, source, tiny_model, monkeypatch):
    models = [{"uri": str(tiny_model)}, classifier(tmp_path, calls=str(tmp_path / "calls"))]
    config = make_run(source, model=models, rows_per_part=4, batch_size=4)
    interrupted(monkeypatch, config, "publish_or_refuse.publish")
    calls = (tmp_path / "calls").read_text().splitlines()
    report = refresh(config)

    assert report.published
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert model_rows(config).keys() == model_rows(config, "shades").keys()


@pytest.mark.parametrize("steps", range(0, 20, 4))
def test_a_publication_that_is_cut_off_anywhere_is_whole_after_the_next_command(
    make_run, tmp_path, tiny_model, monkeypatch, steps
):
    source = samples.folder(tmp_path / "in", num_images=3)
    config = make_run(source, model=[{"uri": str(tiny_model)}, classifier(tmp_path)])
    made, put = [], DiskBackend.put

    def cut_off(self, path, data, condition):
        if made or path.endswith(INTENT_FILE):
            if len(made) == steps:
                raise KeyboardInterrupt
            made.append(path)
        return put(self, path, data, condition)

    with monkeypatch.context() as patch:
        patch.setattr(DiskBackend, "put", cut_off)
        try:
            embed(config)
        except KeyboardInterrupt:
            assert (read_current(StoreFiles(config.store)) is not None) == (CURRENT_FILE in made)
    assert made or not steps
    embed(config)

    assert len(model_rows(config)) == len(model_rows(config, "shades")) == 3
    assert list(read_current(StoreFiles(config.store)).models) == ["shades"]


def test_a_limited_run_gives_each_model_its_items_at_last(make_run, tmp_path, source, tiny_model):
    models = [{"uri": str(tiny_model)}, classifier(tmp_path)]
    config = make_run(source, model=models)
    refresh(make_run(source), limit=5)

    reports = [refresh(config, limit=6) for _ in range(3)]

    assert all(report.published for report in reports)
    assert refresh(config).run_id is None
    assert len(model_rows(config)) == len(model_rows(config, "shades"))


def test_a_model_may_take_what_another_returns(make_run, tmp_path, source, tiny_model, other_model):
    tower = {"name": "names", "uri": other_model, "sides": ["text"], "text_of": "shades.top"}
    config = make_run(source, model=[{"uri": str(tiny_model)}, tower, classifier(tmp_path)])
    embed(config)

    rows, shades = model_rows(config, "names"), model_rows(config, "shades")
    by_name = {}
    for key, row in rows.items():
        assert (row["text_embedding"] is None) == (shades[key]["top"] is None)
        if row["text_embedding"] is not None:
            by_name.setdefault(shades[key]["top"], []).append(row["text_embedding"])
    assert by_name
    for vectors in by_name.values():
        np.testing.assert_allclose(vectors, [vectors[0]] * len(vectors), atol=1e-6)
    changed = make_run(source, model=[{"uri": str(tiny_model)}, tower, classifier(tmp_path, side_px=16)])
    assert refresh(changed).models["names"].reasons == {"model changed": 13}


def test_the_main_model_does_not_load_for_what_another_needs_alone(make_run, tmp_path, source, tiny_model, monkeypatch):
    embed(make_run(source))
    loaded = []
    monkeypatch.setattr("embedder.steps.stage.TowerStage.__init__", lambda self, *_: loaded.append(self))
    report = embed(make_run(source, model=[{"uri": str(tiny_model)}, classifier(tmp_path)]))
    assert report.published
    assert not loaded


@pytest.mark.slow
def test_on_ray_all_models_give_what_they_give_in_one_process(
    make_run, tmp_path, source, tiny_model, other_model, ray_cluster
):
    models = [{"uri": str(tiny_model)}, {"name": "other", "uri": other_model, "stages": 2}, classifier(tmp_path)]
    whole = [{key: value for key, value in model.items() if key != "stages"} for model in models]
    here = make_run(source, model=whole, segment_s=1.0, store=str(tmp_path / "here"))
    embed(here)
    on_ray = {"engine": "ray", "num_stages": 1, "segment_s": 1.0, "decode": {"items_per_task": 4}}
    there = make_run(source, model=models[:1], **on_ray)
    embed(there)
    before = table_hashes(there.store)
    there = make_run(source, model=models, **on_ray)
    report = embed(there)

    assert report.published, report.outcome
    assert table_hashes(there.store) == before
    for name in ("", "other", "shades"):
        found, expected = model_rows(there, name), model_rows(here, name)
        assert_same_vectors(found, expected)
        if name == "shades":
            assert {key: row["top"] for key, row in found.items()} == {k: row["top"] for k, row in expected.items()}


def kill_when_three_parts_are_done(folder, models, store, source, journal, settings):
    """Start a run in a process of its own, and kill it."""
    file = folder / "run.toml"
    tables = ["\n".join(["[[model]]", *(f"{key} = {toml(value)}" for key, value in each.items())]) for each in models]
    top = [f"{key} = {value}" for key, value in settings.items()]
    top += ['engine = "local"', f'store = "{store}"', "[[source]]", f'path = "{source}"']
    file.write_text("\n".join([*top, *tables]))
    run = subprocess.Popen([sys.executable, "-m", "embedder", "embed", "--config", str(file)])
    deadline_s = time.monotonic() + 120
    while len(list(journal.glob("*/journal/*.json"))) < 3 and time.monotonic() < deadline_s and run.poll() is None:
        time.sleep(0.005)
    run.kill()
    assert run.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_run_that_adds_a_model_goes_on_and_the_main_models_files_stay(make_run, tmp_path, tiny_model):
    source = samples.folder(tmp_path / "in", num_images=80)
    settings = {"rows_per_part": 4, "batch_size": 4}
    config = make_run(source, **settings)
    embed(config)
    before = table_hashes(config.store)
    section = classifier(tmp_path, calls=str(tmp_path / "calls"), pause_s=0.05)
    models = [{"uri": str(tiny_model)}, section]
    journal = Path(config.store) / "models" / "shades" / "runs"
    kill_when_three_parts_are_done(tmp_path, models, config.store, source, journal, settings)
    num_done = 4 * len(list(journal.glob("*/journal/*.json")))
    calls = tmp_path / "calls"
    calls.write_text("")
    report = embed(make_run(source, model=models, **settings))

    assert report.published
    assert len(calls.read_text().splitlines()) == 80 - num_done
    assert table_hashes(config.store) == before
    assert model_rows(config).keys() == model_rows(config, "shades").keys()


@pytest.mark.slow
def test_a_killed_chain_of_detector_crops_and_a_cut_tower_goes_on_exactly(make_run, tmp_path, tiny_model, other_model):
    source = samples.folder(tmp_path / "in", num_images=60)
    settings = {"rows_per_part": 4, "batch_size": 4}
    crops = {"name": "crops", "uri": other_model, "sides": ["image"], "image_of": "detector.crop", "stages": 2}
    models = [{"uri": str(tiny_model)}, crops, detector(tmp_path, pause_s=0.05)]
    undisturbed = make_run(source, model=models, store=str(tmp_path / "undisturbed"), **settings)
    embed(undisturbed)
    killed = make_run(source, model=models, store=str(tmp_path / "killed"), **settings)
    journal = Path(killed.store) / "runs"
    kill_when_three_parts_are_done(tmp_path, models, killed.store, source, journal, settings)
    assert not (Path(killed.store) / "CURRENT.json").exists()
    finished = set(journal.glob("*/journal/*.json"))
    report = embed(killed)
    assert report.published and finished <= set(journal.glob("*/journal/*.json"))
    for name in ("", "crops", "detector"):
        found, expected = model_rows(killed, name), model_rows(undisturbed, name)
        assert_same_vectors(found, expected)
        if name == "detector":
            facts = {key: (row["box"], row["crop"]) for key, row in expected.items()}
            assert {key: (row["box"], row["crop"]) for key, row in found.items()} == facts
    boxed = [row for row in model_rows(killed, "detector").values() if row["box"] is not None]
    assert len(boxed) == 60
    assert all(row["image_embedding"] for row in model_rows(killed, "crops").values())


def test_each_models_guard_goes_on_from_its_own_sample(
    make_run, tmp_path, source, tiny_model, other_model, monkeypatch
):
    config = make_run(source, model=[{"uri": str(tiny_model)}, {"name": "other", "uri": other_model, "stages": 3}])
    embed(config)
    files = StoreFiles(config.store)
    kept = [info.path for info in files.list("") if info.path.endswith(PAIRS_FILE)]
    assert sorted(path.split("/")[0] for path in kept) == ["models", "runs"]
    read = []
    monkeypatch.setattr(retrieval_check, "published_pieces", lambda *where: read.append(where) or iter(()))
    (source / "pictures" / "0100.png").write_bytes(samples.image_bytes(100))
    report = embed(config)
    assert (report.published, report.num_new, read) == (True, 1, [])
    kept = [info.path for info in files.list("") if info.path.endswith(PAIRS_FILE)]
    assert len(kept) == 2 and all(report.run_id in path for path in kept), "those before have gone"
