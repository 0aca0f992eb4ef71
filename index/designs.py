"""Designs of an index, in the notation of FAISS's factory strings, and their search parameters.

A design is a factory string for FAISS's `index_factory`, or one with embedder's prefix: `LeanVec48` projects vectors
and queries onto the 48 directions that matter to text queries (`index.design_trials`), `First64` onto their first 64
numbers, which carry the most where a model was trained so (Matryoshka).

Flat                                       exact search
HNSW32,Flat                                a graph over whole vectors
LeanVec48,HNSW32,Flat,Refine(SQfp16)       a graph over projections; the best are re-scored at full width
LeanVec48,IVF512,PQ48x4fsr,Refine(SQfp16)  lists of projections, 4 bits for each number's distance from the centroid
OPQ64,IVF4096,PQ64x4fs,Refine(SQfp16)      lists of product codes, scanned 32 at a time; re-scored
Weighted,IVF1024,PQ96x4fs,Refine(SQ8)      codes of vectors weighted by what queries ask for (`index.query_weights`)
IVF4096,PQ128x4fs,Disk(SQ8)                the same, with the vectors for re-scoring left on disk

`Weighted` and `Disk` are embedder's: such indexes consist of parts that are searched in parallel (`index.disk_index`).

Source: FAISS wiki, "The index factory"; Tepper et al. 2023, "LeanVec: Searching vectors faster by making them fit".
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from index.index_errors import RetrievalError

Kind = Literal["flat", "hnsw", "ivf"]
KINDS: tuple[Kind, ...] = ("flat", "hnsw", "ivf")
Parameters = dict[str, int]

HNSW_EF_CONSTRUCTION = 100  # 40 builds 3 times as fast and finds 0.85 where 100 finds 0.97; 200 finds 0.98
TRAINING_VECTORS_PER_LIST = 64  # FAISS recommends at least 39
MAX_TRAINING_VECTORS = 1 << 20
MIN_PART_VECTORS = 39 * 16  # 16 centroids of a 4-bit code; FAISS warns below 39 vectors each

_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
_LIST_SHARES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)  # one of this many lists is read
_PARTS_FACTORS = (4, 8, 16, 32, 64)  # each row may be a disk read, so no more than needed
_EXACT_CODES_FACTORS = (1, 4)  # rows to re-rank, as a multiple of k, for codes that almost preserve the order
_PROJECTED_FACTORS = (1, 2, 4, 16)  # the same for projections
_PROJECTED_CODES_FACTORS = (2, 4, 8, 16, 32)  # the same for their small codes
_SMALL_CODES_FACTORS = (4, 16, 64)  # the same for codes of a few bits per dimension

# Milliseconds per vector read, when some hundred are requested at once: 200 took 1.8 ms, 600 took 8.6 ms.
_DISK_READ_MS = 0.015

_PROJECTED = re.compile(r"(LeanVec|First)(\d+),")
_TOO_SMALL = re.compile(r"(?<!\d)0+(?!\d)|HNSW0*1(?!\d)")  # FAISS divides by it, aborts or never ends
_LISTS = re.compile(r"IVF(\d+)")
_SMALL_CODES = re.compile(r"PQ|RaBitQ")
_PARTS_FACTORY = re.compile(r"IVF\d+,PQ(\d+)x4fs")
_CODE_BYTES = {"Flat": 4.0, "SQfp16": 2.0, "SQ8": 1.0}  # per dimension
_CODE_GROUPS = re.compile(r"PQ(\d+)x4fs")
_BIT_BYTES, _FACTOR_BYTES = 1 / 8, 8  # per dimension of RaBitQ, and for the factors of a vector
_GRAPH_BYTES, _LIST_BYTES, _PLACE_BYTES = 272, 8, 4  # per vector: 64 links and upper levels, row number, position
_NO_COSINES = re.compile(r"PQ|RaBitQ|PCA|RR|ITQ|Pad")  # scores of projections and small codes are no cosines: re-rank


@dataclass(frozen=True)
class Design:
    """One design; `str()` gives its notation.

    `factory` lacks the re-ranking; `projection` is a width, None for none, and `first` says that it takes the first
    numbers; `rerank` is a code such as `SQfp16` or `Flat`, None for no re-ranking. `in_parts` (weighted vectors, always
    true on disk) means that the index consists of parts.
    """

    factory: str
    projection: int | None = None
    rerank: str | None = None
    on_disk: bool = False
    in_parts: bool = False
    first: bool = False

    def __str__(self) -> str:
        projected = f"{'First' if self.first else 'LeanVec'}{self.projection}," if self.projection else ""
        projected += "Weighted," if self.in_parts and not self.on_disk else ""
        reranked = "Disk" if self.on_disk else "Refine"
        return projected + self.factory + (f",{reranked}({self.rerank})" if self.rerank else "")

    @property
    def kind(self) -> Kind:
        """Family of the structure."""
        return "ivf" if "IVF" in self.factory else "hnsw" if "HNSW" in self.factory else "flat"

    @property
    def is_exact(self) -> bool:
        """Whether it compares each query with every vector, at full precision."""
        return self.factory == "Flat" and self.projection is None

    @property
    def num_lists(self) -> int:
        """Number of inverted lists; 0 for other kinds."""
        found = _LISTS.search(self.factory)
        return int(found.group(1)) if found else 0

    @property
    def num_code_groups(self) -> int:
        """Number of groups of dimensions with their own product code; 0 unless the design is in parts."""
        found = _PARTS_FACTORY.fullmatch(self.factory) if self.in_parts else None
        return int(found.group(1)) if found else 0

    def row_code_bytes(self, dim: int) -> int:
        """Count the bytes of a vector for re-ranking; 0 without re-ranking."""
        return int(dim * _CODE_BYTES[self.rerank]) if self.rerank else 0

    def least_bytes(self, num_vectors: int, dim: int) -> float:
        """Return a lower bound of the memory, from the full-width vectors that it holds; known before the build."""
        if self.on_disk:
            return 0.0
        code = self.rerank or self.factory.rsplit(",", maxsplit=1)[-1]
        return num_vectors * dim * _CODE_BYTES.get(code, 0.0)

    def estimated_bytes(self, num_vectors: int, dim: int) -> float:
        """Estimate the memory of the index, without centroids; known before the build."""
        code, width = self.factory.rsplit(",", maxsplit=1)[-1], self.projection or dim
        groups = _CODE_GROUPS.search(code)
        of_code = width * _CODE_BYTES[code] if code in _CODE_BYTES else width * _BIT_BYTES + _FACTOR_BYTES
        if groups:
            of_code = int(groups.group(1)) / 2
        links = _GRAPH_BYTES if self.kind == "hnsw" else _LIST_BYTES if self.kind == "ivf" else 0
        places = _PLACE_BYTES if self.in_parts else 0
        return num_vectors * (of_code + links + places + (0 if self.on_disk else self.row_code_bytes(dim)))

    @property
    def has_fast_scan(self) -> bool:
        """Whether its codes are of 4 bits, and are scanned 32 at a time."""
        return _CODE_GROUPS.search(self.factory) is not None

    @property
    def has_projected_codes(self) -> bool:
        """Whether its codes are of 4 bits for each number of a projection."""
        return self.projection is not None and self.has_fast_scan

    @property
    def has_code_a_number(self) -> bool:
        """Whether each number of a projection has its own code: of its distance from the list's centroid."""
        return re.fullmatch(rf"IVF\d+,PQ{self.projection}x4fsr", self.factory) is not None

    @property
    def has_small_codes(self) -> bool:
        """Whether its codes have a few bits per dimension."""
        return _SMALL_CODES.search(self.factory) is not None

    def is_outdone_by(self, other: "Design", *, is_small_wanted: bool) -> bool:
        """Whether nothing is left to win over `other`, if that keeps the constraints: 4 bits a number of projections.

        More bits for a number of projections, whole vectors, or a graph over either take more memory and twice the
        time; weighted codes take about as much memory and three times the time (on the shapes of
        `scripts/vector_shapes.py`).
        """
        if not other.has_projected_codes or self.on_disk:
            return False
        has_less = is_small_wanted and self.rerank != other.rerank
        return self.projection is None or not (has_less or self.has_fast_scan)

    @property
    def num_training(self) -> int:
        """The most vectors to train on."""
        per_list = TRAINING_VECTORS_PER_LIST * max(self.num_lists, 1024)
        return min(per_list, MAX_TRAINING_VECTORS)

    def reads_ms(self, parameters: Parameters) -> float:
        """Bound the milliseconds of disk reads of a query for ten rows, with nothing in memory yet."""
        return parameters["k_factor"] * 10 * _DISK_READ_MS if self.on_disk else 0.0

    def search_params(self) -> Iterator[list[Parameters]]:
        """Yield the search parameters to try: a list for each re-ranking factor, cheapest first."""
        factors: tuple[int | None, ...] = (None,)
        if self.in_parts:
            factors = _PARTS_FACTORS
        elif self.rerank:
            factors = _SMALL_CODES_FACTORS if self.has_small_codes else _EXACT_CODES_FACTORS
            if self.projection:
                factors = _PROJECTED_CODES_FACTORS if self.has_small_codes else _PROJECTED_FACTORS
        for factor in factors:
            yield [
                search_params | ({"k_factor": factor} if factor else {}) for search_params in self._structure_params()
            ]

    def _structure_params(self) -> list[Parameters]:
        if self.kind == "hnsw":
            return [{"ef_search": value} for value in _EF_SEARCH]
        if self.kind == "ivf":
            probes = sorted({max(1, self.num_lists // share) for share in _LIST_SHARES})
            return [{"nprobe": value} for value in probes]
        return [{}]


def parse_design(text: str) -> Design:
    """Parse a design's notation; raises a RetrievalError for an unknown structure (FAISS finds other errors)."""
    rest, projection, rerank, first = text.strip(), None, None, False
    if rest.lower() in KINDS and rest not in KINDS and rest != "Flat":
        raise RetrievalError(f"index kind {text!r} is unknown; kinds are written in lower case: {rest.lower()!r}")
    if _TOO_SMALL.search(rest):
        raise RetrievalError(f"index kind {text!r}: a number of it is too small; write 1 or more, after HNSW 2 or more")
    if found := _PROJECTED.match(rest):
        first, projection, rest = found.group(1) == "First", int(found.group(2)), rest[found.end() :]
    if found := re.search(r",Disk\((\w+)\)$", rest):
        return _design_in_parts(text, rest[: found.start()], found.group(1), projection, on_disk=True)
    if found := re.match(r"Weighted,(.*),Refine\((\w+)\)$", rest):
        return _design_in_parts(text, found.group(1), found.group(2), projection, on_disk=False)
    if found := re.search(r",(?:Refine\((\w+)\)|RFlat)$", rest):
        rerank, rest = found.group(1) or "Flat", rest[: found.start()]
    if not re.search(r"Flat|HNSW|IVF|SQ|PQ|RaBitQ", rest) or re.search("LeanVec|First", rest):
        raise RetrievalError(
            f"index kind {text!r} is unknown; write auto, flat, hnsw or ivf, or a design as FAISS's index_factory "
            "reads it, such as LeanVec64,HNSW32,Flat,Refine(SQfp16)"
        )
    if rerank is None and (projection or _NO_COSINES.search(rest)):
        rerank = "SQfp16"
    return Design(rest, projection, rerank, first=first)


def _design_in_parts(text: str, factory: str, rerank: str, projection: int | None, *, on_disk: bool) -> Design:
    if not _PARTS_FACTORY.fullmatch(factory) or rerank not in ("SQ8", "SQfp16") or projection is not None:
        written, place = (
            ("IVF4096,PQ128x4fs,Disk(SQ8)", " on disk")
            if on_disk
            else ("Weighted,IVF4096,PQ128x4fs,Refine(SQ8)", " for re-ranking")
        )
        raise RetrievalError(
            f"index kind {text!r} is unknown; a design {'on disk' if on_disk else 'of weighted vectors'} is written as "
            f"{written}: inverted lists of product codes, and SQ8 or SQfp16 for the vectors{place}"
        )
    return Design(factory, None, rerank, on_disk=on_disk, in_parts=True)


def candidate_designs(
    num_vectors: int, dim: int, projections: tuple[int, ...], *, first: bool = False
) -> tuple[Design, ...]:
    """List the designs to measure, exact search first; `projections` are widths, `first` says of what kind."""
    lists, part_lists = count_lists(num_vectors), count_part_lists(num_vectors)
    designs = [Design("Flat")]
    designs += [  # before what they may outdo
        Design(f"IVF{part_lists},PQ{width}x4fsr", width, rerank, first=first)
        for width in projections
        for rerank in ("SQfp16", "SQ8")
        if num_vectors >= MIN_PART_VECTORS
    ]
    designs += [
        Design("SQfp16"),
        Design("SQ8", rerank="SQfp16"),
        Design("HNSW32,Flat"),
        Design("HNSW32,SQ8", rerank="SQfp16"),
        Design(f"IVF{lists},Flat"),
        Design(f"IVF{lists},SQ8", rerank="SQfp16"),
    ]
    designs += designs_in_parts(num_vectors, dim, on_disk=False)
    designs += [
        Design(factory, width, rerank, first=first)
        for width in projections
        for factory, rerank in (
            ("Flat", "SQfp16"),
            ("HNSW32,Flat", "SQfp16"),
            ("HNSW32,Flat", "SQ8"),
            (f"IVF{lists},SQ8", "SQfp16"),
            (f"IVF{lists},SQ8", "SQ8"),
        )
    ]
    return tuple(designs)


def designs_in_parts(num_vectors: int, dim: int, *, on_disk: bool) -> tuple[Design, ...]:
    """List the designs in parts to measure for a table, smallest first; none for few vectors."""
    if num_vectors < MIN_PART_VECTORS:
        return ()
    lists = count_part_lists(num_vectors)
    groups = sorted({_divisor_near(dim, dim // share) for share in (4, 2)})
    return tuple(Design(f"IVF{lists},PQ{number}x4fs", None, "SQ8", on_disk=on_disk, in_parts=True) for number in groups)


def default_design(kind: Kind, num_vectors: int) -> Design:
    """Return the default design of a kind."""
    if kind == "flat":
        return Design("Flat")
    return Design("HNSW32,Flat" if kind == "hnsw" else f"IVF{count_lists(num_vectors)},Flat")


def count_lists(num_vectors: int) -> int:
    """Compute the number of IVF lists: the power of two nearest to 4 sqrt(N), limited by the vectors to train on."""
    wanted = 1 << round(math.log2(4 * math.sqrt(num_vectors)))
    return max(1, min(wanted, num_vectors // TRAINING_VECTORS_PER_LIST))


def count_part_lists(num_vectors: int) -> int:
    """Compute the number of lists of a design in parts: a quarter of the others', as 32 codes are scanned at once."""
    return max(1, count_lists(num_vectors) // 4)


def _divisor_near(dim: int, wanted: int) -> int:
    """Return the divisor of a width nearest to `wanted`, preferably an even one: 4-bit codes come in pairs."""
    divisors = [value for value in range(1, dim + 1) if dim % value == 0]
    even = [value for value in divisors if value % 2 == 0]
    return min(even or divisors, key=lambda value: abs(value - wanted))
