"""Prediction by servables on any Ray dataset: one read, one decode for each distinct preprocessing, then their actors.

rows     of the dataset; its columns pass through
decode   CPU tasks: make the servables' inputs from images and captions
actors   one pool for each group of servables (`embedder.servables.packing`), in the order of their dependencies
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from embedder.batch_schema import CARRIED
from embedder.compat import worker_options
from embedder.config_toml.run_sections import WebConfig
from embedder.errors import ConfigError, EmbedderError
from embedder.media.given_inputs import file_or_content
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import Colour
from embedder.media.sniff import HEAD_BYTES, sniff
from embedder.servables import make_servable
from embedder.servables.order import order_servables
from embedder.servables.packing import ActorGroup, pack_servables, reserved_cpus
from embedder.servables.prepare import GRID, InputPreparer
from embedder.servables.running_servable import DECODED, RunningServable, comes_from_servable, decoded_name
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import IMAGES, ColumnInput, InputColumn
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.source_errors import from_os_error
from embedder.steps.attempts import limit_deaths
from embedder.steps.stage_actor import RowActor
from embedder.steps.stage_contract import Stage
from embedder.storage.web_address import shown_address
from embedder.store.journal.runs import Run

if TYPE_CHECKING:
    from ray.data import Dataset

DECODE_CURE = "smaller blocks of the dataset need less memory (Dataset.repartition)"
ROWS = 64  # of a decoded table: 10 MB of pixels at 224 px
ACTOR_BYTES = 4 << 30  # memory up to which servables share an actor
DEFAULT_WEB = WebConfig()
DECODE_ERROR = "decode_error"
"""Column that says why a row's image could not be read or decoded."""


class ServablePredictor:
    """Servables of any kinds, to run on the rows of any Ray dataset."""

    def __init__(
        self,
        servables: Sequence[Servable | Mapping[str, Any]],
        limits: DecodeLimits | None = None,
        web: WebConfig | None = None,
        colour: Colour = "srgb",
        actor_bytes: int = ACTOR_BYTES,
    ) -> None:
        """Check and order the servables; no framework is imported.

        Args:
            servables: or sections of a configuration, such as `[[model]]`.
            limits: on the decoding of one image.
            web: limits on web addresses.
            colour: how the numbers of images are read.
            actor_bytes: memory up to which servables share an actor.

        Raises:
            ServableError: one breaks a rule, lacks a file, or doesn't fit the others.
            shards.ModelError: a folder is no model folder.
        """
        if not servables:
            raise ConfigError("no servables: give one at least")
        self.servables = order_servables([make_servable(each).absolute() for each in servables])
        self.groups = pack_servables(self.servables, actor_bytes)
        self.limits, self.web, self.colour = limits or DecodeLimits(), web or WebConfig(), colour

    def predict(self, dataset: "Dataset", *, image: str = "image", caption: str = "caption") -> "Dataset":
        """Add NAME.OUTPUT for each output of each servable, and NAME.error, which says why a row has none.

        The dataset's columns are returned unchanged. Lazy, like all of Ray Data: nothing runs before the result is
        read.

        Args:
            dataset: rows with images, captions, or both.
            image: column with images: file contents, URIs, or uint8 arrays (H, W, 3). It may be missing.
            caption: column with captions. It may be missing.

        Raises:
            ConfigError: Ray is not running.
        """
        import ray

        if not ray.is_initialized():
            raise ConfigError("Ray is not running; call ray.init() before ServablePredictor.predict")
        decode_cpus, cpus = reserved_cpus(self.groups, ray.cluster_resources().get("CPU", 1.0))
        decode = partial(
            decode_rows,
            servables=tuple(self.servables),
            image=image,
            caption=caption,
            limits=self.limits,
            colour=self.colour,
            web=self.web,
        )
        found = dataset.map_batches(decode, batch_format="pyarrow", batch_size=None, num_cpus=decode_cpus)
        found = self._add_stages(found, cpus)
        return found.map_batches(show_rows, batch_format="pyarrow", batch_size=None, num_cpus=decode_cpus)

    def _add_stages(self, decoded: "Dataset", cpus: Sequence[float]) -> "Dataset":
        """Run each group of servables in its own actors, which have some `cpus` each."""
        from ray.data import ActorPoolStrategy

        from embedder.compat.ray_data import map_blocks

        found = decoded
        for number, (group, num_cpus) in enumerate(zip(self.groups, cpus, strict=True)):
            found = map_blocks(
                found,
                ServableActor,
                (ServableStage(group, self.limits, _needed_later(self.groups[number + 1 :])), group),
                rows_per_batch=ROWS,
                num_gpus=group.num_gpus,
                compute=ActorPoolStrategy(size=group.replicas),
                num_cpus=num_cpus,
                **worker_options(),
            )
        return found


def item_inputs(servables: Sequence[Servable]) -> dict[str, InputColumn]:
    """Return the inputs that decode makes, by column name; equal inputs of several servables only once."""
    inputs = [each for servable in servables for each in servable.input_columns().values()]
    made = [each for each in inputs if not isinstance(each, ColumnInput) and not comes_from_servable(each)]
    return {decoded_name(each): each for each in made}


def _needed_later(later: Sequence[ActorGroup]) -> frozenset[str]:
    return frozenset(item_inputs([servable for group in later for servable in group.servables]))


@lru_cache(maxsize=1)
def _preparer_for(limits: DecodeLimits, colour: Colour, web: WebConfig) -> tuple[InputPreparer, Fetcher]:
    return InputPreparer(limits, colour), Fetcher(web)


def decode_rows(
    table: pa.Table,
    *,
    servables: Sequence[Servable],
    image: str,
    caption: str,
    limits: DecodeLimits,
    colour: Colour = "srgb",
    web: WebConfig = DEFAULT_WEB,
) -> Iterator[pa.Table]:
    """Make the servables' inputs from a dataset's rows, in tables of `ROWS`; the dataset's columns are carried along.

    Raises:
        ServableError: a servable's output has the name of a column, or one needs a missing column.
        ConfigError: a column has the name of the one that says why an image can't be decoded.
    """
    order_servables(servables, table.column_names)
    if DECODE_ERROR in table.column_names:
        raise ConfigError(f"the dataset has a column {DECODE_ERROR!r} already; drop or rename it before predict")
    inputs = item_inputs(servables)
    _check_sources(inputs, table.column_names, image, caption)
    preparer, fetcher = _preparer_for(limits, colour, web)
    with limit_deaths(lambda: f"decoding {table.num_rows} rows of the dataset", DECODE_CURE):
        for start in range(0, table.num_rows, ROWS):
            yield _decode_rows(table.slice(start, ROWS), inputs, image, caption, preparer, fetcher)


def _check_sources(inputs: Mapping[str, InputColumn], names: Sequence[str], image: str, caption: str) -> None:
    """Refuse a dataset with nothing that a servable could take."""
    own = {image if isinstance(each, IMAGES) else caption for each in inputs.values() if each.of is None}
    if own and not own & set(names):
        raise ConfigError(
            f"the dataset has columns {list(names)}, and the servables take {', '.join(map(repr, sorted(own)))}; "
            "name them: predict(dataset, image=..., caption=...)"
        )


def _decode_rows(
    part: pa.Table,
    inputs: Mapping[str, InputColumn],
    image: str,
    caption: str,
    preparer: InputPreparer,
    fetcher: Fetcher,
) -> pa.Table:
    problems: list[str | None] = [None] * part.num_rows
    read: dict[str, list[Any]] = {}
    made: dict[str, pa.Array] = {}
    for name, declared in inputs.items():
        is_image = isinstance(declared, IMAGES)
        source = declared.of or (image if is_image else caption)
        if source not in read:
            cells = cells_of(part, source)
            read[source] = _images(cells, fetcher, preparer.limits, problems) if is_image else cells
        prepared = preparer.make(declared, read[source])
        made[name] = prepared.column
        if prepared.grid is not None:
            made[name + GRID] = prepared.grid
        for row, problem in prepared.problems.items():
            problems[row] = problems[row] or problem
    part = part.rename_columns([CARRIED + name for name in part.column_names])
    for name, column in made.items():
        part = part.append_column(name, column)
    return part.append_column(DECODE_ERROR, pa.array(problems, pa.string()))


def _images(
    cells: Sequence[Any], fetcher: Fetcher, limits: DecodeLimits, problems: list[str | None]
) -> list[bytes | None]:
    found: list[bytes | None] = []
    with fetcher.ahead([cell for cell in cells if isinstance(cell, str)], max_bytes=limits.max_file_bytes):
        for row, cell in enumerate(cells):
            content = None
            try:
                content = encoded_image(fetcher, cell, limits.max_file_bytes)
                if content and sniff(content[:4096]) != "image":
                    raise DecodeError("NotAPicture", "a row holds one image; videos go through `embedder embed`")
            except (FetchError, DecodeError) as error:
                problems[row], content = f"{error.error_type}: {error.message}", None
            except EmbedderError as error:
                problems[row], content = f"NotAPicture: {error}", None
            found.append(content)
    return found


def encoded_image(fetcher: Fetcher, image: Any, max_bytes: int) -> bytes | None:
    """Return the encoded image of a dataset's cell; None if there is none.

    `image` is encoded bytes, a URI, an array of pixels, a Pillow image, or a struct with `bytes` or `path`. Of a file
    that is no image, such as a video, at least the first bytes are returned.

    Raises:
        FetchError: a URI can't be read, or names an image of more than `max_bytes`.
        EmbedderError: the cell has none of these types.
    """
    if isinstance(image, dict):  # Hugging Face datasets store images as {bytes, path}
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image:
        with fetcher.fetch(image, max_bytes=max_bytes) as fetched:
            return fetched.data if fetched.path is None else _read_image(fetched.path, image, max_bytes)
    if image is None or isinstance(image, str):
        return None
    content = file_or_content(image)
    return content.read_bytes() if isinstance(content, Path) else content or None


def _read_image(path: Path, uri: str, max_bytes: int) -> bytes:
    """Read an image's file whole; of any other only the first bytes, as it may fill the memory."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if sniff(head) != "image":
                return head
            if (size := file.seek(0, os.SEEK_END)) > max_bytes:
                message = f"{shown_address(uri)}: image of {size:,} bytes; decode.max_file_bytes allows {max_bytes:,}"
                raise FetchError("TooLarge", message)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise from_os_error(error, shown_address(uri)) from None


def cells_of(table: pa.Table, name: str) -> list[Any]:
    """Return the values of a column: Python objects, or arrays for a tensor column; None if it is missing."""
    if name not in table.column_names:
        return [None] * table.num_rows
    column = table[name]
    if isinstance(column.type, pa.FixedShapeTensorType):
        return [array for chunk in column.chunks for array in chunk.to_numpy_ndarray()]
    if isinstance(column.type, pa.ExtensionType):
        return [array for chunk in column.chunks for array in chunk.to_numpy(zero_copy_only=False)]
    return list(column.to_pylist())


class ServableStage(Stage):
    """Servables of one group, which take turns."""

    def __init__(self, group: ActorGroup, limits: DecodeLimits, needed: frozenset[str]) -> None:
        self.running: list[RunningServable] = []
        self._group, self._limits, self._needed = group, limits, needed

    def setup(self) -> None:
        """Load the servables; raises `ServableError` if one can't be loaded."""
        for servable in self._group.servables:
            self.running.append(RunningServable(servable, self.device, self._group.num_threads, self._limits))

    def process(self, table: pa.Table) -> pa.Table:
        """Run each servable on a block."""
        for running in self.running:
            table = running(table)
        return self.without_ended(table)

    def without_ended(self, table: pa.Table, lent: Collection[str] = ()) -> pa.Table:
        """Drop decoded columns that nothing needs any more."""
        names = [name for name in table.column_names if name.startswith(DECODED)]
        needed = [name for name in names if name not in lent and self._needed & {name, name.removesuffix(GRID)}]
        return table.drop_columns([name for name in names if name not in needed])

    def close(self) -> None:
        """Release what the servables hold."""
        for each in self.running:
            each.close()


class ServableActor(RowActor):
    """Actor of the servables of one group."""

    load_cure = "give the node more memory, or hold fewer servables in one actor"
    block_cure = "find the row that does it, or give that servable its own process (timeout_s = ...)"

    def __init__(self, stage: ServableStage, group: ActorGroup, run: Run | None = None) -> None:
        """Load the servables of the group; `run` is as in `RowActor`."""
        self._made, self._device = stage, "cuda" if group.num_gpus else "cpu"
        super().__init__(f"servables {', '.join(each.name for each in group.servables)}", "loading", run)

    def _load(self) -> Stage:
        return self._made.load(self._device)


def show_rows(table: pa.Table) -> pa.Table:
    """Restore the names of the dataset's own columns; those of the servables follow them."""
    if table.num_rows == 0:
        return table
    return table.rename_columns([name.removeprefix(CARRIED) for name in table.column_names])
