"""An index in parts finds what one in memory finds, and an update leaves the parts of before as they are."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_samples import Build, exact_rows, make_ids, make_images_and_captions, share_found, unit

from index import disk_build
from index.atomic_folder import sweep_leftovers
from index.constraints import Constraints
from index.designs import designs_in_parts, parse_design
from index.disk_index import DiskIndex
from index.index_errors import RetrievalError
from index.manifest import Manifest, read_manifest
from index.search import Index, open_index
from index.update import update_index

DESIGN = "IVF16,PQ32x4fs,Disk(SQ8)"
NUM = 6000
IMAGES, CAPTIONS = make_images_and_captions(NUM, 900)
QUERIES = np.ascontiguousarray(CAPTIONS[800:])


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version of three parts."""
    out, manifest = build_parts(tmp_path_factory.mktemp("disk") / "000001")
    assert [part.num_rows for part in manifest.parts or ()] == [2500, 2500, 1000]
    return out


def build_parts(out: Path, **changes: Any) -> tuple[Path, Manifest]:
    from index.build import build_index

    design = parse_design(DESIGN)
    per_row = disk_build.DEFAULT_BUILD_BYTES / disk_build.rows_per_part(design, 64, disk_build.DEFAULT_BUILD_BYTES)
    arguments: dict[str, Any] = {
        "ids": make_ids(NUM),
        "model_fingerprint": "model-a",
        "embeddings_version": 7,
        "kind": DESIGN,
        "queries": CAPTIONS[:800],
        "num_threads": 1,
        "build_bytes": round(2500.4 * per_row),
    } | changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_build, "_LEAST_PART_ROWS", 100)
        return out, build_index(iter([IMAGES[:4000], IMAGES[4000:]]), out=out, **arguments)


def disk_index(index: Index) -> DiskIndex:
    inner = index._index
    assert isinstance(inner, DiskIndex)
    return inner


def test_captions_find_what_exact_search_finds(version: Path) -> None:
    index = open_index(version, model_fingerprint="model-a")
    assert (index.manifest.design, index.manifest.kind, len(index)) == (DESIGN, "ivf", NUM)
    assert index.manifest.recall_at_10 >= 0.95
    found = index.search(QUERIES, 10)
    assert share_found(found.rows, exact_rows(QUERIES, IMAGES)) >= 0.94
    scores = np.einsum("qe,qke->qk", QUERIES, IMAGES[found.rows])
    np.testing.assert_allclose(found.scores, scores, atol=0.01)
    assert (np.diff(found.scores, axis=1) <= 0).all()


def test_the_vectors_of_any_rows_come_back_in_the_order_that_is_asked_for(version: Path) -> None:
    rows = np.array([5999, 0, 2499, 2500, 17, 4999, 5000, 17])
    np.testing.assert_allclose(open_index(version).vectors(rows), IMAGES[rows], atol=0.01)
    assert open_index(version).vectors(np.empty(0, np.int64)).shape == (0, 64)


def test_ids_are_those_of_the_rows(version: Path) -> None:
    ids = open_index(version).ids
    assert ids["item_id"].to_pylist() == make_ids(NUM)["item_id"].to_pylist()
    assert ids["segment"].to_pylist() == make_ids(NUM)["segment"].to_pylist()


@pytest.mark.parametrize("num_passing", [1, 30, 700, 4000])
def test_a_filter_by_mask_and_by_row_numbers_finds_the_same(version: Path, num_passing: int) -> None:
    index = open_index(version)
    rows = np.sort(np.random.default_rng(num_passing).choice(NUM, num_passing, replace=False)).astype(np.int64)
    mask = np.zeros(NUM, bool)
    mask[rows] = True
    by_mask, by_rows = index.search(QUERIES, 10, among=mask), index.search(QUERIES, 10, among=rows)
    assert np.array_equal(by_mask.rows, by_rows.rows)
    assert share_found(by_rows.rows, rows[exact_rows(QUERIES, IMAGES[rows])]) >= 0.94
    exact, _ = disk_index(index).search_exactly(QUERIES, 1), None
    assert share_found(exact[1], exact_rows(QUERIES, IMAGES, 1)) >= 0.94


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([3, 2]), "each once, in ascending order"),
        (np.array([2, 2]), "each once, in ascending order"),
        (np.array([1, 2], np.int32), "give rows as int64"),
        (np.array([0, NUM]), "give rows that it has"),
        (np.array([-1, 2]), "give rows that it has"),
    ],
)
def test_row_numbers_that_break_a_rule_are_refused(version: Path, rows: np.ndarray, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        open_index(version).search(QUERIES[:1], 1, among=rows)


def test_no_row_number_finds_nothing(version: Path) -> None:
    assert open_index(version).search(QUERIES[:2], 5, among=np.empty(0, np.int64)).rows.shape == (2, 0)


def test_an_update_writes_one_part_and_links_the_others(version: Path, tmp_path: Path) -> None:
    added, removed = unit(IMAGES[:500] + 0.01), np.zeros(NUM, bool)
    removed[::20] = True
    out = tmp_path / "000002"
    manifest = update_index(version, out, added, make_ids(500, "run-2"), removed, embeddings_version=8)
    before = read_manifest(version)
    assert [part.num_rows for part in manifest.parts or ()] == [2500, 2500, 1000, 500]
    for part in before.parts or ():
        for name in part.names:
            assert (out / name).samefile(version / name)
            assert manifest.sha256[name] == before.sha256[name]
    index = open_index(out)
    assert len(index) == NUM - 300 + 500
    found = index.search(added[:50], 10).rows
    assert (found[:, 0] == NUM + np.arange(50)).mean() >= 0.9
    assert not removed[found[found < NUM]].any()
    assert index.ids["run_id"][NUM].as_py() == "run-2"
    assert open_index(version).search(QUERIES, 10).rows.shape == (100, 10)


@pytest.mark.medium
def test_small_parts_join_what_is_added(version: Path, tmp_path: Path) -> None:
    none, last = np.zeros(NUM, bool), version
    for number in range(3):
        added = unit(IMAGES[number * 400 : number * 400 + 400] + 0.01)
        out = tmp_path / str(number)
        manifest = update_index(last, out, added, make_ids(400, f"run-{number}"), none, embeddings_version=8)
        none, last = np.zeros(manifest.num_rows, bool), out
    assert [(part.number, part.num_rows) for part in manifest.parts or ()] == [
        (0, 2500),
        (1, 2500),
        (2, 1000),
        (4, 800),
        (5, 400),
    ]
    joined = open_index(last)
    rows = NUM + np.array([0, 399, 400, 799, 800, 1199])
    np.testing.assert_allclose(joined.vectors(rows), unit(IMAGES[rows - NUM] + 0.01), atol=0.01)
    assert [joined.ids["run_id"][int(row)].as_py() for row in rows] == [f"run-{n}" for n in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize(
    ("sizes", "num_added", "num_kept"),
    [([], 5, 0), ([100], 5, 1), ([100], 100, 0), ([100, 5], 5, 1), ([100, 50, 30, 20], 20, 0), ([9, 4, 5], 4, 3)],
)
def test_the_last_parts_that_are_no_larger_join(sizes: list[int], num_added: int, num_kept: int) -> None:
    assert disk_build.num_parts_kept(sizes, num_added) == num_kept


def test_parts_stay_few_however_often_an_index_is_updated() -> None:
    sizes = [1_000_000]
    for _ in range(1000):
        num_kept = disk_build.num_parts_kept(sizes, 100)
        sizes = [*sizes[:num_kept], sum(sizes[num_kept:]) + 100]
        assert len(sizes) <= 12
    assert sum(sizes) == 1_100_000


def test_an_update_that_only_removes_writes_no_part(version: Path, tmp_path: Path) -> None:
    removed = np.zeros(NUM, bool)
    removed[exact_rows(QUERIES[:1], IMAGES)[0]] = True
    out = tmp_path / "000002"
    manifest = update_index(version, out, [], make_ids(0), removed, embeddings_version=8)
    assert manifest.parts == read_manifest(version).parts
    assert not removed[open_index(out).search(QUERIES[:1], 10).rows].any()


@pytest.mark.parametrize("failing", ["clone_index", "write_index"])
def test_an_update_that_fails_leaves_the_version_before_whole(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    found = open_index(version).search(QUERIES, 10).rows
    monkeypatch.setattr(f"index.disk_build.faiss.{failing}", fail)
    with pytest.raises(OSError, match="No space left"):
        update_index(version, tmp_path / "000002", IMAGES[:5], make_ids(5), np.zeros(NUM, bool), embeddings_version=8)
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(open_index(version).search(QUERIES, 10).rows, found)


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_disk_index import IMAGES, NUM, make_ids, update_index, np
print("ready", flush=True)
version, out = Path(sys.argv[1]), Path(sys.argv[2])
for number in range(1000):
    update_index(version, out / str(number), IMAGES[:900], make_ids(900), np.zeros(NUM, bool), embeddings_version=8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 0.9])
def test_an_update_that_is_killed_leaves_whole_versions_alone(version: Path, tmp_path: Path, after_s: float) -> None:
    found = open_index(version).search(QUERIES, 10).rows
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", KILLED.format(paths=paths), str(version), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        process.kill()
    for made in (path for path in tmp_path.iterdir() if not path.name.startswith(".")):
        assert len(open_index(made)) == NUM + 900
    sweep_leftovers(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert np.array_equal(open_index(version).search(QUERIES, 10).rows, found)


def file_names() -> list[str]:
    parts = [f"{kind}-00000{number}.{end}" for kind, end in PART_KINDS for number in range(3)]
    return ["template.faiss", "queries.npz", *parts]


PART_KINDS = [("lists", "faiss"), ("vectors", "codes"), ("places", "u32"), ("ids", "arrow")]


@pytest.mark.parametrize("name", [name for name in file_names() if name != "queries.npz"])
def test_one_altered_bit_or_byte_too_few_is_refused(version: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    assert sorted(path.name for path in version.iterdir()) == sorted([*file_names(), "manifest.json"])
    for path in version.iterdir():
        (copy / path.name).hardlink_to(path)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    for altered in (bytes(content), bytes(content[:-1]), b""):
        (copy / name).unlink()
        (copy / name).write_bytes(altered)
        with pytest.raises(RetrievalError, match=f"{name}: its sha256 is .* altered or cut short, and is not read"):
            open_index(copy)
    (copy / name).unlink()
    with pytest.raises(RetrievalError, match=name):
        open_index(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build_bytes": 1000}, "build_bytes is 1000; give it"),
        ({"kind": "IVF16,PQ24x4fs,Disk(SQ8)"}, "64 dimensions do not fall into 24 equal groups"),
    ],
)
def test_parts_that_can_not_be_built_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        build_parts(tmp_path / "000001", **changes)


@pytest.mark.medium
def test_weighted_vectors_that_stay_in_memory_find_the_same_and_count_as_memory(version: Path, tmp_path: Path) -> None:
    out, manifest = build_parts(tmp_path / "000001", kind="Weighted,IVF16,PQ32x4fs,Refine(SQ8)")
    assert manifest.memory_bytes == read_manifest(version).memory_bytes + NUM * 64
    index, parameters = open_index(out), read_manifest(version).parameters
    found = index.search(QUERIES, 10, parameters=parameters).rows
    assert np.array_equal(found, open_index(version).search(QUERIES, 10).rows)
    removed = np.zeros(NUM, bool)
    removed[:10] = True
    update_index(out, tmp_path / "000002", IMAGES[:5], make_ids(5, "run-2"), removed, embeddings_version=8)
    assert open_index(tmp_path / "000002").search(IMAGES[:5], 1).rows[:, 0].tolist() == [NUM + n for n in range(5)]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Flat,Disk(SQ8)", "on disk is written as IVF4096,PQ128x4fs,Disk"),
        ("IVF16,PQ32x4fs,Disk(SQ4)", "on disk is written as IVF4096,PQ128x4fs,Disk"),
        ("LeanVec8,IVF16,PQ4x4fs,Disk(SQ8)", "on disk is written as IVF4096,PQ128x4fs,Disk"),
        ("IVF16,SQ8,Disk(SQ8)", "on disk is written as IVF4096,PQ128x4fs,Disk"),
        ("Weighted,IVF16,SQ8,Refine(SQ8)", "of weighted vectors is written as Weighted,IVF4096,PQ128x4fs"),
        ("Weighted,IVF16,PQ8x4fs,Refine(SQ4)", "of weighted vectors is written as Weighted,IVF4096,PQ128x4fs"),
    ],
)
def test_a_design_that_can_not_be_in_parts_is_refused(text: str, form: str) -> None:
    with pytest.raises(RetrievalError, match=f"a design {form}"):
        parse_design(text)


def test_only_an_index_in_parts_has_the_new_format(build: Build, version: Path) -> None:
    plain, _ = build()
    assert '"parts"' not in (plain / "manifest.json").read_text()
    assert (read_manifest(plain).format_version, read_manifest(version).format_version) == (2, 3)


@pytest.mark.parametrize("num_vectors", [1, 15, 623, 624, 5000])
def test_designs_on_disk_are_offered_where_their_codes_can_be_trained(num_vectors: int) -> None:
    designs = designs_in_parts(num_vectors, 64, on_disk=True)
    assert len(designs) == (2 if num_vectors >= 624 else 0)
    assert all(parse_design(str(design)) == design for design in designs)


@pytest.mark.medium
def test_memory_too_small_for_the_vectors_brings_a_design_on_disk(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 2000)
    limit = 350_000  # vectors take 384,000 in 8 bits each
    out, manifest = build(IMAGES, queries=CAPTIONS, constraints=Constraints(memory_bytes=limit), num_threads=2)
    assert manifest.design.endswith("Disk(SQ8)")
    assert manifest.memory_bytes <= limit
    assert manifest.recall_at_10 >= 0.95
    trials = {trial.design: trial for trial in manifest.trials}
    assert {name for name in trials if "Disk" not in name} == {"Flat"}
    on_disk = NUM * 64
    assert all(trial.expected_disk_bytes == on_disk for name, trial in trials.items() if "Disk" in name)
    assert share_found(open_index(out).search(QUERIES, 10).rows, exact_rows(QUERIES, IMAGES)) >= 0.93
