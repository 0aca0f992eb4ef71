"""What a path may lead to instead of a TOML file."""

import os

import pytest

from embedder.config_toml.read import read_file
from embedder.errors import ConfigError


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CONTENTS = {
    "JSON": (b'{"store": "x"}', "this is JSON; write the configuration as TOML"),
    "JSON, a list": (b'[{"store": "x"}]', "this is JSON"),
    "YAML": (b"store: x\nsource:\n  - path: photos\n", "this is YAML"),
    "YAML with a mark": (b"---\nstore: x\n", "this is YAML"),
    "XML": (b"<config/>", "this is XML"),
    "UTF-16": ('store = "x"'.encode("utf-16"), "encoded in UTF-16; save it as UTF-8"),
    "UTF-32": ('store = "x"'.encode("utf-32"), "encoded in UTF-32; save it as UTF-8"),
    "Latin-1": ('model = "m"\nstore = "café"\n'.encode("latin-1"), "line 2: the byte 0xe9 is no UTF-8"),
    "an image": (b"\x89PNG\r\n\x1a\n\x00\x00\x00", "this is a binary file"),
    "zeros": (b"\x00" * 10, "this is a binary file"),
    "too long": (b"#" * (2 << 20), "more than 1 MiB"),
    "deep": (b"x = " + b"[" * 5000, "lists or tables within each other"),
    "digits": (b"x = " + b"9" * 5000, "a number of thousands of digits"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_toml_is_named(tmp_path, name):
    content, said = CONTENTS[name]
    (tmp_path / "run.toml").write_bytes(content)
    message = refusal(tmp_path / "run.toml")
    assert message.startswith(str(tmp_path / "run.toml")) and said in message


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
