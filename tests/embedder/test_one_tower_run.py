"""A model with only one tower, through a whole run: what it embeds is found, what it can't is refused in one line."""

import numpy as np
import pytest
import samples
from embedding_runs import embedded
from tiny_models import tiny_config

from embedder.cli.render_report import report_parts
from embedder.errors import ConfigError
from embedder.ingest.embed import refresh
from embedder.plugins.verify.verify import verify
from embedder.retrieval.store_api import open_store
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model folder by side."""
    root, tokenizer = tmp_path_factory.mktemp("single"), train_tokenizer(samples.SENTENCES, 300)
    alone = {side: root / side for side in ("vision", "text")}
    for side, other in (("vision", "text"), ("text", "vision")):
        changes = {other: None, "name": side, "embedding_dim": 32, f"{side}_projection": "none"}
        config = tiny_config().model_copy(update=changes)
        init_model(config, alone[side], seed=0, tokenizer_json=tokenizer if side == "text" else None)
    return alone


@pytest.fixture
def source(tmp_path):
    """Six images, three with captions, a clip, and a caption without a picture."""
    root = samples.folder(tmp_path / "in", num_images=6, num_clips=1)
    (root / "alone.txt").write_text("an old map of the town")
    return root


@pytest.mark.medium
def test_a_vision_model_embeds_images_and_finds_them_by_images(make_run, models, source, run_embedder):
    run = make_run(source, model=str(models["vision"]), max_reject_fraction=0.5, captions={"alone": True})
    report, rows = embedded(run)
    assert report.ignored == {"captions": 3}
    assert all(row["text_embedding"] is None and row["image_embedding"] is not None for row in rows.values())
    assert rows["pictures/0000.png", 0]["caption"] == samples.SENTENCES[0]
    assert {"image", "pair", "video"} == {row["modality"] for row in rows.values()}
    store = open_store(run.store)
    (reject,) = store.rejects().to_pylist()
    assert (reject["item_id"], reject["error_type"]) == ("alone.txt", "NoTower")
    assert "no text tower" in reject["error"]
    hits = store.search(image=source / "pictures" / "0003.png", k=2)
    assert (hits[0].item_id, round(hits[0].score, 4)) == ("pictures/0003.png", 1.0)
    for options in ({}, {"hybrid": True}):
        with pytest.raises(ConfigError, match="has no text tower, so it can't encode texts; give an image"):
            store.search("a red car", **options)
    code, _, error = run_embedder("search", "a red car", "--store", run.store)
    assert (code, len(error.strip().splitlines())) == (2, 1)
    code, found, _ = run_embedder("search", "--image", source / "pictures" / "0003.png", "--store", run.store, "--json")
    assert (code, found["hits"][0]["item_id"]) == (0, "pictures/0003.png")


def test_a_text_model_embeds_captions_and_finds_them_by_texts(make_run, models, source, run_embedder):
    run = make_run(source, model=str(models["text"]), max_reject_fraction=0.9)
    report, rows = embedded(run)
    assert report.ignored == {"images": 3}
    assert all(row["image_embedding"] is None and row["text_embedding"] is not None for row in rows.values())
    assert {item for item, _ in rows} == {"alone.txt", *(f"pictures/000{n}.png" for n in (0, 2, 4))}
    store = open_store(run.store)
    assert {reject["error_type"] for reject in store.rejects().to_pylist()} == {"NoTower"}
    hits = store.search("an old map of the town", k=2)
    assert (hits[0].item_id, round(hits[0].score, 4)) == ("alone.txt", 1.0)
    assert store.search("an old map of the town", k=2, hybrid=True)[0].item_id == "alone.txt"
    with pytest.raises(ConfigError, match="has no vision tower, so it can't encode images; give a text"):
        store.search(image=source / "pictures" / "0003.png")
    code, _, error = run_embedder("search", "--image", source / "pictures" / "0003.png", "--store", run.store)
    assert (code, len(error.strip().splitlines())) == (2, 1)


@pytest.mark.medium
@pytest.mark.parametrize("side", ["vision", "text"])
def test_its_stages_are_verified_and_its_folder_is_described(make_run, models, source, run_embedder, side):
    found = verify(make_run(source, model=str(models[side]), num_stages=2))
    passed = {each.side: each.passed for each in found.comparisons}
    assert passed == {"image": True, "text": None} if side == "vision" else {"image": None, "text": True}
    assert (found.failures, found.num_pairs) == ([], 0)
    code, info, _ = run_embedder("model", "info", models[side], "--json")
    assert (code, {part["name"].split()[0] for part in info["parts"]}) == (0, {side})
    code, plan, _ = run_embedder("plan", "--model", models[side], "--stages", "2", "--estimate", "--json")
    assert (code, len(plan["stages"])) == (0, 2)


@pytest.mark.medium
@pytest.mark.parametrize("side", ["vision", "text"])
def test_its_index_and_evaluation(make_run, models, source, run_embedder, side, tmp_path):
    run = make_run(source, model=str(models[side]), max_reject_fraction=0.9)
    embedded(run)
    code, _, _ = run_embedder("index", "build", "--store", run.store, "--json")
    assert code == 0
    lacking = "text" if side == "vision" else "vision"
    code, _, error = run_embedder("evaluate", "--store", run.store)
    assert (code, f"its model has no {lacking} tower" in error.splitlines()[-1]) == (2, True), error
    queries = tmp_path / "queries.csv"
    queries.write_text("query,item_id\nan old map of the town,pictures/0000.png\n")
    code, _, error = run_embedder("evaluate", "--store", run.store, "--queries", queries)
    assert (code, f"no {lacking} tower" in error.splitlines()[-1]) == (2, True), error
    vectors = open_store(run.store).search(np.eye(32, dtype=np.float32)[0], k=3)
    assert len(vectors) == 3


@pytest.mark.medium
def test_a_refresh_says_in_one_line_how_many_new_captions_were_ignored(make_run, models, source):
    run = make_run(source, model=str(models["vision"]), max_reject_fraction=0.5)
    embedded(run)
    assert refresh(run).ignored == {}, "nothing is new"
    (source / "pictures" / "0001.txt").write_text("a caption that came later")
    report = refresh(run)
    assert report.ignored == {"captions": 1}
    lines = [line for line in map(str, report_parts(report)) if "ignored" in line]
    assert lines == ["1 whose captions were ignored, as the model has no tower for them"]
