"""Word index of each publication: `words/NNNNNN/`, named after the version of the embeddings whose captions it has.

CURRENT.json names that version, so readers never mix the two. For a publication without one, as older releases made,
readers build a word index in their cache.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from embedder.config_toml.sections import IndexConfig
from embedder.errors import StoreError
from embedder.store.backends import manifests_first
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.store_errors import local_problem
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import WORDS_FOLDER, words_column, words_path
from embedder.store_index.analyser import RULES, Analyser
from embedder.store_index.index_versions import fetched_copy, open_copy, write_folder
from embedder.store_index.word_index import (
    WordIndex,
    WordsManifest,
    build_words,
    open_word_index,
    read_words_manifest,
    update_words,
)
from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME

LOG = logging.getLogger(__name__)
NO_WORDS = "none"  # of `index.words`


def ensure_words(files: StoreFiles, version: int, config: IndexConfig, *, may_update: bool = True) -> bool:
    """Make the word index of an embeddings version that is published or about to be; return False if it has none.

    It is updated from that of the published version, else built. The main model has one if captions are published, a
    further one if it gives words, and `index.words` asks for it. The caller holds the write lock. `may_update` allows
    building on the published one, in whose files deleted captions leave traces. Raises StoreError if the disk is full.
    """
    if config.words == NO_WORDS:
        return False
    if has_words(files, version):
        return True
    before = _open_published(files, config.words) if may_update else None
    if before is None and not config.build:
        return False
    table = RecordTable(files, "embeddings", version)
    column = words_column(files, table.schema)
    if column is None:
        return False
    try:
        return _make_words(files, version, config.words, table, before, column)
    except OSError as error:
        raise local_problem(error, f"{files.address}/{WORDS_FOLDER}") from error


def has_words(files: StoreFiles, version: int) -> bool:
    """Return whether an embeddings version has a word index."""
    return files.exists(words_path(version, MANIFEST_NAME))


def repair_words(files: StoreFiles, version: int, config: IndexConfig) -> None:
    """Make the published version's word index unless it exists unaltered, from the configured analyser."""
    if has_words(files, version) and _is_unaltered(files, version, config.words):
        return
    files.confirm_lease()
    for info in manifests_first(files.list(words_path(version))):
        files.delete(info.path)
    ensure_words(files, version, config.model_copy(update={"build": True}), may_update=False)


def _is_unaltered(files: StoreFiles, version: int, analyser: str) -> bool:
    try:
        manifest = open_words(files, version).manifest
    except (RetrievalError, StoreError):
        return False
    names = manifest.sha256.items()
    hashes = files.each(lambda name: hashlib.sha256(files.read(words_path(version, name))).hexdigest(), manifest.sha256)
    is_whole = all(found == digest for found, (_, digest) in zip(hashes, names, strict=True))
    return is_whole and (manifest.analyser, manifest.rules) == (analyser, RULES)


def open_words(files: StoreFiles, version: int) -> WordIndex:
    """Open a version's word index, from a bucket as a local copy; RetrievalError if damaged, StoreError if missing."""
    if files.folder is not None:
        return open_word_index(files.folder / words_path(version))
    return open_copy(partial(_copy, files, version), open_word_index)


def _copy(files: StoreFiles, version: int) -> tuple[Path, bool]:
    try:
        return fetched_copy(files, words_path(version), lambda stage: read_words_manifest(stage).sizes)
    except FileNotFoundError:
        raise StoreError(
            f"{files.uri(words_path(version))}: the word index is not whole; `embedder index build` makes it again"
        ) from None


def _open_published(files: StoreFiles, analyser: str) -> WordIndex | None:
    current = read_current(files)
    if current is None or not has_words(files, current.embeddings):
        return None
    try:
        found = open_words(files, current.embeddings)
    except (RetrievalError, StoreError) as error:
        LOG.warning(f"words: {error}")
        return None
    return found if (found.manifest.analyser, found.manifest.rules) == (analyser, RULES) else None


def _make_words(
    files: StoreFiles, version: int, analyser: str, table: RecordTable, before: WordIndex | None, column: str
) -> bool:
    if before is not None:
        last = before

        def update(folder: Path) -> WordsManifest:
            old = RecordTable(files, "embeddings", last.manifest.embeddings_version)
            return update_words(last, old, table, folder, column)

        try:
            return _add_words(files, version, update)
        except (StoreError, RetrievalError) as error:  # a part file of the older version is gone, or a list altered
            LOG.info(f"words: built from scratch, as the last ones can't be updated: {error}")
    return _add_words(files, version, lambda folder: build_words(table, folder, Analyser(analyser), column))


def _add_words(files: StoreFiles, version: int, make: Callable[[Path], WordsManifest]) -> bool:
    made: list[WordsManifest] = []

    def write(folder: Path) -> Iterable[str]:
        made.append(make(folder))
        return made[0].sizes if made[0].num_captions else ()

    write_folder(files, words_path(version), write)
    (manifest,) = made
    if manifest.num_captions:
        LOG.debug(f"words: {manifest.num_captions:,} captions, {manifest.build_s:.1f} s")
    return manifest.num_captions > 0
