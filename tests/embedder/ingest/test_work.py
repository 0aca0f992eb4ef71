"""A listing is compared alike, whether it fits into memory or lies in parts on disk."""

import random

import pyarrow as pa
import pytest
import samples
from refresh_runs import items_of, refreshed, rows_of

from embedder.ingest.diff import MODEL_CHANGED
from embedder.ingest.dry_run import forecast
from embedder.ingest.known_items import NOTHING_FINISHED, PUBLISHED
from embedder.ingest.listed_items import ListedItems
from embedder.ingest.work import IngestOptions, plan_work
from embedder.sources.listing import LISTING_SCHEMA
from embedder.storage import hashed_rows
from embedder.storage.hashed_rows import HashedRows

pytestmark = pytest.mark.medium

NUM_NAMES = 400
NUM_PARTS = 16  # of 400 names; each part costs a dozen queries
MAX_ATTEMPTS = 5
STATES = ("embedded", "embedded", "embedded", "rejected", "left_out")


def table(schema, rows):
    return pa.Table.from_pylist(rows, schema)


def facts(chance, name):
    """What a listing and a store may know of an item; few values, so that many are equal."""
    return {"item_id": name, "source": name[0], "size_bytes": chance.choice((1, None)), "modified": chance.choice("ab")}


def some(chance, share):
    """Names of two sources, in any order."""
    names = [f"{'xy'[number % 2]}:{number}" for number in range(NUM_NAMES)]
    return chance.sample(names, round(share * NUM_NAMES))


def sample(seed):
    """A listing with repeated ids, published items, and items that an unfinished run has finished."""
    chance = random.Random(seed)
    listed = some(chance, 0.9)
    listed = [{**facts(chance, name), "uri": name} for name in [*listed, *chance.choices(listed, k=20)]]
    state = {"attempts": 2, "content_version": "c", "num_vectors": 1, "stale": False}
    published = [
        {**facts(chance, name), **state, "state": chance.choice(STATES), "transient": chance.choice((True, False))}
        for name in some(chance, 0.8)
    ]
    finished = [
        {**facts(chance, name), "attempts": 3, "state": chance.choice(STATES), "transient": True}
        for name in some(chance, 0.3)
    ]
    return listed, published, [{key: row[key] for key in NOTHING_FINISHED.schema.names} for row in finished]


def planned(listed, published, finished, options, outdated, memory_bytes):
    """The decision as plain values."""
    listing = HashedRows([table(LISTING_SCHEMA, listed)], LISTING_SCHEMA, memory_bytes=memory_bytes)
    held = HashedRows([table(PUBLISHED, published)], PUBLISHED, memory_bytes=memory_bytes)
    done = HashedRows([table(NOTHING_FINISHED.schema, finished)], NOTHING_FINISHED.schema)
    work = plan_work(MAX_ATTEMPTS, options, ListedItems(listing), held, done, outdated)
    return {
        "to_embed": work.difference.to_embed.to_pylist(),
        "first": work.difference.first(options.limit).to_embed["item_id"].to_pylist(),
        "num_unchanged": work.difference.num_unchanged,
        "retired": sorted(work.retired["item_id"].to_pylist()),
        "retired_ids": sorted(work.retired_ids.to_pylist()),
        "left_out": sorted(work.left_out_ids.to_pylist()),
        "counts": (work.num_as_published, work.is_nothing, work.num_listed, dict(work.num_published)),
    }


@pytest.mark.parametrize("outdated", [None, MODEL_CHANGED])
@pytest.mark.parametrize("num_finished", [0, None])
@pytest.mark.parametrize("kind", ["embed", "refresh"])
def test_parts_on_disk_and_one_part_in_memory_decide_alike(kind, num_finished, outdated, monkeypatch):
    monkeypatch.setattr(hashed_rows, "NUM_PARTS", NUM_PARTS)
    for seed in range(3):
        listed, published, finished = sample(seed)
        finished = finished[:num_finished]
        options = IngestOptions(kind=kind, limit=150, only=pa.array([row["item_id"] for row in listed[:250]]))
        for chosen in (options, IngestOptions(kind=kind, limit=50, retry_rejects=True)):
            one = planned(listed, published, finished, chosen, outdated, 1 << 30)
            many = planned(listed, published, finished, chosen, outdated, 0)
            assert many == one
            assert one["to_embed"]
            assert bool(one["retired"]) is chosen.may_retire


def test_a_listing_on_disk_and_a_small_store_meet_in_the_same_parts():
    listed, published, _ = sample(1)
    listing = HashedRows([table(LISTING_SCHEMA, listed)], LISTING_SCHEMA, memory_bytes=0)
    held = HashedRows([table(PUBLISHED, published)], PUBLISHED)
    options = IngestOptions(kind="refresh")
    nothing = HashedRows((), NOTHING_FINISHED.schema)
    mixed = plan_work(MAX_ATTEMPTS, options, ListedItems(listing), held, nothing, None)
    alone = planned(listed, published, [], options, None, 1 << 30)
    assert mixed.difference.to_embed.to_pylist() == alone["to_embed"]
    assert sorted(mixed.retired["item_id"].to_pylist()) == alone["retired"]


def test_a_refresh_with_everything_on_disk_makes_the_same_store(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in")
    (source / "broken.png").write_bytes(b"no image")
    (source / "page.html").write_text("<html>")
    settings = {"max_reject_fraction": 1, "max_retire_fraction": 0.5}
    config, in_memory = make_run(source, **settings), make_run(source, **settings, store=str(tmp_path / "other"))

    def both():
        monkeypatch.setattr(hashed_rows, "MEMORY_BYTES", 1 << 30)
        small, rows = refreshed(in_memory)
        monkeypatch.setattr(hashed_rows, "MEMORY_BYTES", 0)
        expected = forecast(config, IngestOptions(kind="refresh"))
        large, others = refreshed(config)
        assert {each.reason: each.num_items for each in expected.reasons} == large.reasons == small.reasons
        assert expected.num_retired == large.num_retired == small.num_retired
        assert large.num_unchanged == small.num_unchanged
        assert {key: row["image_embedding"] for key, row in others.items()} == {
            key: row["image_embedding"] for key, row in rows.items()
        }
        assert {key: row["state"] for key, row in items_of(config).items()} == {
            key: row["state"] for key, row in items_of(in_memory).items()
        }
        return large

    assert both().published
    assert both().outcome == "nothing to do"
    pictures = sorted(source.rglob("*.png"))
    pictures[0].unlink()
    (source / "another.png").write_bytes(pictures[1].read_bytes())
    report = both()
    assert (report.num_retired, report.reasons) == (1, {"new": 1})
    assert ("another.png", 0) in rows_of(config)
