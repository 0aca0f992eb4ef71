"""Quantities as people write them."""

import pytest

from embedder.quantities import agree, duration_text, figure, money, percent, plural, rate, size_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plural(0, "item"), "0 items"),
        (plural(1, "item"), "1 item"),
        (plural(2, "item"), "2 items"),
        (plural(1911, "item"), "1,911 items"),
        (plural(1, "query", "queries"), "1 query"),
        (plural(0, "query", "queries"), "0 queries"),
        (plural(1.0, "image"), "1 image"),
        (plural(0.9999, "image"), "1 image"),
        (plural(1.25, "image"), "1.25 images"),
        (plural(0.0, "image"), "0 images"),
        (agree(1, "stays", "stay"), "stays"),
        (agree(0, "stays", "stay"), "stay"),
    ],
)
def test_a_noun_goes_with_its_count(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (1.0, "1"),
        (0.04123, "0.0412"),
        (83.46, "83.5"),
        (100, "100"),
        (999.6, "1,000"),
        (15460.33, "15,460"),
        (3.2e6, "3,200,000"),
        (1e-7, "0.0000001"),
        (-2.5, "-2.5"),
    ],
)
def test_a_figure_has_three_digits_and_no_exponent(value, expected):
    assert figure(value) == expected
    assert rate(value) == f"{expected} items/s"


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1 << 10, "1 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (2688 << 20, "2.6 GiB"),
        (1 << 40, "1.0 TiB"),
        (5000 << 40, "5,000.0 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(size_bytes, expected):
    assert size_text(size_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.04, "0.04 s"),
        (18.24, "18.2 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (3569, "59 min"),
        (3570, "1 h"),
        (7980, "2 h 13 min"),
        (2 * 86_400 - 31, "47 h 59 min"),
        (2 * 86_400, "2 days"),
        (100 * 86_400 + 7200, "100 days 2 h"),
    ],
)
def test_a_length_of_time_has_its_two_largest_units(seconds, expected):
    assert duration_text(seconds) == expected


def test_shares_and_prices_are_written_with_what_they_are_in():
    assert [percent(share) for share in (0.07, 0.005, 0.283, 1.0, 0.0)] == ["7 %", "0.5 %", "28 %", "100 %", "0 %"]
    assert [percent(share, signed=True) for share in (0.283, -0.0241, 0.0)] == ["+28 %", "-2.4 %", "+0 %"]
    assert [money(amount, "EUR") for amount in (1.2345, 1240.4, 0.01234)] == ["1.23 EUR", "1,240 EUR", "0.0123 EUR"]
    assert money(5, None) == "5.00"
