"""Program of the kind `ocr`: RapidOCR, version 3.9 or later, on ONNX Runtime; Python 3.9.

Legend: `H, W` sides in px, `L` lines of a picture.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Optional

import numpy as np
import pyarrow as pa

from .onnx_graph import TELEMETRY_OFF
from .tensors import images

STROKE_STEP = 40  # difference of neighbouring grey values at the edge of a stroke
BLOCK_PX = (16, 48)  # a block that a line of small letters fills
MIN_EDGES = 24  # in one block; four letters have more


class PictureText(NamedTuple):
    """Text of a picture, None for none; its L lines, their boxes (L, 4) as parts of the sides, and scores (L,)."""

    words: Optional[str]  # noqa: UP045 (Python 3.9)
    lines: list[str]
    boxes: list[list[float]]
    scores: list[float]


NOTHING = PictureText(None, [], [], [])


class OcrReader:
    """Finder and reader of lines; each picture is read by itself, so that its text depends on no other."""

    def __init__(self, finder: str, reader: str, threshold: float, max_side_px: int) -> None:
        """Note both graphs, the least probability of a line, and the side to which pictures are reduced."""
        self.finder, self.reader, self.threshold, self.max_side_px = finder, reader, threshold, max_side_px

    def load(self, device: str, num_threads: int) -> None:
        """Open both graphs; nothing is downloaded."""
        os.environ[TELEMETRY_OFF] = "1"  # read when ONNX Runtime is imported
        import cv2
        from rapidocr import RapidOCR

        cv2.setNumThreads(num_threads)
        runtime = "EngineConfig.onnxruntime."
        params: dict[str, Any] = {
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "Global.text_score": self.threshold,
            "Global.max_side_len": self.max_side_px,
            "Det.model_path": self.finder,
            "Det.limit_type": "max",  # small pictures are not enlarged
            "Det.limit_side_len": self.max_side_px,
            "Rec.model_path": self.reader,
            runtime + "intra_op_num_threads": num_threads,
            runtime + "inter_op_num_threads": 1,
        }
        if device.startswith("cuda"):
            params[runtime + "use_cuda"] = True
            params[runtime + "cuda_ep_cfg.device_id"] = int(device.partition(":")[2] or 0)
        self.engine: Any = RapidOCR(params=params)
        self.read(np.zeros((64, 64, 3), np.uint8))  # opens the graphs, so that a broken one is found now

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Read the pictures of a batch."""
        found = [self.read(np.asarray(each)) if may_hold_text(each) else NOTHING for each in images(batch.column(0))]
        return pa.table(
            {
                "words": pa.array([each.words for each in found], pa.string()),
                "lines": pa.array([each.lines for each in found], pa.list_(pa.string())),
                "boxes": pa.array([each.boxes for each in found], pa.list_(pa.list_(pa.float32()))),
                "scores": pa.array([each.scores for each in found], pa.list_(pa.float32())),
            }
        )

    def read(self, x_HWC: Any) -> PictureText:
        """Read a picture, uint8 (H, W, 3) RGB."""
        found = self.engine(np.ascontiguousarray(x_HWC[:, :, ::-1]))  # it takes BGR
        if getattr(found, "txts", None) is None or found.boxes is None:
            return NOTHING
        height, width = x_HWC.shape[:2]
        corners = np.asarray(found.boxes, np.float32) / np.array([width, height], np.float32)
        boxes = np.concatenate([corners.min(1), corners.max(1)], axis=1).clip(0, 1)
        lines = [str(line) for line in found.txts]
        return PictureText("\n".join(lines), lines, boxes.tolist(), [float(score) for score in found.scores])


def may_hold_text(image: Any) -> bool:
    """Return whether a picture has a block with as many sharp edges as letters make; takes a millisecond."""
    rows, columns = BLOCK_PX
    grey_HW = np.asarray(image.convert("L"), np.int16)
    is_edge_HW = np.abs(np.diff(grey_HW, axis=1)) >= STROKE_STEP
    height, width = is_edge_HW.shape
    is_edge_HW = np.pad(is_edge_HW, ((0, -height % rows), (0, -width % columns)))
    blocks = is_edge_HW.reshape(is_edge_HW.shape[0] // rows, rows, -1, columns)
    return bool((blocks.sum((1, 3)) >= MIN_EDGES).any())
