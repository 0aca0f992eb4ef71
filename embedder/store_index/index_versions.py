"""Index versions of a store: built locally and uploaded with the manifest last; searched from a local copy.

If the store is in a local folder, they are built and searched in place.
"""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from embedder.errors import StoreError
from embedder.storage.user_cache import cache_folder, drop_folders, mark_used
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.store_errors import StoreUnwritableError
from index.atomic_folder import sweep_leftovers, whole_folder
from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME, Manifest, parse_manifest, read_manifest
from index.versions import next_version, version_path

if TYPE_CHECKING:
    from index.faiss_search import Places
    from index.search import Index

LOG = logging.getLogger(__name__)
INDEX_FOLDER = "index"
CLAIM_NAME = "claim"
"""File with which a writer claims a version's number before it uploads the version."""
COPIES_FOLDER = "indexes"  # in the user's cache
MAX_KEPT_COPIES = 4

Opened = TypeVar("Opened")
Build = Callable[[Path], Manifest]
"""Creates the given folder with a complete index in it; if it fails, it leaves none."""


def add_version(files: StoreFiles, build: Build) -> tuple[int, Manifest]:
    """Build the next version; return its number and manifest."""
    if files.folder is not None:
        root = files.folder / INDEX_FOLDER
        number = next_version(root, _last_deleted(files))
        return number, build(version_path(root, number))
    number = _claim_number(files)
    with tempfile.TemporaryDirectory(prefix="embedder-index-") as name:
        folder = version_path(name, number)
        manifest = build(folder)
        for file_name in (*manifest.sha256, MANIFEST_NAME):
            files.confirm_lease()  # two runs that upload under one number would mix their files
            files.upload(folder / file_name, _path(number, file_name))
    return number, manifest


def has_version(files: StoreFiles, number: int) -> bool:
    """Return whether a version exists completely."""
    return files.exists(_path(number, MANIFEST_NAME))


def list_manifests(files: StoreFiles) -> list[tuple[int, Manifest]]:
    """Return number and manifest of complete versions, oldest first, without those that can't be read."""
    names = (info.path.split("/") for info in sorted(files.list(INDEX_FOLDER)))
    numbers = [int(number) for _, number, *name in names if name == [MANIFEST_NAME] and number.isdecimal()]
    found = []
    for number in numbers:
        try:
            found.append((number, fetched_manifest(files, number)))
        except (RetrievalError, OSError, StoreUnwritableError) as error:  # it may be gone since it was listed
            LOG.warning(f"index version {number} can't be read, and is left out: {error}")
    return found


def manifest_of(files: StoreFiles, number: int) -> Manifest | None:
    """Return the manifest of a version; None if it is missing or can't be read any more."""
    try:
        return fetched_manifest(files, number)
    except (FileNotFoundError, RetrievalError):
        return None


def fetched_manifest(files: StoreFiles, number: int) -> Manifest:
    """Read a manifest; FileNotFoundError if there is none, RetrievalError if damaged or from a newer release."""
    path = _path(number, MANIFEST_NAME)
    return parse_manifest(files.read(path), files.uri(path))


def version_folder(files: StoreFiles, number: int) -> Path:
    """Return a version's local folder, fetched if remote; StoreError if missing, RetrievalError if damaged."""
    if files.folder is not None:
        return version_path(files.folder / INDEX_FOLDER, number)
    return _local_copy(files, number)[0]


def open_version(
    files: StoreFiles,
    number: int,
    model_fingerprint: str,
    samples: Mapping[str, str] | None = None,
    places: "Places | None" = None,
) -> "Index":
    """Open a version; FAISS reads only files whose hash matches the manifest, or `samples`; for both see `open_index`.

    Raises StoreError if there is no such version, and RetrievalError if it is damaged or of another model.
    """
    from index.search import open_index

    if files.folder is not None:
        folder = version_path(files.folder / INDEX_FOLDER, number)
        return open_index(folder, model_fingerprint=model_fingerprint, samples=samples, places=places)
    folder, is_new = _local_copy(files, number)
    try:
        return open_index(folder, model_fingerprint=model_fingerprint, samples=samples, places=places)
    except RetrievalError:
        if is_new or read_manifest(folder).model_fingerprint != model_fingerprint:
            raise
    shutil.rmtree(folder, ignore_errors=True)  # the copy was damaged; the store may be intact
    return open_index(_local_copy(files, number)[0], model_fingerprint=model_fingerprint)


def _local_copy(files: StoreFiles, number: int) -> tuple[Path, bool]:
    """Return a folder with a copy of a version, named after its manifest's hash, and whether it was fetched now."""
    if not has_version(files, number):
        raise StoreError(
            f"store {files.address}: index version {number} is not there; build one with `embedder index build`"
        )

    def names(stage: Path) -> Iterable[str]:
        return read_manifest(stage).sha256

    try:
        return fetched_copy(files, f"{INDEX_FOLDER}/{number:06d}", names)
    except FileNotFoundError as error:
        raise StoreError(f"{error}: a file of index version {number} is missing; build the index again") from None


def fetched_copy(files: StoreFiles, path: str, names: Callable[[Path], Iterable[str]]) -> tuple[Path, bool]:
    """Return a local copy of a folder of a store, and whether it was fetched now.

    The folder at `path` has a manifest and never changes; its copy is named after the manifest's hash. `names` maps a
    folder with the manifest to the names of the other files. Raises FileNotFoundError if a file is missing.
    """
    manifest = files.read(f"{path}/{MANIFEST_NAME}")
    name = hashlib.sha256(manifest).hexdigest()[:32]
    if (copy := cache_folder(COPIES_FOLDER) / name).is_dir() and not _has_manifest(copy, manifest):
        shutil.rmtree(copy, ignore_errors=True)

    def fetch(stage: Path) -> None:
        (stage / MANIFEST_NAME).write_bytes(manifest)
        for name in names(stage):
            files.download(f"{path}/{name}", stage / name)

    try:
        return make_copy(name, fetch)
    except OSError as error:
        if error.errno is None or isinstance(error, FileNotFoundError):  # of the store
            raise
        raise StoreUnwritableError(
            f"{cache_folder(COPIES_FOLDER)}: no copy of {files.uri(path)} can be kept there "
            f"({error.strerror}); make room, or name another cache with XDG_CACHE_HOME"
        ) from None


def _has_manifest(copy: Path, manifest: bytes) -> bool:
    """Return whether a copy has its manifest: what cleans caches may have deleted or cut off some of its files."""
    with suppress(OSError):
        return (copy / MANIFEST_NAME).read_bytes() == manifest
    return False


def make_copy(name: str, make: Callable[[Path], object]) -> tuple[Path, bool]:
    """Return a folder of this machine's cache, and whether it was made now, as it was not there; the last used stay."""
    folder = cache_folder(COPIES_FOLDER) / name
    if folder.is_dir():
        mark_used(folder)
        return folder, False
    try:
        with whole_folder(folder) as stage:
            make(stage)
    except RetrievalError:
        if not folder.is_dir():  # else another process has made it at the same time
            raise
    drop_copies(MAX_KEPT_COPIES)
    return folder, True


def open_copy(fetch: Callable[[], tuple[Path, bool]], open_folder: Callable[[Path], Opened]) -> Opened:
    """Open a copy that `fetched_copy` or `make_copy` gives; a damaged one of before is fetched or made again."""
    folder, is_new = fetch()
    try:
        return open_folder(folder)
    except RetrievalError:
        if is_new:
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return open_folder(fetch()[0])


def write_folder(files: StoreFiles, path: str, make: Callable[[Path], Iterable[str]]) -> None:
    """Write a folder into a store, in place of what was cut off there; into a bucket with the manifest last.

    `make` fills an empty local folder, and returns the names of the files next to the manifest; if there are none,
    nothing is written. Raises OSError if a disk is full, and LeaseLostError if another run has taken over the store.
    """
    if files.folder is not None:
        sweep_leftovers((files.folder / path).parent)
        shutil.rmtree(files.folder / path, ignore_errors=True)
        with whole_folder(files.folder / path) as folder:
            names = [*make(folder)]
        if not names:
            shutil.rmtree(files.folder / path)
        return
    with tempfile.TemporaryDirectory(prefix="embedder-folder-") as name:
        names = [*make(Path(name))]
        for each in (*names, MANIFEST_NAME) if names else ():
            files.confirm_lease()
            files.upload(Path(name) / each, f"{path}/{each}")


def drop_copies(num_kept: int = 0) -> None:
    """Delete this machine's copies of indexes except those used last: they hold ids, including purged ones."""
    sweep_leftovers(cache_folder(COPIES_FOLDER))
    drop_folders(COPIES_FOLDER, num_kept)


def _claim_number(files: StoreFiles) -> int:
    """Claim the number after the highest one that ever existed, complete or not, unless another writer did."""
    names = {info.path.split("/")[1] for info in files.list(INDEX_FOLDER)}
    number = max([_last_deleted(files), *(int(name) for name in names if name.isdecimal())]) + 1
    files.confirm_lease()
    while not files.create(_path(number, CLAIM_NAME), files.environment.token(8).encode()):
        number += 1
    return number


def _last_deleted(files: StoreFiles) -> int:
    current = read_current(files.main)
    return 0 if current is None else current.last_index.get(files.model, 0)


def _path(number: int, name: str) -> str:
    return f"{INDEX_FOLDER}/{number:06d}/{name}"
