"""Units of keys, told from their names, and numbers that were written with another one."""

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
"""Units by the ends of keys; other keys that have one say so in their field."""

MEASURES = ("seconds", "milliseconds", "bytes", "pixels", "degrees")
"""Units that a message names; those of counts say nothing that the key doesn't."""

SECONDS = {"ms": 1e-3, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
SECONDS |= {"hr": 3600, "d": 86_400, "day": 86_400, "w": 604_800, "week": 604_800}
_PREFIXES = "kmgtp"
BYTES = {"b": 1, "byte": 1}
BYTES |= {f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate(_PREFIXES)}
BYTES |= {f"{letter}{end}": 1024 ** (power + 1) for power, letter in enumerate(_PREFIXES) for end in ("", "ib")}
PIXELS = {"px": 1, "pixel": 1, "mp": 10**6, "mpx": 10**6, "megapixel": 10**6}
SHARES = {"%": 0.01, "percent": 0.01, "pct": 0.01}
_SCALES: dict[str, dict[str, float]] = {
    "seconds": SECONDS,
    "milliseconds": {name: seconds * 1000 for name, seconds in SECONDS.items()},
    "bytes": BYTES,  # type: ignore[dict-item]  # integers, which stay exact
    "pixels": PIXELS,  # type: ignore[dict-item]
    SHARE: SHARES,
}

MAX_CHARACTERS = 40  # of a number with its unit

_NUMBER = r"[+-]?\d[\d_]*(?:[.,]\d+)?"
_PART = re.compile(rf"\s*({_NUMBER})\s*([a-zA-Z]+|%)\s*")
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})")
_COUNT = re.compile(r"num_(\w+)|(\w+)_per_\w+")
_THOUSANDS = re.compile(r"\d{1,3}(?:[, ']\d{3})+")


def unit_of(key: str) -> str:
    """Name the unit of a key; empty where its name tells none."""
    if unit := next((unit for end, unit in UNITS.items() if key.endswith(end)), ""):
        return unit
    counted = _COUNT.fullmatch(key)
    return (counted[1] or counted[2]).replace("_", " ") if counted else ""


def stem_of(key: str) -> tuple[str, str]:
    """Split a key into what it measures and the unit at its end: `memory_gb` into `memory` and `gb`."""
    stem, _, end = key.rpartition("_")
    is_unit = f"_{end}" in UNITS or any(_scale(scale, end) is not None for scale in _SCALES.values())
    return (stem, end) if stem and is_unit else (key, "")


def number_in(text: str, unit: str, *, is_integer: bool = False) -> int | float | None:
    """Read a number that was written as a text, with or without a unit.

    Args:
        text: as "8", "1_000", "1,000", "10 GB", "5m", "1h30m", "00:05:00", "5%".
        unit: what the key is in, as `unit_of` names it.
        is_integer: whether the key takes whole numbers only.

    Returns:
        The number in the key's unit; None where the text is no number, or of a unit that doesn't fit.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    number = _plain(text.strip())
    if number is None and (scale := _SCALES.get(unit)) is not None:
        number = _with_units(text, scale)
        if number is None and scale is _SCALES["seconds"] and (clock := _CLOCK.fullmatch(text.strip())):
            hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            number = hours * 3600 + minutes * 60 + seconds
    if number is None:
        return None
    rounded = round(number, 9)
    if rounded == int(rounded):
        return int(rounded)
    return None if is_integer else rounded


def _plain(text: str) -> float | None:
    if _THOUSANDS.fullmatch(text):
        return int(re.sub(r"\D", "", text))
    if not re.fullmatch(_NUMBER, text):
        return None
    try:
        return int(text)
    except ValueError:
        return float(text.replace(",", "."))


def _with_units(text: str, scale: dict[str, float]) -> float | None:
    """Sum of the parts of a text such as "1h 30m"; None where one of them is not of this scale."""
    total: float = 0
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        factor = _scale(scale, found[2]) if found else None
        number = _plain(found[1]) if found else None
        if found is None or factor is None or number is None:
            return None
        total += number * factor
        position = found.end()
    return total if text.strip() else None


def _scale(scale: dict[str, float], name: str) -> float | None:
    """Factor of a unit, whose name may be a plural, in any case."""
    name = name.lower()
    return scale.get(name, scale.get(name.removesuffix("s")))
