"""Ways to damage a file; each takes the random numbers, the content, and the content of another good file."""

from collections.abc import Callable
from random import Random

Mutation = Callable[[Random, bytearray, bytes], bytearray]
HEAD_BYTES = 512
EXTREMES = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x80\x00\x00\x00")


def flip_bits(rng: Random, data: bytearray, _: bytes) -> bytearray:
    for _ in range(rng.choice((1, 4, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_bits_of_the_head(rng: Random, data: bytearray, _: bytes) -> bytearray:
    for _ in range(rng.choice((1, 3, 10))):
        data[rng.randrange(min(HEAD_BYTES, len(data)))] ^= 1 << rng.randrange(8)
    return data


def truncate(rng: Random, data: bytearray, _: bytes) -> bytearray:
    return data[: rng.randrange(len(data))]


def swap_header(rng: Random, data: bytearray, other: bytes) -> bytearray:
    num = rng.choice((4, 12, 64, 512))
    return bytearray(other[:num]) + data[num:]


def splice(rng: Random, data: bytearray, other: bytes) -> bytearray:
    start, place = rng.randrange(len(other)), rng.randrange(len(data))
    piece = other[start : start + rng.randrange(1, 2000)]
    data[place : place + len(piece)] = piece
    return data


def insert(rng: Random, data: bytearray, _: bytes) -> bytearray:
    place = rng.randrange(len(data))
    data[place:place] = rng.randbytes(rng.randrange(1, 5000))
    return data


def repeat(rng: Random, data: bytearray, _: bytes) -> bytearray:
    start = rng.randrange(len(data))
    piece = bytes(data[start : start + rng.randrange(1, 3000)])
    data[start:start] = piece * rng.choice((1, 5, 50))
    return data


def cut_out(rng: Random, data: bytearray, _: bytes) -> bytearray:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 1000)]
    return data


def blank(rng: Random, data: bytearray, _: bytes) -> bytearray:
    start = rng.randrange(len(data))
    length = min(len(data) - start, rng.randrange(1, 2000))
    data[start : start + length] = rng.choice((b"\x00", b"\xff")) * length
    return data


def huge_size(rng: Random, data: bytearray, _: bytes) -> bytearray:
    """Where a header has a size, it is now absurd; most numbers stand at even places near the front."""
    for _ in range(rng.choice((1, 2, 6))):
        place = 2 * rng.randrange(max(1, min(HEAD_BYTES, len(data)) // 2))
        data[place : place + 4] = rng.choice(EXTREMES)
    return data


def append(rng: Random, data: bytearray, other: bytes) -> bytearray:
    return data + (bytearray(other) if rng.random() < 0.5 else rng.randbytes(5000))


def noise_behind_the_head(rng: Random, data: bytearray, _: bytes) -> bytearray:
    return data[: rng.choice((4, 16, 64))] + rng.randbytes(rng.randrange(10, 20_000))


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    flip_bits_of_the_head,
    truncate,
    swap_header,
    splice,
    insert,
    repeat,
    cut_out,
    blank,
    huge_size,
    append,
    noise_behind_the_head,
)


def mutate(rng: Random, data: bytes, other: bytes) -> tuple[bytes, str]:
    """Damage a file in one or two ways; gives the content, and what was done."""
    damaged, done = bytearray(data), []
    for mutation in rng.sample(MUTATIONS, rng.choice((1, 1, 2))):
        damaged = mutation(rng, damaged, other) or bytearray(b"\0")
        done.append(mutation.__name__)
    return bytes(damaged), "+".join(done)
