"""A query service is asked while five versions are published: how many requests failed, mixed versions, or kept traces.

    python scripts/serve_publications.py [NUM_REQUESTS [NUM_CLIENTS]]     # 10000 by 8 clients: minutes on two cores

New captions, another index, another model, a purge and new captions again are published one after another, while
clients search by text, item and image, filter, and read items, thumbnails and facets of `embedder serve`. Each answer
must be whole and of the version that it names: captions name the night that wrote them, and texts find what a store
opened only for that version finds. From the moment that the service names the version of the purge, no answer may
have what was purged, nor any file of its cache. The last line is one JSON document.
"""

import base64
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import embedder
from corpus import DEMO_MODEL, make_model, read_shipped, shipped_pairs, write_pairs
from embedder.config import load_config
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.lock import write_lock
from embedder.store_index.keep_index import index_choice
from harness import ask, serving, until

NUM_ITEMS, NUM_TEXTS, K = 60, 20, 10
PURGED = 7  # number of the item; no client names it but the one that looks for it
SIZES_PX = (160, 320)
OPTIONS = ("--limit", "follow_s=0.2")
VISION = {"image_size": 64, "patch_size": 16, "width": 64, "depth": 2, "num_heads": 2}
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}

Hit = tuple[str, str, float]
"""Item, caption and score."""


@dataclass(frozen=True)
class Answer:
    """What an answer names."""

    version: str  # that answered
    captions: tuple[str, ...]  # of all its hits and rows
    text: int | None = None  # number of the text that was searched for; None of other requests
    hits: tuple[Hit, ...] = ()  # of that text


@dataclass
class Requests:
    """What the clients found."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    num_by_kind: Counter[str] = field(default_factory=Counter)
    is_purged: bool = False
    is_over: bool = False

    @property
    def number(self) -> int:
        return sum(self.num_by_kind.values())


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    num_clients = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory(prefix="serve-publications-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        result = ask_and_publish(Path(folder), num_requests, num_clients)
    print(json.dumps(result))
    is_kept = not (result["failed"] or result["mixed"] or result["traces"])
    sys.exit(0 if is_kept and result["versions_answering"] == result["versions"] else 1)


def ask_and_publish(folder: Path, num_requests: int, num_clients: int) -> dict[str, Any]:
    nights = Nights(folder)
    nights.publish(0)
    expected = dict([answers_now(nights)])
    requests, began_s = Requests(), time.perf_counter()
    with serving(nights.store, folder / "serve.log", OPTIONS) as server, ThreadPoolExecutor(num_clients) as threads:
        asked = itertools.count()
        running = [threads.submit(Client(server.url, requests).run, asked) for _ in range(num_clients)]
        try:
            # Thumbnails of the item that will be purged, so that the service has them in its cache.
            kept = [ask(f"{server.url}{path}")[1] for path in PURGED_IMAGES]
            publications = nights.five_publications()
            for number, one in enumerate(publications, 1):
                due = num_requests * number / (len(publications) + 1)
                until(lambda due=due: requests.number >= due, "requests")
                one()
                version, answers = answers_now(nights)
                expected[version] = answers
                with write_lock(nights.files):
                    vacuum(nights.files, keep_days=0, keep_versions=2)
                until(partial(is_served, server.url, version), f"version {version}")
                requests.is_purged = requests.is_purged or one == nights.purge
            until(lambda: requests.number >= num_requests, "requests")
            requests.traces += traces_in(folder / "cache", kept) + traces_served(server.url)
        finally:
            requests.is_over = True
        for each in running:
            each.result()
    return tally(requests, expected) | {"wall_s": round(time.perf_counter() - began_s, 1)}


class Nights:
    """A store whose captions name the night that they were written in, and what is published to it."""

    def __init__(self, folder: Path) -> None:
        self.store, self.files = folder / "store", StoreFiles(folder / "store")
        self._items = write_pairs(folder / "items", NUM_ITEMS, shipped_pairs()[:NUM_ITEMS])
        self._captions = {path: path.read_text(encoding="utf-8") for path in sorted(self._items.glob("*.txt"))}
        self._other_model = make_model(folder / "other_model", VISION, TEXT)

    def five_publications(self) -> list[Callable[[], object]]:
        first, second, third = (partial(self.publish, night) for night in (1, 2, 3))
        return [first, lambda: embedder.build_index(self._config(), kind="hnsw", force=True), second, self.purge, third]

    def publish(self, night: int) -> None:
        """Write the captions of a night, and refresh the store; the second night brings another model."""
        self._model = self._other_model if night >= 2 else DEMO_MODEL
        for path, caption in self._captions.items():
            path.write_text(f"{caption} (night {night})", encoding="utf-8")
        embedder.refresh(self._config(), forced=("retrieval", "vectors"))

    def purge(self) -> None:
        with write_lock(self.files):
            purge(self.files, [item_id(PURGED)], index_choice(self.files, self._config().index, reuse=False))

    def _config(self) -> Any:
        settings = {"model": str(self._model), "store": str(self.store), "source": [{"path": str(self._items)}]}
        return load_config(overrides=settings | {"engine": "local", "index": {"min_recall": 0.0}})


class Client:
    """One client, which asks what its number says."""

    def __init__(self, url: str, requests: Requests) -> None:
        self._url, self._requests = url, requests
        self._images = [content for content, _, _ in shipped_pairs()[:NUM_ITEMS]]
        self._kinds = {
            "text": lambda number: replace(self._search([{"text": text(number)}]), text=number % NUM_TEXTS),
            "texts": lambda number: self._search([{"text": text(number)}, {"text": text(number + 1)}]),
            "hybrid": lambda number: self._search([{"text": text(number)}], hybrid=True, where="caption IS NOT NULL"),
            "like an item": lambda number: self._search([{"item": item_id(other(number))}]),
            "image": lambda number: self._search([{"image": base64.b64encode(self._images[number % 50]).decode()}]),
            "item": self._item,
            "thumbnail": self._thumbnail,
            "facets": lambda number: Answer(json.loads(self._ask("/facets"))["version"], ()),
            "status": lambda number: Answer(json.loads(self._ask("/status"))["version"], ()),
        }

    def run(self, asked: "itertools.count[int]") -> None:
        """Ask one request after another until it is over; nothing that goes wrong is forgiven."""
        while not self._requests.is_over:
            number = next(asked)
            kind = list(self._kinds)[number % len(self._kinds)]
            try:
                answer = self._kinds[kind](number)
                if answer is not None:
                    self._requests.answers.append(answer)
            except Exception as error:  # noqa: BLE001  # whatever it is, it counts
                self._requests.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self._requests.num_by_kind[kind] += 1

    def _search(self, queries: list[dict[str, Any]], **options: Any) -> Answer:
        found = json.loads(self._ask("/search", {"queries": queries, "k": K, **options}))
        hits = [(hit["item_id"], hit["caption"], hit["score"]) for each in found["answers"] for hit in each["hits"]]
        if len(found["answers"]) != len(queries) or not hits:
            raise ValueError(f"{len(found['answers'])} answers, {len(hits)} hits")
        return Answer(found["version"], tuple(caption for _, caption, _ in hits), None, tuple(hits))

    def _item(self, number: int) -> Answer:
        found = json.loads(self._ask(f"/items/{item_id(other(number))}"))
        captions = [row["caption"] for row in [*found["segments"], *found["neighbours"]]]
        return Answer(found["version"], tuple(captions))

    def _thumbnail(self, number: int) -> None:
        content = self._ask(f"/items/{item_id(other(number))}/image?size={SIZES_PX[number % 2]}")
        if len(content) < 100:
            raise ValueError(f"an image of {len(content)} bytes")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        is_purged = self._requests.is_purged
        status, found = ask(f"{self._url}{path}", body)
        if status != 200:
            raise ValueError(f"{status} {found[:300]!r}")
        if is_purged and item_id(PURGED).encode() in found:
            self._requests.traces.append(f"{path}: the answer has {item_id(PURGED)}")
        return found


def item_id(number: int) -> str:
    return f"{number:06d}.png"


def other(number: int) -> int:
    return (number + (number % NUM_ITEMS == PURGED)) % NUM_ITEMS


def text(number: int) -> str:
    return TEXTS[number % NUM_TEXTS]


TEXTS = read_shipped()[1][:NUM_TEXTS]
PURGED_IMAGES = [f"/items/{item_id(PURGED)}/image?size={size}" for size in SIZES_PX]


def answers_now(nights: Nights) -> tuple[str, list[tuple[Hit, ...]]]:
    store = embedder.open_store(nights.store)
    answers = [store.search(each, K) for each in TEXTS]
    return store.version, [tuple((hit.item_id, hit.caption or "", hit.score) for hit in hits) for hits in answers]


def is_served(url: str, version: str) -> bool:
    return json.loads(ask(f"{url}/status")[1])["version"] == version


def traces_in(cache: Path, kept: list[bytes]) -> list[str]:
    files = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    if not files:
        return ["there is no cache to look into"]
    return [f"{path}: a thumbnail" for path, content in files.items() if any(each in content for each in kept)]


def traces_served(url: str) -> list[str]:
    paths = [f"/items/{item_id(PURGED)}", *PURGED_IMAGES]
    return [f"{path}: {status}" for path in paths if (status := ask(f"{url}{path}")[0]) != 404]


def tally(requests: Requests, expected: dict[str, list[tuple[Hit, ...]]]) -> dict[str, Any]:
    """Count what must not be, and which versions answered."""
    mixed = [answer for answer in requests.answers if not is_of_its_version(answer, expected)]
    versions = {answer.version for answer in requests.answers}
    for line in [*requests.failures[:5], *map(str, mixed[:3]), *requests.traces[:5]]:
        print(line, file=sys.stderr)
    return {
        "requests": requests.number, "by_kind": dict(requests.num_by_kind), "publications": len(expected) - 1,
        "versions": len(expected), "versions_answering": len(versions & set(expected)),
        "failed": len(requests.failures), "mixed": len(mixed), "traces": len(requests.traces),
    }  # fmt: skip


def is_of_its_version(answer: Answer, expected: dict[str, list[tuple[Hit, ...]]]) -> bool:
    """Whether an answer is what the version answers that it names."""
    if answer.version not in expected:
        return False
    wanted = expected[answer.version]
    night = wanted[0][0][1].rpartition(" (")[2]
    if not all(caption.endswith(f" ({night}") for caption in answer.captions):
        return False
    if answer.text is None:
        return True
    # Two hits that score alike may have changed places.
    pairs = zip(answer.hits, wanted[answer.text], strict=False)
    is_same = all(abs(found[2] - hit[2]) < (1e-4 if found[0] == hit[0] else 1e-6) for found, hit in pairs)
    return is_same and len(answer.hits) == len(wanted[answer.text])


if __name__ == "__main__":
    main()
