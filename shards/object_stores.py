"""Object stores (`s3://`, `gs://`, `az://`): whose URI it is, their clients, and what their errors mean.

Sources, model folders and stores all come through here. Credentials come from the usual places and never from a URI:
the variables of the environment, the profile files of `~/.aws`, web identity, the metadata of the instance. They
never reach a message.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from shards.aws_profiles import profile_settings

OBJECT_STORES = ("s3://", "gs://", "az://")

# Every request ends: after so many tries, or so long. Uploads and downloads go in pieces of 16 MB at most, which a line
# of 3 Mbit/s still carries in a minute.
CONNECT_TIMEOUT_S = 10
TIMEOUT_S = 60
MAX_RETRIES = 6
RETRY_TIMEOUT_S = 90
MAX_BACKOFF_S = 10

_BUCKET = re.compile(r"[A-Za-z0-9._-]*")
_STATUS = re.compile(r"status code\W*(\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]+)'|<Region>([a-z0-9-]+)</Region>")
_WRONG_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_TRANSIENT_STATUSES = (408, 409, 425, 429)  # too slow, at the same time as another, too early, too many
_METADATA_SERVICES = ("169.254.169.254", "/latest/api/token", "metadata.google.internal", "/metadata/identity")
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL)")


_DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
_TRANSIENT = ("Changed", "NetworkError")
_MESSAGES = {
    "NoBucket": "there is no such bucket; mend the name, or create it first",
    "FileNotFound": "there is no such object or bucket",
    "NoCredentials": "found no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the other clouds' "
    "variables), name a profile with AWS_PROFILE, or give the machine a role",
    "WrongRegion": "{regions}; set AWS_REGION to the bucket's region",
    "PermissionDenied": "access is denied ({answer}): the credentials in use may not do this; grant them the bucket, "
    "or use others",
    "Changed": "the object was replaced while it was read",
    "BadUri": "{words}",
    "RequestRefused": "the server refused the request ({answer})",
    "NetworkError": "{words}",
}


class ObjectStoreError(Exception):
    """A request failed, or an address is none.

    Attributes:
        kind: `FileNotFound`, `NoBucket`, `PermissionDenied`, `NoCredentials`, `WrongRegion`, `Changed`, `BadUri`,
            `RequestRefused` or `NetworkError`.
        message: one line: where, what was found, the rule or the cure; without any secret.
        transient: whether the same request may succeed later.
    """

    def __init__(self, kind: str, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.kind, self.message, self.transient = kind, message, transient


def is_remote(path: str) -> bool:
    """Whether the path lies in an object store."""
    return path.startswith(OBJECT_STORES)


def split_place(uri: str) -> tuple[str, str]:
    """Split `s3://bucket/a/b` into the bucket's root, `s3://bucket`, and the key below it.

    Raises:
        ObjectStoreError: no bucket is named, or there are credentials in the URI (which is then not quoted).
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ObjectStoreError(
            "BadUri",
            f"{scheme}://...: where the bucket is due, there is more than letters, digits, '.', '_' and '-'; "
            "credentials never stand in a URI; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile "
            "with AWS_PROFILE",
        )
    if not bucket:
        raise ObjectStoreError("BadUri", f"{uri}: the bucket is missing; write {scheme}://bucket/path")
    return f"{scheme}://{bucket}", key.strip("/")


def without_credentials(uri: str) -> str:
    """A URI as messages and tables may hold it: without `key:secret@`, and without a query such as signed ones have.

    Paths in buckets stand as they are; only what comes before the bucket is taken out there.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    authority = rest.partition("/")[0]
    if "@" in authority or (":" in authority and "@" in rest):  # a secret may hold slashes
        rest = "***@" + rest.rpartition("@")[2]
    if not is_remote(uri):
        rest = rest.partition("?")[0]
    return f"{scheme}{mark}{rest}"


def open_place(uri: str) -> Any:
    """Make a client rooted at a folder of a bucket.

    Raises:
        ObjectStoreError: the URI is none.
    """
    root, key = split_place(uri)
    return bucket_store(f"{root}/{key}".rstrip("/"))


@functools.lru_cache(maxsize=32)
def bucket_store(root: str) -> Any:
    """Make the client of one bucket or of a folder in it (`s3://bucket`), once a process."""
    from obstore.store import from_url

    settings: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=TIMEOUT_S),
            "allow_http": plain_endpoint(),
        },
        "retry_config": {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
            "backoff": {"max_backoff": timedelta(seconds=MAX_BACKOFF_S)},
        },
    }
    if root.startswith("s3://"):
        settings["config"], provider = profile_settings()
        if provider is not None:
            settings["credential_provider"] = provider
    with named_errors(root):
        return from_url(root, **settings)


def storage_options(uri: str) -> dict[str, str]:
    """The same client for deltalake; empty for a local path.

    It reads the environment and the metadata of the instance itself, and is given the keys of a profile, which it does
    not find (deltalake 1.6.6): never log what comes back.
    """
    if not is_remote(uri):
        return {}
    options = {
        "timeout": f"{TIMEOUT_S}s",
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "max_retries": str(MAX_RETRIES),
        "retry_timeout": f"{RETRY_TIMEOUT_S}s",
        "allow_http": str(plain_endpoint()).lower(),
    }
    if uri.startswith("s3://"):
        options["aws_conditional_put"] = "etag"
        settings, provider = profile_settings()
        if provider is not None:
            found = provider()
            settings |= {name: found[name] for name in ("access_key_id", "secret_access_key")}
            settings |= {"session_token": found["token"]} if found["token"] else {}
        options |= {f"aws_{name}": value for name, value in settings.items()}
    return options


def plain_endpoint() -> bool:
    """Whether an S3 endpoint without TLS is named; who does that means it (MinIO on this machine)."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return (named or profile_settings()[0].get("endpoint", "")).startswith("http://")


@contextmanager
def named_errors(place: str) -> Iterator[None]:
    """Turn what obstore raises into an ObjectStoreError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise explain(error, place) from None


def explain(error: Exception, place: str) -> ObjectStoreError:
    """Say what an error of obstore, or of another client of the same library, means.

    Args:
        error: any; what it quotes of the server's answer is read, and only its code is quoted again.
        place: the URI that was asked for.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    kind = type(error).__name__
    found = {
        "NoBucket": code == "NoSuchBucket",
        "FileNotFound": isinstance(error, FileNotFoundError) or status == 404,
        "NoCredentials": any(service in text for service in _METADATA_SERVICES),
        "WrongRegion": code in _WRONG_REGION_CODES or "configured region" in text,
        "PermissionDenied": status in (401, 403) or kind in _DENIED,
        "Changed": status == 412 or kind == "PreconditionError",
        "BadUri": kind == "InvalidPathError" or (isinstance(error, ValueError) and not status),
        "RequestRefused": 400 <= status < 500 and status not in _TRANSIENT_STATUSES,
        "NetworkError": True,
    }
    name = next(each for each, holds in found.items() if holds)
    facts = {"answer": f"{status} {code}".strip(), "words": _one_line(text), "regions": _regions(text)}
    return ObjectStoreError(name, f"{place}: {_MESSAGES[name].format(**facts)}", transient=name in _TRANSIENT)


def _regions(text: str) -> str:
    used = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    match = _EXPECTED_REGION.search(text)
    return f"asked for in {used}, and it is " + (f"in {match[1] or match[2]}" if match else "elsewhere")


def _one_line(text: str) -> str:
    """An error's own words, without the server's answer and without any secret."""
    text = re.split(r"<|Debug source", text, maxsplit=1)[0]
    text = re.sub(r"//[^/\s@]+@", "//***@", " ".join(text.replace("↳", "").split()))
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.fullmatch(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return text[:300].rstrip(" :-") or "unknown error"
