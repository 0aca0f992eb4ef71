"""The `uri` of an item: a whole file, a byte range of a tar, a cell of a table, or a row without bytes.

The path is not percent-encoded; only the values inside a fragment are. So `#`, `%`, `?`, spaces and newlines in file
names need no care, and the last `#` of a uri that ends in a known fragment starts that fragment.
"""

import os
import re
from typing import NamedTuple
from urllib.parse import quote, unquote
from urllib.request import url2pathname

from embedder.errors import SourceError
from embedder.storage.object_stores import ObjectStoreError, is_remote, split_place, without_credentials
from embedder.storage.web_address import is_web

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MEMBER = r"#member=([^#&]*)&offset=(\d{1,18})&size=(\d{1,18})"
CELL = r"#column=([^#&]*)&row_group=(\d{1,18})&row=(\d{1,18})"
ROW = r"#row=(\d{1,18})"
"""Fragments at the end of a uri: a member of a tar, a cell of a table, and a row of a table."""
_MEMBER, _CELL, _ROW = (re.compile(rf"{fragment}\Z") for fragment in (MEMBER, CELL, ROW))


MIN_BASE64 = 64  # characters: shorter than any image, longer than a name that begins like one
# Of JPEG, PNG, GIF, WebP (RIFF) and TIFF, also in the alphabet for URLs.
_BASE64_STARTS = ("/9j/", "_9j_", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")


class TarMember(NamedTuple):
    """A byte range of a plain tar."""

    name: str
    offset: int
    size: int


class TableCell(NamedTuple):
    """A cell of a Parquet file; `row` counts within the row group."""

    column: str
    row_group: int
    row: int


class TableRow(NamedTuple):
    """A row with a caption and no bytes; `row` counts within the file."""

    row: int


Part = TarMember | TableCell | TableRow


def member_uri(path: str, name: str, offset: int, size: int) -> str:
    """Return the uri of a tar member's data: `size` bytes from `offset` of the tar."""
    return f"{path}#member={quote(name)}&offset={offset}&size={size}"


def cell_prefix(path: str, column: str, row_group: int) -> str:
    """Return the start of a Parquet cell's uri; the row within its row group completes it."""
    return f"{path}#column={quote(column)}&row_group={row_group}&row="


def row_uri(path: str, row: int) -> str:
    """Return the uri of a table row that needs no fetch."""
    return f"{path}#row={row}"


def split_uri(uri: str) -> tuple[str, Part | None]:
    """Split a uri into the file that holds the bytes and the part that is meant.

    A local file whose full name looks like a fragment takes precedence; a web address has no parts.
    """
    if "#" not in uri or is_web(uri):
        return uri, None
    part = _parse_fragment(uri)
    if part is None or (not is_remote(uri) and os.path.lexists(uri)):
        return uri, None
    return uri[: uri.rindex("#")], part


def name_in(uri: str) -> str:
    """Return the name of the file or tar member that a uri names; of a web address without its query."""
    if is_web(uri):
        return uri.partition("?")[0].partition("#")[0]
    path, part = split_uri(uri)
    return part.name if isinstance(part, TarMember) else path


def looks_like_part(uri: str) -> bool:
    """Return whether a file of this name would be mistaken for a part of another file."""
    return "#" in uri and _parse_fragment(uri) is not None


def _parse_fragment(uri: str) -> Part | None:
    if match := _MEMBER.search(uri):
        return TarMember(unquote(match[1]), int(match[2]), int(match[3]))
    if match := _CELL.search(uri):
        return TableCell(unquote(match[1]), int(match[2]), int(match[3]))
    if match := _ROW.search(uri):
        return TableRow(int(match[1]))
    return None


def is_uri(path: str) -> bool:
    """Return whether the path starts with a scheme, known or not; `data:` has no slashes but counts too."""
    return bool(_SCHEME.match(path)) or path.startswith("data:")


def holds_base64(reference: str) -> bool:
    """Return whether a text that should name an image is the image: a `data:` address, or base64."""
    if reference[:5].lower() == "data:":
        return True
    return len(reference) >= MIN_BASE64 and reference.startswith(_BASE64_STARTS) and bool(_BASE64.fullmatch(reference))


def normalise_source(path: str) -> str:
    """Make a source's path absolute; `file://` and `~` become plain paths, object store URIs lose a last slash.

    Raises a SourceError if the scheme is unknown, the bucket is missing, or the URI contains credentials.
    """
    if is_remote(path):
        try:
            split_place(path)
        except ObjectStoreError as error:
            raise SourceError(f"source: {error.message}") from None
        return path.rstrip("/") if path.count("/") > 2 else path
    if path.startswith("file://"):
        return os.path.abspath(file_url_path(path))  # noqa: PTH100
    if is_uri(path):
        raise SourceError(
            f"{without_credentials(path)}: a source is a local path, file://, s3://, gs:// or az://; "
            "download or mount this one first"
        )
    if not path:
        raise SourceError("a source has an empty path; give a folder, a file, a pattern or a URI")
    return os.path.abspath(path if os.path.lexists(path) else os.path.expanduser(path))  # noqa: PTH100, PTH111


def file_url_path(url: str) -> str:
    """Turn `file:///a%20b` into `/a b`, and `file://a%20b`, which names no host here, into the relative `a b`."""
    return url2pathname(url.removeprefix("file://").removeprefix("localhost"))
