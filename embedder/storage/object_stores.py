"""Object stores (`s3://`, `gs://`, `az://`): addresses, clients, and explanations of their errors.

Sources, model folders and stores all use these clients. Credentials come from the usual places and never from a URI:
environment variables, profiles in `~/.aws` (read by boto3, the extra `s3`), web identity, instance metadata. They never
appear in a message.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from embedder.storage.user_cache import home_folder

OBJECT_STORES = ("s3://", "gs://", "az://")

# Every request ends after a number of tries or a time. Uploads and downloads use pieces of at most 16 MB, which a line
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
_TRANSIENT_STATUSES = (408, 409, 425, 429)  # too slow, concurrent, too early, too many
_METADATA_SERVICES = ("169.254.169.254", "/latest/api/token", "metadata.google.internal", "/metadata/identity")
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL)")

_PROFILE_FILES = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
_GIVES_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
_TRANSIENT = ("Changed", "NetworkError")
_MESSAGES = {
    "NoBucket": "there is no such bucket; correct the name, or create it first",
    "FileNotFound": "there is no such object or bucket",
    "NoCredentials": "found no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the other clouds' "
    "variables), name a profile with AWS_PROFILE (pip install 'embedder[s3]' reads it), or give the machine a role",
    "WrongRegion": "{regions}; set AWS_REGION to the bucket's region",
    "PermissionDenied": "access is denied ({answer}): the credentials in use may not do this; grant them the bucket, "
    "or use others",
    "Changed": "the object was replaced while it was read",
    "BadUri": "{words}",
    "RequestRefused": "the server refused the request ({answer})",
    "NetworkError": "{words}",
}


class ObjectStoreError(Exception):
    """A request failed, or an address is invalid.

    Attributes:
        kind: `FileNotFound`, `NoBucket`, `PermissionDenied`, `NoCredentials`, `WrongRegion`, `Changed`, `BadUri`,
            `OddKey`, `RequestRefused` or `NetworkError`.
        message: one line without secrets: the place, the finding, the rule or the remedy.
        transient: whether the same request may succeed later.
    """

    def __init__(self, kind: str, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.kind, self.message, self.transient = kind, message, transient


def is_remote(path: str) -> bool:
    """Return whether the path is in an object store."""
    return path.startswith(OBJECT_STORES)


def split_place(uri: str) -> tuple[str, str]:
    """Split `s3://bucket/a/b` into the bucket's root, `s3://bucket`, and the key below it.

    Raises ObjectStoreError if no bucket is named, or the URI (then not quoted) contains credentials.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ObjectStoreError(
            "BadUri",
            f"{scheme}://...: the bucket's name holds more than letters, digits, '.', '_' and '-'; "
            "credentials never stand in a URI; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile "
            "with AWS_PROFILE",
        )
    if not bucket:
        raise ObjectStoreError("BadUri", f"{uri}: the bucket is missing; write {scheme}://bucket/path")
    return f"{scheme}://{bucket}", key.strip("/")


def without_credentials(uri: str) -> str:
    """Strip `key:secret@` and the query (signed URIs carry secrets there) from a URI, for messages and tables.

    Of a bucket URI only the part before the bucket is stripped; its path stays as it is.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    authority = rest.partition("/")[0]
    if "@" in authority or (":" in authority and "@" in rest):  # a secret may contain slashes
        rest = "***@" + rest.rpartition("@")[2]
    if not is_remote(uri):
        rest = rest.partition("?")[0]
    return f"{scheme}{mark}{rest}"


def open_place(uri: str, within_s: float | None = None) -> Any:
    """Make a client rooted at a folder of a bucket.

    The client gives up each request after `within_s` seconds, all tries together; by default it takes its time. Raises
    ObjectStoreError if the URI is invalid or the chosen AWS profile can't be used.
    """
    root, key = split_place(uri)
    return bucket_store(f"{root}/{key}".rstrip("/"), within_s)


@functools.lru_cache(maxsize=32)
def bucket_store(root: str, within_s: float | None = None) -> Any:
    """Make the client of a bucket or of a folder in it (`s3://bucket`), once per process.

    A request is retried while less than `retry_timeout` has passed, so the last try may end `timeout` later.
    """
    from obstore.store import from_url

    timeout_s, retry_timeout_s = (TIMEOUT_S, RETRY_TIMEOUT_S) if within_s is None else (within_s / 2, within_s / 3)
    config, provider = profile_settings() if root.startswith("s3://") else ({}, None)
    settings: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s),
            "allow_http": _is_plain_endpoint(config),
        },
        "retry_config": {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retry_timeout_s),
            "backoff": {"max_backoff": timedelta(seconds=min(MAX_BACKOFF_S, timeout_s))},
        },
    }
    if root.startswith("s3://"):
        settings["config"] = config
    if provider is not None:
        settings["credential_provider"] = provider
    with named_errors(root):
        return from_url(root, **settings)


def storage_options(uri: str) -> dict[str, str]:
    """Return the options of the same client for deltalake; empty for a local path.

    deltalake reads the environment and instance metadata but no profiles (1.6.6), so the options include a profile's
    keys: never log them. Raises ObjectStoreError if the chosen AWS profile can't be used.
    """
    if not is_remote(uri):
        return {}
    config, provider = profile_settings() if uri.startswith("s3://") else ({}, None)
    options = {
        "timeout": f"{TIMEOUT_S}s",
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "max_retries": str(MAX_RETRIES),
        "retry_timeout": f"{RETRY_TIMEOUT_S}s",
        "allow_http": str(_is_plain_endpoint(config)).lower(),
    }
    if uri.startswith("s3://"):
        options["aws_conditional_put"] = "etag"
        if provider is not None:
            with _profile_errors():
                found = provider()
            config |= {name: found[name] for name in ("access_key_id", "secret_access_key")}
            config |= {"session_token": found["token"]} if found["token"] else {}
        options |= {f"aws_{name}": value for name, value in config.items()}
    return options


def _is_plain_endpoint(config: Mapping[str, str]) -> bool:
    """Return whether the user chose an S3 endpoint without TLS, such as MinIO on this machine."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return (named or config.get("endpoint", "")).startswith("http://")


def profile_settings() -> tuple[dict[str, str], Any]:
    """Read the chosen profile of `~/.aws` (`AWS_PROFILE`, else `default`), since clients read only the environment.

    Returns settings for obstore's S3 client, and a credential provider or None; environment variables take precedence.
    Raises ObjectStoreError if the profile can't be used, or is named while boto3 is not installed.
    """
    is_named = bool(os.environ.get("AWS_PROFILE"))
    folder = home_folder() / ".aws"
    files = tuple(Path(os.environ.get(name) or folder / file).expanduser() for name, file in _PROFILE_FILES.items())
    if not is_named and not any(file.is_file() for file in files):
        return {}, None
    if importlib.util.find_spec("boto3") is None:
        if is_named:
            raise ObjectStoreError(
                "NoCredentials",
                "AWS_PROFILE names a profile, and boto3, which reads profiles, is not installed; "
                "pip install 'embedder[s3]', or unset AWS_PROFILE and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        return {}, None
    has_credentials = any(name in os.environ for name in _GIVES_CREDENTIALS)
    try:
        with _profile_errors():
            session = _session(os.environ.get("AWS_PROFILE") or None, files)
            profile = session.get_scoped_config() if session else {}
            provider = None if session is None or has_credentials else _provider(session)
    except ObjectStoreError:
        if has_credentials:
            return {}, None
        raise
    settings = {}
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        settings["region"] = profile["region"]
    if "endpoint_url" in profile and not {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys():
        settings["endpoint"] = profile["endpoint_url"]
    return settings, provider


@functools.lru_cache(maxsize=8)
def _session(name: str | None, files: tuple[Path, ...]) -> Any:
    """Make botocore's session once per process, so that all clients share one single sign-on or assumed role.

    No name means `default`; if that doesn't exist, the session is None. `files`, which botocore reads, are part of the
    cache key.
    """
    import botocore.session

    session = botocore.session.Session(profile=name or "default")
    if name is None and "default" not in session.available_profiles:
        return None
    session.get_component("credential_provider").remove("iam-role")  # obstore and deltalake ask the instance themselves
    return session


def _provider(session: Any) -> Any:
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(session) if session.get_credentials() else None


@contextmanager
def _profile_errors() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except BotoCoreError as error:
        raise ObjectStoreError(
            "NoCredentials",
            f"the AWS profile can't be used: {_one_line(str(error))}; correct AWS_PROFILE or the files of ~/.aws, or "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None


@contextmanager
def named_errors(place: str) -> Iterator[None]:
    """Turn obstore errors into ObjectStoreError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise explain(error, place) from None


def explain(error: Exception, place: str) -> ObjectStoreError:
    """Explain an error of an obstore-like client at `place`, quoting only the code of the server's answer."""
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
    """Shorten an error's own text to one line, without the server's answer and without secrets."""
    text = re.split(r"<|Debug source", text, maxsplit=1)[0]
    text = re.sub(r"//[^/\s@]+@", "//***@", " ".join(text.replace("↳", "").split()))
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.fullmatch(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return text[:300].rstrip(" :-") or "unknown error"
