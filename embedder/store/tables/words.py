"""Word indexes of a model: `words/NNNNNN/`, named after the version of the embeddings table whose texts it has.

The main model's is of the captions, a further one's of its output `words`, as text recognition gives.
"""

import re
from collections.abc import Collection

import pyarrow as pa

from embedder.store.backends import FileInfo, manifests_first
from embedder.store.files import StoreFiles

WORDS_FOLDER = "words"
WORDS_COLUMN = "words"
"""Output of a further model that hybrid search reads, one text a row."""
_FILE = re.compile(rf"{WORDS_FOLDER}/(?P<version>\d{{6,}})/.+")


def words_path(version: int, name: str = "") -> str:
    """Return the path of an embeddings version's word index, or of one of its files."""
    return f"{WORDS_FOLDER}/{version:06d}" + (f"/{name}" if name else "")


def searched_column(files: StoreFiles) -> str:
    """Return the name of the column whose words are searched if the model has it."""
    return WORDS_COLUMN if files.model else "caption"


def words_column(files: StoreFiles, schema: pa.Schema | None) -> str | None:
    """Return the column of a model's embeddings table whose words are searched; None if it has none."""
    name = searched_column(files)
    is_text = (
        schema is not None and name in schema.names and schema.field(name).type in (pa.string(), pa.large_string())
    )
    return name if is_text else None


def unneeded_words(files: StoreFiles, versions: Collection[int]) -> list[FileInfo]:
    """List the files of word indexes of other versions, manifests first: without them the rest is no index."""
    infos = [(info, match) for info in files.list(WORDS_FOLDER) if (match := _FILE.fullmatch(info.path))]
    found = [info for info, match in infos if int(match["version"]) not in versions]
    return manifests_first(found)
