"""Files of the search page, read and compressed once: sending them takes no time that searches wait for."""

import gzip
import mimetypes
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from embedder.plugins.serve.etags import is_known

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
MIN_COMPRESSED_BYTES = 1024  # a smaller file is one packet either way


class Encoded(NamedTuple):
    """Content of a file as it is sent, and its ETag: those of a file and its compressed form differ."""

    content: bytes
    etag: str


class PageFile(NamedTuple):
    """One file.

    Attributes:
        media_type: of its content.
        plain: as it is.
        compressed: by gzip; None of a small file.
    """

    media_type: str
    plain: Encoded
    compressed: Encoded | None


class PageFiles:
    """All files of a folder, by name."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: _read(path) for path in folder.iterdir()}

    async def answer(self, request: Request) -> Response:
        """Answer with the file that the path names, the index by default, or with 304 where the browser has it.

        Raises:
            HTTPException: there is no such file.
        """
        file = self._files.get(request.path_params.get("name", INDEX))
        if file is None:
            raise HTTPException(404)
        takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
        sent = file.compressed if takes_gzip and file.compressed is not None else file.plain
        # Asked for again each time, as an upgrade changes all files at once.
        headers = {"Cache-Control": "no-cache", "ETag": sent.etag, "Vary": "Accept-Encoding"}
        if is_known(request, sent.etag):
            return Response(status_code=304, headers=headers)
        if sent is file.compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(sent.content, headers=headers, media_type=file.media_type)


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    is_large = len(content) > MIN_COMPRESSED_BYTES
    return PageFile(media_type, _encode(content), _encode(gzip.compress(content, mtime=0)) if is_large else None)


def _encode(content: bytes) -> Encoded:
    return Encoded(content, f'"{blake2b(content, digest_size=12).hexdigest()}"')
