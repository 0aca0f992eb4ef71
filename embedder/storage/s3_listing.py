"""ListObjectsV2 of our own, for keys that obstore can't represent: one of them ends its listing (0.12).

Such a key has an empty segment, `.` or `..` as a segment, or a control character. What obstore has listed stays;
from there on, requests made and signed here list every key of the folder.
"""

import hashlib
import hmac
import importlib.util
import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, unquote_plus

import pyarrow as pa

from embedder.storage.http import Connections, Limits
from embedder.storage.object_stores import MAX_BACKOFF_S, MAX_RETRIES, TIMEOUT_S, ObjectStoreError, profile_settings
from embedder.storage.printable import printable
from embedder.storage.web_address import parse_address

SCHEMA = pa.schema(  # as of obstore's tables
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.uint64(), nullable=False),
        pa.field("e_tag", pa.string()),
        pa.field("last_modified", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_QUOTED = re.compile(r'[Pp]ath "(.*?)"(?= contained|: Encountered|$)', re.DOTALL)
_EMPTY_SHA256 = hashlib.sha256().hexdigest()


def odd_key_problem(key: str) -> str | None:
    """Return why no request of obstore can name a key, or None if one can."""
    segments = key.split("/")
    found = {
        "has an empty part (//)": "" in segments,
        "has . or .. as a part": bool({".", ".."} & set(segments)),
        "has a control character": _CONTROL.search(key) is not None,
    }
    return next((problem for problem, holds in found.items() if holds), None)


def list_tables(store: Any, root: str, folder: str, chunk_size: int) -> Generator[pa.Table]:
    """List all objects below a folder of a bucket (`root`) as tables of `SCHEMA`.

    Paths are as obstore gives them, without a last slash, and odd keys as they are. Some objects may come twice, with
    the same path and ETag. Raises obstore's errors, OSError, or ObjectStoreError.
    """
    from obstore.exceptions import InvalidPathError

    last = ""
    try:
        for page in store.list(folder or None, chunk_size=chunk_size, return_arrow=True):
            table = pa.table(page).select(SCHEMA.names)
            last = table["path"][-1].as_py() if table.num_rows else last
            yield table
    except InvalidPathError as error:
        if not root.startswith("s3://"):
            raise _explain_odd_key(root, str(error)) from None
        # At the root, obstore takes a first slash away: `x` may have been `/x`, which is listed long before `x`.
        yield from _list_all(root, f"{folder}/" if folder else "", last if folder else "")


def list_folders(store: Any, folder: str) -> tuple[pa.Table, list[str]] | None:
    """List the objects directly in a folder, and its folders; None if an odd key is among them."""
    from obstore.exceptions import InvalidPathError

    try:
        found = store.list_with_delimiter(folder or None, return_arrow=True)
    except InvalidPathError:
        return None
    if "" in found["common_prefixes"]:  # of keys that begin with a slash: listed again, it would never end
        return None
    return pa.table(found["objects"]).select(SCHEMA.names), found["common_prefixes"]


def _explain_odd_key(root: str, text: str) -> ObjectStoreError:
    match = _QUOTED.search(text)
    key = f"'{printable(match[1])}'" if match else "with //, /./, /../ or a control character"
    return ObjectStoreError(
        "OddKey",
        f"{root}: the key {key} can't be listed here, nor what follows it; rename or delete that object, or copy the "
        "others to their own folder and name that as the source",
    )


def _list_all(root: str, prefix: str, after: str) -> Iterator[pa.Table]:
    bucket, connections = root.removeprefix("s3://"), Connections()
    query = {"encoding-type": "url", "list-type": "2", "max-keys": "1000", "prefix": prefix}
    query |= {"start-after": after} if after else {}
    signer = _Signer(bucket)
    try:
        while True:
            answer = _read_page(connections, signer, query, root)
            yield pa.Table.from_pylist(list(_rows(answer)), SCHEMA)
            token = answer.findtext("{*}NextContinuationToken")
            if answer.findtext("{*}IsTruncated") != "true":
                return
            if not token or token == query.get("continuation-token"):
                raise OSError("the server cut its list of keys off, and doesn't say how it continues")
            query.pop("start-after", None)
            query["continuation-token"] = token
    finally:
        connections.close()


def _rows(answer: ET.Element) -> Iterator[dict[str, Any]]:
    decode = unquote_plus if answer.findtext("{*}EncodingType") == "url" else str
    for each in answer.iterfind("{*}Contents"):
        key, size = decode(each.findtext("{*}Key", "")), int(each.findtext("{*}Size", "0"))
        path = key.removeprefix("/").removesuffix("/")
        if odd_key_problem(path):
            if key.endswith("/") and not size:
                continue  # the empty object by which consoles show a folder
            path = key
        moment = datetime.fromisoformat(each.findtext("{*}LastModified", ""))
        yield {"path": path, "size": size, "e_tag": each.findtext("{*}ETag"), "last_modified": moment}


def _read_page(connections: Connections, signer: "_Signer", query: dict[str, str], root: str) -> ET.Element:
    """Request one page, again if the server is busy; the errors' texts are those that `explain` reads."""
    for attempt in range(MAX_RETRIES + 1):
        url, headers = signer.sign(query)
        text, status = "", 0
        try:
            limits = Limits(TIMEOUT_S, time.monotonic() + TIMEOUT_S)
            with connections.ask("GET", parse_address(url), limits, headers, use_proxy=True) as response:
                text, status = response.read().decode("utf-8", "replace"), response.status
        except (OSError, HTTPException) as error:
            if attempt == MAX_RETRIES:
                raise OSError(str(error)) from None
        if status == 200:
            with suppress(ET.ParseError):
                return ET.fromstring(text)
            if "<ListBucketResult" not in text:
                raise OSError(f"status code 200 without a list of keys: {text[:1000]}")
            raise _explain_odd_key(root, "")  # the server writes control characters into XML
        if status and ((status < 500 and status != 429) or attempt == MAX_RETRIES):
            raise OSError(f"status code {status} {text[:1000]}")
        time.sleep(min(0.2 * 2**attempt, MAX_BACKOFF_S))
    raise AssertionError("unreachable")


class _Signer:
    """Requests to one bucket, with the endpoint, region and credentials that obstore would use."""

    def __init__(self, bucket: str) -> None:
        config, self._provider = profile_settings()
        self._region = _variable("REGION", "DEFAULT_REGION") or config.get("region") or "us-east-1"
        endpoint = _variable("ENDPOINT_URL_S3", "ENDPOINT_URL", "ENDPOINT") or config.get("endpoint")
        is_virtual = _variable("VIRTUAL_HOSTED_STYLE_REQUEST").lower() in ("true", "1")
        host = f"{bucket}.s3" if is_virtual else "s3"
        self._endpoint = (endpoint or f"https://{host}.{self._region}.amazonaws.com").rstrip("/")
        self._path = "/" if is_virtual else f"/{bucket}"
        self._extra = {"x-amz-request-payer": "requester"} if _variable("REQUEST_PAYER").lower() == "true" else {}

    def sign(self, query: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return the URL and the headers of a request, signed by AWS Signature Version 4 unless signing is off."""
        text = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
        address = parse_address(f"{self._endpoint}{self._path}?{text}")
        if _variable("SKIP_SIGNATURE").lower() in ("true", "1"):
            return address.url, self._extra
        key, secret, token = self._credentials()
        moment = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        headers = self._extra | {
            "host": address.url.split("/")[2],
            "x-amz-content-sha256": _EMPTY_SHA256,
            "x-amz-date": moment,
            **({"x-amz-security-token": token} if token else {}),
        }
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        path, _, sent_query = address.target.partition("?")
        request = f"GET\n{path}\n{sent_query}\n{lines}\n{names}\n{_EMPTY_SHA256}"
        scope = f"{moment[:8]}/{self._region}/s3/aws4_request"
        signing_key = f"AWS4{secret}".encode()
        for part in scope.split("/"):
            signing_key = hmac.digest(signing_key, part.encode(), "sha256")
        to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(signing_key, to_sign.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return address.url, headers

    def _credentials(self) -> tuple[str, str, str]:
        """Return key, secret and token: of the environment, a profile, or what botocore finds (roles)."""
        if _variable("ACCESS_KEY_ID"):
            return _variable("ACCESS_KEY_ID"), _variable("SECRET_ACCESS_KEY"), _variable("SESSION_TOKEN", "TOKEN")
        if self._provider is not None:
            found = self._provider()
            return found["access_key_id"], found["secret_access_key"], found["token"] or ""
        if importlib.util.find_spec("botocore") is None:
            raise ObjectStoreError(
                "NoCredentials",
                f"s3:/{self._path}: a key with //, /./, /../ or a control character can be listed only with "
                "credentials that are readable here: pip install 'embedder[s3]' reads those of roles; or rename it",
            )
        import botocore.session

        chain = botocore.session.Session().get_credentials()
        if chain is None:
            raise ObjectStoreError("NoCredentials", f"s3:/{self._path}: found no credentials to list it with")
        frozen = chain.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token or ""


def _variable(*names: str) -> str:
    return next(filter(None, (os.environ.get(f"AWS_{name}") for name in names)), "")
