import gzip
import io
import json
import tarfile

import pytest

from embedder.errors import SourceError
from embedder.sources.fetch import Fetcher
from embedder.sources.webdataset import split_key


def data_of(rows):
    with Fetcher() as fetcher:
        return {item: fetcher.fetch(row["uri"], max_bytes=1 << 20).data for item, row in rows.items()}


def errors_of(rows):
    return {item: row["error_type"] for item, row in rows.items()}


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return name, info


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        ("a.jpg", "a", "jpg"), ("x/y/a.b.JPG", "x/y/a", "b.jpg"), ("./a.jpg", "a", "jpg"),
        ("v1.2/a.jpg", "v1.2/a", "jpg"),
        ("README", "README", ""), (".hidden.jpg", ".hidden.jpg", ""), ("x//a.jpg", "x/a", "jpg"), ("a.", "a", ""),
    ],
)  # fmt: skip
def test_the_key_ends_at_the_first_dot_of_the_base_name(name, key, extension):
    assert split_key(name) == (key, extension)


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_items_are_byte_ranges_with_captions_from_text_or_json(make_tar, list_items, tar_format):
    long = "d" * 90 + "/" + "n" * 90
    path = make_tar(
        [
            ("000.jpg", b"JPG0"), ("000.txt", "\ufeff a cat \n"), ("000.json", '{"caption": "ignored"}'),
            ("000.cls", "3"),
            ("sub dir/1.png", b""), ("sub dir/1.json", json.dumps({"text": "a dog", "title": "DSC_1"})),
            ("2.txt", "only a caption"), ("3.mp4", b"M" * 2000), (f"{long}.jpg", b"LONG"),
        ],
        tar_format=tar_format,
    )  # fmt: skip
    rows = list_items(path)
    assert {item: (row["caption"], row["size_bytes"]) for item, row in rows.items()} == {
        "a/000": ("a cat", 4),
        "a/sub dir/1": ("a dog", 0),
        "a/2": ("only a caption", None),
        "a/3": (None, 2000),
        f"a/{long}": (None, 4),
    }
    assert rows["a/000"]["uri"] == f"{path}#member=000.jpg&offset={1536 if tar_format == 7 else 512}&size=4"
    assert data_of(rows) == {
        "a/000": b"JPG0", "a/sub dir/1": b"", "a/2": None, "a/3": b"M" * 2000, f"a/{long}": b"LONG",
    }  # fmt: skip
    assert errors_of(rows) == dict.fromkeys(rows)


def test_names_that_are_not_ascii_and_that_need_quoting(make_tar, list_items):
    members = [
        (f"{name}.jpg", name.encode()) for name in ("ü", "a&b=c", "x#member=y&offset=1&size=2", "50%", "new\nline")
    ]
    rows = list_items(make_tar(members))
    assert data_of(rows) == {f"a/{name.removesuffix('.jpg')}": data for name, data in members}


def test_members_of_one_key_need_not_follow_each_other(make_tar, list_items):
    rows = list_items(make_tar([("a.jpg", b"A"), ("b.jpg", b"B"), ("b.txt", "bee"), ("a.txt", "ay")]))
    assert {item: row["caption"] for item, row in rows.items()} == {"a/a": "ay", "a/b": "bee"}


def members(*names):
    return [(name, name.encode()) for name in names]


EXTRA, UNSAFE, NO_FILE = "ExtraMember", "UnsafeName", "NotAFile"


@pytest.mark.parametrize(
    ("given", "errors"),
    [
        # Of several media members the best is the item.
        (
            members("k.avi", "k.seg.jpg", "k.weird", "k.png", "k.jpeg", "k.npy"),
            {"k": None, "k.png": EXTRA, "k.avi": EXTRA, "k.seg.jpg": EXTRA, "k.weird": EXTRA},
        ),
        (members("k.jpg", "k.jpg", "k.txt", "k.txt"), {"k": None, "k.jpg": EXTRA, "k.txt": EXTRA}),
        (members("photo", "x.heic", ".data"), {"photo": None, "x": None, ".data": None}),
        # What a Mac puts into a tar is left out.
        (members("a.jpg", "._a.jpg", "__MACOSX/._a.jpg", ".DS_Store"), {"a": None}),
        (
            members("ok.jpg", "dots..jpg", "../up.jpg", "/abs.jpg", "x/../../y.jpg"),
            {"ok": None, "dots": None} | dict.fromkeys(("../up.jpg", "/abs.jpg", "x/../../y.jpg"), UNSAFE),
        ),
        (
            [
                special("sym.jpg", tarfile.SYMTYPE, "/etc/passwd"),
                special("hard.jpg", tarfile.LNKTYPE, "ok.jpg"),
                special("dev.jpg", tarfile.CHRTYPE),
                special("pipe.jpg", tarfile.FIFOTYPE),
                special("folder", tarfile.DIRTYPE),
            ],
            dict.fromkeys(("sym.jpg", "hard.jpg", "dev.jpg", "pipe.jpg"), NO_FILE),
        ),
    ],
    ids=["several media", "one name twice", "no known extension", "of a Mac", "climbing names", "links and devices"],
)
def test_members_that_are_items_and_those_that_are_rejects(make_tar, list_items, given, errors):
    rows = list_items(make_tar(given))
    assert errors_of(rows) == {f"a/{name}": error for name, error in errors.items()}
    media = {"k": b"k.jpeg" if "k.png" in errors else b"k.jpg"}
    for name in media.keys() & errors.keys():
        assert data_of({"k": rows[f"a/{name}"]}) == media
    if "photo" in errors:  # whose content says what they are
        assert {item: row["is_media"] for item, row in rows.items()} == {
            "a/photo": False,
            "a/x": True,
            "a/.data": False,
        }


def test_of_two_captions_of_one_name_the_first_counts(make_tar, list_items):
    rows = list_items(make_tar([("k.jpg", b"first"), ("k.jpg", b"second"), ("k.txt", "one"), ("k.txt", "two")]))
    assert rows["a/k"]["caption"] == "one"
    assert data_of({"a/k": rows["a/k"]}) == {"a/k": b"first"}


def test_of_two_json_of_one_name_the_first_counts(make_tar, list_items):
    given = [("k.jpg", b"J"), ("k.json", '{"caption": "one", "n": 1}'), ("k.json", '{"caption": "two", "n": 2}')]
    rows = list_items(make_tar(given), carryover=("n",))
    assert (rows["a/k"]["caption"], rows["a/k"]["n"]) == ("one", 1)
    assert errors_of(rows) == {"a/k": None, "a/k.json": "ExtraMember"}
    unwanted = list_items(make_tar([*given, ("k.txt", "text")], "b.tar"))
    assert errors_of(unwanted) == {"b/k": None}, "as of one that is broken, nothing of it is wanted"


def test_a_member_name_that_is_no_utf8_is_a_readable_reject(tmp_path, list_items):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo("café.jpg"))
    assert errors_of(list_items(path)) == {r"a/caf\xe9.jpg": "NameNotUtf8"}


def test_bad_captions_cost_the_caption_alone(make_tar, list_items):
    rows = list_items(
        make_tar(
            [
                ("1.jpg", b"1"), ("1.txt", b"caf\xe9"), ("2.jpg", b"2"), ("2.json", b"{broken"),
                ("3.jpg", b"3"), ("3.json", b"[1]"), ("4.jpg", b"4"), ("4.json", b'{"caption": 5}'),
                ("5.jpg", b"5"), ("5.txt", b"x" * ((1 << 20) + 1)), ("6.jpg", b"6"), ("6.json", b'{"other": 1}'),
                ("7.jpg", b"7"), ("7.txt", "fine"), ("7.json", b"{broken"), ("8.txt", " "), ("9.cls", "1"),
            ]
        )
    )  # fmt: skip
    assert errors_of(rows) == {
        "a/1": None, "a/1.txt": "CaptionNotUtf8", "a/2": None, "a/2.json": "CaptionBroken", "a/3": None,
        "a/3.json": "CaptionBroken", "a/4": None, "a/4.json": "CaptionBroken", "a/5": None, "a/5.txt": "TooLarge",
        "a/6": None, "a/7": None, "a/8": "Empty", "a/9": "Empty",
    }  # fmt: skip
    assert {item for item, row in rows.items() if row["caption"]} == {"a/7"}


def test_a_number_beyond_double_rejects_its_own_item(make_tar, list_items):
    members = [("a.jpg", b"J"), ("a.json", '{"n": 0.5}'), ("b.jpg", b"J"), ("b.json", json.dumps({"n": 10**400}))]
    rows = list_items(make_tar(members), carryover=("n",))
    assert [(row["n"], row["error_type"]) for row in rows.values()] == [(0.5, None), (None, "CarryoverType")]


def test_carryover_comes_from_json_and_a_value_of_another_type_rejects_its_item(make_tar, list_items):
    members = []
    for number in range(1001):
        members += [(f"{number:04d}.jpg", b"J"), (f"{number:04d}.json", json.dumps({"n": number, "tags": ["a"]}))]
    members += [("x.jpg", b"J"), ("x.json", '{"n": "many"}'), ("y.jpg", b"J"), ("y.json", "{broken")]
    rows = list_items(make_tar(members), carryover=("n", "tags", "absent"))
    assert [rows[f"a/{number:04d}"]["n"] for number in range(1001)] == list(range(1001))
    assert rows["a/0007"]["tags"] == '["a"]'
    assert rows["a/0007"]["absent"] is None
    assert (rows["a/x"]["error_type"], rows["a/x"]["n"]) == ("CarryoverType", None)
    assert (rows["a/y"]["error_type"], rows["a/y.json"]["error_type"]) == (None, "CaptionBroken")


def broken_tar(path):
    """Items 0..3 whole; then the damage."""
    with tarfile.open(path, "w") as tar:
        for number in range(6):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = 1000
            tar.addfile(info, io.BytesIO(bytes([number]) * 1000))
    return bytearray(path.read_bytes())


# Each member takes a header of 512 bytes and 1024 bytes of data: member n begins at byte 1536 n.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: 4 * 1536 + 512 + 500], "member '4.jpg' ends at byte 7,656, the file at 7,156"),
        (lambda data: data[: 4 * 1536 + 100], "the file ends at byte 6,244 without an end marker"),
        (lambda data: data[: 4 * 1536], "the file ends at byte 6,144 without an end marker"),
        (lambda data: data[: 4 * 1536] + b"\x55" * 512 + data[4 * 1536 + 512 :], "no member header at byte 6,144"),
        (lambda data: data[: 4 * 1536] + bytes(1024) + data[: 4 * 1536], "more data follow the end marker at byte"),
    ],
)  # fmt: skip
def test_items_before_a_break_are_listed_and_the_break_is_one_reject(tmp_path, list_items, damage, message):
    path = tmp_path / "a.tar"
    path.write_bytes(damage(broken_tar(path)))
    rows = list_items(path)
    assert errors_of(rows) == {"a/0": None, "a/1": None, "a/2": None, "a/3": None, "a.tar": "BrokenTar"}
    assert message in rows["a.tar"]["error"]
    assert "; 4 items before it kept" in rows["a.tar"]["error"]
    assert data_of({"a/3": rows["a/3"]}) == {"a/3": b"\x03" * 1000}


def test_a_pax_header_that_claims_gigabytes_is_not_read(tmp_path, list_items):
    path = tmp_path / "a.tar"
    data = broken_tar(path)
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    path.write_bytes(data[:1536] + info.tobuf(tarfile.GNU_FORMAT) + data[1536:])
    rows = list_items(path)
    assert errors_of(rows) == {"a/0": None, "a.tar": "BrokenTar"}
    assert "the extended header at byte 1,536 claims 8,589,934,592 bytes" in rows["a.tar"]["error"]


@pytest.mark.parametrize("record", [b"xx path=a\n", b"999 path=a\n", b"3 p\n", b"0 a=b\n"])
def test_a_damaged_pax_record_is_a_break(tmp_path, list_items, record):
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + record.ljust(512, b"\0") + bytes(1024))
    assert errors_of(list_items(path)) == {"a.tar": "BrokenTar"}


def test_an_empty_file_is_a_broken_tar_and_an_empty_tar_has_no_items(tmp_path, make_tar, list_items):
    (tmp_path / "zero.tar").touch()
    assert errors_of(list_items(tmp_path / "zero.tar")) == {"zero.tar": "BrokenTar"}
    assert list_items(make_tar([])) == {}


def test_compressed_tars_are_refused_with_the_cure(make_tar, tmp_path, list_items):
    plain = make_tar([("a.jpg", b"A")])
    for name in ("b.tar.gz", "c.tgz", "d.tar"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
        with pytest.raises(SourceError, match=r"has no byte ranges; unpack it to a plain \.tar"):
            list_items(tmp_path / name)


def test_a_folder_of_tars_has_ids_by_relative_path_and_rejects_strangers(make_tar, tmp_path, list_items):
    make_tar([("1.jpg", b"A")], "set/train/000.tar")
    make_tar([("1.jpg", b"B")], "set/val/000.tar")
    make_tar([("1.jpg", b"C")], "set/000.v2.TAR")
    rows = list_items(tmp_path / "set")
    assert data_of(rows) == {"000.v2/1": b"C", "train/000/1": b"A", "val/000/1": b"B"}
    for name in ("README.md", ".DS_Store", "stray.jpg", "stray.txt"):
        (tmp_path / "set" / name).write_text("hello")
    (tmp_path / "set" / "gone.tar").symlink_to("nowhere.tar")
    rows = list_items(tmp_path / "set", kind="webdataset")
    assert {item: error for item, error in errors_of(rows).items() if error} == {
        "stray.jpg": "NotATar", "gone.tar": "BrokenLink",
    }  # fmt: skip
    assert len(rows) == 5


def test_braces_and_wildcards_name_tars(make_tar, tmp_path, list_items):
    for number in (8, 9, 10, 11):
        make_tar([("k.jpg", bytes([number]))], f"set/part-{number:03d}.tar")
    assert list(list_items(f"{tmp_path}/set/part-{{009..011}}.tar")) == ["part-009/k", "part-010/k", "part-011/k"]
    assert list(list_items(f"{tmp_path}/*/part-01*.tar")) == ["set/part-010/k", "set/part-011/k"]
    assert list(list_items(f"{tmp_path}/{{set,set}}/part-{{008,010}}.tar")) == ["set/part-008/k", "set/part-010/k"]
    with pytest.raises(SourceError, match=r"part-012\.tar: no file of this name"):
        list_items(f"{tmp_path}/set/part-{{008..012}}.tar")


def test_two_tars_of_one_key_do_not_collide(make_tar, tmp_path, list_items):
    make_tar([("y/z.jpg", b"A")], "set/x.tar")
    make_tar([("z.jpg", b"B")], "set/x/y.tar")
    assert errors_of(list_items(tmp_path / "set")) == {"x/y/z": None, "x/y/z#duplicate-1": "DuplicateId"}
