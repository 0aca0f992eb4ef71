"""The page `/docs`, written as plain HTML, and the files of the search page, read and compressed once."""

import gzip
import json
import mimetypes
import re
from hashlib import blake2b
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

METHODS = ("get", "post")


def docs_page(document: dict[str, Any]) -> str:
    """Write the page of an OpenAPI document."""
    info = document["info"]
    routes = [
        _route(method, path, operations[method])
        for path, operations in document["paths"].items()
        for method in METHODS
        if method in operations
    ]
    models = [
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3><pre>{_json(schema)}</pre></section>'
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    title = escape(f"{info['title']} {info['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="stylesheet" href="/page/docs.css"></head><body><main>'
        f"<h1>{title}</h1><p>{escape(info['description'])} "
        'As a document for programs: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(routes)}<h2>Models</h2>{''.join(models)}</main></body></html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    about = escape(operation.get("description", "")).replace("\n", " ")
    rows = [
        (each["name"], each["in"], _type(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    rows += [
        ("body", kind, _type(content["schema"]), "")
        for kind, content in operation.get("requestBody", {}).get("content", {}).items()
    ]
    rows += [
        ("answer", status, ", ".join(_types(answer)), answer.get("description", ""))
        for status, answer in sorted(operation["responses"].items())
    ]
    cells = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code></summary><p>{about}</p>"
        f"<table>{cells}</table></details>"
    )


def _types(answer: dict[str, Any]) -> list[str]:
    return [_type(content.get("schema", {})) or kind for kind, content in answer.get("content", {}).items()]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(str(each) for each in schema["enum"])
    return str(schema.get("type", ""))


def _json(schema: dict[str, Any]) -> str:
    return escape(json.dumps(schema, indent=2, ensure_ascii=False))


def is_known(request: Request, etag: str) -> bool:
    """Whether the client has this content."""
    known = request.headers.get("if-none-match", "")
    return known == "*" or etag in {each.strip().removeprefix("W/") for each in known.split(",")}


FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
MIN_COMPRESSED_BYTES = 1024  # a smaller file is one packet either way
NO_WEIGHT = re.compile(r"q=0(\.0*)?")


class Encoded(NamedTuple):
    """Content of a file as it is sent, and its ETag: a file and its compressed form have different ones."""

    content: bytes
    etag: str


class PageFile(NamedTuple):
    """One file, plain and compressed by gzip; the latter is None for a small file."""

    media_type: str
    plain: Encoded
    compressed: Encoded | None


class PageFiles:
    """All files of the page, by name."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in FOLDER.iterdir()}

    async def answer(self, request: Request) -> Response:
        """Answer with the file that the path names, the index by default, or with 304 if the browser has it.

        Raises `HTTPException` if there is no such file.
        """
        file = self._files.get(request.path_params.get("name", INDEX))
        if file is None:
            raise HTTPException(404)
        takes_gzip = _takes_gzip(request.headers.get("accept-encoding", ""))
        sent = file.compressed if takes_gzip and file.compressed is not None else file.plain
        # Requested again each time, as an upgrade changes all files at once.
        headers = {"Cache-Control": "no-cache", "ETag": sent.etag, "Vary": "Accept-Encoding"}
        if is_known(request, sent.etag):
            return Response(status_code=304, headers=headers)
        if sent is file.compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(sent.content, headers=headers, media_type=file.media_type)


def _takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` names gzip; with a weight of 0 it refuses it."""
    codings = (each.lower().replace(" ", "").partition(";") for each in accepted.split(","))
    return any(name == "gzip" and not NO_WEIGHT.fullmatch(weight) for name, _, weight in codings)


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    is_large = len(content) > MIN_COMPRESSED_BYTES
    return PageFile(media_type, _encode(content), _encode(gzip.compress(content, mtime=0)) if is_large else None)


def _encode(content: bytes) -> Encoded:
    return Encoded(content, f'"{blake2b(content, digest_size=12).hexdigest()}"')
