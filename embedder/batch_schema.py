"""Schema of the table that flows from step to step, and how its columns change on the way.

One row is one item, or one segment of a video. Each tower's state is in one column, which the stages replace:

    pixels    -> image_activation -> image_embedding
    token_ids -> text_activation  -> text_embedding

For models whose images keep their own proportions, a column `image_grid` accompanies the first two image columns; so
does `image_text` where a picture is embedded with its caption, or a clip's frames as one sequence.

All but the embeddings are nullable `large_binary`, one value per row: nulls cost nothing, the value buffer is the
packed tensor, the offsets are the lengths. All other columns pass through without a copy.
"""

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa

from embedder.installation import MISSING_EXTRA
from embedder.medium_columns import BY_NAME

# Prefix of carried columns, and of those that the user's own steps add, so that none of them collides with a column of
# the pipeline.
CARRIED = "carried:"

# Column with the number of a row's item, if carried columns bypass the model (`embedder.executors.carried`).
ITEM_NUMBER = "item_number"

# Column of a listing with the address that is published instead of `uri`, if that is only valid in a run.
SHOWN_URI = "shown_uri"

# Columns of each model of a run (`model_column`): why it embeds an item, and whether a row is for it. Rows of a run of
# one model lack the second.
REASON = "reason"
NEEDED = "needed"

# In the reason why a model or a step has no output for a row: its process was killed, and a retry may be faster.
HUNG = "took longer than"

TENSOR = pa.large_binary()
VECTOR = pa.list_(pa.float32())


@dataclass
class Measurement:
    """Measurement of one call of one step, in the column `trace`; filled in when the call ends."""

    step: str  # decode, stage 0, stage 1, ...; load 0, load 1, ... for the start of a stage
    node: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    started_s: float = 0.0  # Unix time
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the process with its threads; for decode, of the thread and its sandbox process
    num_rows: int = 0
    num_images: int = 0  # only of decode, like the next: images and video frames
    num_captions: int = 0
    num_tokens: int = 0  # of captions, as computed: with the padding of their groups
    num_cut_captions: int = 0  # beyond a model's limit
    num_cut_characters: int = 0  # of them, that no tower sees
    caption_places: Counter[str] = field(default_factory=Counter)  # captions by where they were found
    num_frames: int = 0  # of videos, embedded
    num_decoded_frames: int = 0  # of videos, decoded to get those
    bytes_out: int = 0  # tensors passed on
    peak_rss_bytes: int = 0  # of the process so far
    peak_gpu_bytes: int = 0  # the same for its tensors on a GPU; 0 without one
    waited_input_s: float = 0.0  # a GPU was idle before the call because the step before had made no input
    waited_driver_s: float = 0.0  # the same, while Ray's driver had not sent it to the stage's process
    waited_store_s: float = 0.0  # the same, while it came from the object store
    waited_unpack_s: float = 0.0  # the same, while it was unpacked and grouped
    waited_copy_s: float = 0.0  # the same, while it was copied to the GPU
    waited_launch_s: float = 0.0  # the same, until the first kernel was launched
    device_speed: dict[str, float] = field(default_factory=dict)  # measured figures of a GPU, at the start of a stage
    note: str = ""  # line for the report, of what a process can say to nobody else; empty for nearly all calls
    num_calls: int = 1  # more if it sums calls of a process (`embedder.report.step_sums.join_measurements`)

    def __post_init__(self) -> None:
        """Read what rows and journals have as pairs."""
        self.caption_places = Counter(dict(self.caption_places or ()))
        self.device_speed = dict(self.device_speed or ())
        self.note = self.note or ""


_OF_MEASUREMENTS: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    Counter[str]: pa.map_(pa.string(), pa.int64()),
    dict[str, float]: pa.map_(pa.string(), pa.float64()),
}
TRACE = pa.list_(
    pa.struct([(each.name, _OF_MEASUREMENTS[each.type]) for each in fields(Measurement) if each.name != "num_calls"])
)
"""Calls of the steps so far, in the first row of a batch."""

REGION = pa.struct({name: pa.int32() for name in ("x", "y", "width", "height", "image_width", "image_height")})
"""Part of an image that a row is about, in pixels of the image, with the image's width and height."""

IMAGE_GRID = pa.field("image_grid", TENSOR)
"""int32 (3,): frames, patch rows and patch columns."""

IMAGE_TEXT = pa.field("image_text", TENSOR)
"""int32 (T,): token ids of the caption that a picture is embedded with, or of all that a clip's frames are in, with
numbers below 0 in their places; null or empty without either."""

BESIDE_IMAGES = (IMAGE_GRID.name, IMAGE_TEXT.name)
"""Names of the columns that accompany those of images, up to their embeddings."""

UNREADABLE_KIND, OTHER_FILE = "UnreadableKind", "OtherFile"
LEFT_OUT = (UNREADABLE_KIND, OTHER_FILE, MISSING_EXTRA)
"""Error types of items that are not broken: media that this version or installation can't read, or no media.

The state of such an item is `left_out`; it is not counted as a reject.
"""

# Columns that the decode step adds to a listing. `modality` is null in a row that only reports on its item;
# `num_vectors` (rows of the item that have a modality) is null except in the last row of an item.
DECODED = pa.schema(
    {
        "segment": pa.int32(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
        "modality": pa.string(),
        "content_version": pa.string(),
        "num_vectors": pa.int32(),
        "step": pa.string(),
        "error_type": pa.string(),
        "error": pa.string(),
        "transient": pa.bool_(),
        "unchanged": pa.bool_(),  # the content equals that of the published rows, so these stay
        "pixels": TENSOR,  # uint8 (F, H, W, 3), or patches (N, 3 for each pixel) of all frames
        "token_ids": TENSOR,  # int32 (T,)
        "medium": pa.string(),  # JSON, the values of the columns of `medium_schema`
        "trace": TRACE,
    }
)


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the carried columns under their own names."""
    return pa.schema(
        [column.with_name(column.name.removeprefix(CARRIED)) for column in schema if column.name.startswith(CARRIED)]
    )


KINDS = {"timestamp": pa.timestamp("us"), "utc": pa.timestamp("us", tz="UTC"), "strings": pa.list_(pa.string())}


def medium_schema(names: Iterable[str]) -> pa.Schema:
    """Return the schema of some columns of the medium."""
    kinds = {name: BY_NAME[name].kind for name in names}
    return pa.schema({name: KINDS.get(kind) or getattr(pa, kind)() for name, kind in kinds.items()})


def step_schema(outputs: Mapping[str, str]) -> pa.Schema:
    """Return the schema of the columns that the user's own steps add to the embeddings table, under their own names.

    `outputs` has the type of each as in a configuration: `float32`, `string[]`, `region`.
    """
    return pa.schema([pa.field(name, step_type(kind)) for name, kind in outputs.items()])


def step_type(kind: str) -> pa.DataType:
    """Return the Arrow type of an output of a step."""
    if kind == "region":
        return REGION
    value = kind.removesuffix("[]")
    found = pa.bool_() if value == "bool" else getattr(pa, value)()
    return pa.list_(found) if kind.endswith("[]") else found


def model_column(column: str, model: str) -> str:
    """Return the name of a column that each model of a run has; the main model has the empty name."""
    return f"{column}@{model}" if model else column
