"""Encodings of a Parquet file: levels of a page, and structs of Thrift's compact protocol; what is damaged raises."""

from typing import Any

import numpy as np
import pyarrow as pa

Ints = np.ndarray[Any, np.dtype[np.int64]]


MAX_DEPTH = 12  # of nesting in a footer
KEY_BYTES, MAX_PERIOD = 12, 96
"""Levels repeat where these bytes recur within so many; a period holds up to eight rows, each of some five bytes."""


def find_unlike(data: bytes, num: int, usual: int, expected: int, *, bits: int) -> tuple[Ints, Ints]:
    """Return the ascending positions and the values of the levels that are not the usual one, as many as expected.

    `data` is the hybrid of run lengths and packed groups of eight, of `num` levels with `bits` bits each.
    """
    at, first, counts, value = _read_runs(data, num, usual, 2 * expected + num // 256 + 64, bits=bits).T
    is_run = value >= 0
    if counts[is_run].sum() > expected:
        raise pa.ArrowInvalid("the levels of a page don't add up to its rows")
    groups, in_group = _expand(at[~is_run], counts[~is_run], bits), np.arange(bits)
    packed = np.unpackbits(np.frombuffer(data, np.uint8)[groups[:, None] + in_group], axis=None, bitorder="little")
    levels = np.bitwise_or.reduce([packed[bit::bits] << bit for bit in range(bits)])
    unlike = np.flatnonzero(levels != usual)
    places = _expand(first[~is_run], counts[~is_run], 8)[unlike >> 3] + (unlike & 7)
    unlike, places = unlike[places < num], places[places < num]  # the last group is filled up
    places = np.concatenate([places, _expand(first[is_run], counts[is_run], 1)])
    values = np.concatenate([levels[unlike], np.repeat(value[is_run], counts[is_run])])
    if len(places) != expected:
        raise pa.ArrowInvalid("the levels of a page don't add up to its rows")
    order = np.argsort(places, kind="stable")
    return places[order], values[order]


def _expand(starts: Ints, counts: Ints, step: int) -> Ints:
    """Return `start`, `start + step`, ... of each count, one after another."""
    ends = np.cumsum(counts)
    within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return np.asarray(np.repeat(starts, counts) + within * step, np.int64)


def _read_runs(data: bytes, num: int, usual: int, max_runs: int, *, bits: int) -> Ints:
    """Return rows of position in `data`, first level, count and value, for runs of other levels than the usual one.

    Packed groups have the value -1, and their number as count. A run means the same wherever it stands: where a period
    of bytes recurs, its runs are repeated and not parsed again.
    """
    position = level = num_parsed = start = start_level = first_run = 0
    period = _find_period(data, 0)
    runs: list[tuple[int, int, int, int]] = []
    repeats: list[tuple[int, int, int, int, int]] = []
    while level < num:
        if position < len(data) and data[position] < 0x80:  # most; a call takes longer than the rest
            header, position = data[position], position + 1
        else:
            header, position = _parse_varint(data, position)
        count, num_parsed = header >> 1, num_parsed + 1
        num_bytes, num_levels, num_filled = (count * bits, 8 * count, 7) if header & 1 else (1, count, 0)
        is_within = position + num_bytes <= len(data) and level + num_levels <= num + num_filled
        if not count or not is_within or num_parsed > max_runs:
            raise pa.ArrowInvalid("the levels of a page are damaged")
        value = -1 if header & 1 else data[position]
        if value != usual:
            runs.append((position, level, count, value))
        position, level = position + num_bytes, level + num_levels
        if position < start + period:
            continue
        if period and position == start + period:
            step = level - start_level
            times = max(0, min(_count_repeats(data, start, period), (num - level) // step))
            repeats.append((first_run, len(runs) - first_run, times, period, step))
            position, level = position + times * period, level + times * step
        start, start_level, first_run, period = position, level, len(runs), _find_period(data, position)
    if position != len(data):
        raise pa.ArrowInvalid("the levels of a page have more bytes than they need")
    return _repeat(np.array(runs, np.int64).reshape(-1, 4), np.array(repeats, np.int64).reshape(-1, 5))


def _repeat(runs: Ints, repeats: Ints) -> Ints:
    """Append what recurs: each repeat has its first run, how many, how often, and the period in bytes and levels."""
    first, num, times, period, step = repeats.T
    sizes = num * times
    number = _expand(np.zeros_like(sizes), sizes, 1)  # of each appended run within its repeat
    first, num, period, step = (np.repeat(each, sizes) for each in (first, num, period, step))
    again = runs[first + number % num]
    again[:, 0] += (number // num + 1) * period
    again[:, 1] += (number // num + 1) * step
    return np.concatenate([runs, again])


def _find_period(data: bytes, start: int) -> int:
    """Return after how many bytes those at `start` recur; 0 if they don't soon."""
    return max(0, data.find(data[start : start + KEY_BYTES], start + 1, start + MAX_PERIOD) - start)


def _count_repeats(data: bytes, start: int, period: int) -> int:
    """Return how often the bytes of a period recur right after it; the step is doubled, then halved."""

    def recurs(step: int) -> bool:
        here, there, size = start, start + times * period, step * period
        return data[here : here + size] == data[there : there + size]

    times = step = 1
    while recurs(step):
        times += step
        step = times
    while step := step // 2:
        times += step if recurs(step) else 0
    return times - 1


def _parse_varint(data: "bytes | memoryview", position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise pa.ArrowInvalid("a page's header or levels end within a number")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def parse_struct(data: memoryview, position: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a Thrift struct; return its fields by id, and the position after it."""
    fields: dict[int, Any] = {}
    field = 0
    while True:
        if position >= len(data):
            raise pa.ArrowInvalid("a header or the footer is cut off")
        kind, delta = data[position] & 0x0F, data[position] >> 4
        position += 1
        if kind == 0 and not delta:
            return fields, position
        if delta:
            field += delta
        else:
            number, position = _parse_varint(data, position)
            field = (number >> 1) ^ -(number & 1)
        if field in fields:
            raise pa.ArrowInvalid("a header or the footer has a field twice")
        if kind in (1, 2):
            fields[field] = kind == 1
        else:
            fields[field], position = _parse_value(data, position, kind, depth)


def _parse_value(data: memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise pa.ArrowInvalid("a header or the footer is nested too deep")
    if kind == 12:
        return parse_struct(data, position, depth + 1)
    if kind in (4, 5, 6):
        number, position = _parse_varint(data, position)
        return (number >> 1) ^ -(number & 1), position
    if kind == 8:
        length, position = _parse_varint(data, position)
        if length > len(data) - position:
            raise pa.ArrowInvalid("a header or the footer names more bytes than there are")
        return bytes(data[position : position + length]), position + length
    if kind in (1, 2, 3) and position < len(data):
        return data[position], position + 1
    if kind != 9 or position >= len(data):
        raise pa.ArrowInvalid(f"a header or the footer has a field of type {kind}")
    length, of_kind, position = data[position] >> 4, data[position] & 0x0F, position + 1
    if length == 15:
        length, position = _parse_varint(data, position)
    values = []
    if length > len(data) - position:
        raise pa.ArrowInvalid("a header or the footer has a longer list than there are bytes")
    for _ in range(length):
        value, position = _parse_value(data, position, of_kind, depth + 1)
        values.append(value)
    return values, position
