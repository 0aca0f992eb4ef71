"""Batches as graphs take them, and graphs' results as columns; Python 3.9.

It needs only NumPy and Arrow, and Pillow for whole images.

Legend: `B` rows, `H, W` sides in px, `T` tokens of the longest caption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

MAX_BYTE = 255.0


def graph_inputs(batch: pa.RecordBatch, declared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Convert a batch to arrays by the names of the graph's inputs, in their order.

    `declared` has each input's settings, as in `embedder.servables.servable_columns`.
    """
    arrays: dict[str, Any] = {}
    for name, settings in declared.items():
        column = batch.column(batch.schema.get_field_index(name))
        if settings["make"] == "pixels":
            arrays[name] = pixels(column, settings)
        elif settings["make"] == "token_ids":
            arrays.update(padded_ids(name, column, settings))
        else:
            arrays[name] = dense(column, settings)
    return arrays


def pixels(column: Any, settings: Mapping[str, Any]) -> Any:
    """Convert a tensor column, uint8 (B, H, W, 3), to pixels, (B, 3, H, W) or as is, scaled as the settings say."""
    x_BHWC = column.to_numpy_ndarray()
    preprocess = settings["preprocess"]
    if settings["values"] != "uint8":
        x_BHWC = x_BHWC.astype(np.float32) / np.float32(MAX_BYTE)
    if settings["values"] == "normalised":
        x_BHWC -= np.array(preprocess["mean"], np.float32)
        x_BHWC /= np.array(preprocess["std"], np.float32)
    return np.ascontiguousarray(x_BHWC.transpose(0, 3, 1, 2)) if settings["layout"] == "nchw" else x_BHWC


def images(column: Any) -> list[Any]:
    """Make Pillow images from structs of pixels, height and width."""
    from PIL import Image

    flat, heights, widths = (column.field(name) for name in ("pixels", "height", "width"))
    found = []
    for row in range(len(column)):
        shape = (heights[row].as_py(), widths[row].as_py(), 3)
        found.append(Image.fromarray(np.frombuffer(flat[row].as_buffer(), np.uint8).reshape(shape)))
    return found


def padded_ids(name: str, column: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists of int32 to token ids (B, T), and their mask if the graph takes one."""
    lengths = np.diff(column.offsets.to_numpy())
    width = settings["pad_to"] or int(lengths.max())
    is_token = np.arange(width) < lengths[:, None]
    ids = np.full(is_token.shape, settings["padding_id"], settings["type"])
    ids[is_token] = column.flatten().to_numpy()
    mask = {settings["mask"]: is_token.astype(settings["type"])} if settings["mask"] else {}
    return {name: ids, **mask}


def dense(column: Any, settings: Mapping[str, Any]) -> Any:
    """Convert values, or lists of one size, to an array (B, ...); ValueError for sizes or types that don't fit."""
    if settings["make"] != "column" or settings["type"] in ("string", "binary"):
        kind = settings["make"] if settings["make"] != "column" else settings["type"]
        raise ValueError(f"a graph takes pixels, token ids and numbers, and this input is {kind!r}")
    values, sizes = column, []
    for size in settings["shape"]:
        lengths = np.unique(np.diff(values.offsets.to_numpy()))
        if len(lengths) > 1:
            raise ValueError(f"a graph takes rows of one size, and these have {lengths[0]} to {lengths[-1]}")
        sizes.append(int(lengths[0]) if size == "any" else size)
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).reshape(len(column), *sizes)


def in_pieces(arrays: Mapping[str, Any], least: int, most: int | None) -> list[tuple[int, dict[str, Any]]]:
    """Cut arrays into pieces of `least` to `most` rows (None: no limit); return each piece's own row count and arrays.

    If the last piece is too short, its last row is repeated; the row count excludes the copies.
    """
    num_rows = len(next(iter(arrays.values())))
    step = most or max(num_rows, 1)
    pieces = []
    for start in range(0, num_rows, step):
        count = min(step, num_rows - start)
        rows = np.minimum(np.arange(max(count, least)), count - 1) + start
        pieces.append((count, {name: values[rows] for name, values in arrays.items()}))
    return pieces


def join_outputs(pieces: list[dict[str, Any]], declared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the outputs of all pieces."""
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in declared}


def named_outputs(found: Any, declared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Name a graph's results, one or several, in order or by name; ValueError if a declared one is missing."""
    if isinstance(found, Mapping):
        missing = [name for name in declared if name not in found]
        if missing:
            raise ValueError(
                f"it returned {', '.join(map(str, found))}, and no {missing[0]!r}; declare what it returns"
            )
        return {name: found[name] for name in declared}
    values = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(values) != len(declared):
        raise ValueError(f"it returned {len(values)} outputs, and {len(declared)} are declared ({', '.join(declared)})")
    return dict(zip(declared, values))  # noqa: B905 (Python 3.9)
