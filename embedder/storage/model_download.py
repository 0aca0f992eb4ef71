"""Resolves a model's name to a local folder: a path, a hub id, or an s3:// or gs:// URI that is downloaded once."""

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from embedder.storage.atomic_write import atomic_write
from embedder.storage.object_ranges import PIECE_BYTES, ObjectRanges, join_ranges
from embedder.storage.object_stores import ObjectStoreError, is_remote, named_errors, open_place, without_credentials
from embedder.storage.user_cache import cache_folder
from shards.model_config import CONFIG_FILE, find_model_folder, load_model_config
from shards.model_errors import ModelError
from shards.model_settings import ModelSettings, apply_settings, split_address
from shards.saving import staged_folder
from shards.shard_specs import ShardSpec, whole_model
from shards.tensor_shapes import shard_shapes
from shards.weights import MAX_HEADER_BYTES, WEIGHTS_FILE, WEIGHTS_INDEX_FILE, read_header, read_index

# Data only: no pickles, no code. Tokeniser files (.txt, .model) are for `embedder model import`.
ALLOWED_FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
# With them are fetched the templates of chats, which say what stands around an item of a decoder with eyes.
FETCHED_FILES = (*ALLOWED_FILES, "*.jinja")
# For a plan.
CONFIG_FILES = ("*.json", "*.jinja")
# Pickled weights, which `embedder model import` turns into safetensors without running code.
PICKLED_FILES = ("*pytorch_model*.bin",)
# Files that say which weights a shard needs.
SHARD_FILES = (CONFIG_FILE, WEIGHTS_INDEX_FILE)

HELD_FILE = "held_tensors.json"  # names of the tensors that a file of weights holds so far; the rest of it is zeros
HEADER_BYTES = 1 << 20  # size of the first request for such a file; most headers fit
GAP_BYTES = 256 << 10  # gap between two needed tensors that is fetched along, which is cheaper than a request

HUB_SCHEMES = ("hf://", "hf-hub:", "hf:")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_NAMED_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


def resolve_model(uri: str | Path, shard: ShardSpec | None = None) -> Path:
    """Return a model's local folder; download it if necessary, from object stores to the user's cache folder.

    Args:
        uri: a local folder; `s3://` or `gs://` and a prefix; `org/name`, `hf:org/name`, `hf://org/name` or
            `hf-hub:org/name` on the Hugging Face hub, with `@revision` if wanted; `#` and settings behind any of them
            (`shards.model_settings`).
        shard: download only the configuration and what these layers need: from a bucket their tensors, from the hub
            the files that hold them.

    Returns:
        The local folder, with settings one next to it in the user's cache; its content is not checked.

    Raises:
        ModelError: there is no such folder, it can't be downloaded, or it doesn't allow the settings.
    """
    place, settings = split_address(uri) if isinstance(uri, str) else (uri, ModelSettings())
    folder = _resolve(place, FETCHED_FILES, shard)
    return folder if not settings.changes_vectors else _with_settings(folder, settings)


def _with_settings(folder: Path, settings: ModelSettings) -> Path:
    """Return a folder in the cache with the configuration that settings give, and links to a model's other files."""
    folder, cache = folder.absolute(), cache_folder("models")
    text = apply_settings(load_model_config(folder), settings, folder).to_json()
    derived = cache / f"set-{hashlib.sha256(repr((str(folder), text)).encode()).hexdigest()[:16]}"
    try:
        with _lock(cache, derived.name):
            derived.mkdir(exist_ok=True)
            for path in folder.iterdir():  # of a shard's parts, some are fetched later
                link = derived / path.name
                if path.is_file() and path.name != CONFIG_FILE and not link.is_symlink():
                    link.symlink_to(path)
            with atomic_write(derived / CONFIG_FILE) as file:
                file.write(text.encode())
    except OSError as error:
        raise ModelError(
            f"{folder}: its settings can't be kept in {cache} ({error.strerror}); free space, or set XDG_CACHE_HOME"
        ) from None
    return derived


def resolve_checkpoint(uri: str | Path, *, config_only: bool = False) -> Path:
    """Return a checkpoint's folder as `resolve_model` does, with pickled weights if there are no safetensors.

    `config_only` downloads only its JSON files. Raises ModelError if there is no such folder, or it can't be
    downloaded.
    """
    if config_only:
        return _resolve(uri, CONFIG_FILES)
    folder, hub_id = resolve_model(uri), _hub_id(uri)
    if not is_remote(str(uri)) and hub_id is None:
        return folder
    if not any(folder.glob("*.safetensors")):
        folder = _resolve(uri, FETCHED_FILES + PICKLED_FILES)
    if hub_id is not None:
        _download_hub_modules(hub_id, folder)
    return folder


def model_name(uri: str | Path) -> str:
    """Return the last part of a model's address, without a hub id's revision."""
    hub_id = _hub_id(uri)
    return Path(uri if hub_id is None else hub_id.partition("@")[0]).name


def _resolve(uri: str | Path, allowed: Sequence[str], shard: ShardSpec | None = None) -> Path:
    text = str(uri)
    if is_remote(text):
        return _download_prefix(text, allowed, shard)
    hub_id = _hub_id(uri)
    if hub_id is not None:
        return _download_hub(hub_id, allowed) if shard is None else _download_hub_shard(hub_id, shard)
    if text and Path(text).expanduser().exists():
        return find_model_folder(text)
    raise ModelError(
        f"{without_credentials(text)!r}: there is no such folder; give a model folder, s3://, gs://, az://, or a hub "
        "id hf:org/name"
    )


def _hub_id(uri: str | Path) -> str | None:
    """Return hub id and revision; without a scheme only if no file or folder has that name."""
    text = str(uri)
    for scheme in HUB_SCHEMES:
        if text.startswith(scheme):
            return text.removeprefix(scheme)
    is_id = isinstance(uri, str) and _HUB_ID.fullmatch(text) and not Path(text).exists()
    return text if is_id else None


def _download_hub_modules(hub_id: str, folder: Path) -> None:
    """Download the folders that sentence-transformers' modules.json names into a snapshot; pickles where it is all."""
    snapshot = f"{hub_id.partition('@')[0]}@{folder.name}"
    from shards.convert.sentence_transformers import module_folders

    for each in module_folders(folder):
        for patterns in (ALLOWED_FILES, PICKLED_FILES):
            if not any((folder / each).glob("*.safetensors")):
                _download_hub(snapshot, [f"{each}/{pattern}" for pattern in patterns], ignored=())


def _download_hub(hub_id: str, allowed: Sequence[str], ignored: Sequence[str] = ("*/*",)) -> Path:
    """Return a snapshot in the hub's cache; download what is missing, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    name, _, revision = hub_id.partition("@")
    if not _NAMED_HUB_ID.fullmatch(hub_id) or ".." in revision:
        raise ModelError(
            f"hf:{hub_id}: this is no id of the Hugging Face hub; give hf:org/name or hf:org/name@revision"
        )
    try:
        # Subfolders of a repository hold the same model for other programs.
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=[*allowed], ignore_patterns=[*ignored])
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


def _download_hub_shard(hub_id: str, shard: ShardSpec) -> Path:
    folder = _download_hub(hub_id, SHARD_FILES)
    weights = [WEIGHTS_FILE]
    if (folder / WEIGHTS_INDEX_FILE).is_file():
        weights = _needed_files(folder, shard_shapes(load_model_config(folder), shard))
    # A snapshot is named after its commit; a branch may have moved.
    return _download_hub(f"{hub_id.partition('@')[0]}@{folder.name}", [*SHARD_FILES, *weights])


def _download_prefix(uri: str, allowed: Sequence[str], shard: ShardSpec | None) -> Path:
    cache = cache_folder("models")
    try:
        if shard is not None:
            return download_shard(open_place(uri), uri, cache, shard)
        return download_model(open_place(uri), uri, cache, allowed)
    except ObjectStoreError as error:
        raise ModelError(f"model {error.message}") from None
    except OSError as error:
        raise ModelError(
            f"{uri}: can't be kept in {cache} ({error.strerror}); free space there, or set XDG_CACHE_HOME"
        ) from None


def download_model(store: Any, uri: str, cache: Path, allowed: Sequence[str] = ALLOWED_FILES) -> Path:
    """Copy the allowed files at the root of an object store, and of sentence-transformers' modules below it, once.

    `store` is an obstore store rooted at the model folder, which messages call `uri`. `cache` has a folder for each
    downloaded version; processes wait for each other. Raises ModelError if there are no files.
    """
    objects = _list_objects(store, uri, allowed)
    objects += _list_modules(store, uri, objects)
    folder = cache / _version_name(uri, objects)
    with _lock(cache, folder.name):
        if not folder.is_dir():
            with staged_folder(folder) as stage:
                for item in objects:
                    _download_object(store, uri, item, stage)
    return folder


def download_shard(store: Any, uri: str, cache: Path, shard: ShardSpec) -> Path:
    """Copy what a shard needs of a model into the cache, next to what other shards needed; each tensor or file once.

    The copy has its own folder, as a model without all weights must not pass for a whole one. If a whole one is there,
    or all is needed, that is used. `store`, `uri` and `cache` are as in `download_model`. Raises ModelError if there
    are no files, or those that say what the shard needs are broken.
    """
    objects = _list_objects(store, uri, ALLOWED_FILES)
    whole = cache / _version_name(uri, objects)
    folder = whole.with_name(f"{whole.name}-parts")
    by_name = {Path(item["path"]).name: item for item in objects}
    if whole.is_dir():
        return whole
    with _lock(cache, folder.name):
        folder.mkdir(exist_ok=True)
        _download_missing(store, uri, [by_name[name] for name in SHARD_FILES if name in by_name], folder)
        config = load_model_config(folder)
        needs_all = shard == whole_model(config)
        if not needs_all:
            names = shard_shapes(config, shard)
            if WEIGHTS_FILE in by_name:
                _download_tensors(store, uri, by_name[WEIGHTS_FILE], folder, names)
            elif WEIGHTS_INDEX_FILE in by_name:
                needed = _needed_files(folder, names)
                _download_missing(store, uri, [by_name[name] for name in needed if name in by_name], folder)
    return download_model(store, uri, cache) if needs_all else folder


def _list_objects(store: Any, uri: str, allowed: Sequence[str]) -> list[Any]:
    import obstore

    with named_errors(uri):
        found = obstore.list_with_delimiter(store)["objects"]
    objects = sorted((item for item in found if _is_allowed(item["path"], allowed)), key=lambda item: item["path"])
    if not objects:
        raise ModelError(f"{uri}: found no model files there; give the URI of the folder that holds config.json")
    return objects


def _list_modules(store: Any, uri: str, objects: Sequence[Any]) -> list[Any]:
    import obstore

    from shards.convert.sentence_transformers import MODULES_FILE, module_folders

    listing = [item for item in objects if item["path"] == MODULES_FILE]
    if not listing:
        return []
    with tempfile.TemporaryDirectory() as stage:
        _download_object(store, uri, listing[0], Path(stage))
        folders = module_folders(Path(stage))
    found: list[Any] = []
    for each in folders:
        with named_errors(uri):
            items = obstore.list_with_delimiter(store, each)["objects"]
        is_safe = any(item["path"].endswith(".safetensors") for item in items)
        allowed = ALLOWED_FILES if is_safe else ALLOWED_FILES + PICKLED_FILES
        found += [item for item in items if _is_allowed(item["path"], allowed)]
    return sorted(found, key=lambda item: item["path"])


def _version_name(uri: str, objects: Iterable[Any]) -> str:
    versions = [(item["path"], item["size"], item["e_tag"]) for item in objects]
    return hashlib.sha256(repr((uri, versions)).encode()).hexdigest()[:16]


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """Keep other processes of this machine from writing the same folder; the kernel unlocks when the process dies."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _needed_files(folder: Path, names: Collection[str]) -> list[str]:
    files = read_index(folder / WEIGHTS_INDEX_FILE, "safetensors")
    return sorted({files[name] for name in names if name in files})


def _download_missing(store: Any, uri: str, objects: Iterable[Any], folder: Path) -> None:
    for item in objects:
        if not (folder / Path(item["path"]).name).exists():
            _download_object(store, uri, item, folder)


def _download_object(store: Any, uri: str, item: Any, folder: Path) -> None:
    ranges = _open_ranges(store, uri, item)
    (folder / item["path"]).parent.mkdir(exist_ok=True)
    with atomic_write(folder / item["path"]) as file:
        _copy_range(ranges, file, 0, ranges.size)


def _download_tensors(store: Any, uri: str, item: Any, folder: Path, names: Collection[str]) -> None:
    """Fill in the needed tensors that are missing; the file has its full length, with holes for other tensors."""
    path, held_path = folder / Path(item["path"]).name, folder / HELD_FILE
    ranges = _open_ranges(store, uri, item)
    if not path.exists():
        _download_header(ranges, path)
    held = set(json.loads(held_path.read_text(encoding="utf-8"))) if held_path.exists() else set()
    header = read_header(path)
    missing = sorted(header.keys() & set(names) - held)
    if not missing:
        return
    with path.open("r+b") as file:
        for start, stop in join_ranges(((header[name].start, header[name].stop) for name in missing), GAP_BYTES):
            file.seek(start)
            _copy_range(ranges, file, start, stop)
        file.flush()
        os.fsync(file.fileno())  # otherwise a crash could leave zeros that count as held
    with atomic_write(held_path) as file:
        file.write(json.dumps(sorted(held.union(missing))).encode())


def _download_header(ranges: ObjectRanges, path: Path) -> None:
    """Create a file of the object's length with its safetensors header, which says where the tensors are."""
    head = ranges.read_at(0, HEADER_BYTES)
    stop = 8 + int.from_bytes(head[:8], "little")
    with atomic_write(path) as file:
        file.write(head)
        if stop <= MAX_HEADER_BYTES:  # `read_header` refuses a longer one
            _copy_range(ranges, file, len(head), stop)
        file.truncate(ranges.size)


def _open_ranges(store: Any, uri: str, item: Any) -> ObjectRanges:
    key = item["path"]
    return ObjectRanges(store, key, partial(named_errors, f"{uri}/{key}"), meta=item)


def _copy_range(ranges: ObjectRanges, file: BinaryIO, start: int, stop: int) -> None:
    """Copy piece by piece, so that no request has to carry a large file within its time."""
    for offset in range(start, min(stop, ranges.size), PIECE_BYTES):
        file.write(ranges.read_at(offset, min(PIECE_BYTES, stop - offset)))


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    return any(fnmatch(Path(path).name, pattern) for pattern in allowed)
