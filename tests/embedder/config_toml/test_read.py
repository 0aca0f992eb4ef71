"""What a path may lead to instead of a TOML file, where the syntax breaks, and the lines of keys."""

import os
import tomllib

import pytest

from embedder.config_toml.read import explain_syntax, line_index, read_file, statements
from embedder.errors import ConfigError


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


NO_TOML = {
    b'{"store": "x"}': ": this is JSON; write the configuration as TOML, in lines of key = value",
    b'[{"store": "x"}]': ": this is JSON",
    b"# mine\n\nstore: x\nsource:\n  - path: photos\n": ": this is YAML",
    b"---\nstore: x\n": ": this is YAML",
    b"<config/>": ": this is XML",
    'store = "x"'.encode("utf-16"): ", line 1: the byte 0xff is no UTF-8; give a TOML file, saved as UTF-8",
    'model = "m"\nstore = "café"\n'.encode("latin-1"): ", line 2: the byte 0xe9 is no UTF-8",
    b'\xef\xbb\xbfmodel = "m"\nstore = "caf\xe9"\n\n': ", line 2: the byte 0xe9 is no UTF-8",
    b"\x89PNG\r\n\x1a\n\x00\x00\x00": ", line 1: the byte 0x89 is no UTF-8",
    b"\x00" * 10: ", line 1, column 1: this is no TOML (invalid statement); correct this line",
    b"#" * (2 << 20): ": more than 1 MiB",
    b"x = " + b"[" * 5000: ", line 1: this is no TOML (lists within each other",
    b"x = " + b"9" * 5000: "or a number of thousands of digits)",
    b"\ndtype = bfloat16": ", line 2, column 9: this is no TOML (invalid value); a text stands in quotes",
    b"fast_start = True": ", line 1, column 14: this is no TOML (invalid value); a text stands in quotes",
    b"plan =": ", line 1: this is no TOML (invalid value); a text stands in quotes",
    b"a = 1\na = 2\n": ", line 2, column 6: this is no TOML (cannot overwrite a value); the key stands twice",
    b"[decode]\n[index]\n[decode]\n": "line 3, column 8: this is no TOML (cannot declare ('decode',) twice); the table",
    b'path = "C:\\photos"': "write a text with backslashes in single quotes ('C:\\photos')",
    b'store = "x': ", line 1: this is no TOML (unterminated string); write a quote at the end of the text",
    b"my key = 1": ", line 1, column 4: this is no TOML (expected '=' after a key in a key/value pair); write",
    b'model = "a", store = "b"': "each key has its own line",
    b"timeout_s = 5m": ", line 1, column 14: this is no TOML (expected newline or end of document after a statement)",
    b'texts = ["a" "b"]': "write ] at the end of the list, and commas between its items",
    b"[decode\na = 1": ", line 1, column 8: this is no TOML (expected ']' at the end of a table declaration); write",
    b"= 3": ", line 1, column 1: this is no TOML (invalid statement); correct this line",
}


@pytest.mark.parametrize("content", NO_TOML, ids=lambda content: content[:20])
def test_what_is_no_toml_is_named_with_its_line_and_its_cure(tmp_path, content):
    (tmp_path / "run.toml").write_bytes(content)
    message = refusal(tmp_path / "run.toml")
    assert NO_TOML[content] in message
    assert message.startswith((": ", ", line "))


@pytest.mark.parametrize(
    "text",
    [
        "password = T0PS3CRET",
        "store = s3://key:T0PS3CRET@b/x",
        "on_failure.webhook = https://h/T0PS3CRET",
        'x = "T0PS3CRET',
    ],
)
def test_a_broken_line_is_not_repeated_as_it_may_hold_a_secret(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    assert "T0PS3CRET" not in refusal(tmp_path / "run.toml")


@pytest.mark.parametrize("text", ["", "\n\n", "[", '"', "a = [" * 300, "\r", "a=\n" * 300])
def test_no_text_is_too_strange_to_be_explained(text):
    for message in ("Invalid value (at end of document)", "of another version of Python"):
        assert explain_syntax(text, message).startswith(", line ")


def test_a_missing_file_a_folder_and_a_closed_file_are_named_with_their_cure(tmp_path):
    (tmp_path / "run.toml").write_text("")
    assert f"there is no such file (did you mean {tmp_path / 'run.toml'}?)" in refusal(tmp_path / "rum.toml")
    assert f"did you mean {tmp_path / 'run.toml'}?" in refusal(tmp_path / "run")
    assert f"and no folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "run.toml")
    assert "this is a folder with run.toml" in refusal(tmp_path)
    assert "Not a directory" in refusal(tmp_path / "run.toml" / "x.toml")
    assert "null byte" in refusal(tmp_path / "a\0b")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert "symbolic links" in refusal(tmp_path / "loop.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "run.toml").touch(mode=0)
    assert "Permission denied" in refusal(tmp_path / "run.toml")


def test_a_mark_of_utf_8_and_lines_of_windows_change_nothing(tmp_path):
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbfmodel = "m"\r\n[decode]\r\ntimeout_s = 3\r\n')
    found = read_file(tmp_path / "run.toml")
    assert found.tree == {"model": "m", "decode": {"timeout_s": 3}}
    assert found.lines[("decode", "timeout_s")] == 3


FILE = '''\
# a comment
model = "a"   # another
texts = [
    "one", # ]
    "[two]",
]

prices.L4 = 1
on_failure = { command = ["a", "b"], timeout_s = 3 }
long = """
[decode]
timeout_s = 3
"""

[[source]]
path = "x"
[source.columns]
id = "sku"

[[source]]
"path" = "y"
columns = { id = "z" }
[ stage . replicas ]
min = 1
[[a.b]]
[a.b.c]
d = 1
[[a.b]]
c.d = 2
'''
LINES = {
    ("model",): 2,
    ("texts",): 3,
    ("texts", 1): 3,
    ("prices",): 8,
    ("prices", "L4"): 8,
    ("on_failure", "timeout_s"): 9,
    ("on_failure", "command", 1): 9,
    ("long",): 10,
    ("source",): 15,
    ("source", 0): 15,
    ("source", 0, "path"): 16,
    ("source", 0, "columns"): 17,
    ("source", 0, "columns", "id"): 18,
    ("source", 1): 20,
    ("source", 1, "path"): 21,
    ("source", 1, "columns", "id"): 22,
    ("stage", "replicas"): 23,
    ("stage", "replicas", "min"): 24,
    ("a", "b", 0, "c", "d"): 27,
    ("a", "b", 1): 28,
    ("a", "b", 1, "c", "d"): 29,
}


@pytest.mark.parametrize("text", [FILE, FILE.replace("\n", "\r\n")], ids=["unix", "windows"])
def test_each_key_has_its_line(text):
    found = line_index(text)
    assert {path: found.get(path) for path in LINES} == LINES
    assert ("decode",) not in found, "the text of a value holds no tables"


def test_every_path_that_the_parser_finds_has_a_line():
    def paths(value, path=()):
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in entries:
            yield (*path, key)
            yield from paths(inner, (*path, key))

    assert set(line_index(FILE)) == set(paths(tomllib.loads(FILE)))


def test_a_broken_statement_ends_the_list_and_costs_no_time():
    assert [line for line, _ in statements("a = 1\nb = [\nc = 2\n")] == [1]
    assert list(statements("x = [\n" * 50_000)) == []
