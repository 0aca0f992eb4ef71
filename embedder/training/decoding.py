"""Which engine decodes the examples, and that engine made ready."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pyarrow as pa

from embedder.engine.block_size import FEW_ITEMS
from embedder.engine.choose_engine import EngineChoice
from embedder.engine.local import ahead
from embedder.engine.resources import decode_cpus
from embedder.training.config import TrainConfig
from embedder.training.example_cache import Decode
from embedder.training.examples import ExampleSpec, decode_examples
from shards.planning.costs import STARTUP_S

# A careful guess of what one core decodes.
PICTURES_PER_CORE_S = 200.0


def choose_feed(config: TrainConfig, num_items: int, num_cpus: int, *, has_ray: bool = True) -> EngineChoice:
    """Follow the configuration; for `auto`, take Ray where decoding outweighs its start. Pure."""
    if config.engine != "auto":
        return EngineChoice(config.engine, "as configured")
    if config.num_workers > 1:
        return EngineChoice("ray", f"{config.num_workers} training workers")
    if config.ray_address is not None:
        return EngineChoice("ray", f"a cluster was given: {config.ray_address}")
    if not has_ray:
        return EngineChoice("local", "Ray is not installed")
    decode_s = num_items / (PICTURES_PER_CORE_S * num_cpus)
    work = f"{num_items:,} pictures are about {decode_s:.0f} s of decoding"
    if decode_s < STARTUP_S:
        return EngineChoice("local", f"{work}, less than Ray's start ({STARTUP_S:.0f} s)")
    return EngineChoice("ray", f"{work}, more than Ray's start ({STARTUP_S:.0f} s)")


@contextmanager
def decoding(config: TrainConfig, spec: ExampleSpec, choice: EngineChoice) -> Iterator[Decode]:
    """Make an engine ready to decode."""
    num_items = FEW_ITEMS if config.decode.items_per_task == "auto" else config.decode.items_per_task
    if choice.engine == "local":

        def decode_locally(listing: pa.Table) -> Generator[pa.Table, None, None]:
            blocks = slices(listing, num_items)
            return ahead(table for block in blocks for table in decode_examples(block, spec=spec))

        yield decode_locally
        return
    from embedder.engine.ray_session import ray_session

    with ray_session(config.ray_address, config.no_progress_timeout_s) as available:
        from embedder.training.stream import decode_on_ray

        num_cpus = decode_cpus(config.decode, available)
        yield lambda listing: decode_on_ray(listing, spec, num_items, num_cpus)


def slices(listing: pa.Table, num_items: int) -> Iterator[pa.Table]:
    """Cut the listing into what one decode task takes."""
    for start in range(0, listing.num_rows, num_items):
        yield listing.slice(start, num_items)
