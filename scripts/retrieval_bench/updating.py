"""An update against a rebuild of the same design, and the recall of both."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from index.build import build_index
from index.manifest import Manifest
from index.search import open_index
from index.update import update_index
from index.vectors import Rows
from retrieval_bench.comparison import exact_rows
from retrieval_bench.measures import K, recall
from retrieval_bench.processes import blocks, ids

MODEL = {"model_fingerprint": "hard vectors", "embeddings_version": 2}


def compare_update(folder: Path, num_images: int) -> dict:
    """Add a tenth, remove a twentieth; neither time counts tuning, both count saving and the exact answers."""
    num_added, num_removed = num_images // 10, num_images // 20
    stop = num_images + num_added
    before = folder / "index" / "000001"
    removed = np.random.default_rng(4).choice(num_images, num_removed, replace=False)
    mask = np.zeros(num_images, dtype=bool)
    mask[removed] = True
    print(f"updating: {num_added:,} added, {num_removed:,} removed", flush=True)
    added = blocks(folder, np.arange(num_images, stop))
    updated = update_index(
        before, folder / "index" / "000002", added, ids(num_images, stop), mask, embeddings_version=2
    )
    left = np.flatnonzero(~np.pad(mask, (0, num_added)))
    print(f"building {updated.design} of the same {len(left):,} rows", flush=True)
    rebuilt = build_index(
        blocks(folder, left),
        ids(0, stop).take(pa.array(left)),
        folder / "index" / "000003",
        kind=updated.design,
        queries=np.load(folder / "captions.npy"),
        **MODEL,
    )
    queries = np.load(folder / "held_out.npy")
    found = {
        "update_s": untuned_s(updated),
        "rebuild_s": untuned_s(rebuilt),
        "times_faster": untuned_s(rebuilt) / untuned_s(updated),
        **recalls_of(folder, stop, left, queries),
        "update_steps_s": updated.steps_s,
        "rebuild_steps_s": rebuilt.steps_s,
    }
    print(
        f"update {found['update_s']:.1f} s, rebuild {found['rebuild_s']:.1f} s: {found['times_faster']:.1f} times; "
        f"recall@10 {found['updated_recall']:.3f} against {found['rebuilt_recall']:.3f}",
        flush=True,
    )
    return found


def untuned_s(manifest: Manifest) -> float:
    return manifest.build_s - manifest.steps_s["tune"] - manifest.steps_s.get("choose", 0.0)


def recalls_of(folder: Path, stop: int, left: Rows, queries: np.ndarray) -> dict[str, float]:
    """Recall of the updated and of the rebuilt index on held-out captions, against brute force over the same rows."""
    images = np.load(folder / "images.npy", mmap_mode="r")
    kept = folder / "kept"
    kept.mkdir()
    np.save(kept / "images.npy", images[:stop][left])
    exact = left[exact_rows(kept, len(left), queries)]
    found = {}
    for name, version in (("updated", 2), ("rebuilt", 3)):
        index = open_index(folder / "index" / f"{version:06d}")
        numbers = np.array(index.ids["item_id"].to_pylist()).astype(np.int64)
        found[f"{name}_recall"] = recall(numbers[index.search(queries, K).rows], exact)
    return found
