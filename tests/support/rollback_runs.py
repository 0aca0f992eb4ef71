"""Refreshes of a changing folder, a rollback over them, and its release."""

import os

import samples
from refresh_runs import refreshed

from embedder.store.files import StoreFiles
from embedder.store.lock import write_lock
from embedder.store.maintenance.rollback import release, rollback
from embedder.store_index.keep_index import index_choice


def change(source, night: int):
    """Change a folder for one refresh: a new image, and another image in an old file."""
    (source / "pictures" / f"{100 + night:04d}.png").write_bytes(samples.image_bytes(100 + night))
    repaint(source / "pictures" / "0003.png", seed=200 + night)


def repaint(path, seed: int):
    """Write another image to the same file."""
    time_ns = path.stat().st_mtime_ns + 5_000_000_000
    path.write_bytes(samples.image_bytes(seed))
    os.utime(path, ns=(time_ns, time_ns))


def back(config, run_id=None, choose=None):
    files = StoreFiles(config.store)
    with write_lock(files):
        return rollback(files, run_id, choose or index_choice(files))


def let_go(config):
    files = StoreFiles(config.store)
    with write_lock(files):
        return release(files)


def nights(config, source, number: int = 2, **changes):
    """Publish, then refresh after each of `number` changes; gives the rows of each publication."""
    rows = [refreshed(config, **changes)[1]]
    for night in range(1, number + 1):
        change(source, night)
        rows.append(refreshed(config, **changes)[1])
    return rows
