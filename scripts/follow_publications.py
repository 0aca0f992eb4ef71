"""A service searches while a store publishes: how many searches failed, and how many mixed two versions.

    python scripts/follow_publications.py [NUM_SEARCHES [NUM_THREADS]]   # 10000 by 4 threads: 20 s on two cores

Five publications follow one another while the threads search: a night that changes every row, an index of another kind,
a rollback, a night that changes some rows and retires others, and again an index. Each is followed by a vacuum that
keeps nothing but the newest two publications. What each version answers is recorded as it is published, by a store
opened for that alone; every answer of the service must be, row by row, what the version answers that it names. The last
line is one JSON document.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from published_rows import as_embedded, publish_rows

import embedder
from corpus import unit
from embedder.batch_schema import VECTOR
from embedder.config import RunConfig
from embedder.entrances import build_index
from embedder.retrieval.store_follower import FollowingStore
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store.lock import write_lock
from embedder.store.maintenance.rollback import rollback
from embedder.store.maintenance.vacuum import vacuum
from embedder.store_index.keep_index import ensure_index, index_choice

DIM, NUM_ITEMS, NUM_QUERIES, K = 32, 300, 50, 10
LOOK_EVERY_S = 0.02
INFO = StoreInfo(
    model="none",
    model_fingerprint="model",
    preprocess_fingerprint="preprocessing",
    segment_s=5.0,
    frames_per_segment=4,
    dtype="float32",
)

Answer = tuple[tuple[str, str, float], ...]
"""Of each hit: its item, its caption, which tells the night that wrote it, and its score."""


@dataclass
class Searches:
    """What the threads found: of each search, the version that answered, the number of the query, the answer."""

    found: list[tuple[str, int, Answer]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def number(self) -> int:
        """How many there were."""
        return len(self.found) + len(self.failures)


def main() -> None:
    num_searches = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    num_threads = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with tempfile.TemporaryDirectory(prefix="follow-publications-") as folder:
        result = follow(StoreFiles(folder), num_searches, num_threads)
    print(json.dumps(result))
    sys.exit(1 if result["failed"] or result["mixed"] or result["versions_answering"] < result["versions"] else 0)


def follow(files: StoreFiles, num_searches: int, num_threads: int) -> dict:
    """Search and publish at the same time; gives the counts.

    Args:
        files: an empty store.
        num_searches: at least.
        num_threads: that search.
    """
    night(files, 0, range(NUM_ITEMS))
    build_index(RunConfig(store=files.address), kind="flat")
    queries = unit(np.random.default_rng(1).standard_normal((NUM_QUERIES, DIM)))
    expected = dict([answers_now(files, queries)])
    searches, started_s = Searches(), time.perf_counter()
    with (
        embedder.follow_store(files.address, every_s=LOOK_EVERY_S) as service,
        ThreadPoolExecutor(num_threads) as threads,
    ):
        for thread in range(num_threads):
            threads.submit(search, service, queries, searches, thread)
        try:
            publications = five_publications(files)
            for number, one in enumerate(publications, 1):
                until(lambda share=number: searches.number >= num_searches * share / (len(publications) + 1))
                one()
                version, answers = answers_now(files, queries)
                expected[version] = answers
                with write_lock(files):
                    vacuum(files, keep_days=0, keep_versions=2)
                until(lambda version=version: service.version == version)
            until(lambda: searches.number >= num_searches)
        finally:
            searches.is_over = True
    return tally(searches, expected) | {"wall_s": round(time.perf_counter() - started_s, 1)}


def five_publications(files: StoreFiles) -> list[Callable[[], object]]:
    """What is published while the threads search, one after another."""

    def back() -> None:
        with write_lock(files):
            rollback(files, None, index_choice(files))

    return [
        lambda: night(files, 1, range(NUM_ITEMS)),
        lambda: build_index(RunConfig(store=files.address), kind="hnsw"),
        back,
        lambda: night(files, 2, range(0, NUM_ITEMS, 3), retired=range(1, NUM_ITEMS, 30)),
        lambda: build_index(RunConfig(store=files.address), kind="ivf"),
    ]


def search(service: FollowingStore, queries: np.ndarray, searches: Searches, first: int) -> None:
    """Ask one query after another until it is over; nothing that goes wrong is forgiven."""
    number = first
    while not searches.is_over:
        number = (number + 1) % len(queries)
        try:
            hits = service.search(queries[number], K)
            searches.found.append((hits.version, number, answer(hits)))
        except Exception as error:  # noqa: BLE001  # whatever it is, it counts
            searches.failures.append(f"{type(error).__name__}: {error}")


def answers_now(files: StoreFiles, queries: np.ndarray) -> tuple[str, list[Answer]]:
    """What is published, and what it answers, as a store opened for this alone finds it."""
    store = embedder.open_store(files.address)
    return store.version, [answer(store.search(query, K)) for query in queries]


def answer(hits: list) -> Answer:
    return tuple((hit.item_id, hit.caption, hit.score) for hit in hits)


def tally(searches: Searches, expected: dict[str, list[Answer]]) -> dict:
    """Count what must not be, and which versions answered how often."""
    by_version = Counter(version for version, _, _ in searches.found)
    mixed = [each for each in searches.found if not is_of_its_version(*each, expected)]
    for line in [*searches.failures[:3], *map(str, mixed[:3])]:
        print(line, file=sys.stderr)
    return {
        "searches": searches.number,
        "publications": len(expected) - 1,
        "versions": len(expected),
        "versions_answering": len(by_version),
        "failed": len(searches.failures),
        "mixed": len(mixed),
        "searches_by_version": [by_version[version] for version in expected],
    }


def is_of_its_version(version: str, query: int, found: Answer, expected: dict[str, list[Answer]]) -> bool:
    """Whether an answer is what the version answers that it names: the same rows, captions and scores."""
    wanted = expected.get(version, [()] * (query + 1))[query]
    return [hit[:2] for hit in found] == [hit[:2] for hit in wanted] and np.allclose(
        [hit[2] for hit in found], [hit[2] for hit in wanted], atol=1e-5
    )


def night(files: StoreFiles, number: int, items: range, retired: range = range(0)) -> None:
    """Publish new vectors and captions of some items as a refresh does, and retire others; the index is kept.

    Args:
        files: the store.
        number: of the night; vectors and captions follow from it.
        items: that are new or changed.
        retired: that leave.
    """
    vectors = unit(np.random.default_rng(number).standard_normal((len(items), DIM)))
    same = {"source": "", "modified": str(number), "caption": f"night {number}"}
    listed = pa.table(
        {"item_id": [name(item) for item in items], "uri": [f"/pictures/{name(item)}" for item in items]}
        | {column: [value] * len(items) for column, value in same.items()}
        | {"size_bytes": pa.array([1] * len(items))}
    )
    rows = as_embedded(listed, pa.array(list(vectors), VECTOR), content_version=str(number))
    ids = pa.chunked_array([[name(item) for item in retired]], pa.string())
    with write_lock(files):
        publish_rows(files, INFO, [rows], lambda version: ensure_index(files, version, None), ids)


def name(item: int) -> str:
    return f"{item:06d}.jpg"


def until(happened: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait for something."""
    stop_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > stop_s:
            sys.exit(f"follow_publications: waited {limit_s:g} s in vain")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
