"""Registry of the kinds of source.

A new kind takes a name in `config.SourceKind`, a module that lists it, and its entry in `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from embedder.config import SourceConfig, SourceKind
from embedder.sources.files import list_files
from embedder.sources.listing_schema import Listing
from embedder.sources.selection import Selects
from embedder.sources.table_files import is_delta
from embedder.sources.table_formats import FORMATS
from embedder.sources.tables import list_table
from embedder.sources.tar_scan import PACKED_TAR_SUFFIXES
from embedder.sources.webdataset import list_tars

ListSource = Callable[[SourceConfig, str, Selects], Listing]
"""Takes the source, its normalised path and the maker of its selection; may raise a SourceError."""


@dataclass(frozen=True)
class KindEntry:
    """One kind of source: its recognition, its listing, and the configuration keys that it takes.

    Attributes:
        list_source: starts to list a source of this kind.
        keys: those of `columns`, `carryover`, `include` and `exclude` that mean something for this kind.
        formats: suffixes of its files in lower case, grouped by format; a folder of one format is of this kind.
        is_folder: recognises a folder of this kind without looking at its files' names.
    """

    list_source: ListSource
    keys: frozenset[str]
    formats: tuple[tuple[str, ...], ...] = ()
    is_folder: Callable[[str], bool] | None = None


KINDS: dict[SourceKind, KindEntry] = {
    "table": KindEntry(
        list_table, frozenset({"columns", "carryover"}), tuple((suffix,) for suffix in FORMATS), is_folder=is_delta
    ),
    "webdataset": KindEntry(list_tars, frozenset({"carryover"}), ((".tar", *PACKED_TAR_SUFFIXES),)),
    "files": KindEntry(list_files, frozenset({"include", "exclude"})),
}
OTHER_FILES: SourceKind = "files"
"""The kind of whatever no entry recognises."""
