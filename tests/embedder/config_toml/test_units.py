"""Units of keys, and numbers that were written with another one."""

import pytest

from embedder.config_toml.units import number_in, stem_of, unit_of

READ = [
    ("8", "", 8),
    (" 1_000 ", "bytes", 1000),
    ("5m", "seconds", 300),
    ("1h30m", "seconds", 5400),
    ("1 h 30 min", "seconds", 5400),
    ("500 ms", "seconds", 0.5),
    ("2 days", "seconds", 172_800),
    ("0.5 s", "milliseconds", 500),
    ("10GB", "bytes", 10_000_000_000),
    ("10 GiB", "bytes", 10 << 30),
    ("4G", "bytes", 4 << 30),
    ("1.5MB", "bytes", 1_500_000),
    ("100 MP", "pixels", 100_000_000),
    ("5%", "share", 0.05),
    ("12.5 percent", "share", 0.125),
]


@pytest.mark.parametrize(("text", "unit", "number"), READ)
def test_a_number_with_a_unit_is_read_in_the_unit_of_its_key(text, unit, number):
    found = number_in(text, unit)
    assert (found, type(found)) == (number, type(number))


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("five", "seconds"),
        ("5m", ""),
        ("5 GB", "seconds"),
        ("5s", "bytes"),
        ("", "seconds"),
        ("5 m!", "seconds"),
        ("1 2", "seconds"),
        ("1__2", "seconds"),
        ("m", "seconds"),
        ("9" * 5000, "bytes"),
        ("1e400", "seconds"),
        ("nan", "seconds"),
    ],
)
def test_what_is_no_number_of_that_unit_is_none(text, unit):
    assert number_in(text, unit) is None


def test_a_key_of_whole_numbers_gets_no_fraction():
    assert number_in("2.5", "", is_integer=True) is None
    assert number_in("2.0", "", is_integer=True) == 2


def test_the_name_of_a_key_tells_its_unit():
    keys = ("timeout_s", "latency_ms", "max_file_bytes", "max_reject_fraction", "num_stages", "rows_per_part", "model")
    assert [unit_of(key) for key in keys] == ["seconds", "milliseconds", "bytes", "share", "stages", "rows", ""]
    assert [stem_of(key) for key in ("memory_gb", "timeout_seconds", "max_pixels", "model", "_s")] == [
        ("memory", "gb"),
        ("timeout", "seconds"),
        ("max", "pixels"),
        ("model", ""),
        ("_s", ""),
    ]
