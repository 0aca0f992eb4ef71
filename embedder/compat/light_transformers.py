"""Imports transformers with a third less CPU, for a process that only computes a shard.

transformers imports torch's tensors on many devices and its flexible attention if available, which a shard never uses:
0.7 s of CPU, half of it for sympy. And Python collects garbage after every few hundred new objects, although importing
creates a million that all stay: another 0.4 s.

Only for our own processes: the patched functions of transformers stay replaced.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shards.compat import Private, is_fast_start

UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")
QUESTIONS = Private(
    "the import of transformers without distributed tensors",
    tuple(f"transformers.utils.import_utils:{name}" for name in UNUSED),
    "transformers 5.23.0",
)


@contextmanager
def sparing_imports(*, with_text: bool) -> Iterator[None]:
    """Import in the block only what a shard needs; transformers only if `with_text`."""
    if not is_fast_start():
        yield
        return
    gc.disable()
    try:
        if with_text and QUESTIONS.saves_time():
            _spare_transformers()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _spare_transformers() -> None:
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):  # both have the function
        vars(module).update(dict.fromkeys(UNUSED, _no))


def _no() -> bool:
    return False
