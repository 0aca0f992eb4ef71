"""Row files of a store: `rows/EMBEDDINGS-ITEMS-INDEX/`, what searches read of the items of one publication.

Named after the versions of both tables and the index that they belong to, so that a reader never mixes two.
"""

import re
from collections.abc import Collection

from embedder.store.backends import FileInfo, manifests_first
from embedder.store.files import StoreFiles
from embedder.store.layout import Current

ROWS_FOLDER = "rows"
_FILE = re.compile(rf"{ROWS_FOLDER}/(?P<name>\d{{6,}}-\d{{6,}}-\d{{6,}})[^/]*/.+")


def rows_path(version: Current, others: str = "") -> str:
    """Return the folder of a model's row files; `others` names the columns of other models in them, if any."""
    return f"{ROWS_FOLDER}/{_name(version)}" + (f"-{others}" if others else "")


def unneeded_rows(files: StoreFiles, versions: Collection[Current]) -> list[FileInfo]:
    """List the row files of other versions, manifests first: without them the rest is not read."""
    needed = {_name(version) for version in versions if version.index is not None}
    infos = [(info, match) for info in files.list(ROWS_FOLDER) if (match := _FILE.fullmatch(info.path))]
    found = [info for info, match in infos if match["name"] not in needed]
    return manifests_first(found)


def _name(version: Current) -> str:
    return f"{version.embeddings:06d}-{version.items:06d}-{version.index or 0:06d}"
