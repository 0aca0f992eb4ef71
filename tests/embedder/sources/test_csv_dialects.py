"""CSV as people write it: other dialects are read, and no caption's punctuation changes how a readable file is read."""

import csv
import io
import re

import pytest

from embedder.errors import SourceError
from embedder.sources.csv_dialects import SAMPLE_CHARACTERS, find_dialect
from embedder.sources.table_formats import FORMATS


def rows_of(path):
    """Header and rows of a file, as the product reads them."""
    opened = FORMATS[path.suffix].open_rows(str(path))
    return opened.header, [list(row.values()) for _, row in opened.rows]


def rows_by_first_line(text):
    """The same by the rule of before: the first line shows comma, semicolon or tab; `"` quotes."""
    unquoted = re.sub(r'"[^"]*("|$)', "", io.StringIO(text, newline="").readline())
    delimiter = next((each for each in ",;\t" if each in unquoted), ",")
    header, *rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    return header, [row for row in rows if row]


HOSTILE = {
    "semicolons in captions": "file,title\n" + "".join(f"{n}.jpg,one; two; three; {n}\n" for n in range(50)),
    "one semicolon in each": "file,title\n" + "".join(f"{n}.jpg,one; two\n" for n in range(50)),
    "pipes and tabs in captions": "file,title\n" + "".join(f"{n}.jpg,one | two\tthree\n" for n in range(50)),
    "single column": "file\n" + "".join(f"img/{n}.jpg\n" for n in range(9)),
    "single column of captions with semicolons": "title\none; two\nthree; four\n",
    "quoted, one column": '"title"\n"one, two"\n"three; four"\n',
    "newlines in quotes": 'file,title\na.jpg,"one\ntwo; three\n\nfour"\nb.jpg,"x\r\ny"\n',
    "header of one name, blank rows": "title\n\n\nx\n\n",
    "NUL": "file,title\na.jpg,x\0y\n",
    "only a header": "file,title\n",
    "mixed line ends": "file,title\r\na.jpg,x\nb.jpg,y\r\n",
    "old Mac's line ends": "file,title\ra.jpg,x\rb.jpg,y\r",
    "huge field": "file,title\na.jpg," + "x;" * 60_000 + "\nb.jpg,y\n",
    "apostrophes": "file,title\na.jpg,'tis\nb.jpg,it's 'so'\n",
    "single quotes stay": "file,title\na.jpg,'house'\nb.jpg,'tree'\n",
    "backslashes stay": 'file,title\na.jpg,C:\\new\nb.jpg,"\\"\n',
    "number signs are rows": "#id,title\n#1,x\n#2,y\n",
    "decimal commas": "file;width\na.jpg;1,5\nb.jpg;2,25\n",
    "semicolon in the header's comma": "file,title; note\na.jpg,x; y\n",
    "commas in all rows of semicolons": "file;title\n" + "".join(f"{n}.jpg;one, two\n" for n in range(50)),
    "spaces after commas stay": "file, title\na.jpg, x\n",
    "sep without a separator": "sep=,title\na,x\n",
    "empty fields": "file,title,note\n,,\na,,\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_its_first_line_reads_is_read_by_its_first_line(tmp_path, name):
    (tmp_path / "t.csv").write_bytes(HOSTILE[name].encode())
    assert rows_of(tmp_path / "t.csv") == rows_by_first_line(HOSTILE[name])


EXPECTED = (["file", "title"], [["a.jpg", "one, two"], ["b.jpg", "it's"]])
DIALECTS = {
    "pipes": "file|title\na.jpg|one, two\nb.jpg|it's\n",
    "pipes and spaces": "file| title\na.jpg| one, two\nb.jpg| it's\n",
    "pipes and quotes": 'file|title\na.jpg|"one, two"\nb.jpg|it\'s\n',
    "Excel's first line": "sep=;\r\nfile;title\r\na.jpg;one, two\r\nb.jpg;it's\r\n",
    "Excel's first line with pipe": "sep=|\nfile|title\na.jpg|one, two\nb.jpg|it's\n",
    "comments": '# made by hand\n# 2024\nfile,title\na.jpg,"one, two"\n# and then\nb.jpg,it\'s\n',
    "comments and pipes": "# made by hand\nfile|title\na.jpg|one, two\n# so\nb.jpg|it's\n",
    "backslashes before quotes": 'file,title\na.jpg,"one, two"\nb.jpg,"it\'s"\nc.jpg,"a \\"b\\", c"\n',
    "single quotes": "file,title\na.jpg,'one, two'\nb.jpg,'it''s'\n",
    "pipes, mixed line ends": "file|title\r\na.jpg|one, two\nb.jpg|it's\r\n",
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_other_dialects_are_found(tmp_path, name, encoding):
    (tmp_path / "t.csv").write_bytes(DIALECTS[name].encode(encoding))
    header, rows = rows_of(tmp_path / "t.csv")
    assert (header, rows[:2]) == EXPECTED
    assert rows[2:] == ([["c.jpg", 'a "b", c']] if "backslashes" in name else [])


def test_a_comma_within_the_header_of_semicolons(tmp_path):
    (tmp_path / "t.csv").write_text("file;size, cm;title\n" + "".join(f"{n}.jpg;{n};a house\n" for n in range(9)))
    header, rows = rows_of(tmp_path / "t.csv")
    assert header == ["file", "size, cm", "title"]
    assert rows[8] == ["8.jpg", "8", "a house"]


def test_a_tsv_that_has_commas_is_read(tmp_path):
    (tmp_path / "t.tsv").write_text("file,title\na.jpg,x\nb.jpg,y\n")
    assert rows_of(tmp_path / "t.tsv") == (["file", "title"], [["a.jpg", "x"], ["b.jpg", "y"]])


REFUSED = {
    "file,title\na.jpg,one, two\nb.jpg,x\n": r":2: 3 fields where the header has 2: a ',' within a value separates",
    "file,title\na.jpg\n": r":2: 1 fields where the header has 2: some are missing",
    "Report of 2024\nfile,title\na.jpg,x\n": r":2: 2 fields where the header has 1: the first line, 'Report of 2024'",
    "# note\nfile,title\na.jpg,one, two\nb.jpg,x\n": r":\d: \d fields where the header has \d",
    "": "the file is empty",
    "\n\n": "the file is empty",
    "file,file\na,b\n": r":1: two columns are named 'file'",
    'file,title\na.jpg,"open\n': r":2: no valid CSV \(unexpected end of data\)",
    "file,title\na.jpg," + "x" * (17 << 20) + "\n": r":2: no valid CSV \(field larger than field limit",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_no_dialect_reads_is_refused_with_what_is_the_matter(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SourceError, match=REFUSED[text]):
        rows_of(tmp_path / "t.csv")


def test_a_value_as_long_as_a_picture_in_base64_is_read(tmp_path):
    (tmp_path / "t.csv").write_text(f'file,title\na.jpg,"{"x" * 400_000}"\nb.jpg,y\n')
    assert rows_of(tmp_path / "t.csv")[1] == [["a.jpg", "x" * 400_000], ["b.jpg", "y"]]


def test_a_sample_that_ends_within_a_value_tells_the_dialect_and_lines_keep_their_numbers(tmp_path):
    body = "".join(f'{n}.jpg|"one\ntwo, three"\n' for n in range(20_000))
    assert len(body) > SAMPLE_CHARACTERS
    found = find_dialect(("file|title\n" + body)[:SAMPLE_CHARACTERS], is_whole=False)
    assert (found.delimiter, found.is_sniffed) == ("|", True)
    (tmp_path / "t.csv").write_text("# note\nfile|title\n" + body + "bad|x|y\n")
    with pytest.raises(SourceError, match=r"t\.csv:40003: 3 fields where the header has 2"):
        rows_of(tmp_path / "t.csv")


def test_a_missing_column_is_refused_with_the_separator_that_was_found(tmp_path, list_items):
    (tmp_path / "t.csv").write_text("file|title\na|x\nb|y\n")
    with pytest.raises(SourceError, match=r"there is no column 'id'.* the columns file, title \(separated by '\|'\)"):
        list_items(tmp_path / "t.csv", columns={"id": "id", "caption": "title"})
