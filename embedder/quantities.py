"""Quantities as people write them: counts with their nouns, figures, sizes, times, shares.

Messages and tables are written with these; JSON has the numbers themselves.
"""

import math

KIB, MIB = 1 << 10, 1 << 20
MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400


def plural(num: float, noun: str, several: str = "") -> str:
    """Write a count or a mean with its noun: 1 item, 1,911 items, 0 indexes, 1.25 images.

    Args:
        num: the count, or the mean of counts, of which three digits are written.
        noun: in the singular.
        several: the noun in the plural, where that is more than an s.
    """
    text = f"{num:,}" if isinstance(num, int) else figure(num)
    return f"{text} {noun if text == '1' else several or f'{noun}s'}"


def agree(num: int, singular: str, plural: str) -> str:
    """Choose the form of a verb or a noun that goes with a count."""
    return singular if num == 1 else plural


def figure(value: float, digits: int = 3) -> str:
    """Write a measured number to so many digits, whole where it has more before the point: 0.0412, 83.5, 15,460."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rate(items_per_s: float) -> str:
    """Write a throughput: 83.5 items/s."""
    return f"{figure(items_per_s)} items/s"


def size_text(size_bytes: float) -> str:
    """Write a number of bytes: 512 bytes, 83 KiB, 4.2 MiB, 12.4 GiB."""
    if size_bytes < KIB:
        return plural(int(size_bytes), "byte")
    if round(size_bytes / KIB) < 1024:
        return f"{size_bytes / KIB:.0f} KiB"
    value, names = size_bytes / MIB, ["MiB", "GiB", "TiB"]
    while len(names) > 1 and round(value, 1) >= 1024:
        value, names = value / 1024, names[1:]
    return f"{value:,.1f} {names[0]}"


def duration_text(seconds: float) -> str:
    """Write a length of time in the two units that say most: 0.4 s, 18.2 s, 13 min, 2 h 13 min, 3 days 4 h."""
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
    """Write a share: 7 %, 0.5 %; of a change +7 %, -0.5 %.

    Args:
        share: as a fraction.
        signed: whether a gain has its sign too.
    """
    value = round(100 * share, 1)
    places = 0 if abs(value) >= 10 or value == round(value) else 1
    return f"{value:{'+' if signed else ''},.{places}f} %"


def money(amount: float, currency: str | None) -> str:
    """Write a price in its currency, to three digits below a hundred: 1.24 EUR, 1,240 EUR.

    Args:
        amount: the price.
        currency: of the configuration; None where it names none, and the amount stands alone.
    """
    text = f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}" if amount >= 1 else figure(amount)
    return f"{text} {currency}" if currency else text
