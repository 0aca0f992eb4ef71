"""Parallel build of inverted lists: several processes build parts, which are merged on disk into one index file.

template    trained and empty; a process that has its file can build a part
part        the template with some of the rows, in order
merged      all parts in order: byte for byte the template after all rows are added at once (except projections, which
            BLAS rounds differently in blocks of another size)

Merging reads one list at a time from disk, so memory is bounded by the largest list. The result is an ordinary index
file, which `index.faiss_build` reads or maps. The bytes that FAISS writes for an empty index are split where its lists
(and re-ranking codes) would be; if they are not as expected, parts are not used.

FAISS trusts index files, and these have no manifest with a hash yet: the caller must have written them itself, to its
own folder.

Source: faiss-cpu 1.15, faiss/impl/index_write.cpp, `write_InvertedLists` and `write_index`.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from index import faiss_build
from index.vectors import Floats

_COPIED_BYTES = 64 << 20
_EMPTY_VECTOR = struct.pack("<Q", 0)


@dataclass(frozen=True)
class _Frame:
    """Bytes of a file that do not depend on the rows: before the lists, between lists and codes, and after those."""

    before: bytes
    between: bytes
    after: bytes


def can_be_merged(template: faiss.Index) -> bool:
    """Whether parts of this index can be merged: its inverted lists have the plain layout, not blocks of 32."""
    lists = faiss_build.innermost(template)
    if not isinstance(lists, faiss.IndexIVF):
        return False
    is_plain = isinstance(faiss.downcast_InvertedLists(lists.invlists), faiss.ArrayInvertedLists)
    return is_plain and _frame(template) is not None


def build_part(template: Path, blocks: Iterable[Floats], out: Path) -> int:
    """Add rows, (n, E) float32 of unit norm, to a trained template, and write it as a part; returns their number."""
    index = faiss.read_index(str(template))
    faiss_build.add(index, blocks)
    faiss_build.write(index, out)
    return int(index.ntotal)


def merge_parts(template: Path, parts: Sequence[Path], out: Path) -> int:
    """Write the rows of all parts in order; returns their number. `can_be_merged` must hold for the template."""
    shell = faiss.read_index(str(template))
    opened = [faiss.read_index(str(part), faiss.IO_FLAG_MMAP_IFC) for part in parts]
    num_rows = sum(part.ntotal for part in opened)
    _count(shell, num_rows)
    frame = _frame(shell)
    if frame is None:
        raise RuntimeError("asked to merge what can't be merged")
    with out.open("wb") as file:
        file.write(frame.before)
        _write_lists(file, [faiss_build.innermost(part) for part in opened])
        file.write(frame.between)
        if isinstance(shell, faiss.IndexRefine):
            _write_codes(file, [_codes(part) for part in opened], _code_unit(shell))
        file.write(frame.after)
    return int(num_rows)


def _count(index: faiss.Index, num_rows: int) -> None:
    """Set the number of rows of an index and of everything inside it."""
    index = faiss.downcast_index(index)
    index.ntotal = num_rows
    if isinstance(index, faiss.IndexRefine):
        _count(index.base_index, num_rows)
        _count(index.refine_index, num_rows)
    elif isinstance(index, faiss.IndexPreTransform):
        _count(index.index, num_rows)


def _frame(index: faiss.Index) -> _Frame | None:
    """Split the bytes that FAISS writes for an index without rows; None if the layout differs."""
    lists = faiss_build.innermost(index)
    empty = struct.pack("<4sQQ4sQ", b"ilar", lists.nlist, lists.code_size, b"sprs", 0)
    if not isinstance(index, faiss.IndexRefine):
        whole = faiss.serialize_index(index).tobytes()
        return _Frame(whole.removesuffix(empty), b"", b"") if whole.endswith(empty) else None
    whole, base, codes = (
        faiss.serialize_index(each).tobytes() for each in (index, index.base_index, index.refine_index)
    )
    head, found, tail = whole.partition(base + codes)
    if not (found and base.endswith(empty) and codes.endswith(_EMPTY_VECTOR)):
        return None
    return _Frame(head + base.removesuffix(empty), codes.removesuffix(_EMPTY_VECTOR), tail)


def _write_lists(file: BinaryIO, parts: Sequence[Any]) -> None:
    """Write all lists, each with the parts' entries in order; row numbers continue from part to part."""
    num_lists, code_size = parts[0].nlist, parts[0].code_size
    sizes = np.array([[part.invlists.list_size(number) for number in range(num_lists)] for part in parts], np.uint64)
    filled = sizes.sum(axis=0)
    numbers = np.flatnonzero(filled)
    file.write(struct.pack("<4sQQ", b"ilar", num_lists, code_size))
    if len(numbers) > num_lists // 2:
        file.write(struct.pack("<4sQ", b"full", num_lists) + filled.tobytes())
    else:
        pairs = np.stack([numbers.astype(np.uint64), filled[numbers]], axis=1)
        file.write(struct.pack("<4sQ", b"sprs", pairs.size) + pairs.tobytes())
    starts = np.cumsum([0, *(part.ntotal for part in parts)])
    for number in numbers.tolist():
        held = [place for place in range(len(parts)) if sizes[place, number]]
        for place in held:
            size = int(sizes[place, number]) * code_size
            file.write(faiss.rev_swig_ptr(parts[place].invlists.get_codes(number), size).tobytes())
        for place in held:
            ids = faiss.rev_swig_ptr(parts[place].invlists.get_ids(number), int(sizes[place, number]))
            file.write((ids + starts[place]).astype(np.int64).tobytes())


def _codes(index: faiss.Index) -> NDArray[np.uint8]:
    """Return the re-ranking codes, row by row, (bytes,), without a copy."""
    flat = faiss.downcast_index(index.refine_index)
    return faiss.rev_swig_ptr(flat.codes.data(), flat.codes.size())  # type: ignore[no-any-return]


def _code_unit(index: faiss.Index) -> int:
    """Return the unit in which FAISS counts those codes: 4 bytes for floats, else 1."""
    return 4 if isinstance(faiss.downcast_index(index.refine_index), faiss.IndexFlat) else 1


def _write_codes(file: BinaryIO, parts: Sequence[NDArray[np.uint8]], unit: int) -> None:
    file.write(struct.pack("<Q", sum(map(len, parts)) // unit))
    for codes in parts:
        for start in range(0, len(codes), _COPIED_BYTES):
            file.write(codes[start : start + _COPIED_BYTES].tobytes())
