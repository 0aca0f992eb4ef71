"""Values of the medium's columns, from headers, metadata blocks and decoded pixels. Runs in the sandbox process.

Which sources a column has stands in `embedder.medium_columns`. A value that is malformed or impossible is null.
"""

import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, BinaryIO, Literal, NamedTuple

from PIL import ExifTags, Image, ImageCms, ImageFilter

from embedder.media.loaded_image import PictureForm
from embedder.media.metadata_blocks import MetadataBlocks, read_blocks
from embedder.media.picture_texts import find_keywords
from embedder.media.resize import Size, SizedPixels
from embedder.medium_columns import BY_NAME

Values = dict[str, Any]
"""Values by column, as JSON has them: times in ISO 8601."""

MAX_TEXT, MAX_NOTE = 300, 300  # characters
MAX_COUNTED_BYTES = 8 << 20  # of a GIF whose frames are counted, block by block: at worst 2 s
MAX_PAGES = 10_000
ALPHA_MODES = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})
BITS = {"1": 1, "I": 32, "F": 32, "I;16": 16, "I;16B": 16, "I;16L": 16}
BITS_TAG = 258
ANIMATED = frozenset({"GIF", "PNG", "WEBP", "AVIF"})
EPOCHS = ("1904-01-01T00:00:00", "1970-01-01T00:00:00")
"""Times of containers that say none."""

TIME = re.compile(
    r"(\d{4})[:/-]?(\d\d)[:/-]?(\d\d)[ T]?(\d\d):?(\d\d):?(\d\d)(\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?\0*", re.ASCII
)
ISO_6709 = re.compile(r"([+-]\d+(?:\.\d+)?)([+-]\d+(?:\.\d+)?)([+-]\d+(?:\.\d+)?)?(?:CRS\w+)?/?", re.ASCII)
XMP_DEGREES = re.compile(r"(\d+),(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?([NSEW])", re.ASCII)


@lru_cache(maxsize=256)
def _parse_source(source: str) -> tuple[str, Any]:
    kind, _, name = source.partition(".")
    if kind == "iptc":
        record, _, number = name.partition(":")
        return kind, (int(record), int(number))
    return kind, ExifTags.Base[name].value if kind == "exif" else ExifTags.GPS[name].value if kind == "gps" else name


class Sources(NamedTuple):
    """What values are looked for in: an image's metadata blocks, or a clip's tags."""

    blocks: MetadataBlocks
    clip: Mapping[str, str]

    def get(self, source: str) -> Any:
        """Return the value of a source of `embedder.medium_columns`; None if it has none."""
        kind, key = _parse_source(source)
        if kind == "exif":
            return self.blocks.exif_details.get(key, self.blocks.exif.get(key))
        if kind == "gps":
            return self.blocks.gps.get(key)
        if kind == "iptc":
            return next(iter(self.blocks.iptc.get(key, ())), None)
        if kind in ("clip", "png"):
            return (self.clip if kind == "clip" else self.blocks.text).get(key)
        texts = self.blocks.xmp.get(key, ())
        if key == "dc:creator":
            return ", ".join(each.text for each in texts[:10]) or None
        return texts[0].text if texts else None

    def first(self, column: str, read: Callable[[Any], Any]) -> Any:
        """Return the first value of a column's sources that can be read."""
        for source in BY_NAME[column].sources:
            if (found := self.get(source)) is not None and (value := read(found)) is not None:
                return value
        return None


def picture_values(
    form: PictureForm, opened: Any, file: BinaryIO, columns: Collection[str], sized: SizedPixels | None = None
) -> Values:
    """Return the values of a picture's columns that it has.

    Args:
        form: the picture as its header describes it.
        opened: the image as Pillow or a plug-in has opened it; None if there is none.
        file: the whole file, seekable.
        columns: names of those that are asked for.
        sized: its pixels as the model takes them; None leaves out what is computed of them.
    """
    notes = list[str]()
    blocks = read_blocks(opened, file)
    values = _try("form", notes, lambda: _form_values(form, opened, file, columns))
    values |= source_values(Sources(blocks, {}), notes)
    if "keywords" in columns:
        values |= _try("keywords", notes, lambda: {"keywords": find_keywords(blocks) or None})
    if sized is not None:
        values |= _try("pixels", notes, lambda: pixel_values(sized, columns))
    return with_note(values, (*blocks.notes, *notes), columns)


def with_note(values: Values, notes: Collection[str], columns: Collection[str]) -> Values:
    """Return the values that columns ask for and that are there, with the notes on what could not be read."""
    found = {name: value for name, value in values.items() if name in columns and value is not None}
    if notes and "metadata_note" in columns:
        found["metadata_note"] = "; ".join(notes)[:MAX_NOTE]
    return found


def _try(what: str, notes: list[str], read: Callable[[], Values]) -> Values:
    """Read some values; what metadata raises, which may be anything, must not cost a picture."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - see above
        notes.append(f"{what}: {type(error).__name__}")
        return {}


def source_values(sources: Sources, notes: list[str]) -> Values:
    """Return the values that stand in metadata; a group that can't be read is left out, with a note."""
    values: Values = {}
    blocks = sources.blocks
    if not any((blocks.exif, blocks.exif_details, blocks.gps, blocks.xmp, blocks.iptc, blocks.text, sources.clip)):
        return values
    for what, read in (("time", _times), ("camera", _camera), ("place", _place), ("author", _texts)):
        values |= _try(what, notes, lambda read=read: read(sources))  # type: ignore[misc]
    return values


def _form_values(form: PictureForm, opened: Any, file: BinaryIO, columns: Collection[str]) -> Values:
    width, height = form.size
    values: Values = {"orientation": form.orientation, "format": form.format}
    if width and height:
        values |= {"width": width, "height": height}
    if form.mode:
        values |= {"bits": _bits(form, opened, file), "has_alpha": form.mode in ALPHA_MODES}
    if opened is None:
        return values
    if form.mode:
        values["has_alpha"] |= "transparency" in opened.info
    profile = opened.info.get("icc_profile")
    if "colour_profile" in columns and isinstance(profile, bytes):
        values["colour_profile"] = _profile_name(profile)
    if "num_frames" in columns or "is_animated" in columns:
        values["num_frames"] = _num_frames(form, opened, file)
        is_moving = form.format in ANIMATED and (values["num_frames"] or 0) > 1
        values["is_animated"] = None if values["num_frames"] is None else is_moving
    return values


def _bits(form: PictureForm, opened: Any, file: BinaryIO) -> int:
    if form.format == "PNG":
        file.seek(24)
        return file.read(1)[0]
    if (tags := getattr(opened, "tag_v2", None)) is not None and BITS_TAG in tags:
        return int(tags[BITS_TAG][0])
    declared = opened.info.get("bit_depth") if opened is not None else None
    return int(declared) if declared else BITS.get(form.mode, 8)


def _num_frames(form: PictureForm, opened: Any, file: BinaryIO) -> int | None:
    """Count frames or pages; those of a GIF by another pass over the file, if it is in memory and not too large."""
    if form.format == "TIFF":
        return _num_pages(file)
    if form.format != "GIF":
        num_others = int(getattr(opened, "default_image", False))  # an image of a PNG for viewers without animation
        return int(getattr(opened, "n_frames", 1)) - num_others if form.format != "JPEG" else 1
    if not isinstance(file, io.BytesIO) or len(file.getbuffer()) > MAX_COUNTED_BYTES:
        return None
    with Image.open(io.BytesIO(file.getbuffer()), formats=("GIF",)) as again:
        return int(getattr(again, "n_frames", 1))


def _num_pages(file: BinaryIO) -> int | None:
    """Count the directories of a TIFF, without their values; None for a BigTIFF, or a chain that bites its tail."""
    file.seek(0)
    head, seen = file.read(8), set[int]()
    order: Literal["little", "big"] = "little" if head[:2] == b"II" else "big"
    place = int.from_bytes(head[4:], order) if head[2:4] in (b"*\0", b"\0*") else 0
    while place:
        if place in seen or len(seen) == MAX_PAGES:
            return None
        seen.add(place)
        file.seek(place)
        num_tags = int.from_bytes(file.read(2), order)
        file.seek(place + 2 + 12 * num_tags)
        place = int.from_bytes(file.read(4), order)
    return len(seen) or None


@lru_cache(maxsize=64)
def _profile_name(profile: bytes) -> str | None:
    try:
        return text_of(ImageCms.getProfileDescription(ImageCms.getOpenProfile(io.BytesIO(profile))))
    except (ImageCms.PyCMSError, OSError):
        return None


def pixel_values(sized: SizedPixels, columns: Collection[str]) -> Values:
    """Return what is computed of a picture's pixels, in the size that the model takes, so at no decoding.

    perceptual_hash: a difference hash (Source: N. Krawetz, "Kind of like that", 2013): grey levels at 9 x 8 pixels,
    a bit for each that is darker than its right neighbour. sharpness: the variance of the Laplacian in the middle
    half, of both sides (Source:
    Pech-Pacheco et al., "Diatom autofocusing", 2000). one_colour_share: of colours of four bits a channel, at about
    28 pixels a side.
    """
    image = Image.frombytes("RGB", sized.size, sized.data)
    grey, values = image.convert("L"), Values()
    if "perceptual_hash" in columns:
        small = grey.resize((9, 8), Image.Resampling.BOX).tobytes()
        darker = ["01"[left < right] for left, right in pairwise(small)]
        del darker[8::9]  # the end of a row next to the start of the next
        values["perceptual_hash"] = f"{int(''.join(darker), 2):016x}"
    if "sharpness" in columns and min(sized.size) >= 8:
        width, height = grey.size
        middle = grey.crop((width // 4, height // 4, width - width // 4, height - height // 4))
        edges = middle.filter(LAPLACIAN).crop((1, 1, middle.width - 1, middle.height - 1))
        counts = edges.histogram()
        values["sharpness"] = round(_mean(counts, SQUARES) - _mean(counts, LEVELS) ** 2, 2)
    if "brightness" in columns:
        values["brightness"] = round(_mean(grey.histogram(), LEVELS) / 255, 4)
    if "one_colour_share" in columns:
        few = image.reduce(max(1, min(sized.size) // COLOUR_SIDE))
        coarse = Image.frombytes("RGB", few.size, few.tobytes().translate(FOUR_BITS))
        colours = coarse.getcolors(few.width * few.height) or []
        values["one_colour_share"] = round(max(colours)[0] / (few.width * few.height), 4)
    return values


LAPLACIAN = ImageFilter.Kernel((3, 3), (0, 1, 0, 1, -4, 1, 0, 1, 0), scale=1, offset=128)
FOUR_BITS = bytes(level & 0xF0 for level in range(256))
COLOUR_SIDE = 28
"""Pixels of the shorter side, at least, at which colours are counted."""
LEVELS, SQUARES = range(256), [level**2 for level in range(256)]


def _mean(counts: Sequence[int], values: Sequence[int]) -> float:
    total: int = sum(map(mul, counts, values))
    return total / sum(counts)


def _times(sources: Sources) -> Values:
    taken = sources.first("taken_at", lambda found: _read_time(_with_parts(found, sources)))
    if taken is not None:
        moment, offset = taken
        if offset is None:
            offset = sources.first("taken_offset_min", _offset_min)
        taken = {"taken_at": moment.isoformat(), "taken_offset_min": offset}
    created = sources.first("created_at", lambda found: None if str(found).startswith(EPOCHS) else _read_time(found))
    return (taken or {}) | ({"created_at": created[0].isoformat()} if created is not None else {})


def _with_parts(found: Any, sources: Sources) -> str:
    """Complete a time by what stands in separate tags: Exif's fractions of a second, IPTC's time of the day."""
    text = text_of(found) or ""
    if found == sources.get("exif.DateTimeOriginal") and (part := text_of(sources.get("exif.SubsecTimeOriginal"))):
        return f"{text}.{part}" if part.isascii() and part.isdigit() else text
    if found == sources.get("iptc.2:55"):
        return f"{text}{text_of(sources.get('iptc.2:60')) or ''}"
    return text


def _read_time(found: Any) -> tuple[datetime, int | None] | None:
    """Read a date with a time of the day; a date without one is not completed by a guess."""
    match = TIME.fullmatch(text_of(found) or "")
    if match is None:
        return None
    try:
        moment = datetime(*map(int, match.groups()[:6]))  # type: ignore[arg-type]
    except ValueError:
        return None
    if moment.year < 1800:  # a counter that was never set
        return None
    micros = int(round(float(match[7]), 6) * 1e6) if match[7] else 0
    return moment.replace(microsecond=min(micros, 999_999)), _offset_min(match[8])


def _offset_min(found: Any) -> int | None:
    text = text_of(found) or ""
    if text == "Z":
        return 0
    match = re.fullmatch(r"([+-])(\d\d):?(\d\d)", text, re.ASCII)
    minutes = int(match[2]) * 60 + int(match[3]) if match else 10_000
    return None if match is None or minutes > 14 * 60 else minutes * (1 if match[1] == "+" else -1)


def _camera(sources: Sources) -> Values:
    model = sources.first("camera", text_of)
    maker = next((text for each in MAKERS if (text := text_of(sources.get(each)))), None)
    if model and maker and not model.lower().startswith(maker.lower().split()[0]):
        model = f"{maker} {model}"
    values: Values = {"camera": model or maker, "lens": sources.first("lens", text_of)}
    for name in ("focal_length_mm", "exposure_s", "f_number"):
        values[name] = sources.first(name, lambda found: _within(_number(found), 1e-9, 1e6))
    iso = sources.first("iso", lambda found: _within(_number(found), 1, 2**31 - 1))
    return values | {"iso": None if iso is None else int(iso)}


MAKERS = ("exif.Make", "xmp.tiff:Make", "clip.com.apple.quicktime.make")


def _place(sources: Sources) -> Values:
    location = sources.clip.get("com.apple.quicktime.location.ISO6709") or sources.clip.get("location")
    point = ISO_6709.fullmatch(text_of(location) or "")
    if point is not None:
        latitude, longitude, altitude = (_number(each) if each else None for each in point.groups())
    else:
        latitude = sources.first("latitude", lambda found: _degrees(found, sources.get("gps.GPSLatitudeRef")))
        longitude = sources.first("longitude", lambda found: _degrees(found, sources.get("gps.GPSLongitudeRef")))
        altitude = sources.first("altitude_m", _number)
        below = (sources.get("gps.GPSAltitudeRef"), sources.get("xmp.exif:GPSAltitudeRef"))
        altitude = -altitude if altitude and any(each in (b"\1", 1, "1") for each in below) else altitude
    latitude, longitude = _within(latitude, -90, 90), _within(longitude, -180, 180)
    if latitude is None or longitude is None:
        return {}
    return {"latitude": latitude, "longitude": longitude, "altitude_m": _within(altitude, -12_000, 1e7)}


def _degrees(found: Any, ref: Any) -> float | None:
    """Read degrees, minutes and seconds, of Exif or of XMP; south and west are negative."""
    if isinstance(found, str):
        match = XMP_DEGREES.fullmatch(found.strip())
        if match is None:
            return None
        parts, side = [float(each or 0) for each in match.groups()[:3]], match[4]
    else:
        numbers = [_number(each) for each in found] if isinstance(found, tuple) else [_number(found)]
        parts, side = [each for each in numbers if each is not None], text_of(ref) or ""
        if len(parts) != len(numbers) or side not in ("N", "S", "E", "W"):
            return None
    total: float = sum(part / 60**place for place, part in enumerate(parts))
    return round(-total if side in ("S", "W") else total, 7)


def _texts(sources: Sources) -> Values:
    return {name: sources.first(name, text_of) for name in ("creator", "credit", "copyright", "software")}


def _within(value: float | None, least: float, most: float) -> float | None:
    return None if value is None or not least <= value <= most else value


def _number(found: Any) -> float | None:
    """Read a number, a rational, or the first of several; None if it is no number, or infinite."""
    if isinstance(found, (tuple, list)):
        found = found[0] if found else None
    if isinstance(found, bool):
        return None
    try:
        numerator, _, denominator = found.partition("/") if isinstance(found, str) else (found, "", "")
        value: float = float(numerator) / float(denominator or 1)  # a Fraction of "1e999999999" fills the memory
    except (TypeError, ValueError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def text_of(found: Any) -> str | None:
    """Return text of metadata in one line, without characters that control a terminal; None if nothing is left."""
    if isinstance(found, (tuple, list)):
        found = found[0] if found else None
    if not isinstance(found, (str, bytes)):
        return None
    text = found if isinstance(found, str) else found.decode("latin-1")
    with suppress(UnicodeError):  # Pillow reads Exif's text as Latin-1; programs write UTF-8
        text = text.encode("latin-1").decode()
    shown = "".join(each if each.isprintable() else " " for each in text[: 4 * MAX_TEXT])
    return " ".join(shown.split())[:MAX_TEXT] or None


def clip_values(container: Any, stream: Any, size: Size, orientation: int, columns: Collection[str]) -> Values:
    """Return the values of a clip's columns that its container says; `size` is upright."""
    tags = {name: str(value)[: 4 * MAX_TEXT] for name, value in [*stream.metadata.items(), *container.metadata.items()]}
    notes, pixels = list[str](), stream.codec_context.format
    duration = stream.duration * stream.time_base if stream.duration else None
    if duration is None and container.duration:
        duration = Fraction(container.duration, 1_000_000)
    values: Values = {
        "width": size[0],
        "height": size[1],
        "orientation": orientation,
        "format": _container_name(container.format.name, tags),
        "bits": pixels.components[0].bits if pixels else None,
        "has_alpha": any(component.is_alpha for component in pixels.components) if pixels else None,
        "num_frames": stream.frames if 0 < stream.frames < 2**31 else None,
        "duration_s": _within(_number(duration), 0, 1e9),
        "fps": _within(_number(stream.average_rate), 0, 1e6),
        "codec": stream.codec_context.name,
        "has_audio": bool(container.streams.audio),
    }
    return with_note(values | source_values(Sources(MetadataBlocks(), tags), notes), notes, columns)


def _container_name(name: str, tags: Mapping[str, str]) -> str:
    if name.startswith("mov,mp4"):
        return "MOV" if tags.get("major_brand", "").strip() == "qt" else "MP4"
    return name.partition(",")[0].upper()
