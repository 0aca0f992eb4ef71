"""A run's counts among Ray's own metrics, for clusters whose Ray exports them (`ray[default]`).

Each write task adds its own to `ray_embedder_items`, `_rejects`, `_vectors` and `_step_seconds{step="stage 0"}`.
"""

from functools import lru_cache
from typing import Any

from embedder.store.journal import JournalEntry


def count_part(entry: JournalEntry) -> None:
    """Add what a write task has finished; called inside the task."""
    counters = _counters()
    num_vectors = sum(part.num_rows for part in entry.parts if part.table == "embeddings")
    for name, number in (("items", entry.num_items), ("rejects", entry.num_rejects), ("vectors", num_vectors)):
        if number:  # Ray's counters refuse a zero
            counters[name].inc(number)
    for call in entry.trace:
        if call["wall_s"] > 0:
            counters["step_seconds"].inc(call["wall_s"], {"step": call["step"]})


@lru_cache(maxsize=1)
def _counters() -> dict[str, Any]:
    """One of each in a process: two of a name would be two series."""
    from ray.util.metrics import Counter

    descriptions = {
        "items": "Items finished, embedded or rejected.",
        "rejects": "Items that could not be embedded.",
        "vectors": "Rows with vectors written.",
        "step_seconds": "Seconds inside each step.",
    }
    return {
        name: Counter(f"embedder_{name}", text, tag_keys=("step",) if name == "step_seconds" else ())
        for name, text in descriptions.items()
    }
