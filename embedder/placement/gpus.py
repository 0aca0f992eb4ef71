"""Shares of GPUs that Ray can place in any order. Pure.

Ray counts GPUs as numbers but places them as devices: a part lies on one device, the one with the least sufficient
room, in the order in which processes start, which is unknown in advance. So 0.66 + 0.66 + 0.66 add up to 2 but need 3
devices, and what fits in one order may not in another. The shares of this module fit in every order.

Source: Ray 2.60 `src/ray/common/scheduling/resource_instance_set.cc`, `TryAllocate`; also observed with logical GPUs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

UNITS = 10_000  # per device: Ray counts and rounds in these
MAX_PARTS = 100  # processes on one device
MAX_STATES = 5_000  # of a search over orders; a larger one is replaced by an upper bound

Request = tuple[float, int]
"""GPUs of one replica, and the number of replicas."""
_State = tuple[tuple[int, ...], tuple[int, ...], int]
"""Parts still to be placed, by size; room on devices in use, in units; the number of these devices."""


def part_of_device(num_parts: int) -> float:
    """Return one k-th of a device, rounded down to Ray's units: 0.3333 for three parts."""
    return UNITS // num_parts / UNITS


def whole_units(num_gpus: float) -> float:
    """Round GPUs down to Ray's units, ignoring a float's rounding error."""
    return math.floor(num_gpus * UNITS + 1e-3) / UNITS


def share_gpus(num_devices: int, reserved: Sequence[Request], num_replicas: Sequence[int]) -> list[float]:
    """Return the GPUs of a replica of each stage, as large and even as possible such that all can be placed.

    Each replica gets a device if there are enough. Else as few as possible share one, and stages take devices of their
    own, the first ones first, as long as devices would be idle otherwise. `reserved` has the requests of other stages,
    `num_replicas` the replicas of each stage to serve, heaviest first. Returns 1.0, or 1/k of a device, by stage; zeros
    if no device has room for them next to what is reserved.
    """

    def fit(shares: Sequence[float]) -> bool:
        return devices_needed([*reserved, *zip(shares, num_replicas, strict=True)]) <= num_devices

    parts = (part_of_device(num_parts) for num_parts in range(1, MAX_PARTS + 1))
    share = next((part for part in parts if fit([part] * len(num_replicas))), 0.0)
    shares = [share] * len(num_replicas)
    for index in range(len(shares) if share else 0):
        alone = [*shares[:index], 1.0, *shares[index + 1 :]]
        shares = alone if fit(alone) else shares
    return shares


def devices_needed(requests: Iterable[Request]) -> int:
    """Return the most devices that replicas take, in whichever order Ray places them."""
    num_whole, sizes = 0, Counter[int]()
    for num_gpus, number in requests:
        if num_gpus >= 1:
            num_whole += math.ceil(num_gpus) * number
        elif num_gpus > 0 and number:
            sizes[max(1, round(num_gpus * UNITS))] += number
    return num_whole + (_devices_shared(dict(sorted(sizes.items()))) if sizes else 0)


def _devices_shared(sizes: dict[int, int]) -> int:
    """Return the devices that parts take, given the number of parts of each size in units."""
    if len(sizes) == 1:
        ((size, number),) = sizes.items()
        return math.ceil(number / (UNITS // size))
    exact = _devices_of_even_parts(sizes)
    return exact if exact is not None else _devices_in_worst_order(sizes) or _most_devices(sizes)


def _devices_of_even_parts(sizes: dict[int, int]) -> int | None:
    """Return the devices for parts 1/k whose k divide one another (1/2, 1/4), which fit in any order; else None."""
    if any(UNITS // (UNITS // size) != size for size in sizes):
        return None
    parts = {UNITS // size: number for size, number in sizes.items()}
    finest = max(parts)
    ordered = sorted(parts)
    if any(finer % coarser for coarser, finer in pairwise(ordered)):
        return None
    return math.ceil(sum(number * (finest // num_parts) for num_parts, number in parts.items()) / finest)


def _devices_in_worst_order(sizes: dict[int, int]) -> int | None:
    """Return the most devices over all orders, by trying them; None if there are too many."""
    start: _State = (tuple(sizes.values()), (), 0)
    seen, waiting, most = {start}, [start], 0
    while waiting:
        left, room, num_devices = waiting.pop()
        most = max(most, num_devices)
        for index, size in enumerate(sizes):
            if not left[index]:
                continue
            after = (*left[:index], left[index] - 1, *left[index + 1 :])
            state = (after, *_place(size, room, num_devices))
            if state not in seen:
                seen.add(state)
                waiting.append(state)
        if len(seen) > MAX_STATES:
            return None
    return most


def _place(size: int, room: tuple[int, ...], num_devices: int) -> tuple[tuple[int, ...], int]:
    """Return the room on the devices, and their number, once Ray has placed a part where the least room suffices."""
    tightest = min((each for each in room if each >= size), default=None)
    if tightest is None:
        return tuple(sorted((*room, UNITS - size))), num_devices + 1
    rest = list(room)
    rest[rest.index(tightest)] = tightest - size
    return tuple(sorted(rest)), num_devices


def _most_devices(sizes: dict[int, int]) -> int:
    """Return an upper bound: a new device is used for a part only when each of those in use is too full for it."""
    units = sum(size * number for size, number in sizes.items())
    return min(sum(sizes.values()), max((units - size) // (UNITS - size + 1) + 1 for size in sizes))
