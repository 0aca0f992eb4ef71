"""Query towers in a store: the model's towers as ONNX files, so that a search needs neither torch nor the model folder.

They are stored under `query_towers/MODEL/PREPROCESS/`, by the two fingerprints that bind a store's vectors, and never
change. The manifest, written last, has the size and hash of each file. From a bucket, files are fetched at first use
into a local folder named after the manifest's hash.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from embedder.errors import StoreError
from embedder.quantities import plural
from embedder.storage.user_cache import cache_folder, drop_folders, mark_used
from embedder.store.backends import FileInfo, manifests_first
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store.tables.models import MODELS_FOLDER

TOWERS_FOLDER = "query_towers"
MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
MAX_KEPT_COPIES = 4

_TOWER_FILE = re.compile(rf"{TOWERS_FOLDER}/(?P<model>[^/]+)/(?P<preprocess>[^/]+)/.+")
_OF_MODEL = re.compile(rf"^{MODELS_FOLDER}/[^/]+/")


class TowerFile(BaseModel):
    """Size and hash of one file."""

    model_config = ConfigDict(frozen=True)

    sha256: str
    size_bytes: int


class TowersManifest(BaseModel):
    """`manifest.json` of query towers; written last, so that all files exist if it does."""

    model_config = ConfigDict(extra="allow", frozen=True)

    format_version: int = FORMAT_VERSION
    model_fingerprint: str
    preprocess_fingerprint: str
    files: dict[str, TowerFile]


@dataclass(frozen=True)
class QueryTowers:
    """Query towers of a model in a store; a file is checked when its path is requested."""

    files: StoreFiles
    info: StoreInfo
    manifest: TowersManifest
    manifest_sha256: str

    @cached_property
    def folder(self) -> Path:
        """Local folder that holds the files, or will hold them."""
        if self.files.folder is not None:
            return self.files.folder / towers_path(self.info)
        return cache_folder(TOWERS_FOLDER) / self.manifest_sha256[:32]

    def path(self, name: str) -> Path:
        """Return the path of a file, fetched if necessary; StoreError if it is missing or its hash is wrong."""
        expected, path = self.manifest.files[name], self.folder / name
        if _is_whole(path, expected):
            if self.files.folder is None:  # readers never write to a store
                mark_used(self.folder)
            return path
        uri = self.files.uri(f"{towers_path(self.info)}/{name}")
        if self.files.folder is None:
            fetched = path.with_name(f".{name}-{secrets.token_hex(4)}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files.download(f"{towers_path(self.info)}/{name}", fetched)
                if _is_whole(fetched, expected):
                    fetched.replace(path)
                    return path
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(
                    f"{self.folder}: no copy of {uri} can be kept there ({error.strerror or error}); make room, or "
                    "name another cache with XDG_CACHE_HOME"
                ) from None
            finally:
                with suppress(OSError):
                    fetched.unlink()
        raise StoreError(
            f"{uri}: it is missing, or not of the {plural(expected.size_bytes, 'byte')} and hash that the manifest "
            f"next to it names; write it again with `embedder export-query-towers --force {self.files.option}`"
        )


def towers_path(info: StoreInfo) -> str:
    """Return the folder of the query towers for a model's vectors, relative to the store."""
    return f"{TOWERS_FOLDER}/{info.model_fingerprint}/{info.preprocess_fingerprint}"


def has_towers(files: StoreFiles, info: StoreInfo) -> bool:
    """Return whether a store has query towers for a model's vectors, in a format that this version reads."""
    return find_towers(files, info) is not None


def find_towers(files: StoreFiles, info: StoreInfo) -> QueryTowers | None:
    """Return the query towers for a model's vectors; None if there are none that this version reads."""
    try:
        content = files.read(f"{towers_path(info)}/{MANIFEST_FILE}")
    except FileNotFoundError:
        return None
    manifest = _parse(content)
    return None if manifest is None else QueryTowers(files, info, manifest, hashlib.sha256(content).hexdigest())


def _parse(content: bytes) -> TowersManifest | None:
    try:
        manifest = TowersManifest.model_validate_json(content)
    except ValidationError:
        return None
    return manifest if manifest.format_version == FORMAT_VERSION else None


def write_manifest(folder: Path, info: StoreInfo) -> None:
    """Write the manifest of all files of a folder, as the last file."""
    manifest = TowersManifest(
        model_fingerprint=info.model_fingerprint,
        preprocess_fingerprint=info.preprocess_fingerprint,
        files={path.name: _describe(path) for path in sorted(folder.iterdir()) if path.is_file()},
    )
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def upload_towers(files: StoreFiles, info: StoreInfo, folder: Path) -> None:
    """Copy a local folder with a manifest into the store for the model in `info`, the manifest last."""
    manifest = _parse((folder / MANIFEST_FILE).read_bytes())
    for name in (*(manifest.files if manifest else ()), MANIFEST_FILE):
        files.confirm_lease()
        files.upload(folder / name, f"{towers_path(info)}/{name}")


def cached_folder(info: StoreInfo) -> Path | None:
    """Return the local folder that holds all files of a model's query towers, made or fetched before, or None."""
    for path in cache_folder(TOWERS_FOLDER).glob(f"*/{MANIFEST_FILE}"):
        manifest = _parse(path.read_bytes())
        if manifest is None or (manifest.model_fingerprint, manifest.preprocess_fingerprint) != (
            info.model_fingerprint,
            info.preprocess_fingerprint,
        ):
            continue
        if all(_is_whole(path.parent / name, expected) for name, expected in manifest.files.items()):
            mark_used(path.parent)
            return path.parent
    return None


def keep_in_cache(folder: Path) -> Path:
    """Move a folder with a manifest into this machine's cache, named after the manifest's hash."""
    kept = cache_folder(TOWERS_FOLDER) / hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()[:32]
    if kept.is_dir():  # fetched in parts
        shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(kept)
    drop_folders(TOWERS_FOLDER, MAX_KEPT_COPIES)
    return kept


def unneeded_towers(files: StoreFiles, infos: Collection[StoreInfo]) -> list[FileInfo]:
    """List the files of query towers for none of the models, manifests first, as the rest is nothing without them."""
    needed = {(info.model_fingerprint, info.preprocess_fingerprint) for info in infos}
    return manifests_first(info for info, key in _tower_files(files) if key not in needed)


def delete_towers(files: StoreFiles, info: StoreInfo) -> None:
    """Delete a model's query towers, the manifest first."""
    for each in manifests_first(files.list(towers_path(info))):
        files.delete(each.path)


def is_tower_file(path: str) -> bool:
    """Return whether a path is a query tower's: words in it are from the vocabulary, not from an item."""
    return _TOWER_FILE.fullmatch(_OF_MODEL.sub("", path)) is not None


def _tower_files(files: StoreFiles) -> Iterator[tuple[FileInfo, tuple[str, str]]]:
    for info in files.list(TOWERS_FOLDER):
        if match := _TOWER_FILE.fullmatch(info.path):
            yield info, (match["model"], match["preprocess"])


def _describe(path: Path) -> TowerFile:
    with path.open("rb") as file:
        return TowerFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size_bytes=path.stat().st_size)


def _is_whole(path: Path, expected: TowerFile) -> bool:
    return path.is_file() and path.stat().st_size == expected.size_bytes and _describe(path) == expected
