"""Imports of transformers on two thirds of the CPU, for a process that only computes a shard.

transformers imports torch's tensors on many devices and its flexible attention wherever they are to be had, which a
shard never uses: 0.7 s of CPU, half of it for sympy. And Python looks for garbage after each few hundred new objects,
where importing makes a million that all stay: another 0.4 s.

Only for processes of our own: the patched functions of transformers stay replaced.

Source: transformers 5.23 `utils/import_utils.py`, `core_model_loading.py`, `masking_utils.py`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shards.compat import Tested, is_fast_start, saves_time

TESTED: Tested = (("transformers", "==5.23.*"), ("torch", ">=2.11,<2.16"))
UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")


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
        if with_text and saves_time("the import of transformers without distributed tensors", TESTED):
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
