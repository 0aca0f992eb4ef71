"""Choice of the published items that a run reads though they look unchanged, to compare their content."""

import math
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config_toml.run_sections import SourcesConfig


@dataclass(frozen=True)
class ContentChecks:
    """A share of the published items, those first whose record is oldest; with `ids`, these instead.

    A record is made anew when its item is read, so that a share of 1/n reads each item in n runs.
    """

    share: float = 0.0
    ids: pa.ChunkedArray | None = None

    def choose(self, published: pa.Table) -> pa.ChunkedArray:
        """Return whether to check each item of a part; those without whole vectors of the present file never are."""
        is_embedded = pc.equal(published["state"], "embedded")
        if self.ids is not None:
            return pc.and_(is_embedded, pc.is_in(published["item_id"], value_set=self.ids.combine_chunks()))
        if self.share in (0, 1):
            return pc.and_(is_embedded, self.share == 1)
        embedded = published.select(["item_id", "updated_at"]).filter(is_embedded)
        oldest = embedded.sort_by([("updated_at", "ascending"), ("item_id", "ascending")])["item_id"]
        chosen = oldest.slice(0, math.ceil(self.share * len(oldest)))
        return pc.and_(is_embedded, pc.is_in(published["item_id"], value_set=chosen.combine_chunks()))


NO_CHECKS = ContentChecks()


def configured_checks(sources: SourcesConfig, *, is_refresh: bool) -> ContentChecks:
    """Return the checks that a configuration asks for; a share is checked by a refresh alone."""
    if sources.changed_by == "content":
        return ContentChecks(1.0)
    return ContentChecks(sources.verify_share) if is_refresh else NO_CHECKS
