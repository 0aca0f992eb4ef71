"""A start on two thirds of the CPU: what a process that only computes a shard leaves out of its libraries.

transformers imports torch's tensors on many devices and its flexible attention wherever they are to be had, which a
shard never uses: 0.7 s of CPU, half of it for sympy. And Python looks for garbage after each few hundred new objects,
where importing makes a million that all stay: another 0.4 s.

Only for processes of our own: transformers stays as it was imported.

Source: transformers 5.23 `utils/import_utils.py`, `core_model_loading.py`, `masking_utils.py`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")


@contextmanager
def sparing_imports(*, with_text: bool) -> Iterator[None]:
    """Import in the block what a shard needs and no more.

    Args:
        with_text: whether transformers will be needed; it is not imported otherwise.
    """
    gc.disable()
    try:
        if with_text:
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
