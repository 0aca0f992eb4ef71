"""Columns of the medium: what the file of a picture or clip says of itself. One table, which all else follows.

The embeddings table has these columns besides carried ones. Decoding fills them (`embedder.media.medium_values` reads
the sources named here), `docs/metadata.md` lists them, `[metadata]` keeps or drops them by name or group.
"""

from collections.abc import Iterable
from typing import NamedTuple


class MediumColumn(NamedTuple):
    """Column of the medium.

    Attributes:
        name: of the column.
        kind: Arrow type: `timestamp` has microseconds and no zone, `utc` is of UTC, `strings` is a list.
        group: what is kept or dropped together.
        text: for the documentation.
        sources: where the value is looked for, in this order: `exif.NAME` and `gps.NAME` are tags of Exif, `xmp.NAME`
            is a property, `iptc.R:N` a data set, `png.NAME` a keyword, `clip.NAME` of a container's metadata; none if
            it follows from the header or the pixels.
    """

    name: str
    kind: str
    group: str
    text: str
    sources: tuple[str, ...] = ()


COLUMNS = (
    MediumColumn("width", "int32", "form", "pixels of the upright picture"),
    MediumColumn("height", "int32", "form", "pixels of the upright picture"),
    MediumColumn("orientation", "int16", "form", "how the file stores it, 1 to 8 as in Exif", ("exif.Orientation",)),
    MediumColumn("format", "string", "form", "JPEG, PNG, WEBP, HEIC, RAW, ...; a clip's container: MP4, MOV, ..."),
    MediumColumn("bits", "int16", "form", "bits of a channel"),
    MediumColumn("colour_profile", "string", "form", "name of the ICC profile"),
    MediumColumn("has_alpha", "bool_", "form", "has transparency"),
    MediumColumn("is_animated", "bool_", "form", "has several frames shown one after the other"),
    MediumColumn("num_frames", "int32", "form", "frames, or pages of a TIFF"),
    MediumColumn(
        "taken_at",
        "timestamp",
        "time",
        "when the shutter was released, by the clock of the camera; never a guess from the file's time",
        (
            "exif.DateTimeOriginal",
            "xmp.exif:DateTimeOriginal",
            "xmp.photoshop:DateCreated",
            "iptc.2:55",
            "clip.com.apple.quicktime.creationdate",
        ),
    ),
    MediumColumn(
        "taken_offset_min",
        "int16",
        "time",
        "minutes that this clock is before UTC; null if the file does not say",
        ("exif.OffsetTimeOriginal",),
    ),
    MediumColumn(
        "camera",
        "string",
        "camera",
        "maker and model",
        ("exif.Model", "xmp.tiff:Model", "clip.com.apple.quicktime.model"),
    ),
    MediumColumn(
        "lens", "string", "camera", "model of the lens", ("exif.LensModel", "xmp.exifEX:LensModel", "xmp.aux:Lens")
    ),
    MediumColumn("focal_length_mm", "float64", "camera", "focal length", ("exif.FocalLength", "xmp.exif:FocalLength")),
    MediumColumn("exposure_s", "float64", "camera", "exposure time", ("exif.ExposureTime", "xmp.exif:ExposureTime")),
    MediumColumn("f_number", "float64", "camera", "aperture", ("exif.FNumber", "xmp.exif:FNumber")),
    MediumColumn("iso", "int32", "camera", "sensitivity", ("exif.ISOSpeedRatings", "xmp.exif:ISOSpeedRatings")),
    MediumColumn(
        "latitude", "float64", "gps", "degrees north", ("gps.GPSLatitude", "xmp.exif:GPSLatitude", "clip.location")
    ),
    MediumColumn(
        "longitude", "float64", "gps", "degrees east", ("gps.GPSLongitude", "xmp.exif:GPSLongitude", "clip.location")
    ),
    MediumColumn(
        "altitude_m",
        "float64",
        "gps",
        "metres above the sea",
        ("gps.GPSAltitude", "xmp.exif:GPSAltitude", "clip.location"),
    ),
    MediumColumn(
        "creator", "string", "author", "who made it", ("xmp.dc:creator", "iptc.2:80", "exif.Artist", "png.Author")
    ),
    MediumColumn("credit", "string", "author", "whom to name", ("xmp.photoshop:Credit", "iptc.2:110")),
    MediumColumn(
        "copyright",
        "string",
        "author",
        "notice of rights",
        ("xmp.dc:rights", "iptc.2:116", "exif.Copyright", "png.Copyright"),
    ),
    MediumColumn(
        "software",
        "string",
        "software",
        "program that wrote it",
        ("exif.Software", "xmp.xmp:CreatorTool", "png.Software", "clip.encoder"),
    ),
    MediumColumn(
        "keywords",
        "strings",
        "keywords",
        "keywords of the picture: those of all sources",
        ("xmp.dc:subject", "iptc.2:25", "exif.XPKeywords"),
    ),
    MediumColumn("duration_s", "float64", "clip", "length of the clip in seconds"),
    MediumColumn("fps", "float64", "clip", "frames a second"),
    MediumColumn("codec", "string", "clip", "FFmpeg's name of the video codec"),
    MediumColumn("has_audio", "bool_", "clip", "has sound"),
    MediumColumn("created_at", "utc", "time", "when the container says it was written", ("clip.creation_time",)),
    MediumColumn("content_hash", "string", "hash", "hash of the file's bytes: equal files have equal ones"),
    MediumColumn(
        "perceptual_hash",
        "string",
        "hash",
        "16 hexadecimal digits; pictures that look alike differ in few of the 64 bits (difference hash)",
    ),
    MediumColumn("sharpness", "float32", "look", "variance of the Laplacian of grey levels: low if blurred or blank"),
    MediumColumn("brightness", "float32", "look", "mean of the grey levels, in [0, 1]"),
    MediumColumn("one_colour_share", "float32", "look", "share of pixels in one of 4,096 colours: near 1 if blank"),
    MediumColumn("metadata_note", "string", "form", "what of the metadata could not be read"),
)
BY_NAME = {column.name: column for column in COLUMNS}
GROUPS = tuple(dict.fromkeys(column.group for column in COLUMNS))
OF_PIXELS = ("perceptual_hash", "sharpness", "brightness", "one_colour_share")
NOT_IN_HEADERS = (*OF_PIXELS, "content_hash")
"""Columns that headers don't give: the picture, or all bytes, are needed."""


def check_medium_name(name: str) -> str:
    """Return the name of a column or group; a ValueError for any other."""
    if name not in BY_NAME and name not in GROUPS:
        known = ", ".join((*GROUPS, *BY_NAME))
        raise ValueError(f"{name!r} is no column of the medium; known are {known}")
    return name


def chosen_columns(keep: Iterable[str], drop: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the columns to fill, in the table's order; `keep` and `drop` are names and groups."""
    kept, dropped = set(keep), set(drop)
    return tuple(
        column.name
        for column in COLUMNS
        if (column.name in kept or column.group in kept) and not (column.name in dropped or column.group in dropped)
    )
