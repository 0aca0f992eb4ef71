"""Another model: all is embedded again, the old vectors are served until then, and nothing is mixed."""

import json
from pathlib import Path

import numpy as np
import pytest
import samples
from refresh_runs import contents, items_of, refreshed, rows_of
from store_states import build_store_index

import embedder
from embedder.errors import StoreError
from embedder.ingest.embed import embed
from embedder.store.files import StoreFiles
from embedder.store.layout import STORE_FILE
from index.manifest import read_manifest

pytestmark = pytest.mark.medium


def fingerprints(config):
    return {row["model_fingerprint"] for row in rows_of(config).values()}


def test_a_new_model_embeds_all_anew_and_is_published_at_once_when_whole(make_run, tmp_path, other_model):
    source = samples.folder(tmp_path / "in", num_images=20)
    old = make_run(source)
    _, before = refreshed(old)
    build_store_index(StoreFiles(old.store))
    new = make_run(source, model=other_model)
    picture = source / "pictures" / "0003.png"

    for number, limit in enumerate((8, 8)):
        report, rows = refreshed(new, limit=limit)
        assert not report.published
        assert f"{8 * number + 8} items done and kept" in report.outcome
        assert rows == before
        store = embedder.open_store(old.store)
        assert store.info.model == old.model
        assert store.search(store.encode_image([picture])[0], k=1)[0].item_id == "pictures/0003.png"

    report, rows = refreshed(new, limit=8)
    assert report.published
    assert (report.reasons, report.num_unchanged, report.num_items) == ({"model changed": 4}, 16, 20)
    assert rows.keys() == before.keys()
    store = embedder.open_store(old.store)
    (fingerprint,) = fingerprints(new)
    assert store.info.model == other_model
    assert fingerprint == store.info.model_fingerprint == store.current.model_fingerprint
    assert json.loads((Path(old.store) / STORE_FILE).read_text())["model"] == other_model
    manifest = read_manifest(Path(old.store) / "index" / f"{store.current.index:06d}")
    assert (manifest.model_fingerprint, manifest.embeddings_version) == (fingerprint, store.current.embeddings)
    hit = store.search(store.encode_image([picture])[0], k=1)[0]
    assert (hit.item_id, hit.score) == ("pictures/0003.png", pytest.approx(1, abs=1e-4))
    assert not np.allclose(
        rows["pictures/0003.png", 0]["image_embedding"], before["pictures/0003.png", 0]["image_embedding"]
    )
    assert refreshed(new)[0].outcome == "nothing to do"


def test_what_changes_or_goes_while_a_model_changes_is_right_in_the_end(make_run, tmp_path, other_model):
    source = samples.folder(tmp_path / "in", num_images=20)
    refreshed(make_run(source))
    new = make_run(source, model=other_model, max_retire_fraction=1)
    refreshed(new, limit=10)
    (source / "pictures" / "0001.png").unlink()  # done already
    (source / "pictures" / "0019.png").unlink()  # not done yet
    (source / "pictures" / "0002.png").write_bytes(samples.image_bytes(222))  # done, and changed since
    (source / "new.png").write_bytes(samples.image_bytes(99))
    report, rows = refreshed(new)
    assert report.published
    expected = {f"pictures/{number:04d}.png" for number in range(20) if number not in (1, 19)} | {"new.png"}
    assert {key[0] for key in rows} == set(items_of(new)) == expected
    assert len(fingerprints(new)) == 1
    vector = embedder.open_store(new.store).encode_image([samples.image_bytes(222)])[0]
    assert np.allclose(rows["pictures/0002.png", 0]["image_embedding"], vector, atol=1e-5)


def test_a_reject_under_the_new_model_keeps_no_vector_of_the_old_one(make_run, tmp_path, other_model):
    source = samples.folder(tmp_path / "in", num_images=6)
    refreshed(make_run(source))
    (source / "pictures" / "0001.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    new = make_run(source, model=other_model, max_reject_fraction=1)
    _, rows = refreshed(new)
    assert ("pictures/0001.png", 0) not in rows
    item = items_of(new)["pictures/0001.png"]
    assert (item["state"], item["stale"], item["num_vectors"]) == ("rejected", False, 0)


def test_other_segments_are_a_change_of_the_preprocessing(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=2, num_clips=1)
    _, before = refreshed(make_run(source, segment_s=2.0))
    other = make_run(source, segment_s=1.0)
    report, after = refreshed(other)
    assert report.reasons == {"preprocessing changed": 3}
    assert len(after) > len(before)
    assert embedder.open_store(other.store).info.segment_s == 1.0


def test_embed_refuses_another_model_and_names_the_refresh(make_run, tmp_path, other_model):
    source = samples.folder(tmp_path / "in", num_images=2)
    refreshed(make_run(source))
    before = contents(make_run(source).store)
    with pytest.raises(StoreError, match=r"model fingerprint.*embedder refresh"):
        embed(make_run(source, model=other_model))
    assert contents(make_run(source).store) == before
