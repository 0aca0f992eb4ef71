import pyarrow as pa
import pytest

from embedder.errors import SourceError
from embedder.sources.globbing import expand_braces, fixed_root
from embedder.sources.type_inference import infer_json_type, infer_text_type, json_value, text_value
from embedder.sources.uris import TableCell, TarMember, cell_prefix, looks_like_part, member_uri, split_uri
from embedder.storage.printable import readable


@pytest.mark.parametrize("path", ["/a b/x.tar", "s3://team/x#y.tar", "/x%20?.tar", "/new\nline.tar"])
@pytest.mark.parametrize("name", ["a.jpg", "d/ü &=#%?.jpg", "a&offset=1&size=2", "new\nline"])
def test_uris_round_trip_whatever_the_names(path, name):
    assert split_uri(member_uri(path, name, 512, 77)) == (path, TarMember(name, 512, 77))
    assert split_uri(cell_prefix(path, name, 3) + "9") == (path, TableCell(name, 3, 9))


@pytest.mark.parametrize(
    "uri", ["/a#b", "/a#row=x", "/a#row=1.jpg", "/a#member=x&offset=1", "s3://t/a#", "/a#row=1\n", f"/a#row={10**30}"]
)
def test_other_hashes_are_part_of_the_name(uri):
    assert split_uri(uri) == (uri, None)
    assert not looks_like_part(uri)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a\udce9.jpg", r"a\xe9.jpg"), ("ü", "ü"), ("a\ud800", r"a\ud800"), ("a\ud800\udce9", r"a\ud800\udce9")],
)
def test_names_that_are_no_utf8_become_readable(name, text):
    assert readable(name) == text


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a{08..11}", ["a08", "a09", "a10", "a11"]),
        ("{1..2}-{x,y}", ["1-x", "1-y", "2-x", "2-y"]),
        ("a{b}c", ["a{b}c"]),
        ("a{,b}", ["a", "ab"]),
        ("plain", ["plain"]),
    ],
)
def test_braces(pattern, names):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["{0..9999999}", "{0..999}{0..999}{0..999}", "{9..1}"])
def test_braces_that_explode_or_run_backwards_are_refused(pattern):
    with pytest.raises(SourceError, match=r"braces name more than 1,000,000|runs backwards"):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "root"),
    [("/a/b/*.tar", "/a/b"), ("/a/x{0..1}/b.tar", "/a"), ("/*.tar", "/"), ("s3://team/a/*/x", "s3://team/a"),
     ("s3://team/*.tar", "s3://team")],
)  # fmt: skip
def test_the_root_of_a_pattern_is_the_folder_above_its_first_wildcard(pattern, root):
    assert fixed_root(pattern) == root


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, None], pa.bool_()), ([1, 2], pa.int64()), ([1, 2.5], pa.float64()), (["a"], pa.string()),
        ([True, 1], pa.string()), ([{"a": 1}], pa.string()), ([], pa.string()), ([None], pa.string()),
    ],
)  # fmt: skip
def test_types_of_json_values(values, kind):
    assert infer_json_type(values) == kind


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "", "-2"], pa.int64()), (["007"], pa.string()), (["1", "2.5"], pa.float64()),
        (["1e3", "nan"], pa.float64()),
        (["true", "False"], pa.bool_()), (["", ""], pa.string()), (["."], pa.string()), (["e5"], pa.string()),
        (["-"], pa.string()), (["12345678901234567890"], pa.string()), (["1_000"], pa.string()), (["٣"], pa.string()),
    ],
)  # fmt: skip
def test_types_of_csv_fields(values, kind):
    assert infer_text_type(values) == kind
    for value in values:
        pa.array([text_value(value, kind)], kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, pa.int64()), (2**63, pa.int64()), ("1", pa.int64()), (1, pa.bool_()), (True, pa.float64())],
)
def test_json_values_of_another_type_are_refused(value, kind):
    with pytest.raises(ValueError, match=r"which the first rows hold|beyond int64"):
        json_value(value, kind)
