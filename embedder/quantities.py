"""Quantities for people: counts with their nouns, figures, sizes, times, shares.

Messages and tables use these; JSON has the numbers themselves.
"""

import math

KIB, MIB = 1 << 10, 1 << 20
MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400


def plural(num: float, noun: str, several: str = "") -> str:
    """Format a count, or a mean (to three digits), with its noun: 1 item, 1,911 items, 0 indexes, 1.25 images.

    `several` is the plural of the noun, if it isn't formed with an s.
    """
    text = f"{num:,}" if isinstance(num, int) else figure(num)
    return f"{text} {noun if text == '1' else several or f'{noun}s'}"


def agree(num: int, singular: str, plural: str) -> str:
    """Choose the form of a verb or a noun that goes with a count."""
    return singular if num == 1 else plural


def figure(value: float, digits: int = 3) -> str:
    """Format a number to some digits; whole if it has more before the point: 0.0412, 83.5, 15,460."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rate(items_per_s: float) -> str:
    """Format a throughput: 83.5 items/s."""
    return f"{figure(items_per_s)} items/s"


def size_text(size_bytes: float) -> str:
    """Format a number of bytes: 512 bytes, 83 KiB, 4.2 MiB, 12.4 GiB."""
    if size_bytes < KIB:
        return plural(int(size_bytes), "byte")
    if round(size_bytes / KIB) < 1024:
        return f"{size_bytes / KIB:.0f} KiB"
    value, names = size_bytes / MIB, ["MiB", "GiB", "TiB"]
    while len(names) > 1 and round(value, 1) >= 1024:
        value, names = value / 1024, names[1:]
    return f"{value:,.1f} {names[0]}"


def duration_text(seconds: float) -> str:
    """Format a duration in its two most significant units: 0.4 s, 18.2 s, 13 min, 2 h 13 min, 3 days 4 h."""
    if seconds < 10:
        return f"{figure(seconds, 2)} s"
    if round(seconds) < 2 * MINUTE_S:
        return f"{figure(seconds)} s"
    minutes = round(seconds / MINUTE_S)
    if minutes < HOUR_S / MINUTE_S:
        return f"{minutes} min"
    if minutes < 2 * DAY_S / MINUTE_S:
        return _two_units(minutes, 60, "{} h", "{} min")
    return _two_units(round(seconds / HOUR_S), 24, "{:,} days", "{} h")


def _two_units(number: int, base: int, large: str, small: str) -> str:
    whole, rest = divmod(number, base)
    return large.format(whole) + (f" {small.format(rest)}" if rest else "")


def percent(share: float, *, signed: bool = False) -> str:
    """Format a share, given as a fraction: 7 %, 0.5 %; `signed` adds the sign of a gain too: +7 %, -0.5 %."""
    value = round(100 * share, 1)
    places = 0 if abs(value) >= 10 or value == round(value) else 1
    return f"{value:{'+' if signed else ''},.{places}f} %"


def money(amount: float, currency: str | None) -> str:
    """Format a price, to three digits below a hundred: 1.24 EUR, 1,240 EUR; without a currency if that is None."""
    text = f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}" if amount >= 1 else figure(amount)
    return f"{text} {currency}" if currency else text
