"""Sample of a run's items, through the real decode step: their mix, and the cost of decoding."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from embedder.batch_schema import IMAGE_GRID, Measurement
from embedder.config import RowSettings
from embedder.executors.job import decode_spec
from embedder.models.model_folder import Model
from embedder.placement import hardware
from embedder.planning.background_load import busy_machine
from embedder.sources.demo_source import shipped_source
from embedder.sources.listing import list_sources
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.steps.decode import ItemReader, grids_of
from shards.planning.planning_costs import DataMix

NUM_ITEMS = 64
NUM_WARM = 4  # the first ones start the sandbox
NUM_CAPTIONS = 64
MAX_S = 3.0  # a sample of long videos ends here


@dataclass(frozen=True)
class ItemSample:
    """Mix and costs of sampled items; `mix` has means, with the padding that is computed for captions.

    CPU seconds of an image include fetching and hashing its file; those of a caption without images, all other work.
    """

    mix: DataMix
    decode_s_per_image: float | None
    tokenise_s_per_caption: float
    rows: pa.Table


def sample_items(rows: RowSettings, model: Model, listing: pa.Table | None = None) -> ItemSample:
    """Decode items spread evenly over a listing of `embedder.sources.listing`; None uses the shipped images."""
    if listing is None or listing.num_rows == 0:
        with shipped_source() as source:
            listing = pa.concat_tables(list(list_sources([source])))
    numbers = np.unique(np.linspace(0, listing.num_rows - 1, NUM_ITEMS + NUM_WARM).astype(int))
    listing = listing.take(pa.array(numbers))
    reader = ItemReader(decode_spec(rows, model))
    num_warm = min(NUM_WARM, listing.num_rows // 2)
    reader.decoder.warm_up()
    with busy_machine(hardware.num_cpus()):
        list(reader.decode(listing.slice(0, num_warm), lambda: False))
        ends_s = time.perf_counter() + MAX_S
        tables = list(reader.decode(listing.slice(num_warm), lambda: time.perf_counter() > ends_s))
    tables = tables or list(reader.decode(listing.slice(0, 1), lambda: False))  # the first items used up all the time
    return _sum_up(pa.concat_tables(tables), _captions_s(model, tables))


def _sum_up(rows: pa.Table, encode_s: float) -> ItemSample:
    calls = [Measurement(**call) for calls in rows["trace"].drop_null().to_pylist() for call in calls]
    num_images, num_captions = sum(call.num_images for call in calls), sum(call.num_captions for call in calls)
    cpu_s = sum(call.cpu_s for call in calls)
    mix = observed_mix(calls, sum(number is not None for number in rows["num_vectors"].to_pylist()))
    if num_images and IMAGE_GRID.name in rows.column_names:
        grids = grids_of(rows)
        mix = replace(mix, image_patches=round(int(grids.prod(1).sum()) / int(grids[:, 0].sum())))
    if num_images == 0:
        return ItemSample(mix, None, cpu_s / max(num_captions, 1), rows)
    return ItemSample(mix, max(cpu_s - encode_s * num_captions, 0.0) / num_images, encode_s, rows)


def _captions_s(model: Model, tables: Sequence[pa.Table]) -> float:
    """Return the median CPU seconds of tokenising one caption; none for a model without a text tower."""
    if model.tokenizer_json is None:
        return 0.0
    captions = [text for table in tables for text in table["caption"].to_pylist() if text] or ["an image of a cat"]
    config = model.config
    encoder = CaptionEncoder(model.tokenizer_json, config.preprocess.max_caption_tokens, config.required_text.end_id)
    seconds = []
    for caption in (captions * NUM_CAPTIONS)[:NUM_CAPTIONS]:
        started_s = time.thread_time()
        encoder.encode(caption)
        seconds.append(time.thread_time() - started_s)
    return statistics.median(seconds)


def observed_mix(calls: Sequence[Measurement], num_items: int) -> DataMix:
    """Return the mix of decoded items."""
    num_images, num_captions = sum(call.num_images for call in calls), sum(call.num_captions for call in calls)
    num_tokens = sum(call.num_tokens for call in calls)
    if num_items == 0 or num_images + num_captions == 0:
        return DataMix()
    return DataMix(
        images_per_item=num_images / num_items,
        captions_per_item=num_captions / num_items,
        caption_tokens=max(1, round(num_tokens / num_captions)) if num_captions else DataMix.caption_tokens,
    )
