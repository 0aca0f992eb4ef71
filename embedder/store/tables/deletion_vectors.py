"""Delta's deletion vectors: which rows of a part file have left a version of the table, while the file stays as it is.

Source: Delta's PROTOCOL.md, "Deletion Vectors" and "Deletion Vector Format"; the Roaring format specification. Bytes
are read as if an enemy had written them: whatever is wrong raises StoreError, and no row comes back.
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from index.vectors import Mask, Rows

FEATURE = "deletionVectors"
PROPERTY = "delta.enableDeletionVectors"
MAGIC = 1681511377
INLINE_BYTES = 512
"""Size up to which a vector stands in the log (250 rows); larger ones of a commit share a file: logs stay small."""
LEGACY_FEATURES = ("appendOnly", "invariants")
"""Features of the protocol (1, 2), which has no lists: the lists of version 7 have to name them."""


_DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VALUES = np.full(256, 255, np.uint8)
_VALUES[np.frombuffer(_DIGITS, np.uint8)] = np.arange(85)
_POWERS = 85 ** np.arange(4, -1, -1, dtype=np.uint64)
_PLAIN, _WITH_RUNS, _FEW_CONTAINERS = 12346, 12347, 4
_UUID_DIGITS = 20
_FILE = re.compile(r"/(items|embeddings)/part-[^/]+-marked/deletion_vector_[0-9a-f-]{36}\.bin$")


class DeletionVectorError(StoreError):
    """Deletion vector that is missing or damaged, so that a part file can't be read."""


class DeletionVector(NamedTuple):
    """Place of a deletion vector by the log: `kind` is `i` (inline, in Z85), `u` or `p` (in a file).

    `size_bytes` is that of the bitmap; `cardinality` counts the rows that have left.
    """

    kind: str
    value: str
    size_bytes: int
    cardinality: int
    offset: int | None = None

    def file(self, table: str) -> str | None:
        """Return its file's path below the table's folder, None if it is inline; StoreError if it lies elsewhere."""
        if self.kind == "i":
            return None
        prefix, name = self.value[:-_UUID_DIGITS], self.value[-_UUID_DIGITS:]
        if self.kind != "u" or ".." in prefix or prefix.startswith("/"):
            raise _damage(table, f"deletion vector {self.kind}{self.value}", "it is outside of the table's folder")
        uuid = UUID(bytes=decode_z85(name))
        return f"{prefix}/deletion_vector_{uuid}.bin".lstrip("/")

    def action(self) -> dict[str, Any]:
        """Return its fields in the log."""
        offset = {} if self.offset is None else {"offset": self.offset}
        fields = {"storageType": self.kind, "pathOrInlineDv": self.value}
        return fields | offset | {"sizeInBytes": self.size_bytes, "cardinality": self.cardinality}


def is_vector_file(path: str) -> bool:
    """Return whether a file of the store has deletion vectors by its path: numbers of rows, and nothing else."""
    return _FILE.search(f"/{path}") is not None


def vector_of(action: Mapping[str, Any]) -> DeletionVector | None:
    """Return the deletion vector of an `add` or `remove`; ValueError, LookupError or TypeError if it is damaged."""
    found = action.get("deletionVector")
    if not found:
        return None
    vector = DeletionVector(
        found["storageType"],
        found["pathOrInlineDv"],
        int(found["sizeInBytes"]),
        int(found["cardinality"]),
        None if found.get("offset") is None else int(found["offset"]),
    )
    if vector.kind not in ("i", "u", "p") or min(vector.size_bytes, vector.cardinality, vector.offset or 0) < 0:
        raise ValueError(f"a deletion vector of kind {vector.kind!r} with {vector.cardinality} rows")
    return vector


def store_vectors(
    files: StoreFiles, table: str, run_id: str, session: str, rows: Mapping[str, Rows]
) -> dict[str, DeletionVector]:
    """Write the deletion vectors of a commit, from the rows of each part file; return them by the file's path.

    What is too large for the log goes to one file, whose name follows from run, session and content, so that repeating
    the commit repeats the file, and no other commit has its name.
    """
    bitmaps = {path: encode_rows(own) for path, own in sorted(rows.items())}
    large = {path: data for path, data in bitmaps.items() if len(data) > INLINE_BYTES}
    content, offsets = bytearray(b"\x01"), dict[str, int]()
    digest = hashlib.blake2b(f"{run_id}\n{session}".encode(), digest_size=16)
    for path, data in large.items():
        offsets[path] = len(content)
        content += struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
        digest.update(path.encode())
    digest.update(content)
    place = f"part-{run_id}-marked" + encode_z85(digest.digest())
    vectors = {
        path: DeletionVector("u", place, len(data), len(rows[path]), offsets[path])
        if path in large
        else DeletionVector("i", encode_z85(data), len(data), len(rows[path]))
        for path, data in bitmaps.items()
    }
    if large:
        files.write(f"{table}/{vectors[next(iter(large))].file(table)}", bytes(content))
    return vectors


def marked_rows(files: StoreFiles, table: str, vector: DeletionVector, num_stored: int) -> Rows:
    """Return the rows of a part file of `num_stored` rows that have left; StoreError if the vector can't be read."""
    where = f"{table}/{vector.file(table) or 'inline'}"
    try:
        data = (
            decode_z85(vector.value)[: vector.size_bytes] if vector.kind == "i" else _read_stored(files, where, vector)
        )
        if vector.cardinality > num_stored:
            raise ValueError(f"{vector.cardinality:,} rows have left, and the part file has {num_stored:,}")
        rows = decode_rows(data, vector.cardinality)
        if len(rows) and rows[-1] >= num_stored:
            raise ValueError(f"row {rows[-1]:,} has left, and the part file has {num_stored:,}")
    except FileNotFoundError:
        raise _damage(files.uri(where), "missing", "it says which rows of a part file have left") from None
    except (ValueError, struct.error) as error:
        raise _damage(files.uri(where), "damaged", str(error)) from None
    return rows


def _read_stored(files: StoreFiles, path: str, vector: DeletionVector) -> bytes:
    content, start = files.read(path), vector.offset or 0
    if content[:1] != b"\x01":
        raise ValueError("a file of deletion vectors begins with its version, 1")
    (size,) = struct.unpack_from(">I", content, start)
    data = content[start + 4 : start + 4 + size]
    if size != vector.size_bytes or len(data) != size:
        raise ValueError(f"{size:,} bytes at {start:,}, and the log says {vector.size_bytes:,}")
    if zlib.crc32(data) != struct.unpack_from(">I", content, start + 4 + size)[0]:
        raise ValueError("its checksum is wrong")
    return data


def _damage(where: str, what: str, why: str) -> DeletionVectorError:
    return DeletionVectorError(
        f"{where}: deletion vector {what} ({why}), and without it rows that have left would come back; restore the "
        "file from a backup, or go back with `embedder rollback`"
    )


def live_rows(marked: Rows, num_stored: int) -> Mask:
    """Return a mask of the rows of a part file that have not left."""
    mask = np.ones(num_stored, np.bool_)
    mask[marked] = False
    return mask


def encode_rows(rows: Rows) -> bytes:
    """Return ascending row numbers as Delta's bitmap."""
    keys, starts = np.unique(rows >> 32, return_index=True)
    groups = np.split(rows & 0xFFFFFFFF, starts[1:]) if len(rows) else []
    buckets = (struct.pack("<I", key) + _encode_bucket(group) for key, group in zip(keys.tolist(), groups, strict=True))
    return struct.pack("<IQ", MAGIC, len(keys)) + b"".join(buckets)


def _encode_bucket(rows: Rows) -> bytes:
    """Return the rows of one 32-bit bitmap, in arrays (few rows) and bitmaps of 65,536 bits."""
    keys, starts = np.unique(rows >> 16, return_index=True)
    groups = np.split((rows & 0xFFFF).astype("<u2"), starts[1:])
    containers = [_encode_container(group) for group in groups]
    head = b"".join(struct.pack("<HH", key, len(group) - 1) for key, group in zip(keys.tolist(), groups, strict=True))
    ends = np.cumsum([8 + 8 * len(keys), *map(len, containers)])
    return struct.pack("<II", _PLAIN, len(keys)) + head + ends[:-1].astype("<u4").tobytes() + b"".join(containers)


def _encode_container(rows: "np.ndarray[Any, np.dtype[np.uint16]]") -> bytes:
    if len(rows) <= 4096:
        return rows.tobytes()
    bits = np.zeros(1 << 16, np.bool_)
    bits[rows] = True
    return np.packbits(bits, bitorder="little").tobytes()


def decode_rows(data: bytes, cardinality: int) -> Rows:
    """Return the row numbers of a bitmap; ValueError or struct.error if it isn't one of so many ascending rows."""
    magic, num_buckets = struct.unpack_from("<IQ", data)
    if magic != MAGIC:
        raise ValueError(f"magic number {magic}, not {MAGIC}")
    place, found = 12, [np.empty(0, np.int64)]
    for _ in range(num_buckets):  # each takes bytes, so that a false number ends with them
        (key,) = struct.unpack_from("<I", data, place)
        place, sizes = _read_head(data, place + 4)
        if key >> 31 or sum(size for _, size, _ in sizes) + sum(map(len, found)) > cardinality:
            raise ValueError(f"it has more rows than {cardinality:,}, or such as no part file has")
        for high, size, has_runs in sizes:
            place, low = _read_container(data, place, size, has_runs)
            found.append(low + (high << 16) + (key << 32))
    rows = np.concatenate(found)
    if len(rows) != cardinality or (np.diff(rows) <= 0).any():
        raise ValueError(f"{len(rows):,} rows, and the log says {cardinality:,}, in ascending order")
    return rows


def _read_head(data: bytes, place: int) -> tuple[int, list[tuple[int, int, bool]]]:
    """Return the end of a bitmap's header, and its containers: upper half of rows, their number, whether in runs."""
    (cookie,) = struct.unpack_from("<I", data, place)
    if cookie == _PLAIN:
        (number,) = struct.unpack_from("<I", data, place + 4)
        place, flags = place + 8, b""
    elif cookie & 0xFFFF == _WITH_RUNS:
        number = (cookie >> 16) + 1
        place, flags = place + 4 + (number + 7) // 8, data[place + 4 : place + 4 + (number + 7) // 8]
    else:
        raise ValueError(f"a bitmap that begins with {cookie}")
    heads = struct.unpack_from(f"<{2 * number}H", data, place) if number <= 1 << 16 else ()
    has_offsets = not flags or number >= _FEW_CONTAINERS
    place += 4 * number * (2 if has_offsets else 1)
    runs = [bool(flags and flags[each // 8] >> (each % 8) & 1) for each in range(len(heads) // 2)]
    return place, [(high, size + 1, own) for high, size, own in zip(heads[::2], heads[1::2], runs, strict=True)]


def _read_container(data: bytes, place: int, size: int, has_runs: bool) -> tuple[int, Rows]:
    if has_runs:
        (number,) = struct.unpack_from("<H", data, place)
        pairs = np.array(struct.unpack_from(f"<{2 * number}H", data, place + 2), np.int64).reshape(-1, 2)
        if (pairs[:, 1] + 1).sum() != size:
            raise ValueError("runs of another length than its header says")
        return place + 2 + 4 * number, np.concatenate([np.empty(0, np.int64), *map(_run, pairs)])
    num_bytes = 2 * size if size <= 4096 else 8192
    part = data[place : place + num_bytes]
    if len(part) != num_bytes:
        raise ValueError("it ends too early")
    if size <= 4096:
        return place + num_bytes, np.frombuffer(part, "<u2").astype(np.int64)
    return place + num_bytes, np.flatnonzero(np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little"))


def _run(pair: Rows) -> Rows:
    return np.arange(pair[0], pair[0] + pair[1] + 1, dtype=np.int64)


def encode_z85(data: bytes) -> str:
    """Return bytes as Z85, filled up with zeros to a multiple of four."""
    words = np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.uint64)
    digits = words[:, None] // _POWERS % 85
    return np.frombuffer(_DIGITS, np.uint8)[digits.astype(np.int64)].tobytes().decode()


def decode_z85(text: str) -> bytes:
    """Return the bytes of Z85; ValueError if it is no Z85."""
    digits = _VALUES[np.frombuffer(text.encode(), np.uint8)]
    if len(digits) % 5 or (digits > 84).any():
        raise ValueError("no Z85")
    words = (digits.reshape(-1, 5).astype(np.uint64) * _POWERS).sum(axis=1)
    if (words > 0xFFFFFFFF).any():
        raise ValueError("no Z85")
    data: bytes = words.astype(">u4").tobytes()
    return data


def with_feature(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's protocol with deletion vectors."""
    features = {name: set(protocol.get(name) or ()) | {FEATURE} for name in ("readerFeatures", "writerFeatures")}
    if protocol["minWriterVersion"] < 7:
        features["writerFeatures"].update(LEGACY_FEATURES)
    return {"minReaderVersion": 3, "minWriterVersion": 7} | {name: sorted(own) for name, own in features.items()}


def has_feature(protocol: Mapping[str, Any]) -> bool:
    """Return whether a table's protocol has deletion vectors."""
    return FEATURE in (protocol.get("readerFeatures") or ())


def with_property(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's metadata with the property that allows writing deletion vectors."""
    kinds = metadata["format"]
    own = {"format": {"provider": kinds["provider"], "options": dict(kinds.get("options") or {})}}
    return {**metadata, **own, "configuration": dict(metadata.get("configuration") or {}) | {PROPERTY: "true"}}


def marked_stats(stats: str, num_null: Mapping[str, int]) -> str:
    """Return the statistics of a part file with rows that have left, of which `num_null` have no vector, by column."""
    return json.dumps(json.loads(stats) | {"tightBounds": False, "markedNullCount": dict(num_null)})


def files_of(table: str, action: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that an `add` or `remove` needs: the part file, and that of its deletion vector."""
    yield action["path"]
    vector = vector_of(action)
    if vector is not None and (path := vector.file(table)) is not None:
        yield path
