"""Sorts files by name: media, a companion of media, something else, or junk that systems leave behind.

A name decides only what need not be read. Everything else is an item, and its content decides its kind.
"""

import re
from functools import lru_cache
from typing import Literal

from embedder.media.formats import CAMERA_RAW, EXTRA_FORMATS, IMAGE_FORMATS

Sort = Literal["media", "unknown", "other", "sidecar", "junk"]
"""`media`: an image or video by its suffix. `unknown`: its content decides. `other`: no media. `sidecar`: belongs to an
item and is no item itself. `junk`: left behind by a system or a program.
"""

NO_SUFFIX = "no suffix"


def words(*groups: str) -> frozenset[str]:
    """Return the words of all groups."""
    return frozenset(word for group in groups for word in group.split())


def _suffixes(*groups: str) -> frozenset[str]:
    return frozenset(f".{word}" for word in words(*groups))


# Kinds that can be read.
_IMAGE_SUFFIXES = frozenset(suffix for each in (*IMAGE_FORMATS, *EXTRA_FORMATS) for suffix in each.suffixes)
CLIP_SUFFIXES = _suffixes("mp4 m4v mov qt mkv webm avi 3gp 3g2 mpg mpeg mpe m2v vob mts m2ts m2t wmv asf flv")
READ_SUFFIXES = _IMAGE_SUFFIXES | CLIP_SUFFIXES
# Kinds that this version can't read, under their common names.
_UNREADABLE_SUFFIXES = _suffixes(
    # images
    "svg svgz psd psb ico cur icns tga pcx ppm pgm pbm pnm exr hdr dds jp2 j2k jpx jxr wmf emf eps xcf",
    # clips
    "rm rmvb ogv dv mxf insv insp",
)
UNREADABLE_SUFFIXES = {suffix: suffix[1:].upper() for suffix in (*_UNREADABLE_SUFFIXES, *CAMERA_RAW.suffixes)}
"""Common names of camera raw kinds, for files whose content doesn't reveal the kind."""
RAW_SUFFIXES = _suffixes("3fr arw cr2 dcr dng erf fff gpr iiq k25 kdc mef mos nef nrw orf pef rw2 rwl sr2 srf srw")
"""Suffixes of camera raws whose content is a TIFF."""
MEDIA_SUFFIXES = READ_SUFFIXES | UNREADABLE_SUFFIXES.keys()

_SIDECARS = _suffixes("xmp aae thm lrv pp3 dop cos comask vrd nksc acr on1 srt vtt ass ssa sub")

_OTHERS = _suffixes(
    # documents and notes
    "pdf doc docx docm dot dotx odt rtf xls xlsx xlsm xlsb ods csv tsv ppt pptx pps ppsx odp key pages numbers md"
    " markdown rst tex log epub mobi azw3 djvu htm html xhtml mht mhtml xml xsd css js yaml yml toml ini cfg conf"
    " url webloc website lnk desktop eml msg pst ics vcf nfo cue m3u m3u8 pls torrent one xps indd idml sketch fig",
    # places and times
    "gpx kml kmz tcx fit geojson",
    # archives and images of disks
    "zip rar 7z tar gz tgz bz2 tbz2 xz txz zst lz4 cab iso img dmg pkg jar",
    # programs with their parts and data
    "exe dll msi sys apk aab ipa app so dylib com bat cmd ps1 vbs sh bash py pyc pyo ipynb java class c h cc cpp"
    " hpp cs go rs rb php pl lua r jl swift kt sql plist sqlite sqlite3 db db3 mdb accdb lrcat lrprev bak old tmp"
    " temp part crdownload download partial parquet arrow feather avro orc jsonl ndjson npy npz pkl pickle pt pth"
    " ckpt safetensors onnx h5 hdf5 mat ttf otf woff woff2 lock",
    # sound
    "mp3 m4a m4b m4r aac wav wave flac ogg oga opus wma amr awb aif aiff aifc caf mid midi ape ac3 dts mka",
)

_SORTS: dict[str, Sort] = {
    **dict.fromkeys(_OTHERS, "other"),
    **dict.fromkeys(_SIDECARS, "sidecar"),
    **dict.fromkeys(MEDIA_SUFFIXES, "media"),
}
_COMMON = READ_SUFFIXES | {suffix.upper() for suffix in READ_SUFFIXES}

_JUNK_NAMES = words(
    # macOS
    ".ds_store .localized .volumeicon.icns .apdisk .com.apple.timemachine.donotpresent",
    # Windows
    "thumbs.db thumbs.db:encryptable ehthumbs.db ehthumbs_vista.db desktop.ini autorun.inf folder.htt",
    # galleries, desktops and shares
    ".picasa.ini picasa.ini zbthumbnail.info .bridgecache .bridgecachet .nomedia .directory .dropbox .dropbox.attr",
    # repositories
    ".stignore .gitignore .gitattributes .gitkeep .keep",
) | {"icon\r"}
_JUNK_FOLDERS = words(
    # macOS
    "__macosx .spotlight-v100 .fseventsd .temporaryitems .documentrevisions-v100 .appledouble",
    # Windows, network disks, Linux
    "$recycle.bin recycler @eadir @tmp #recycle #snapshot lost+found .thumbnails",
    # shares and repositories
    ".stversions .stfolder .dropbox.cache .git .svn .hg __pycache__",
) | {"system volume information"}
# `._a.jpg` holds macOS metadata of `a.jpg`; `~$a.docx` and `.~lock.a.odt#` exist while somebody edits the document.
_JUNK_STARTS = ("._", "~$", ".~lock.")
_TRASH = ".trash"  # .Trash, .Trashes, .Trash-1000, .trashed-...
_COPY_NUMBER = re.compile(r"\(\d+\)$")
# Google Takeout: `a.jpg.json`, `a.jpg.supplemental-metadata.json`; the middle part is cut if the name gets too long.
TAKEOUT = "supplemental-metadata"
_SHARD_STATISTICS = re.compile(r"\d{5,}_stats\.json")
_PLAIN_SUFFIX = re.compile(r"\.[a-z0-9_+-]{1,12}")


def suffix_of(name: str) -> str:
    """Return the lower-case suffix with its dot; empty if there is none, as in `.hidden`."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if base.strip(".") and dot > 0 and base[:dot].strip(".") else ""


def shown_suffix(name: str) -> str:
    """Return the suffix for messages; an unusual one counts as none."""
    suffix = suffix_of(name)
    return suffix if _PLAIN_SUFFIX.fullmatch(suffix) else NO_SUFFIX


def sort_of(name: str) -> Sort:
    """Sort a file by its name."""
    folder, _, base = name.rpartition("/")
    if folder and in_junk_folder(folder):
        return "junk"
    stem, _, end = base.rpartition(".")
    if stem[:1].isalnum() and f".{end}" in _COMMON:  # of a million names, nearly all
        return "media"
    if base.startswith(_JUNK_STARTS) or base.lower() in _JUNK_NAMES:
        return "junk"
    suffix = suffix_of(base)
    if suffix == ".json" and (_is_takeout(base) or is_shard_statistics(base)):
        return "sidecar"
    return _SORTS.get(suffix, "unknown")


def is_shard_statistics(name: str) -> bool:
    """Return whether a file has img2dataset's statistics of a shard, next to its tar, table or folder."""
    return _SHARD_STATISTICS.fullmatch(name.rpartition("/")[2]) is not None


def is_hidden(name: str) -> bool:
    """Return whether Spark and Arrow treat the name as bookkeeping: some part starts with `_` or `.`."""
    return any(part.startswith(("_", ".")) for part in name.split("/"))


@lru_cache(maxsize=1024)
def in_junk_folder(folder: str) -> bool:
    """Return whether a folder, or one above it, belongs only to a system or a program."""
    return any(part in _JUNK_FOLDERS or part.startswith(_TRASH) for part in folder.lower().split("/"))


def _is_takeout(base: str) -> bool:
    stem = _COPY_NUMBER.sub("", base[: -len(".json")])
    if suffix_of(stem) in MEDIA_SUFFIXES:
        return True
    head, _, tail = stem.rpartition(".")
    return bool(tail) and TAKEOUT.startswith(tail.lower()) and suffix_of(head) in MEDIA_SUFFIXES
