"""Examples in a given order: decoded by an engine while the model learns, or kept in memory from the epoch before."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from embedder.local import ahead
from embedder.run.engine import Choice
from embedder.training.config import TrainConfig
from embedder.training.examples import Example, ExampleSpec, decode_examples, examples_of
from embedder.training.items import Items
from embedder.training.places import decode_cpus

Decode = Callable[[pa.Table], Generator[pa.Table, None, None]]
"""Turns listed items into tables of `EXAMPLES`, one row an item, in the items' order."""

# What Ray costs before the first row, and a careful guess of what one core decodes.
RAY_STARTUP_S = 15.0
PICTURES_PER_CORE_S = 200.0


def choose_feed(config: TrainConfig, num_items: int, num_cpus: int, *, has_ray: bool = True) -> Choice:
    """Follow the configuration; for `auto`, take Ray where decoding outweighs its start. Pure."""
    if config.engine != "auto":
        return Choice(config.engine, "as configured")
    if config.num_workers > 1:
        return Choice("ray", f"{config.num_workers} training workers")
    if config.ray_address is not None:
        return Choice("ray", f"a cluster was given: {config.ray_address}")
    if not has_ray:
        return Choice("local", "Ray is not installed")
    decode_s = num_items / (PICTURES_PER_CORE_S * num_cpus)
    guess = f"{num_items:,} pictures are about {decode_s:.0f} s of decoding"
    if decode_s < RAY_STARTUP_S:
        return Choice("local", f"{guess}, less than Ray's start ({RAY_STARTUP_S:.0f} s)")
    return Choice("ray", f"{guess}, more than Ray's start ({RAY_STARTUP_S:.0f} s)")


@contextmanager
def decoding(config: TrainConfig, spec: ExampleSpec, choice: Choice) -> Iterator[Decode]:
    """Make an engine ready to decode."""
    if choice.engine == "local":

        def decode_locally(listing: pa.Table) -> Generator[pa.Table, None, None]:
            blocks = slices(listing, config.decode.items_per_task)
            return ahead(table for block in blocks for table in decode_examples(block, spec=spec))

        yield decode_locally
        return
    from embedder.run.ray_session import ray_session

    with ray_session(config.ray_address, config.no_progress_timeout_s) as available:
        from embedder.training.stream import decode_on_ray

        num_cpus = decode_cpus(config, available)
        yield lambda listing: decode_on_ray(listing, spec, config.decode.items_per_task, num_cpus)


def slices(listing: pa.Table, num_items: int) -> Iterator[pa.Table]:
    """Cut the listing into what one decode task takes."""
    for start in range(0, listing.num_rows, num_items):
        yield listing.slice(start, num_items)


@dataclass
class Feed:
    """Gives items as examples, in the order asked for.

    Decoded examples stay in memory as long as `cache_bytes` hold them, so that a small set is decoded once; with a
    larger one the rest is decoded anew in each epoch. What comes out is the same either way.
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
        """One example an item, in their order.

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
