"""Word indexes of a store: `words/NNNNNN/`, named after the version of the embeddings table whose captions it has."""

import re
from collections.abc import Collection

from embedder.store.backends import FileInfo
from embedder.store.files import StoreFiles

WORDS_FOLDER = "words"
_FILE = re.compile(rf"{WORDS_FOLDER}/(?P<version>\d{{6,}})/.+")


def words_path(version: int, name: str = "") -> str:
    """Return the path of an embeddings version's word index, or of one of its files."""
    return f"{WORDS_FOLDER}/{version:06d}" + (f"/{name}" if name else "")


def unneeded_words(files: StoreFiles, versions: Collection[int]) -> list[FileInfo]:
    """List the files of word indexes of other versions, manifests first: without them the rest is no index."""
    infos = [(info, match) for info in files.list(WORDS_FOLDER) if (match := _FILE.fullmatch(info.path))]
    found = [info for info, match in infos if int(match["version"]) not in versions]
    return sorted(found, key=lambda info: (not info.path.endswith("/manifest.json"), info.path))
