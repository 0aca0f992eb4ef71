"""Word indexes of a model: `words/NNNNNN/`, named after the version of the embeddings table whose texts it has.

The main model's is of captions with their keywords, a further one's of its output `words`, as text recognition gives.
"""

import re
from collections.abc import Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import medium_schema
from embedder.store.backends import FileInfo, manifests_first
from embedder.store.files import StoreFiles
from embedder.store.tables.tables import RecordTable

WORDS_FOLDER = "words"
WORDS_COLUMN = "words"
"""Output of a further model that hybrid search reads, one text a row."""
KEYWORDS = medium_schema(["keywords"]).field("keywords")
"""Column of the medium whose words join the captions'."""
LARGE = pa.large_string()
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


def has_keywords(schema: pa.Schema | None) -> bool:
    """Return whether a main model's embeddings table has keywords besides captions."""
    return schema is not None and KEYWORDS.name in schema.names and schema.field(KEYWORDS.name).type == KEYWORDS.type


def read_texts(table: RecordTable, column: str, paths: list[str], others: Sequence[str] = ()) -> pa.Table:
    """Read what is searched of some files, as `column`, and `others`: captions with their keywords behind them."""
    if column == WORDS_COLUMN or not has_keywords(table.schema):
        return table.read([*others, column], paths)
    rows = table.read([*others, column, KEYWORDS.name], paths)
    captions, lists = rows[column].cast(LARGE).combine_chunks(), rows[KEYWORDS.name].combine_chunks()
    keywords = pc.if_else(pc.greater(pc.list_value_length(lists), 0), pc.binary_join(lists, "\n"), None).cast(LARGE)
    both = pc.binary_join_element_wise(captions, keywords, pa.scalar("\n", LARGE))  # null where one is
    texts = pc.coalesce(both, captions, keywords)
    return rows.drop_columns([KEYWORDS.name]).set_column(len(others), column, pa.chunked_array([texts]))


def unneeded_words(files: StoreFiles, versions: Collection[int]) -> list[FileInfo]:
    """List the files of word indexes of other versions, manifests first: without them the rest is no index."""
    infos = [(info, match) for info in files.list(WORDS_FOLDER) if (match := _FILE.fullmatch(info.path))]
    found = [info for info, match in infos if int(match["version"]) not in versions]
    return manifests_first(found)
