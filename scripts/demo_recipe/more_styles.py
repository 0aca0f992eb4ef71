"""Openly licensed drawings in packages of npm, made into tables like those of the other styles.

Of a package its drawings alone are read, and what each is named: by its codes, or by a name that is compared with the
caption and the Unicode name of concepts that training knows. No keyword of a package is opened.
"""

import io
import json
import re
import tarfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demo_recipe.drawings import Concept, table_of
from demo_recipe.packages import Package, fetch
from demo_recipe.training import log

SIDE_PX = 72  # of the other styles' drawings
ICONIFY_SIDE = 16  # where a set doesn't say it

Drawn = Iterator[tuple[str | None, bytes]]
"""Drawings as SVG or WebP, each with its concept's code; None for what training doesn't know."""


@dataclass(frozen=True)
class DrawnPackage(Package):
    """A package with drawings."""

    # drawings: a pattern of the files, whose group `codes` has the concept's codes; none: a set of Iconify,
    # drawings by name in `icons.json`
    drawings: str | None = None
    only_of: str | None = None  # another style, whose concepts alone are taken


PACKAGES = {
    "emojione": DrawnPackage(
        name="@iconify-json/emojione@1.2.3",
        sha256="26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e",
        licence="CC-BY 4.0",
        authors="EmojiOne 2, as kept by EmojiTwo",
    ),
    "emojione-v1": DrawnPackage(
        name="@iconify-json/emojione-v1@1.2.3",
        sha256="6641d59d48a42823fdc2b84e7427e9f302944eb98d2c7d94d6e67c139e7b37b3",
        licence="CC-BY-SA 4.0",
        authors="EmojiOne 1, as kept by JoyPixels",
    ),
    "fxemoji": DrawnPackage(
        name="@iconify-json/fxemoji@1.2.2",
        sha256="f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef",
        licence="Apache-2.0",
        authors="Firefox OS Emoji, Mozilla",
    ),
    "fluent-3d": DrawnPackage(
        name="@lobehub/fluent-emoji-3d@1.1.0",
        sha256="c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        licence="MIT",
        authors="Microsoft Corporation, packed by LobeHub",
        drawings=r"package/assets/(?P<codes>[0-9a-f-]+)\.webp",
        only_of="fluent-flat",  # the package has flags of countries, whose origin it doesn't tell
    ),
    "streamline": DrawnPackage(
        name="@iconify-json/streamline-emojis@1.2.4",
        sha256="5dac87c876b322500989828c5823143e0100d78881627a2e4081a4b897cbfdbc",
        licence="CC-BY 4.0",
        authors="Streamline",
    ),
}
"""Style -> the package that draws it. Noto and its ancestors (Blob) have no place here: they are the test."""

MORE_STYLES = tuple(PACKAGES)


def make_tables(concepts: list[Concept], data: Path, work: Path) -> None:
    """Write the table of each further style that is in neither folder; a tarball that is missing is fetched by npm."""
    for style, package in PACKAGES.items():
        if table_of(style, data, work).exists():
            continue
        taken = concepts
        if package.only_of is not None:
            drawn = pq.read_table(table_of(package.only_of, data, work), columns=["hexcode"])["hexcode"].to_pylist()
            taken = [concept for concept in concepts if concept["hexcode"] in set(drawn)]
        rows = rows_of(style, package, fetch(package, work), taken)
        unfinished = work / f"{style}.part"
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.replace(table_of(style, data, work))
        log(f"{style}: {len(rows):,} drawings of {package.name}")


def rows_of(style: str, package: DrawnPackage, tarball: Path, concepts: list[Concept]) -> list[dict[str, object]]:
    """Draw what concepts of training are in the package: one row of a table each, ordered by code."""
    found: dict[str, bytes] = {}
    with tarfile.open(tarball) as tar:
        for hexcode, source in _by_code(tar, package, concepts) if package.drawings else _by_name(tar, concepts):
            if hexcode is not None and hexcode not in found:
                found[hexcode] = png_of(source)
    return [
        {"item_id": f"{style}/{hexcode.lower()}", "style": style, "hexcode": hexcode, "image": found[hexcode]}
        for hexcode in sorted(found)
    ]


def _by_code(tar: tarfile.TarFile, package: DrawnPackage, concepts: list[Concept]) -> Drawn:
    known = {plain_codes(concept["hexcode"]): concept["hexcode"] for concept in concepts}
    for member in tar:
        named = re.fullmatch(package.drawings or "", member.name)
        file = tar.extractfile(member) if named else None
        if named and file:
            yield known.get(plain_codes(named["codes"])), file.read()


def _by_name(tar: tarfile.TarFile, concepts: list[Concept]) -> Drawn:
    """Drawings of Iconify's file by name, then by other names that don't change the drawing; `x-2` is another x."""
    file = tar.extractfile("package/icons.json")
    icons = json.load(file) if file else {}
    drawings, known = icons.get("icons", {}), names_of(concepts)
    names = {name: name for name in drawings} | {
        name: alias["parent"] for name, alias in icons.get("aliases", {}).items() if set(alias) == {"parent"}
    }
    for pattern in ("", r"-\d$"):
        for name, drawing in names.items():
            if drawing in drawings:
                yield known.get(plain_name(re.sub(pattern, "", name))), svg_of(icons | drawings[drawing])


def svg_of(icon: dict[str, Any]) -> bytes:
    """An SVG of a drawing of Iconify: body and box; its square is as wide as the longer side."""
    width, height = icon.get("width", ICONIFY_SIDE), icon.get("height", ICONIFY_SIDE)
    side = max(width, height)
    left, top = icon.get("left", 0) - (side - width) / 2, icon.get("top", 0) - (side - height) / 2
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="{left} {top} {side} {side}">{icon["body"]}</svg>'.encode()


def png_of(source: bytes) -> bytes:
    """Draw an SVG or another image on white, as large as the other styles' drawings."""
    from PIL import Image

    if source.lstrip()[:1] == b"<":
        from resvg_py import svg_to_bytes

        source = bytes(svg_to_bytes(svg_string=source.decode(), width=2 * SIDE_PX, height=2 * SIDE_PX))
    with Image.open(io.BytesIO(source)) as opened:
        opened.load()
        image = opened.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    small = Image.alpha_composite(white, image).convert("RGB").resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    small.save(data, "PNG")
    return data.getvalue()


def plain_codes(codes: str) -> str:
    """Codes without leading zeros and variation selectors: sets differ in both."""
    return "-".join(code.lstrip("0") for code in codes.upper().split("-") if code != "FE0F")


def plain_name(name: str) -> str:
    """A name's letters and digits, without accents, in small letters."""
    return re.sub("[^a-z0-9]", "", unicodedata.normalize("NFKD", name.lower()))


def names_of(concepts: list[Concept]) -> dict[str, str]:
    """Plain names -> codes of the concept: its caption, else what sets call it that are older than the caption."""
    names: dict[str, str] = {}
    for naming in (_captions, _unicode_names, _old_names):
        for concept in concepts:
            for name in naming(concept):
                names.setdefault(plain_name(name), concept["hexcode"])
    return names


def _captions(concept: Concept) -> Iterator[str]:
    yield concept["caption"]


def _unicode_names(concept: Concept) -> Iterator[str]:
    codes = plain_codes(concept["hexcode"]).split("-")
    if len(codes) == 1:
        yield unicodedata.name(chr(int(codes[0], 16)), concept["caption"])


def _old_names(concept: Concept) -> Iterator[str]:
    caption = concept["caption"]
    kind, _, rest = caption.partition(": ")
    if kind == "flag":
        yield from (f"flag for {rest}", f"{rest} flag")
    if kind == "keycap" and rest.isdigit() and len(rest) == 1:
        yield f"digit {unicodedata.name(rest).removeprefix('DIGIT ')}"
    if concept["groups"][1].startswith("animal"):
        yield f"{caption} face"
