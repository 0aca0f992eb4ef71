"""A program: a run on its own Ray with an object store of 80 MB, and what it held, spilled and left in flight.

python small_store_run.py CONFIG.toml SPILL_FOLDER WRITE_PAUSE_S HELD_MB    prints one line of JSON
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import ray

from embedder import pipeline
from embedder.compat import operator_readings
from embedder.config import load_config
from embedder.errors import RunFailedError
from embedder.executors.datasink import PartSink
from embedder.ingest.embed import embed

STORE_BYTES = 80 << 20


class InFlight:
    """Display that counts the rows that the last stage has made and that are in no part file yet."""

    def __init__(self):
        self.max_rows = self.num_done = 0

    def show(self, num_items):
        return nullcontext(self)

    def __call__(self, num_done):
        self.num_done = num_done

    def show_operators(self, view):
        rows = next((each.num_rows for each in view.operators if each.name == "stage 2"), 0)
        self.max_rows = max(self.max_rows, rows - self.num_done)


def main(config_file, spill_folder, write_pause_s, held_mb):
    """Embed while something else holds part of the object store, with a sink that sleeps before each part."""
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        object_spilling_directory=spill_folder,
        include_dashboard=False,
        log_to_driver=False,
    )
    held = ray.get(ray.put(np.ones(int(held_mb) << 20, np.uint8)))  # what is mapped can't be spilled
    pause_s = float(write_pause_s)

    class SlowSink(PartSink):
        def write(self, blocks, ctx):
            time.sleep(pause_s)
            return super().write(blocks, ctx)

    pipeline.PartSink = SlowSink
    operator_readings.INTERVAL_S = 0.2
    in_flight = InFlight()
    try:
        report = embed(load_config(Path(config_file)), show_progress=in_flight.show)
    except RunFailedError as error:
        print(json.dumps({"failure": str(error)}))
        return
    operators = {each.name: each.model_dump() for each in report.operators}
    figures = {"held_bytes": held.nbytes, "max_rows_in_flight": in_flight.max_rows}
    print(json.dumps(figures | {"spilled_bytes": report.spilled_bytes, "operators": operators}))


if __name__ == "__main__":
    main(*sys.argv[1:])
