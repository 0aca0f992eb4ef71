"""A version is opened only if it is whole, unaltered, and of the model that asks."""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from index_samples import Build, make_ids, make_vectors

from index import faiss_build
from index.index_errors import RebuildNeededError, RetrievalError
from index.search import open_index
from index.update import update_index


@pytest.fixture
def version(build: Build) -> Path:
    out, _ = build()
    return out


@pytest.fixture
def faiss_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every file that FAISS is given to read."""
    reads: list[Any] = []
    monkeypatch.setattr(faiss_build, "read", reads.append)
    return reads


def edit_manifest(version: Path, **changes: Any) -> None:
    path = version / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["index.faiss", "ids.parquet"])
@pytest.mark.parametrize(
    "spoil",
    [
        *(partial(flip_bit, position=position) for position in (0, 200, -1)),
        *(partial(os.truncate, length=keep) for keep in (0, 1, 1000)),
    ],
    ids=lambda spoil: f"{spoil.func.__name__} {spoil.keywords}",
)
def test_an_altered_bit_anywhere_or_a_cut_is_refused_before_faiss_reads(
    version: Path, faiss_reads: list[Any], name: str, spoil: partial[None]
) -> None:
    spoil(version / name)
    with pytest.raises(RetrievalError, match=rf"{name}: its sha256 is .* altered or cut short, and is not read"):
        open_index(version)
    assert faiss_reads == []


def test_a_large_file_is_checked_and_read_through_one_open_file(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.version_files.READ_ONCE_BYTES", 100)
    queries = make_vectors(300)[:5]
    assert open_index(version).search(queries, 1).rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    flip_bit(version / "index.faiss", 500)
    with pytest.raises(RetrievalError, match="altered"):
        open_index(version)


@pytest.mark.parametrize("read_once_bytes", [100, 1 << 30])
def test_a_file_swapped_between_check_and_read_is_not_what_is_read(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_once_bytes: int
) -> None:
    version, _ = build()
    other, _ = build(make_vectors(300, seed=1), out=tmp_path / "other")
    monkeypatch.setattr("index.version_files.READ_ONCE_BYTES", read_once_bytes)
    for name in ("read", "map_file"):
        read = getattr(faiss_build, name)

        def swap_then_read(file: Any, read: Any = read) -> Any:
            (other / "index.faiss").replace(version / "index.faiss")
            return read(file)

        monkeypatch.setattr(faiss_build, name, swap_then_read)
    assert open_index(version).search(make_vectors(300)[:5], 1).rows[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["index.faiss", "ids.parquet", "manifest.json"])
def test_a_missing_file_is_named(version: Path, name: str) -> None:
    (version / name).unlink()
    with pytest.raises(RetrievalError, match=name):
        open_index(version)


def test_a_missing_version_says_so(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no index version here; build one"):
        open_index(tmp_path / "000009")


def test_an_index_of_another_model_is_refused(version: Path, faiss_reads: list[Any]) -> None:
    with pytest.raises(RetrievalError, match="vectors are of model model-a, the queries of model-b"):
        open_index(version, model_fingerprint="model-b")
    assert faiss_reads == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format_version is 3, this release reads 2"),
        ({"format_version": None}, "format_version is None"),
        ({"num_vectors": "many"}, "these keys break their rules: num_vectors"),
        ({"recall_at_10": 1.5, "dim": 0}, "these keys break their rules: dim, recall_at_10"),
        ({"surprise": 1}, "these keys break their rules: surprise"),
        ({"sha256": {}}, "sha256 names nothing, and must name ids.parquet, index.faiss, of others only live.npy"),
        ({"sha256": {"index.faiss": "0", "../../secret": "0"}}, "sha256 names"),
        ({"num_vectors": 299}, "found 300 ids, 300 of them to be found, and its manifest says 300 and 299"),
        ({"dim": 15}, "found 300 rows of width 16, and its manifest says 300 and 15"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(version: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(version, **changes)
    with pytest.raises(RetrievalError, match=message):
        open_index(version)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_a_version_of_the_first_release_is_still_searched(build: Build, kind: str) -> None:
    version, manifest = build(kind=kind)
    for name in ("queries.npz", "ids.parquet"):
        (version / name).unlink()
    pq.write_table(make_ids(300).drop_columns("run_id"), version / "ids.parquet")
    names = ("index.faiss", "ids.parquet")
    hashes = {name: hashlib.sha256((version / name).read_bytes()).hexdigest() for name in names}
    kept = ("dim", "num_vectors", "embeddings_version", "model_fingerprint", "size_bytes", "recall_at_10", "built_at")
    first = {name: getattr(manifest, name) for name in (*kept, "num_recall_queries", "recall_query_kind", "build_s")}
    build_parameters = {"flat": {}, "hnsw": {"links": 32, "ef_construction": 100}, "ivf": {"num_lists": 4}}[kind]
    first |= {"format_version": 1, "kind": kind, "metric": "inner_product", "faiss_version": "1.12.0", "sha256": hashes}
    first["parameters"] = build_parameters | manifest.parameters
    (version / "manifest.json").write_text(json.dumps(first))
    index = open_index(version)
    assert index.search(make_vectors(300)[:5], 1).rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert index.manifest.parameters == manifest.parameters
    with pytest.raises(RebuildNeededError, match="an earlier release built it"):
        update_index(
            version, version.parent / "000002", [], index.ids.slice(0, 0), np.zeros(300, bool), embeddings_version=8
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [*((content, "no valid JSON") for content in (b"", b"{", b"\xff\xfe", b"[" * 200_000)), (b"[]", "no JSON object")],
)
def test_a_broken_manifest_is_refused(version: Path, content: bytes, message: str) -> None:
    (version / "manifest.json").write_bytes(content)
    with pytest.raises(RetrievalError, match=message):
        open_index(version)


@pytest.mark.parametrize(
    "changes", [*({"parameters": value} for value in (None, [], "x", -1)), {"kind": []}, {"kind": {}}]
)
def test_a_damaged_manifest_of_the_first_release_is_refused(version: Path, changes: dict[str, Any]) -> None:
    (version / "manifest.json").write_text(json.dumps({"format_version": 1, "kind": "ivf", "parameters": {}} | changes))
    with pytest.raises(RetrievalError, match=r"manifest\.json"):
        open_index(version)


def test_a_file_that_faiss_does_not_know_is_one_clear_line(version: Path) -> None:
    """As after a change of FAISS's format: the hash is right, the content is unknown."""
    content = b"none of FAISS's formats"
    (version / "index.faiss").write_bytes(content)
    hashes = json.loads((version / "manifest.json").read_text())["sha256"]
    edit_manifest(version, sha256=hashes | {"index.faiss": hashlib.sha256(content).hexdigest()})
    with pytest.raises(RetrievalError, match=r"FAISS .* can't read what FAISS .* wrote") as caught:
        open_index(version)
    assert "\n" not in str(caught.value)
