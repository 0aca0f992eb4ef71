"""Search of one version of an index, which is checked when opened."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from operator import gt
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from index import faiss_build, faiss_search
from index.disk_index import DiskIndex
from index.faiss_scan import RowScan
from index.faiss_search import FindAmong, ListedRows, Places
from index.index_errors import RetrievalError
from index.manifest import Manifest, read_manifest
from index.recall import NUM_NEIGHBOURS
from index.selector import Selector
from index.vectors import Among, Floats, Mask, Neighbours, Profile, Rows, check_vectors
from index.version_files import read_contents, read_index, read_live

# An approximate search for more than a tenth of the table reads nearly all of it, and is slower than the exact one.
EXACT_SHARE = 10
THREAD_MS = 2.0  # of search per thread


class Index:
    """One version of an index; `search` is thread-safe.

    Attributes:
        is_live: bool (rows,), whether a row may be found; false for rows removed since the build.
    """

    def __init__(
        self,
        manifest: Manifest,
        read_ids: Callable[[], pa.Table],
        index: faiss.Index | DiskIndex,
        is_live: Mask,
        places: Places | None = None,
    ) -> None:
        """Make an index from its parts, as `open_index` reads them; `is_live` is bool (rows,)."""
        self.manifest = manifest
        self._places = places
        self._read_ids = read_ids
        self.is_live = is_live
        self._index = index
        self._has_masked = not self.is_live.all()

    @cached_property
    def ids(self) -> pa.Table:
        """Item, segment and run of each row; read on first use."""
        return self._read_ids()

    @property
    def dim(self) -> int:
        """Width of a vector."""
        return self.manifest.dim

    def __len__(self) -> int:
        """Number of vectors that can be found."""
        return self.manifest.num_vectors

    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        among: Among | None = None,
        profile: Profile = "text",
        parameters: dict[str, int] | None = None,
        num_threads: int | None = None,
    ) -> Neighbours:
        """Find the k nearest vectors of each query; if fewer may be found, all of them.

        With a filter that few rows pass, only those are scored; otherwise the index is searched with parameters that
        grow as the share of passing rows shrinks.

        Args:
            queries: (Q, E) of unit norm, float32 or another float type, from the model whose fingerprint the index has.
            k: number of neighbours, at least 1.
            among: bool (rows,), whether a row may be found; or int64 (n,), the ascending rows that may be, which costs
                nothing for the others; None for all.
            profile: kind of the queries; texts and images need different search parameters.
            parameters: search parameters instead of the manifest's.
            num_threads: threads of FAISS; None for as many as are worthwhile, up to all cores.

        Returns:
            Neighbours of width min(k, rows that may be found).

        Raises:
            RetrievalError: the queries have another width, are not finite or not of unit norm, k is below 1, or the
                mask has another length.
        """
        if k < 1:
            raise RetrievalError(f"k is {k}; ask for 1 result or more")
        queries_QE = self._as_queries(queries)
        selector = self._selector(among)
        num_allowed = len(self) if selector is None else selector.num_rows
        k = min(k, num_allowed)
        if k == 0:
            return Neighbours(np.empty((len(queries_QE), 0), np.float32), np.empty((len(queries_QE), 0), np.int64))
        if parameters is None:
            parameters = self.manifest.parameters if profile == "text" else self.manifest.image_parameters
        if parameters is None or k * EXACT_SHARE >= num_allowed:
            with faiss_build.threads(num_threads):
                return _order(*faiss_search.search_exactly(self._index, queries_QE, k, selector))
        if among is not None and selector is not None:
            scan, row_us = self._scan(profile)
            if row_us * num_allowed <= self.manifest.latency_ms * 1000 / (num_allowed / len(self)):
                with faiss_build.threads(num_threads):
                    return _order(*scan(queries_QE, k, selector))
        share = 1.0 if among is None else num_allowed / len(self)
        search_params = parameters if among is None else widen_search_params(parameters, share)
        with faiss_build.threads(num_threads or self._num_threads(len(queries_QE) / share)):
            num_found = max(k, min(NUM_NEIGHBOURS, num_allowed))  # or fewer are re-ranked than recall was measured with
            scores, rows = faiss_search.search(self._index, queries_QE, num_found, search_params, selector)
            scores, rows = scores[:, :k], rows[:, :k]
        lowest = (
            min(rows[0].tolist()) if len(rows) == 1 else rows.min(initial=0)
        )  # NumPy's takes 1 us of a short search
        if lowest < 0:  # return k results whenever k exist
            is_short = (rows < 0).any(axis=1)
            with faiss_build.threads(num_threads):
                scores[is_short], rows[is_short] = faiss_search.search_exactly(
                    self._index, queries_QE[is_short], k, selector
                )
        return _order(scores, rows)

    def vectors(self, rows: Rows) -> Floats:
        """Fetch the vectors of some rows, (n, E) float32, with the precision of the index's codes.

        Raises a RetrievalError if the places that the index was opened with are not those of these rows.
        """
        return faiss_search.vectors(self._index, rows) if self._listed is None else self._listed.vectors(rows)

    def places(self) -> Places | None:
        """Return where each row's vector lies, int32 (rows,), for `open_index`; None where its number says it."""
        return faiss_search.list_places(self._index) if faiss_search.has_lists(self._index) else None

    @cached_property
    def _listed(self) -> ListedRows | None:
        if self._places is None or not faiss_search.has_lists(self._index):
            return None
        return ListedRows(self._index, self._places)

    def _num_threads(self, num_searches: float) -> int:
        """Return how many threads pay off at the manifest's latency: FAISS's waiting threads spin on their cores."""
        most: int = faiss.omp_get_max_threads()
        return max(1, min(most, int(num_searches * self.manifest.latency_ms / THREAD_MS)))

    def _as_queries(self, queries: Any) -> Floats:
        if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            with np.errstate(over="ignore"):
                queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_vectors(queries, "queries", dim=self.manifest.dim)
        return queries  # type: ignore[no-any-return]  # check_vectors proved it

    def _selector(self, among: Among | None) -> Selector | None:
        if among is None:
            return self._live_selector if self._has_masked else None
        if among.dtype != np.bool_:
            return self._selector_of_rows(among)
        if among.shape != self.is_live.shape:
            raise RetrievalError(
                f"filter: found {among.shape} for an index of {len(self.is_live):,} rows; give one value per row"
            )
        return Selector(among & self.is_live if self._has_masked else among)

    def _selector_of_rows(self, rows: Among) -> Selector:
        num_rows = len(self.is_live)
        if rows.ndim != 1 or rows.dtype != np.int64 or (np.diff(rows) <= 0).any():
            raise RetrievalError(
                f"filter: found {rows.dtype} of shape {rows.shape}; give rows as int64, each once, in ascending order"
            )
        if len(rows) and not 0 <= rows[0] <= rows[-1] < num_rows:
            raise RetrievalError(
                f"filter: found rows {rows[0]:,} to {rows[-1]:,} for an index of {num_rows:,}; give rows that it has"
            )
        return Selector(rows[self.is_live[rows]] if self._has_masked else rows, num_rows)

    @cached_property
    def _live_selector(self) -> Selector:
        return Selector(self.is_live)

    def _scan(self, profile: Profile) -> tuple[FindAmong, float]:
        """Return the cheapest way to score the rows that pass a filter, and its measured microseconds per row."""
        if profile == "text" and self.manifest.scan_row_us < self.manifest.exact_row_us:
            return self._row_scan.find, self.manifest.scan_row_us
        return partial(faiss_search.search_exactly, self._index), self.manifest.exact_row_us

    @cached_property
    def _row_scan(self) -> RowScan:
        return RowScan(self._index)


def widen_search_params(parameters: dict[str, int], share: float) -> dict[str, int]:
    """Raise search parameters so that a search among a share of the rows finds as much as one among all.

    A search of a graph or of lists visits a fixed number of rows, whether or not they pass the filter; so that number
    is divided by the share that passes.
    """
    raised = {name: -(-value // share) for name, value in parameters.items() if name != "k_factor"}
    return parameters | {name: int(value) for name, value in raised.items()}


def _order(scores: Floats, rows: Rows) -> Neighbours:
    if len(scores) == 1:  # no call of NumPy: ten of them take as long as a short search
        one: list[float] = scores[0].tolist()
        is_ordered = all(map(gt, one, one[1:]))
    else:
        is_ordered = bool((scores[:, 1:] < scores[:, :-1]).all())
    if is_ordered:
        return Neighbours(scores, rows)
    order = np.arange(len(rows))[:, None], np.lexsort((rows, -scores), axis=1)
    return Neighbours(scores[order], rows[order])


def open_index(
    folder: str | Path,
    *,
    model_fingerprint: str | None = None,
    samples: Mapping[str, str] | None = None,
    places: Places | None = None,
) -> Index:
    """Open one numbered version; each file's hash is checked before FAISS reads it, because FAISS trusts index files.

    A large index file is mapped: its vectors are read as searches touch them, once for all processes. A damaged
    version, or one of another model than `model_fingerprint` (None: any), raises a RetrievalError.

    With `samples`, `hash_samples` of the files by name, only those are compared, the index is mapped however small it
    is, and `ids` are read on first use: whoever gives them has whole hashes checked afterwards. With `places`, as
    `Index.places` returns them, fetching vectors makes no map of all rows.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if model_fingerprint is not None and model_fingerprint != manifest.model_fingerprint:
        raise RetrievalError(
            f"{folder}: its vectors are of model {manifest.model_fingerprint}, the queries of {model_fingerprint}; "
            "vectors of two models can't be compared: search with that model, or embed and build again with this one"
        )
    if samples is not None:
        index = read_index(folder, manifest, map_large=True, samples=samples)
        return Index(manifest, lambda: read_contents(folder, manifest).ids, index, read_live(folder, manifest), places)
    contents = read_contents(folder, manifest)
    index = read_index(folder, manifest, map_large=True)
    return Index(manifest, lambda: contents.ids, index, contents.is_live)
