"""Broken TOML: the place, the common cause, and what to write."""

import tomllib

import pytest

from embedder.config_toml.syntax import explain_syntax

CAUSES = {
    "store = runs/photos # mine": ', line 1, column 9: a text stands in quotes; write store = "runs/photos"',
    "dtype = bfloat16": ', line 1, column 9: a text stands in quotes; write dtype = "bfloat16"',
    "store = C:\\photos": ", line 1, column 9: a text stands in quotes; write store = 'C:\\photos'",
    "fast_start = True": ", line 1, column 14: True is no value of TOML; write fast_start = true",
    "build = no": ", line 1, column 9: no is no value of TOML; write build = false",
    "plan = None": ", line 1, column 8: TOML has no None; leave plan out",
    "plan =": ", line 1: plan has no value; write plan = value, or leave the key out",
    "a = 1\na = 2\n": ", line 2, column 6: a stands twice; keep one of the two",
    "[decode]\n[index]\n[decode]\n": (
        ", line 3, column 8: [decode] stands twice, or as a key, too; keep one table, with the keys of both"
    ),
    '[source]\npath = "a"\n[source]\n': (
        ", line 3, column 8: [source] is a list; write [[source]], in double brackets, everywhere: each is one entry"
    ),
    'path = "C:\\photos"': (
        ", line 1, column 13: in double quotes a backslash begins an escape; write the text in single quotes "
        "('C:\\photos'), or with / in place of it"
    ),
    'store = "x': ', line 1: the text of store has no closing quote; write " at its end',
    'store = "x\nmodel = "y"': ', line 1, column 11: the text of store has no closing quote; write " at its end',
    'store = """x\n\n': ', line 1: the text of store has no closing quote; write """ at its end',
    "store = 'it's'": (
        ", line 1, column 13: the text of store holds the quote that it stands in; write it in double quotes: "
        'store = "..."'
    ),
    "store = \u201cx\u201d": ', line 1, column 9: \u201c is a typographic quote; write straight ones: "..."',
    'a = 1\nstore: "x"': ", line 2, column 6: write store = ..., with one equals sign in place of :",
    "num_stages == 3": ", line 1, column 13: write num_stages = ..., with one equals sign in place of ==",
    "my key = 1": ", line 1, column 4: a key is one word; write my_key = ..., or the key in quotes",
    "store": ", line 1: no = after the key store; write key = value",
    "// a": ", line 1, column 1: a comment begins with #",
    "num_stages = 5 // five": ", line 1, column 16: a comment begins with #, not with //",
    "timeout_s = 5m": (
        ", line 1, column 14: a number stands without a unit; timeout_s is in seconds: write timeout_s = 300"
    ),
    "memory_bytes = 10 GB": (
        ", line 1, column 19: a number stands without a unit; memory_bytes is in bytes: write memory_bytes = "
        "10_000_000_000"
    ),
    "max_reject_fraction = 5%": (
        ", line 1, column 24: a number stands without a unit; max_reject_fraction is a share: write "
        "max_reject_fraction = 0.05"
    ),
    "decode = { timeout_s = 5m }": (
        ", line 1, column 25: a number stands without a unit; timeout_s is in seconds: write timeout_s = 300"
    ),
    "max_pixels = 1,000,000": (
        ", line 1, column 15: a number has neither commas nor spaces; write max_pixels = 1_000_000"
    ),
    "segment_s = 1,5": ", line 1, column 14: a number has a point, and no comma; write segment_s = 1.5",
    "segment_s = .5": ", line 1, column 13: a number has digits on both sides of its point; write segment_s = 0.5",
    "num_stages = 007": ", line 1, column 15: a number doesn't begin with 0; write num_stages = 7",
    'texts = ["a" "b"]': ", line 1, column 14: a comma is missing between two items of texts",
    'texts = ["a",, "b"]': ", line 1, column 14: a comma of texts stands twice",
    'texts = ["a]': ", line 1: a closing quote is missing",
    '# x\ntexts = [\n"a",\nmodel = "b"': (
        ", line 2: the list of texts, which begins here, is not closed; write ] at its end"
    ),
    "decode = { a = 1, }": (
        ", line 1, column 19: a table in braces has no comma at its end; take the last one of decode away"
    ),
    "decode = {\na = 1\n}": (
        ", line 1, column 11: a table in braces stands on one line; write [decode], and its keys below it"
    ),
    "[decode\na = 1": ", line 1, column 8: a bracket is missing; write [decode]",
    "[[source]\na = 1": ", line 1, column 9: a bracket is missing; write [[source]]",
    "[my table]": ", line 1, column 5: a table's name is one word; write [my], and comments behind #",
    'model = "a", store = "b"': ", line 1, column 12: each key stands on a line of its own; begin a new one here",
    'store = "a" "b"': (
        ", line 1, column 13: the value ends before this column; take away what follows, or write all of it in quotes"
    ),
    "store = \x01": ", line 1, column 9: the character U+0001, which can't be seen, stands here; take it away",
    "= 3": ", line 1, column 1: this is no TOML (invalid statement); correct this line",
}


@pytest.mark.parametrize("text", CAUSES)
def test_the_cause_is_told_with_its_place_and_its_cure(text):
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads(text)
    assert explain_syntax(text, str(caught.value), {"source"}) == CAUSES[text]


@pytest.mark.parametrize(
    "text", ["password = T0PS3CRET", "store = s3://key:T0PS3CRET@b/x", "on_failure.webhook = https://h/T0PS3CRET"]
)
def test_a_secret_is_not_repeated(text):
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads(text)
    assert "T0PS3CRET" not in explain_syntax(text, str(caught.value))


@pytest.mark.parametrize("text", ["", "\n\n", "[", "]", '"', "=", "a = [" * 300, "\\", "é", "\r", "[[", "a=\n" * 300])
def test_no_text_is_too_strange_to_be_explained(text):
    assert explain_syntax(text, "Invalid value (at end of document)").startswith(", line ")
    assert explain_syntax(text, "of another version of Python").startswith(", line ")
