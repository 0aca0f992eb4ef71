"""Values as TOML writes them; secrets are masked."""

import tomllib
from datetime import date, datetime, time

import pytest

from embedder.config_toml.values import dotted_key, format_value, heading, toml, type_name, without_secrets

VALUES = [
    True, 0, 100_000, -123_456_789, 2**62, 0.1, 1e-5, 1e16, -0.0, 5.0, float("inf"),
    "", 'quote " and \\ backslash', "tab\tnewline\nbell\x07del\x7f", "café 猫 🐈", "\u202e\u200b", "'''", [],
    ["a", 1, [True]],
    {"a b": {"c": 1}, "d": ["e"], '"': "f"}, date(2024, 1, 2), datetime(2024, 1, 2, 3, 4, 5), time(3, 4),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_read_again_as_it_was(value):
    found = tomllib.loads(f"x = {toml(value)}")["x"]
    assert (found, type(found)) == (value, type(value))
    assert "\n" not in toml(value)


def test_types_and_places_are_named_as_toml_does():
    assert [type_name(value) for value in (True, 1, 1.5, "a", [], {}, date(2024, 1, 1))] == [
        *("a boolean", "an integer", "a number", "a string", "a list", "a table", "a date or time")
    ]
    assert dotted_key(("source", 1, "columns", "a b")) == 'source.columns."a b"'
    assert [heading(("decode",)), heading(("source", 0)), heading(("source", 0, "columns"))] == [
        *("[decode]", "[[source]]", "[source.columns]")
    ]


SECRET = "T0PS3CRETvalue"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("on_failure", "webhook"), f"https://hooks.example.com/services/{SECRET}"),
        (("on_failure", "webhook"), f"hooks.example.com/{SECRET}"),
        (("store",), f"s3://key:{SECRET}@bucket/x"),
        (("source", 0, "path"), f"https://h/x?X-Amz-Signature={SECRET}"),
        (("on_failure", "command"), ["notify", "--token", SECRET]),
        (("on_failure", "command"), ["notify", f"--api-key={SECRET}"]),
        (("on_failure", "command"), ["curl", "-H", f"Authorization: Bearer {SECRET}"]),
        (("on_failure", "command"), ["curl", "-H", f"Authorization: Basic {SECRET}"]),
        (("on_failure",), {"webhook": f"https://h/{SECRET}"}),
    ],
)
def test_secrets_are_masked_and_the_rest_stays(path, value):
    assert SECRET not in str(without_secrets(path, value)) and "***" in str(without_secrets(path, value))
    assert SECRET not in format_value(path, value)


def test_what_is_no_secret_stays():
    for value in ("photos/*.jpg", ["mail", "--subject", "token"], 5, {"tokenizer": "a/tokenizer.json"}, "s3://b/k"):
        assert without_secrets(("x",), value) == value


def test_a_long_value_is_shortened():
    assert len(format_value(("x",), "a" * 500)) == 80
