"""The form of a clip: the frames of a segment as one sequence, as a model takes a video.

Source: transformers 5.23, `replace_video_token` of the processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and EmbeddingGemma
2, and `resize` of their video processors, with the cap of each frame that they are about to make the default.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from shards.file_schema import ModelSection

FRAMES, PROMPT, PLACE, SECONDS = "{frames}", "{prompt}", "{place}", "{seconds}"
"""Marks in the texts of a form."""
FLOOR = 1.05
"""A frame's cap is no lower than so many times the least pixels."""


class ClipForm(ModelSection):
    """What is written around and between the frames of a clip, and how large they are."""

    form: str = Field(FRAMES, description=f"a clip as text: {FRAMES} for its frames, {PROMPT} for the caption_prompt")
    frame: str = Field(PLACE, description=f"frames that are computed together: {PLACE}, and their {SECONDS}")
    place: str = Field(min_length=1, description="the token that stands for them")
    frames_together: int = Field(1, ge=1, description="of them; the last frame fills up the last ones")
    tokens_per_second: float | None = Field(
        None, gt=0, description="positions in time between frames; none: they are numbered"
    )
    shares_pixels: bool = Field(False, description="the frames of a clip share the pixels that a clip may have")
    min_pixels: int = Field(ge=1, description="a frame, or a clip, with fewer is enlarged")
    max_pixels: int = Field(ge=1, description="most of a frame, or of a clip")
    max_frame_pixels: int = Field(ge=1, description="most of a frame of a clip in any case")
    max_frames: int = Field(ge=1, description="most frames of a clip")

    @model_validator(mode="after")
    def _has_marks(self) -> Self:
        for key, mark in (("form", FRAMES), ("frame", PLACE)):
            if getattr(self, key).count(mark) != 1:
                raise ValueError(f"{key} is {getattr(self, key)!r}; it has {mark} once")
        return self

    def count_places(self, num_frames: int) -> int:
        """Count the places that stand for so many frames."""
        return -(-num_frames // self.frames_together)

    def write(self, prompt: str, times_s: Sequence[float]) -> str:
        """Write the text of a clip, given the times of its frames, in seconds."""
        step = self.frames_together
        groups = [times_s[start : start + step] for start in range(0, len(times_s), step)]
        seconds = [f"{(group[0] + group[-1]) / 2:.1f}" for group in groups]
        frames = "".join(self.frame.replace(SECONDS, each).replace(PLACE, self.place) for each in seconds)
        return prompt.join(self.form.replace(FRAMES, frames).split(PROMPT))

    def positions(self, num_frames: int, length_s: float) -> NDArray[np.int64]:
        """Return the position in time of each place, counted from the last text, for frames of so many seconds.

        Source: `Qwen2_5_VLModel.get_rope_index`, which multiplies in float32.
        """
        numbers = np.arange(self.count_places(num_frames), dtype=np.float32)
        if self.frame != PLACE:
            return np.zeros(len(numbers), np.int64)
        if self.tokens_per_second is not None:
            numbers *= np.float32(self.tokens_per_second) * np.float32(self.frames_together * length_s / num_frames)
        return numbers.astype(np.int64)

    def pixel_limits(self, frames_per_clip: int) -> tuple[int, int, int]:
        """Return how many frames share a number of pixels, 1 for each by itself, and the least and most of that."""
        frames = max(frames_per_clip, self.frames_together) if self.shares_pixels else 1
        most = max(min(self.max_frame_pixels, self.max_pixels // frames), int(self.min_pixels * FLOOR))
        return frames, self.min_pixels, frames * most
