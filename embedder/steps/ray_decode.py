"""Decoding as Ray starts it: in a process that gives way to the stages, and hands on large tables.

What is decoded ahead waits in any case, and a stage that runs dry leaves its core to decoding.
"""

import os
from collections.abc import Iterator
from functools import cache

import pyarrow as pa

from embedder.steps.decode import decode
from embedder.steps.item_decoder import DecodeSpec
from embedder.store.runs import Run

LEAST = 19  # niceness; the system bounds it
TABLE_BYTES = 8 << 20  # each column of each table costs Ray as much, however small it is; large ones cost memory


def decode_behind(listing: pa.Table, *, spec: DecodeSpec, run: Run) -> Iterator[pa.Table]:
    """`decode`, with less claim to the cores than any stage has."""
    _give_way()
    yield from decode(listing, spec=spec, run=run, table_bytes=TABLE_BYTES)


@cache
def _give_way() -> None:
    os.nice(LEAST)
