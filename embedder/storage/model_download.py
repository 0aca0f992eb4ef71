"""From a model's name to a local folder: a path, a hub id, or an s3:// or gs:// URI that is downloaded once."""

import fcntl
import hashlib
import os
import re
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from embedder.storage.object_ranges import PIECE_BYTES, ObjectRanges
from embedder.storage.object_stores import ObjectStoreError, is_remote, named_errors, open_place, without_credentials
from shards.config import find_model_folder
from shards.errors import ModelError
from shards.saving import staged_folder

# Data only: no pickles, no code. The last three patterns are for checkpoints that `embedder model import` reads.
ALLOWED_FILES = ("*.safetensors", "*.json", "spiece.model", "vocab.txt", "merges.txt")

HUB_SCHEMES = ("hf://", "hf-hub:")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def resolve_model(uri: str | Path) -> Path:
    """Find a model folder, downloading it where it isn't local; those of object stores go to the user's cache folder.

    Args:
        uri: a local folder; `s3://` or `gs://` and a prefix; `org/name`, `hf://org/name` or `hf-hub:org/name` on the
            Hugging Face hub, with `@revision` if wanted.

    Returns:
        The local folder; its content is not checked.

    Raises:
        ModelError: there is no such folder, or it can't be downloaded.
    """
    text = str(uri)
    if is_remote(text):
        return _download_prefix(text)
    for scheme in HUB_SCHEMES:
        if text.startswith(scheme):
            return _download_hub(text.removeprefix(scheme))
    if text and Path(text).expanduser().exists():
        return find_model_folder(text)
    if isinstance(uri, str) and _HUB_ID.fullmatch(text) and not text.startswith("."):
        return _download_hub(text)
    raise ModelError(
        f"{without_credentials(text)!r}: there is no such folder; give a model folder, s3://, gs://, az://, or a hub "
        "id org/name"
    )


def _download_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, revision = hub_id.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(ALLOWED_FILES)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{hub_id}: there is no such folder here, and the Hugging Face hub gave none ({reason}); "
            "correct the path, or check the id and the network"
        ) from None


def _download_prefix(uri: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embedder" / "models"
    try:
        return download_model(open_place(uri), uri, cache)
    except ObjectStoreError as error:
        raise ModelError(f"model {error.message}") from None
    except OSError as error:
        raise ModelError(
            f"{uri}: can't be kept in {cache} ({error.strerror}); free space there, or set XDG_CACHE_HOME"
        ) from None


def download_model(store: Any, uri: str, cache: Path) -> Path:
    """Copy the allowed files at the root of an object store into the cache, once for each of their versions.

    Args:
        store: an obstore store, rooted at the model folder.
        uri: the user's name of it, for messages.
        cache: holds a folder for each downloaded version; processes wait for one another.

    Raises:
        ModelError: there are no files.
    """
    import obstore

    with named_errors(uri):
        found = obstore.list_with_delimiter(store)["objects"]
    objects = sorted((item for item in found if _is_allowed(item["path"])), key=lambda item: item["path"])
    if not objects:
        raise ModelError(f"{uri}: found no model files there; give the URI of the folder that holds config.json")
    versions = [(item["path"], item["size"], item["e_tag"]) for item in objects]
    folder = cache / hashlib.sha256(repr((uri, versions)).encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process dies
        if not folder.is_dir():
            with staged_folder(folder) as stage:
                for item in objects:
                    _download_object(store, uri, item, stage)
    return folder


def _download_object(store: Any, uri: str, item: Any, folder: Path) -> None:
    """Copy piece by piece, so that no request has to carry all of a large file in its time; of the listed version."""
    key = item["path"]
    ranges = ObjectRanges(store, key, partial(named_errors, f"{uri}/{key}"), meta=item)
    with (folder / Path(key).name).open("wb") as file:
        for start in range(0, ranges.size, PIECE_BYTES):
            file.write(ranges.read_at(start, PIECE_BYTES))


def _is_allowed(path: str) -> bool:
    return any(fnmatch(Path(path).name, pattern) for pattern in ALLOWED_FILES)
