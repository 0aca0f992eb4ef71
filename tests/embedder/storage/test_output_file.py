"""Files to write are checked before the work that they are for; no folder is made."""

from pathlib import Path

import pytest

from embedder.errors import ConfigError
from embedder.storage.output_file import check_output_file

FORMATS = (".png", ".pdf")


def test_the_suffix_is_given_in_lower_case_and_an_older_file_may_be_there(tmp_path):
    (tmp_path / "a.PNG").write_bytes(b"old")
    assert check_output_file(tmp_path / "a.PNG", FORMATS, "--sheet") == ".png"
    assert (tmp_path / "a.PNG").read_bytes() == b"old"
    assert check_output_file(Path("b.pdf"), FORMATS, "--sheet") == ".pdf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.bmp", "its suffix is .bmp, which names no format; known are .png, .pdf"),
        ("a", "it has no suffix"),
        ("none/a.png", "there is no folder"),
        ("none/a.png", "make it first: mkdir -p"),
        ("file/a.png", "is no folder; name another place"),
        ("folder.png", "it is a folder; name a file"),
        ("a" * 300 + ".png", "File name too long; name a place that can be written"),
        ("a" * 300 + "/a.png", "File name too long; name a place that can be written"),
    ],
)
def test_what_can_not_be_written_is_told_in_one_line(name, message, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="^--sheet [^\n]*$") as caught:
        check_output_file(tmp_path / name, FORMATS, "--sheet")
    assert message in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_the_cure_can_be_typed_whatever_the_name(tmp_path):
    with pytest.raises(ConfigError, match=r"mkdir -p '.*it is; new'$"):
        check_output_file(tmp_path / "it is; new" / "a.png", FORMATS, "--sheet")
