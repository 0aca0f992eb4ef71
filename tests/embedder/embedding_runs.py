"""Runs the main job and reads what it published."""

from contextlib import nullcontext

import embedder
from embedder.ingest.embed import embed


class Quiet:
    """Watches nothing."""

    def say(self, message):
        """Be told."""

    def progress(self, num_items):
        """Show nothing."""
        return nullcontext(lambda num_done: None)


def embedded(config, **options):
    """Run, and give the report and the table by (item_id, segment)."""
    report = embed(config, Quiet(), **options)
    rows = embedder.open_store(config.store).to_arrow().to_pylist()
    by_key = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(by_key) == len(rows), "each row once"
    return report, by_key
