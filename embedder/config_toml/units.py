"""Units of keys, derived from their names, and numbers that were written with another unit."""

import re

SHARE = "share"
UNITS = {
    "_ms": "milliseconds",
    "_s": "seconds",
    "_bytes": "bytes",
    "_pixels": "pixels",
    "_fraction": SHARE,
    "_cpus": "CPUs",
    "_gpus": "GPUs",
    "_threads": "threads",
    "_steps": "steps",
    "_items": "items",
    "_deg": "degrees",
    "_tokens": "tokens",
}
"""Units by the ends of keys; other keys with a unit declare it in their field."""

MEASURES = ("seconds", "milliseconds", "bytes", "pixels", "degrees")
"""Units that a message names; those of counts add nothing to the key."""

_SECONDS: dict[str, float] = {
    "ms": 1e-3,
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
}
_SECONDS |= {"d": 86_400, "day": 86_400, "week": 604_800}
_BYTES: dict[str, float] = {"b": 1, "byte": 1}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES |= {f"{_letter}b": 1000**_power, _letter: 1024**_power, f"{_letter}ib": 1024**_power}
_SCALES: dict[str, dict[str, float]] = {
    "seconds": _SECONDS,
    "milliseconds": {name: seconds * 1000 for name, seconds in _SECONDS.items()},
    "bytes": _BYTES,
    "pixels": {"px": 1, "pixel": 1, "mp": 10**6, "mpx": 10**6, "megapixel": 10**6},
    SHARE: {"%": 0.01, "percent": 0.01, "pct": 0.01},
}
MAX_CHARACTERS = 40  # of a number with its unit

_PART = re.compile(r"\s*([+-]?\d+(?:_\d+)*(?:\.\d+)?)\s*([a-zA-Z]+|%)?\s*")
_COUNT = re.compile(r"num_(\w+)|(\w+)_per_\w+")


def unit_of(key: str) -> str:
    """Return the unit of a key; empty if its name has none."""
    counted = _COUNT.fullmatch(key)
    if counted is not None and counted[2]:  # `rate_per_s` is in no seconds
        return str(counted[2]).replace("_", " ")
    unit = next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return unit or (counted[1].replace("_", " ") if counted is not None else "")


def stem_of(key: str) -> tuple[str, str]:
    """Split a key into what it measures and the unit at its end: `memory_gb` into `memory` and `gb`."""
    stem, _, end = key.rpartition("_")
    is_unit = f"_{end}" in UNITS or any(_factor(scale, end) is not None for scale in _SCALES.values())
    return (stem, end) if stem and is_unit else (key, "")


def number_in(text: str, unit: str, *, is_integer: bool = False) -> int | float | None:
    """Parse a number with or without a unit, such as "8", "1_000", "10 GB", "5m", "1h30m", "5%", in the key's `unit`.

    None if the text is no number, or has a unit that doesn't fit. `is_integer` says whether the key takes only
    integers.
    """
    if len(text) > MAX_CHARACTERS or not text.strip() or _PART.sub("", text):
        return None
    parts, scale = _PART.findall(text), _SCALES.get(unit, {})
    factors = [1 if not name and len(parts) == 1 else _factor(scale, name) for _, name in parts]
    if None in factors:
        return None
    numbers = (float(number) if "." in number else int(number) for number, _ in parts)
    total = round(sum(number * (factor or 0) for number, factor in zip(numbers, factors, strict=True)), 9)
    if total == int(total):
        return int(total)
    return None if is_integer else total


def _factor(scale: dict[str, float], name: str) -> float | None:
    name = name.lower()
    return scale.get(name, scale.get(name.removesuffix("s")))
