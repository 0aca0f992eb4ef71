"""Examples in a given order: decoded while the model learns, or kept in memory from the epoch before."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field

import pyarrow as pa

from embedder.training.examples import Example, examples_of
from embedder.training.items import Items

Decode = Callable[[pa.Table], Generator[pa.Table, None, None]]
"""Turns listed items into tables of `EXAMPLES`, one row for each item, in the items' order."""


@dataclass
class ExampleCache:
    """Source of examples, in the order asked for.

    Decoded examples stay in memory as long as `cache_bytes` hold them, so that a small set is decoded once; with a
    larger one the rest is decoded anew in each epoch. The examples are the same either way.

    Attributes:
        decode: decodes a listing.
        image_size: side of the images, px.
        cache_bytes: limit of the memory.
        cached_bytes: memory in use.
    """

    decode: Decode
    image_size: int
    cache_bytes: int
    cached_bytes: int = 0
    _cache: dict[str, Example] = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        """Examples in memory."""
        return len(self._cache)

    def examples(self, items: Items) -> Generator[Example, None, None]:
        """One example for each item, in their order.

        Raises:
            RuntimeError: the engine gave other items than asked for, or in another order.
        """
        ids = items.listing["item_id"].to_pylist()
        missing = [number for number, item_id in enumerate(ids) if item_id not in self._cache]
        with closing(self._decoded(items.listing, missing)) as decoded:
            for item_id in ids:
                example = self._cache.get(item_id) or next(decoded, None)
                if example is None or example.item_id != item_id:
                    raise RuntimeError(f"decoding gave {example and example.item_id!r} where {item_id!r} was due")
                self._keep(example)
                yield example

    def _decoded(self, listing: pa.Table, missing: list[int]) -> Generator[Example, None, None]:
        if missing:
            tables = self.decode(listing.take(pa.array(missing)).combine_chunks())
            with closing(tables):
                for table in tables:
                    yield from examples_of(table, self.image_size)

    def _keep(self, example: Example) -> None:
        if example.item_id in self._cache or self.cached_bytes + example.num_bytes > self.cache_bytes:
            return
        self._cache[example.item_id] = example
        self.cached_bytes += example.num_bytes
