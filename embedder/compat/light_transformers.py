"""Imports of transformers on two thirds of the CPU, for a process that only computes a shard.

transformers imports torch's tensors on many devices and its flexible attention wherever they are to be had, which a
shard never uses: 0.7 s of CPU, half of it for sympy. And Python looks for garbage after each few hundred new objects,
where importing makes a million that all stay: another 0.4 s.

Only for processes of our own: the patched functions of transformers stay replaced.
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
    """Import in the block what a shard needs and no more.

    Args:
        with_text: whether transformers will be needed; it is not imported otherwise.
    """
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

    for module in (utils, import_utils):  # asked in both places
        vars(module).update(dict.fromkeys(UNUSED, _no))


def _no() -> bool:
    return False
