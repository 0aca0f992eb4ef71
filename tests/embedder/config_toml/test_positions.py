"""Lines of keys in a TOML file."""

import tomllib

import pytest

from embedder.config_toml.positions import line_index, statements

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
