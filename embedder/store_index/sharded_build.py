"""Inverted-list index filled by a cluster: each task makes one part from some part files, this process merges them.

It is trained here, on a sample. A task needs the trained index (its centroids), the store's address and one CPU, and
returns its part, which this process keeps on disk. So this process holds in memory only parts in transit, and one list
while merging.
"""

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.quantities import duration_text, plural
from embedder.steps.attempts import limit_deaths
from embedder.store.files import StoreFiles
from embedder.store.layout import Searched
from embedder.store_index.indexed_rows import IndexRows
from index.designs import Design
from index.list_reach import Projection
from index.vectors import VectorTable

if TYPE_CHECKING:
    import faiss

ROWS_PER_PART = 1 << 18  # 256 MiB of vectors at 256 dimensions, and a part of at most as much
PART_CURE = "give the nodes more memory"
WAITING_PER_CPU = 2
NO_PROGRESS_S = 300.0

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterGroup:
    """Consecutive part files that become one part of the index."""

    paths: tuple[str, ...]
    num_rows: int


@contextmanager
def cluster_filler(address: str | None, files: StoreFiles, rows: IndexRows) -> Iterator["ClusterFiller | None"]:
    """Yield a function that fills an index on a cluster, for the block; None without a cluster, or for few rows.

    Raises ConfigError if no cluster answers at the address.
    """
    if address is None or rows.ids.num_rows <= ROWS_PER_PART:
        yield None
        return
    from embedder.executors.ray_session import cluster, ray_session

    with ray_session(address, NO_PROGRESS_S):
        yield ClusterFiller(files, rows, cluster().num_cpus)


def plan_groups(num_rows: Sequence[tuple[str, int]], rows_per_part: int) -> list[ClusterGroup]:
    """Group part files into parts, in order, at least one file in each."""
    groups: list[ClusterGroup] = []
    for path, rows in num_rows:
        if groups and groups[-1].num_rows + rows <= rows_per_part:
            groups[-1] = ClusterGroup((*groups[-1].paths, path), groups[-1].num_rows + rows)
        else:
            groups.append(ClusterGroup((path,), rows))
    return groups


class ClusterFiller:
    """Filler of indexes on a running Ray; an `index.build.Fill`."""

    def __init__(self, files: StoreFiles, rows: IndexRows, num_cpus: float) -> None:
        self.files, self.rows, self.num_cpus = files, rows, num_cpus

    def __call__(self, design: Design, table: VectorTable, projection: Projection | None) -> "faiss.Index":
        """Make an index of the rows; in this process if its lists can't be merged."""
        from index import faiss_build, faiss_merge

        template = faiss_build.train(design, table, projection)
        if not faiss_merge.can_be_merged(template):
            faiss_build.add(template, table.blocks())
            return template
        with tempfile.TemporaryDirectory(prefix="embedder-parts-") as name:
            folder = Path(name)
            faiss_build.write(template, folder / "template")
            parts = self._make_parts(folder)
            faiss_merge.merge_parts(folder / "template", parts, folder / "merged")
            return faiss_build.map_file(folder / "merged")

    def _make_parts(self, folder: Path) -> list[Path]:
        groups = plan_groups(self.rows.num_by_file(), ROWS_PER_PART)
        num_rows, done, started_s = sum(group.num_rows for group in groups), 0, time.monotonic()
        paths = [folder / f"part-{number:06d}" for number in range(len(groups))]
        for number, content in self._parts(groups, (folder / "template").read_bytes()):
            paths[number].write_bytes(content)
            done += groups[number].num_rows
            left_s = (time.monotonic() - started_s) * (num_rows - done) / max(1, done)
            left = f"about {duration_text(round(left_s))} left" if done < num_rows else "all built"
            LOG.info(f"index: {done:,} of {plural(num_rows, 'vector')} in parts, {left}")
        return paths

    def _parts(self, groups: Sequence[ClusterGroup], template: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield parts with their numbers as they become ready; few tasks wait at a time."""
        import ray

        task, rows = ray.remote(num_cpus=1, max_retries=-1)(_make_part), self.rows  # `limit_deaths` limits them
        template_ref = ray.put(template)
        running: dict[Any, int] = {}
        waiting = list(enumerate(groups))[::-1]
        while waiting or running:
            while waiting and len(running) < max(1.0, self.num_cpus * WAITING_PER_CPU):
                number, group = waiting.pop()
                running[task.remote(template_ref, self.files, rows.version, group.paths, rows.searched)] = number
            for reference in ray.wait(list(running))[0]:
                yield running.pop(reference), ray.get(reference)


def _make_part(template: bytes, files: StoreFiles, version: int, paths: Sequence[str], searched: Searched) -> bytes:
    """Make one part of the index in a Ray task; RunFailedError if it has killed several processes."""
    with limit_deaths(lambda: f"index: a part of {plural(len(paths), 'file')}", PART_CURE):
        return _built_part(template, IndexRows(files, version, paths, searched))


def _built_part(template: bytes, rows: IndexRows) -> bytes:
    from index import faiss_build, faiss_merge

    with tempfile.TemporaryDirectory(prefix="embedder-part-") as name, faiss_build.threads(1):
        folder = Path(name)
        (folder / "template").write_bytes(template)
        faiss_merge.build_part(folder / "template", rows.vectors(), folder / "part")
        return (folder / "part").read_bytes()
