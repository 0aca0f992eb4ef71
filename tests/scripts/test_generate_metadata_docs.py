"""The page about the columns of the medium is generated from the table that the code follows."""

import generate_metadata_docs as metadata_docs

from embedder.media.medium_values import Sources
from embedder.media.metadata_blocks import MetadataBlocks
from embedder.medium_columns import COLUMNS


def test_the_page_has_the_columns_as_they_are():
    assert metadata_docs.PAGE.read_text(encoding="utf-8") == metadata_docs.page(), (
        "run python scripts/generate_metadata_docs.py"
    )


def test_every_source_of_the_table_can_be_looked_for():
    nothing = Sources(MetadataBlocks(), {})
    assert all(nothing.get(source) is None for column in COLUMNS for source in column.sources)
