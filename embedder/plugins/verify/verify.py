"""`embedder verify`: runs real items through the stages of a run and through the unsplit towers.

Both get the same batches of the same decoded items. The unsplit towers run timm's and transformers' own forward
functions in float32. In another dtype, a second reference separates the effect of the cut from that of the dtype: one
shard with everything. With a store, a third reference is its published vectors of these items, possibly made by other
versions of libraries.

The limits and their reasons. float32: at most 1e-6 apart; on one thread shards are equal to the last bit, but several
threads may sum in another order. bfloat16 and float16: a cosine of 0.999; with 8 bits of mantissa, each rounding has
a relative error of 2^-9, which gives 0.9999 in practice. int8: 0.99, and the loss is printed. The cut itself: 1e-6,
whatever the dtype.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import ComputeSettings, RunConfig, with_fast_start
from embedder.errors import ConfigError, SourceError, StoreError
from embedder.executors.job import decode_spec, make_plan, stage_threads, store_info
from embedder.installation import require
from embedder.models.model_folder import Model, open_model
from embedder.placement.compute_dtype import Gpu, Gpus, choose_dtype
from embedder.placement.device_settings import rows_per_batch, settings_of
from embedder.plugins.verify.compare_vectors import Limit, VectorComparison, compare, cosines
from embedder.quantities import plural
from embedder.retrieval.rank_metrics import retrieval_at
from embedder.sources.demo_source import shipped_source
from embedder.sources.listing import list_sources
from embedder.steps.decode import ItemReader
from embedder.steps.stage import EMBEDDINGS, TowerStage, UnsplitStage
from embedder.steps.stage_spec import StageSpec
from embedder.storage.vector_pages import VectorColumn
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store.store_info import differing, read_published, read_store_info, served_info
from embedder.store.tables.arrow_lookup import KnownIds
from embedder.store.tables.arrow_tensors import unpack_vectors
from embedder.store.tables.tables import RecordTable
from index.vectors import Mask
from shards.costs import Dtype, weight_bytes
from shards.shard_specs import ShardSpec, whole_model

if TYPE_CHECKING:
    from shards.int8_benefit import Int8Benefit

LIMITS = {
    "float32": Limit(max_difference=1e-6),
    "bfloat16": Limit(min_cosine=0.999),
    "float16": Limit(min_cosine=0.999),
    "int8": Limit(min_cosine=0.99),
}
CUT_LIMIT = Limit(max_difference=1e-6)
UNSPLIT = "unsplit towers, float32"
KEYS = ("item_id", "segment", "content_version")
"""Columns that are equal where a row of a store and a decoded row have the same content."""
SIDES = {"image": "vision", "text": "text"}
COMPARED: tuple[Dtype, ...] = ("float32", "bfloat16", "int8")
MAX_LISTED = 10_000  # items are taken evenly spaced from these, as neighbours in a listing are alike
RANK = 10

Embedded = dict[str, VectorColumn]


@dataclass(frozen=True)
class Precision:
    """Cost and loss of a dtype, with the same stages.

    Cosines are by side, with the unsplit towers in float32. `weight_bytes` are those of all stages together, `row_s`
    the seconds of all stages for one row. `recall_at_10` is the share of captions whose own image is among the best
    ten; None if there are too few pairs.
    """

    dtype: str
    weight_bytes: int
    row_s: float
    least_cosine: dict[str, float]
    mean_cosine: dict[str, float]
    recall_at_10: float | None


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        model_fingerprint: of the weights.
        dtype: compute dtype.
        device: torch device.
        plan: the stages' layers.
        num_rows: decoded rows, including rejects.
        num_rejected: rows of items that couldn't be read completely.
        num_pairs: rows with an image and a caption.
        comparisons: each side against each reference.
        precisions: int8 next to the float dtypes; empty for other dtypes.
        gain: the figures that decide whether int8 is refused.
    """

    model_fingerprint: str
    dtype: str
    device: str
    plan: tuple[ShardSpec, ...]
    num_rows: int
    num_rejected: int
    num_pairs: int
    comparisons: tuple[VectorComparison, ...]
    precisions: tuple[Precision, ...]
    gain: "Int8Benefit | None"

    @property
    def failures(self) -> list[str]:
        """Reasons against using it, one clause each; empty if there are none."""
        refusal = self.gain.refusal() if self.gain is not None else None
        failed = [each.describe_failure() for each in self.comparisons if each.passed is False]
        return failed + ([refusal] if refusal else [])


@with_fast_start
def verify(
    config: RunConfig,
    *,
    num_items: int = 64,
    store: str | None = None,
    max_difference: float | None = None,
    min_cosine: float | None = None,
    device: str = "cpu",
) -> Verification:
    """Compare the stages of a run with the unsplit towers.

    Args:
        config: the run: model, plan or number of stages, dtype, batch size, sources (none: the demo's images).
        num_items: items to take of the sources.
        store: store whose published vectors are compared, too; it also supplies what the configuration leaves open:
            model, dtype, colours.
        max_difference: limit against the unsplit towers; None means that of the dtype.
        min_cosine: limit against the unsplit towers; None means that of the dtype.
        device: `cpu`, or a GPU of this machine: `cuda`, `cuda:1`.

    Raises:
        InstallationError: torch is not installed.
        ConfigError: no model is given, or there is no such device here.
        StoreError: the store can't be read, is of another model, or has none of the items as they are now.
        SourceError: a source can't be listed, or none of its items can be embedded.
        shards.ModelError: the model or the plan can't be used.
    """
    require("embed", "embedder verify")
    _check_device(device)
    config = config if store is None else _as_published(config, StoreFiles(store))
    model = open_model(config.required_model)
    plan = make_plan(config.compute, model)
    planned = plan.dtype if config.plan is not None else None
    compute = choose_dtype(config.compute, lambda: _gpus_of(device), planned=planned).apply_to(config.compute)
    dtype = compute.settled_dtype
    rows = _decode_items(config, model, num_items)
    runner = _Runner(compute, model, device)
    whole = whole_model(model.config)

    specs = tuple(stage.spec for stage in plan.stages)
    expected, _ = runner.run(rows, [whole], "float32", UnsplitStage)
    found, _ = runner.run(rows, specs, dtype)
    limit = LIMITS[dtype]
    limit = Limit(_either(max_difference, limit.max_difference), _either(min_cosine, limit.min_cosine))
    comparisons = _compare(found, UNSPLIT, expected, limit)
    if dtype != "float32":
        one, _ = runner.run(rows, [whole], dtype)
        comparisons += _compare(found, f"one shard, {dtype}", one, CUT_LIMIT)
    if store is not None:
        comparisons += _compare_with_store(StoreFiles(store), store_info(config.rows, model, dtype), rows, found, limit)
    precisions, gain = [], None
    if dtype == "int8":
        from shards.int8_benefit import measure_int8_benefit

        precisions = [_precision(runner, rows, specs, each, expected) for each in COMPARED]
        gain = measure_int8_benefit(model.folder, device, num_threads=stage_threads(compute))
    return Verification(
        model_fingerprint=model.fingerprint,
        dtype=dtype,
        device=device,
        plan=specs,
        num_rows=sum(table.num_rows for table in rows),
        num_rejected=sum(table.num_rows - table["error_type"].null_count for table in rows),
        num_pairs=int(_is_pair(expected).sum()),
        comparisons=tuple(comparisons),
        precisions=tuple(precisions),
        gain=gain,
    )


def _as_published(config: RunConfig, files: StoreFiles) -> RunConfig:
    """Fill in from a store the settings that affect vectors and are open, and how it cut videos."""
    served = served_info(read_store_info(files), read_published(files))
    decode = config.decode
    if decode.colour == "auto":
        decode = decode.model_copy(update={"colour": served.colour})
    return config.model_copy(
        update={
            "segment_s": served.segment_s,
            "frames_per_segment": served.frames_per_segment,
            "decode": decode,
            "dtype": served.dtype if config.dtype == "auto" and config.plan is None else config.dtype,
            "model": config.model if config.main_model is not None else served.model,
        }
    )


def _check_device(device: str) -> None:
    import torch

    kind, _, number = device.partition(":")
    num_gpus = torch.cuda.device_count()
    if device != "cpu" and not (kind == "cuda" and (number or "0") in map(str, range(num_gpus))):
        raise ConfigError(
            f"verify: device {device!r}, and torch {torch.__version__} can use {plural(num_gpus, 'GPU')} here; write "
            "cpu, or cuda where there is one"
        )


def _gpus_of(device: str) -> Gpus:
    import torch

    kind = torch.device(device)
    if kind.type != "cuda":
        return ()
    return (Gpu(torch.cuda.get_device_name(kind), torch.cuda.get_device_capability(kind)),)


def _either(given: float | None, usual: float | None) -> float | None:
    return usual if given is None else given


@dataclass(frozen=True)
class _Runner:
    """Runs decoded rows through stages, with one stage in memory at a time."""

    compute: ComputeSettings
    model: Model
    device: str

    def run(
        self, rows: Sequence[pa.Table], specs: Iterable[ShardSpec], dtype: str, kind: type[TowerStage] = TowerStage
    ) -> tuple[Embedded, float]:
        """Return the vectors of the rows, and the seconds of all stages for one row."""
        tables = list(rows)
        for index, shard in enumerate(specs):
            spec = StageSpec(
                index=index,
                model=self.model.uri,
                shard=shard,
                dtype=dtype,
                device=self.device,
                num_threads=stage_threads(self.compute),
                batch_sizes=(rows_per_batch(self.compute.batch_size, settings_of([self.device], self.model.config)),),
            )
            stage = kind(spec).load()
            stage(tables[0])  # warm-up: the first call of a process is slower and must not be timed
            tables = [stage(table) for table in tables]
            del stage
        return _vectors(tables), _row_s(tables)


def _decode_items(config: RunConfig, model: Model, num_items: int) -> list[pa.Table]:
    with shipped_source() as shipped:
        listing = _take(list_sources(config.source or (shipped,)), num_items)
        rows = list(
            ItemReader(decode_spec(config.rows, model, rows_per_batch(config.batch_size))).decode(
                listing, lambda: False
            )
        )
    if not any(table["modality"].null_count < table.num_rows for table in rows):
        reasons = {f"{row['error_type']}: {row['error']}" for table in rows for row in table.to_pylist()[:1]}
        paths = ", ".join(source.path for source in config.source)
        raise SourceError(
            f"source {paths}: 0 of {plural(listing.num_rows, 'item')} can be embedded "
            f"({'; '.join(sorted(reasons)[:2])}); name a source with images, videos or captions"
        )
    return rows


def _take(listing: Iterable[pa.Table], num_items: int) -> pa.Table:
    tables: list[pa.Table] = []
    for table in listing:
        tables.append(table)
        if sum(each.num_rows for each in tables) >= MAX_LISTED:
            break
    if not sum(table.num_rows for table in tables):
        raise SourceError("the source is empty; name one with images, videos or captions")
    items = pa.concat_tables(tables)
    num_taken = min(num_items, items.num_rows)
    return items.take(pa.array(np.arange(num_taken) * items.num_rows // num_taken))


def _vectors(tables: Sequence[pa.Table]) -> Embedded:
    columns = {
        side: pa.chunked_array([chunk for table in tables for chunk in table[EMBEDDINGS[tower]].chunks])
        for side, tower in SIDES.items()
    }
    return {
        side: VectorColumn(unpack_vectors(column.drop_null()), pc.is_valid(column).to_numpy())
        for side, column in columns.items()
    }


def _row_s(tables: Sequence[pa.Table]) -> float:
    calls = [call for table in tables for calls in table["trace"].drop_null().to_pylist() for call in calls]
    stages_s = sum(call["wall_s"] for call in calls if call["step"].startswith("stage"))
    return float(stages_s / sum(table.num_rows for table in tables))


def _compare(found: Embedded, reference: str, expected: Embedded, limit: Limit) -> list[VectorComparison]:
    return [compare(side, found[side], reference, expected[side], limit) for side in SIDES]


def _compare_with_store(
    files: StoreFiles, info: StoreInfo, rows: Sequence[pa.Table], found: Embedded, limit: Limit
) -> list[VectorComparison]:
    current = read_published(files)
    served = served_info(read_store_info(files), current)
    if names := differing(served, info):
        raise StoreError(
            f"store {files.address}: its {' and '.join(name.replace('_', ' ') for name in names)} is not this run's; "
            "verify with its model, sources and preprocessing"
        )
    here = pa.concat_tables([table.select(KEYS) for table in rows])
    columns = {side: f"{side}_embedding" for side in SIDES}
    pieces = RecordTable(files, "embeddings", current.embeddings).pieces([*KEYS, *columns.values()])
    wanted = KnownIds(here["item_id"])
    stored = pa.concat_tables([piece.take(wanted.find_among(piece["item_id"])) for piece in pieces])
    place_of = {key: place for place, key in enumerate(_keys(stored))}
    places = [place_of.get(key) for key in _keys(here)]
    if not any(place is not None for place in places):
        raise StoreError(f"store {files.address}: it has none of the items as they are now; name the sources it is of")
    made_with = (
        ", ".join(f"{name} {version}" for name, version in served.libraries.items()) or "versions it doesn't say"
    )
    comparisons = []
    for side, column in columns.items():
        vectors = stored[column].take(pa.array(places, pa.int64()))
        expected = VectorColumn(unpack_vectors(vectors.drop_null()), pc.is_valid(vectors).to_numpy())
        comparisons.append(
            compare(side, _select_rows(found[side], expected.present), f"the store ({made_with})", expected, limit)
        )
    return comparisons


def _keys(rows: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in KEYS), strict=True))


def _select_rows(vectors: VectorColumn, wanted: Mask) -> VectorColumn:
    return VectorColumn(vectors.values[wanted[vectors.present]], vectors.present & wanted)


def _precision(
    runner: _Runner, rows: Sequence[pa.Table], specs: Sequence[ShardSpec], dtype: Dtype, expected: Embedded
) -> Precision:
    found, row_s = runner.run(rows, specs, dtype)
    angles = {side: cosines(found[side].values, expected[side].values) for side in SIDES if len(expected[side].values)}
    return Precision(
        dtype=dtype,
        weight_bytes=sum(weight_bytes(runner.model.config, spec, dtype) for spec in specs),
        row_s=row_s,
        least_cosine={side: float(values.min()) for side, values in angles.items()},
        mean_cosine={side: float(values.mean()) for side, values in angles.items()},
        recall_at_10=_recall(found),
    )


def _is_pair(vectors: Embedded) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.asarray(vectors["image"].present & vectors["text"].present)


def _recall(vectors: Embedded) -> float | None:
    is_pair = _is_pair(vectors)
    if is_pair.sum() <= RANK:
        return None
    image, text = (side.values[is_pair[side.present]] for side in (vectors["image"], vectors["text"]))
    numbers = np.arange(len(image))
    return retrieval_at(text, numbers, image, numbers, (RANK,))[RANK]
