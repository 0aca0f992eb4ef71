"""Adds two columns of embeddings to any Ray dataset with columns of images and captions."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from embedder.batch_schema import CARRIED, TENSOR
from embedder.compat import fast_start
from embedder.config import ComputeSettings, load_config
from embedder.errors import ConfigError, EmbedderError, check_argument
from embedder.executors.job import check_int8, decode_limits, decode_spec, make_plan, stage_specs
from embedder.executors.ray_session import cluster
from embedder.installation import require
from embedder.media.sniff import sniff
from embedder.models.model_folder import Model, open_model
from embedder.placement.allocation import Allocation
from embedder.placement.compute_dtype import choose_dtype, gpus_of_nodes
from embedder.placement.device_settings import rows_per_batch
from embedder.placement.resources import allocate
from embedder.quantities import plural
from embedder.servables.predict import ServablePredictor, cells_of, encoded_image
from embedder.servables.servable import Servable
from embedder.sources.fetch import Fetcher, FetchError
from embedder.steps.attempts import limit_deaths
from embedder.steps.item_decoder import DecodeSpec, ItemContent, ItemDecoder, ItemProblem, Values
from embedder.store.journal.step_metrics import measure, trace_column
from embedder.store.tables.arrow_tensors import pack
from shards.plan import ShardPlan

if TYPE_CHECKING:
    from ray.data import Dataset

LOG = logging.getLogger(__name__)
PREDICT_CURE = "smaller blocks of the dataset need less memory (Dataset.repartition)"
ADDED = ("image_embedding", "text_embedding", "embedding_error")
IMAGE_TYPES = "binary (files), string (URIs), struct<bytes: binary, path: string>, or a tensor of uint8 (H, W, 3)"
CAPTION_TYPES = "string"
OBJECTS = "ray.data.arrow_pickled_object"  # type of values that Arrow has no type for; each row of them is checked


class BatchPredictor:
    """Model cut into stages, to embed the rows of any Ray dataset."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self.model = model
        self.config = load_config(overrides=options)

    @classmethod
    def from_model(cls, uri: str | Path, **options: Any) -> Self:
        """Open a model folder.

        Args:
            uri: model folder: local, s3:// or hub id.
            options: keys of the configuration file: `dtype`, `num_stages`, `batch_size`, `stage`, ...

        Raises:
            shards.ModelError: the folder is no model folder.
            ConfigError: an option is unknown, or breaks its rule.
        """
        return cls(open_model(str(uri)), options)

    @staticmethod
    def from_servables(servables: Sequence[Servable | Mapping[str, Any]], **options: Any) -> ServablePredictor:
        """Open models of any framework, which share one read and one decode; outputs of one may be inputs of another.

        Args:
            servables: or their sections, such as `{"name": "tower", "kind": "towers", "uri": "models/clip"}`.
            options: keys of the configuration file; only `decode` and `web` matter here.

        Raises:
            ServableError: one breaks a rule, lacks a file, or doesn't fit the others.
            shards.ModelError: a folder is no model folder.
            ConfigError: an option is unknown, or breaks its rule.
        """
        config = load_config(overrides=options)
        return ServablePredictor(
            servables, decode_limits(config.decode), config.web, colour=config.decode.settled_colour
        )

    def predict(self, dataset: "Dataset", *, image: str = "image", caption: str = "caption") -> "Dataset":
        """Add `image_embedding` and `text_embedding` (list<float>, L2-normalised; null where a row lacks the side).

        All other columns are returned unchanged. A row that can't be embedded keeps its place, with the reason in
        `embedding_error`. Lazy, like all of Ray Data: nothing runs before the result is read. The dataset's schema is
        checked at once; if Ray Data doesn't know it, it computes the first rows for it.

        Args:
            dataset: rows with images, captions, or both.
            image: column with images: file contents, URIs, or uint8 arrays (H, W, 3). It may be missing.
            caption: column with captions. It may be missing, but not both.

        Raises:
            ArgumentTypeError: the dataset isn't one of Ray Data, or a column's name isn't a string.
            ConfigError: neither column is there, one has an unsupported type or the name of an added column; the stages
                need more CPUs or GPUs than the cluster has, or int8 doesn't help here.
        """
        require("embed", "BatchPredictor.predict")
        from embedder.pipeline import through_stages

        _check_dataset(dataset, image, caption)
        compute, plan, allocation = self._plan_for_cluster()
        spec = decode_spec(self.config.rows, self.model, rows_per_batch(compute.batch_size))
        decoded = dataset.map_batches(
            partial(decode_columns, spec=spec, image=image, caption=caption),
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=allocation.decode_cpus,
        )
        stages = stage_specs(compute, self.model, plan, allocation)
        with fast_start(self.config.fast_start):
            embedded = through_stages(decoded, stages, allocation)
        return embedded.map_batches(
            show_columns, batch_format="pyarrow", batch_size=None, num_cpus=allocation.write_cpus
        )

    def _plan_for_cluster(self) -> tuple[ComputeSettings, ShardPlan, Allocation]:
        """Choose the dtype, cut the model, and allot CPUs and GPUs of the cluster's nodes to its stages."""
        compute = self.config.compute
        plan, there = make_plan(compute, self.model), cluster()
        planned = plan.dtype if compute.plan is not None else None
        dtype = choose_dtype(compute, lambda: gpus_of_nodes(there.nodes), planned=planned)
        compute = dtype.apply_to(compute)
        if not dtype.was_asked:
            LOG.info(f"dtype {dtype}")
        if plan.dtype != dtype.dtype:
            plan = make_plan(compute, self.model)
        allocation = allocate(compute, there, plan.stages)
        check_int8(compute, self.model)
        return compute, plan, allocation


def _check_dataset(dataset: "Dataset", image: str, caption: str) -> None:
    """Refuse what is no dataset of a running Ray, or lacks columns that can be embedded."""
    import ray

    if not ray.is_initialized():
        raise ConfigError("Ray is not running; call ray.init() before BatchPredictor.predict")
    expected = "a dataset of Ray Data, as ray.data.from_items makes one"
    check_argument("BatchPredictor.predict: dataset", dataset, ray.data.Dataset, expected)
    schema = dataset.schema()
    if schema is not None:
        check_columns(dict(zip(schema.names, schema.types, strict=True)), image, caption)


@lru_cache(maxsize=1)
def _decoder_for(spec: DecodeSpec) -> tuple[ItemDecoder, Fetcher]:
    return ItemDecoder(spec), Fetcher(spec.web)


def decode_columns(table: pa.Table, *, spec: DecodeSpec, image: str, caption: str) -> Iterator[pa.Table]:
    """Decode a dataset's rows into pixels and token ids, in batches; the dataset's columns are carried along.

    Raises:
        ConfigError: as in `check_columns`.
        RunFailedError: the rows have killed several processes.
    """
    check_columns(dict.fromkeys(table.schema.names), image, caption)  # a block of other types only loses its own rows
    with limit_deaths(lambda: f"decoding {plural(table.num_rows, 'row')} of the dataset", PREDICT_CURE):
        yield from _decode_rows(table, spec, image, caption)


def _decode_rows(table: pa.Table, spec: DecodeSpec, image: str, caption: str) -> Iterator[pa.Table]:
    decoder, fetcher = _decoder_for(spec)
    for start in range(0, table.num_rows, spec.rows_per_batch):
        part = table.slice(start, spec.rows_per_batch)
        with measure("decode", decoder.cpu_s) as measurement:
            images = cells_of(part, image)
            captions = cells_of(part, caption)
            addresses = [each for each in images if isinstance(each, str)]
            with fetcher.ahead(addresses, max_bytes=spec.limits.max_file_bytes):
                rows = [_decode_row(decoder, fetcher, *cells) for cells in zip(images, captions, strict=True)]
            part = part.rename_columns([CARRIED + name for name in part.schema.names])
            for column in [column for column in spec.columns if column.type == TENSOR or column.name == "error"]:
                cells = [row.get(column.name) for row in rows]
                values = pack(cells) if column.type == TENSOR else pa.array(cells, column.type)
                part = part.append_column(column, values)
            measurement.num_rows = len(rows)
        yield part.append_column("trace", trace_column(len(rows), measurement))


def show_columns(table: pa.Table) -> pa.Table:
    """Restore the names of the dataset's own columns, and append the added ones."""
    if table.num_rows == 0:
        return table
    own = [name for name in table.schema.names if name.startswith(CARRIED)]
    added = ["image_embedding", "text_embedding", "error"]
    return table.select([*own, *added]).rename_columns([*[name.removeprefix(CARRIED) for name in own], *ADDED])


def check_columns(columns: Mapping[str, Any], image: str, caption: str) -> None:
    """Check that a dataset has the needed columns, of supported types, and none with the name of an added one.

    `columns` has the Arrow type of each column by name; anything else if it isn't known before the rows are read.

    Raises:
        ArgumentTypeError: a column's name isn't a string.
        ConfigError: neither column is there, one has another type, or the dataset has a column that would be added.
    """
    for key, name in (("image", image), ("caption", caption)):
        check_argument(f"BatchPredictor.predict: {key}", name, str, "the name of a column")
    if image not in columns and caption not in columns:
        shown = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
        raise ConfigError(
            f"the dataset has the columns {shown}, and neither {image!r} ({IMAGE_TYPES}) nor {caption!r} "
            f"({CAPTION_TYPES}); name them: predict(dataset, image=..., caption=...)"
        )
    problems = [
        f"column {name!r} is {columns[name]}; expected {expected}"
        for name, expected, is_taken in ((image, IMAGE_TYPES, _holds_images), (caption, CAPTION_TYPES, _holds_texts))
        if isinstance(columns.get(name), pa.DataType) and not is_taken(columns[name])
    ]
    if problems:
        raise ConfigError(
            f"the dataset's {'; its '.join(problems)}; convert it, or name another: "
            "predict(dataset, image=..., caption=...)"
        )
    taken = [name for name in ADDED if name in columns]
    if taken:
        raise ConfigError(f"the dataset has columns {taken} already; drop or rename them before predict")


def _number_type(kind: Any) -> pa.DataType | None:
    """Return the type of a tensor's numbers: `value_type` since Ray 2.56, `scalar_type` before."""
    return getattr(kind, "value_type", None) or getattr(kind, "scalar_type", None)


def _holds_images(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", None)  # of a tensor
        if shape is None:
            return kind.extension_name == OBJECTS or _holds_images(kind.storage_type)
        is_shape = len(shape) == 2 or (len(shape) == 3 and shape[2] in (None, 1, 3, 4))
        return is_shape and _number_type(kind) == pa.uint8()
    if pa.types.is_struct(kind):
        return bool({"bytes", "path"} & {field.name for field in kind})
    is_kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in is_kinds) or _holds_texts(kind)


def _holds_texts(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == OBJECTS or _holds_texts(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _holds_texts(kind.value_type)
    is_kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(is_kind(kind) for is_kind in is_kinds)


def _decode_row(decoder: ItemDecoder, fetcher: Fetcher, image: Any, caption: Any) -> Values:
    """Decode one row into pixels, token ids and error; a row is one image, so a video is an error."""
    problem = None
    if caption is not None and not isinstance(caption, str):
        found = f"found {type(caption).__name__} as a caption, which is {CAPTION_TYPES}"
        caption, problem = None, ItemProblem("decode", "NotAText", found)
    try:
        content = _content(decoder, fetcher, image, caption)
    except FetchError as error:
        content = ItemContent(caption=caption, problem=ItemProblem("read", error.error_type, error.message))
    except EmbedderError as error:
        content = ItemContent(caption=caption, problem=ItemProblem("decode", "NotAPicture", str(error)))
    (row,) = decoder.rows(replace(content, problem=content.problem or problem))
    if "error" in row:
        row["error"] = f"{row['error_type']}: {row['error']}"
    return row


def _content(decoder: ItemDecoder, fetcher: Fetcher, image: Any, caption: str | None) -> ItemContent:
    content = encoded_image(fetcher, image, decoder.spec.limits.max_file_bytes)
    if content is None:
        return ItemContent("text", None, caption)
    if sniff(content[:4096]) == "image":
        return ItemContent("image", content, caption)
    message = "a row holds one image; videos go through `embedder embed`"
    return ItemContent(caption=caption, problem=ItemProblem("decode", "NotAPicture", message))
