"""Schema of the table that flows from step to step, and the changes of its columns on the way.

One row is one item, or one segment of a video. Each tower's state is in one column, which the stages replace:

    pixels    -> image_activation -> image_embedding
    token_ids -> text_activation  -> text_embedding

Images that keep their own proportions have a column `image_grid` beside the first two, of which other models have none.

All but the embeddings are nullable `large_binary`, one value per row: nulls cost nothing, the value buffer is the
packed tensor, the offsets are the lengths. All other columns pass through without a copy.
"""

import pyarrow as pa

from embedder.installation import MISSING_EXTRA

# Prefix of carried columns, so that none of them collides with a column of the pipeline.
CARRIED = "carried:"

TENSOR = pa.large_binary()
VECTOR = pa.list_(pa.float32())

TRACE = pa.list_(
    pa.struct(
        {
            "step": pa.string(),  # decode, stage 0, stage 1, ...; load 0, load 1, ... where a stage begins
            "node": pa.string(),
            "pid": pa.int64(),
            "started_s": pa.float64(),  # Unix time
            "wall_s": pa.float64(),
            "cpu_s": pa.float64(),  # of the process with its threads; of decode, the thread and its sandbox process
            "num_rows": pa.int64(),
            "num_images": pa.int64(),  # decode's alone, as the next two: images and video frames
            "num_captions": pa.int64(),
            "num_tokens": pa.int64(),  # of captions, as they are computed: with the padding of their groups
            "bytes_out": pa.int64(),  # tensors passed on
            "peak_rss_bytes": pa.int64(),  # of the process so far
            "peak_gpu_bytes": pa.int64(),  # the same of its tensors on a GPU; 0 without one
        }
    )
)

IMAGE_GRID = pa.field("image_grid", TENSOR)
"""int32 (3,): frames, patch rows and patch columns."""

UNREADABLE_KIND, OTHER_FILE = "UnreadableKind", "OtherFile"
LEFT_OUT = (UNREADABLE_KIND, OTHER_FILE, MISSING_EXTRA)
"""Error types of items that are not broken: media of a kind that this version or installation can't read, or no media.
Such an item's state is `left_out`; it is not counted as a reject."""

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
        "trace": TRACE,
    }
)


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """Schema of the carried columns under their own names."""
    return pa.schema(
        [column.with_name(column.name.removeprefix(CARRIED)) for column in schema if column.name.startswith(CARRIED)]
    )
