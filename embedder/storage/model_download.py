"""From a model's name to a local folder: a path, a hub id, or an s3:// or gs:// URI that is downloaded once."""

import fcntl
import hashlib
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from embedder.storage.object_ranges import PIECE_BYTES, ObjectRanges
from embedder.storage.object_stores import ObjectStoreError, is_remote, named_errors, open_place, without_credentials
from shards.config import find_model_folder
from shards.errors import ModelError
from shards.saving import staged_folder

# Data only: no pickles, no code. Those of tokenisers (.txt, .model) are for what `embedder model import` reads.
ALLOWED_FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
# For a plan.
CONFIG_FILES = ("*.json",)
# Pickled weights, which that import turns into safetensors without running code.
PICKLED_FILES = ("*pytorch_model*.bin",)

HUB_SCHEMES = ("hf://", "hf-hub:", "hf:")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_NAMED_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


def resolve_model(uri: str | Path) -> Path:
    """Find a model folder, downloading it where it isn't local; those of object stores go to the user's cache folder.

    Args:
        uri: a local folder; `s3://` or `gs://` and a prefix; `org/name`, `hf:org/name`, `hf://org/name` or
            `hf-hub:org/name` on the Hugging Face hub, with `@revision` if wanted.

    Returns:
        The local folder; its content is not checked.

    Raises:
        ModelError: there is no such folder, or it can't be downloaded.
    """
    return _resolve(uri, ALLOWED_FILES)


def resolve_checkpoint(uri: str | Path, *, config_only: bool = False) -> Path:
    """Find the folder of a checkpoint as `resolve_model` does; with pickled weights where there are no safetensors.

    Args:
        uri: as for `resolve_model`.
        config_only: download its JSON files alone.

    Raises:
        ModelError: there is no such folder, or it can't be downloaded.
    """
    if config_only:
        return _resolve(uri, CONFIG_FILES)
    folder = resolve_model(uri)
    is_local = not is_remote(str(uri)) and _hub_id(uri) is None
    if is_local or any(folder.glob("*.safetensors")):
        return folder
    return _resolve(uri, ALLOWED_FILES + PICKLED_FILES)


def model_name(uri: str | Path) -> str:
    """Give the last part of a model's address, without a hub id's revision."""
    hub_id = _hub_id(uri)
    return Path(uri if hub_id is None else hub_id.partition("@")[0]).name


def _resolve(uri: str | Path, allowed: Sequence[str]) -> Path:
    text = str(uri)
    if is_remote(text):
        return _download_prefix(text, allowed)
    hub_id = _hub_id(uri)
    if hub_id is not None:
        return _download_hub(hub_id, allowed)
    if text and Path(text).expanduser().exists():
        return find_model_folder(text)
    raise ModelError(
        f"{without_credentials(text)!r}: there is no such folder; give a model folder, s3://, gs://, az://, or a hub "
        "id hf:org/name"
    )


def _hub_id(uri: str | Path) -> str | None:
    """Id on the hub, and revision; without a scheme only where no file or folder is called so."""
    text = str(uri)
    for scheme in HUB_SCHEMES:
        if text.startswith(scheme):
            return text.removeprefix(scheme)
    is_id = isinstance(uri, str) and _HUB_ID.fullmatch(text) and not Path(text).exists()
    return text if is_id else None


def _download_hub(hub_id: str, allowed: Sequence[str]) -> Path:
    """Find a snapshot in the hub's cache; what lacks there is downloaded, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    name, _, revision = hub_id.partition("@")
    if not _NAMED_HUB_ID.fullmatch(hub_id) or ".." in revision:
        raise ModelError(
            f"hf:{hub_id}: this is no id of the Hugging Face hub; give hf:org/name or hf:org/name@revision"
        )
    try:
        # Folders of a repository hold the same model for other programs.
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=[*allowed], ignore_patterns=["*/*"])
        )
    except (HTTPError, HFValidationError, OSError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub can't be reached"
            raise ModelError(
                f"hf:{hub_id}: there is no such folder here, {constants.HF_HUB_CACHE} holds no whole model of that id, "
                f"and {why}; correct the path or id, or run `hf download {name}` where there is a network"
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"hf:{hub_id}: there is no such folder here, and the Hugging Face hub gave none ({reason}); "
            "correct the path or id, or log in with `hf auth login` if the model is not public"
        ) from None


def _download_prefix(uri: str, allowed: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embedder" / "models"
    try:
        return download_model(open_place(uri), uri, cache, allowed)
    except ObjectStoreError as error:
        raise ModelError(f"model {error.message}") from None
    except OSError as error:
        raise ModelError(
            f"{uri}: can't be kept in {cache} ({error.strerror}); free space there, or set XDG_CACHE_HOME"
        ) from None


def download_model(store: Any, uri: str, cache: Path, allowed: Sequence[str] = ALLOWED_FILES) -> Path:
    """Copy the allowed files at the root of an object store into the cache, once for each of their versions.

    Args:
        store: an obstore store, rooted at the model folder.
        uri: the user's name of it, for messages.
        cache: holds a folder for each downloaded version; processes wait for one another.
        allowed: patterns of the names of the files.

    Raises:
        ModelError: there are no files.
    """
    import obstore

    with named_errors(uri):
        found = obstore.list_with_delimiter(store)["objects"]
    objects = sorted((item for item in found if _is_allowed(item["path"], allowed)), key=lambda item: item["path"])
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


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    return any(fnmatch(Path(path).name, pattern) for pattern in allowed)
