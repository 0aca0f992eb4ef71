"""Captions, names, links and tars made to be as bad as the formats allow."""

import json
import os
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hostile.crafted_media import Good, Make, writer
from hostile.good_files import tar_of

LONG_NAME = "n" * 240


def source_cases(good: Good) -> Iterator[tuple[str, Make]]:
    for name, content in captions().items():
        yield f"caption: {name}", caption_case(good["plain.jpg"], name, content)
    for name in names():
        yield f"name: {name!r}", named_case(name, good["plain.jpg"])
    for name, make in (("link out of the root", link_out), ("link to itself", link_loop), ("pipe", pipe)):
        yield name, make
    yield "socket", unix_socket
    yield "folder that looks like an image", lambda folder: (folder / "folder.jpg").mkdir()
    yield "folder as deep as can be", lambda folder: (folder / "/".join(["d"] * 200)).mkdir(parents=True)
    for name, content in tars(good):
        yield f"tar: {name}", writer("shard.tar", content)
    for name, text in tables().items():
        yield f"table: {name}", writer(name.rpartition(" ")[2], text)


def captions() -> dict[str, bytes]:
    """Content of a caption by the name of its file."""
    return {
        "nul.txt": b"a red\x00 car\x00",
        "not utf-8.txt": b"caf\xe9 \xff\xfe",
        "ten thousand words.txt": b"word " * 10_000,
        "one word of a megabyte.txt": b"w" * 1_000_000,
        "too large.txt": b"a " * 5_000_000,
        "utf-16.txt": "a red car".encode("utf-16"),
        "blank.txt": b" \n\t\n",
        "empty.txt": b"",
        "controls.txt": bytes(range(1, 32)),
        "right to left.txt": "\u202egnp.exe \u200b\u200d\ufeff a\u0301".encode() * 50,
        "families.txt": ("\U0001f468\u200d\U0001f469\u200d\U0001f467" * 2000).encode(),
        "special tokens.txt": b"[CLS] [SEP] [PAD] [MASK] <unk> </s>" * 100,
        "half a pair.json": b'{"caption": "a \\ud800 car"}',
        "nul in json.json": b'{"caption": "a \\u0000 car"}',
        "deep.json": b"[" * 100_000 + b"]" * 100_000,
        "deep object.json": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "long number.json": b'{"caption": ' + b"9" * 100_000 + b"}",
        "not a number.json": b'{"caption": NaN}',
        "a list.json": b'["a", "b"]',
        "twice.json": b'{"caption": "first", "caption": "second"}',
        "of another type.json": b'{"caption": {"text": ["a"]}}',
        "cut off.json": b'{"caption": "a red ',
        "many keys.json": json.dumps({str(number): number for number in range(50_000)}).encode(),
    }


def caption_case(image: bytes, name: str, content: bytes) -> Make:
    """The caption alone, and beside an image, which it must not cost."""

    def make(folder: Path) -> None:
        stem, _, suffix = name.rpartition(".")
        (folder / f"{stem} pair.jpg").write_bytes(image)
        (folder / f"{stem} pair.{suffix}").write_bytes(content)
        (folder / name).write_bytes(content)

    return make


def names() -> list[bytes]:
    return [
        b"with  spaces .jpg",
        "\u00e9\u4e2d\u0416\U0001f600.jpg".encode(),
        "e\u0301 and \u00e9.jpg".encode(),
        b"line\nbreak.jpg",
        b"tab\tbell\x07.jpg",
        b"\xff\xfe not utf-8.jpg",
        b"#fragment?query=1&a.jpg",
        b"100%25 %00.jpg",
        b"-rf.jpg",
        b"*[a-z]?.jpg",
        b"$(touch x);`id`.jpg",
        b"'quotes\"\\.jpg",
        b"a.tar#member=b.jpg",
        b".hidden.jpg",
        b"..jpg",
        b"no suffix",
        b"CON.jpg ",
        LONG_NAME.encode() + b".jpg",
        b"[bold red]markup.jpg",
    ]


def named_case(name: bytes, image: bytes) -> Make:
    def make(folder: Path) -> None:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(image)  # noqa: PTH118 - bytes

    return make


def link_out(folder: Path) -> None:
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "root.jpg").symlink_to("/")
    (folder / "climbs.txt").symlink_to("../" * 30 + "etc/passwd")
    (folder / "zero.jpg").symlink_to("/dev/zero")


def link_loop(folder: Path) -> None:
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "here").symlink_to(".", target_is_directory=True)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jpg")


def unix_socket(folder: Path) -> None:
    here = Path.cwd()
    os.chdir(folder)  # names of sockets may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket.jpg")
    finally:
        os.chdir(here)


def tars(good: Good) -> Iterator[tuple[str, bytes]]:
    image = good["plain.jpg"]
    yield ("members that climb", tar({"../../escape.jpg": image, "/etc/absolute.jpg": image, "a/../../b.jpg": image}))
    yield "one name three times", tar_of(*[("a.jpg", image, {})] * 3)
    yield "a tar in a tar in a tar", tar({"inner.tar": tar({"innermost.tar": good["shard.tar"]})})
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}
    special = ((f"{name}.jpg", b"", {"type": kind, "linkname": "/etc/passwd"}) for name, kind in kinds.items())
    yield "links and devices", tar_of(*special)
    yield "ten thousand empty members", tar({f"{number}.jpg": b"" for number in range(10_000)})
    yield "size beyond the end", lie(good["shard.tar"], b"77777777777\0")
    yield "size of 2^63", lie(good["shard.tar"], b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7)
    yield "size below zero", lie(good["shard.tar"], b"\xff" * 12)
    yield "size that is no number", lie(good["shard.tar"], b"size, please")
    yield "a name of a megabyte", tar({"n" * 1_000_000 + ".jpg": image})
    yield "names that are none", tar({"": image, ".": image, "./": image, "\n": image, "a//b.jpg": image})
    yield "nothing but zeros", bytes(10_240)
    yield "only half a block", good["shard.tar"][:300]
    yield "headers that claim gigabytes", lie(tar_of(("x", b"", {"type": tarfile.XHDTYPE})), b"77777777777\0")


def tar(members: dict[str, bytes]) -> bytes:
    return tar_of(*((name, content, {}) for name, content in members.items()))


def lie(content: bytes, size: bytes) -> bytes:
    """Another size in the first member's header, with the checksum that goes with it."""
    header = bytearray(content[:512])
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def tables() -> dict[str, bytes]:
    return {
        "no header empty.csv": b"",
        "nul bytes nul.csv": b"id,caption\n1,a\x00b\n",
        "a million columns wide.csv": b",".join(b"c%d" % number for number in range(100_000)) + b"\n",
        "an open quote open.csv": b'id,caption\n1,"never closed\n' + b"x,y\n" * 10_000,
        "one long line long.jsonl": b'{"id": "1", "caption": "' + b"w" * 5_000_000 + b'"}',
        "deep deep.jsonl": b'{"id": "1", "caption": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "half a pair pair.jsonl": b'{"id": "\\ud800", "caption": "\\ud800"}',
        "no parquet no.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
    }
