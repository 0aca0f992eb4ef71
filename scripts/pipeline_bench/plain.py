"""Decoding, tokenising and the whole model as a script would have them: no child process, no stages, no Ray.

`B` pairs, `S` side of the square, `T` tokens of all captions, `E` embedding size.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from shards.activations import Batch, TowerState
from shards.config import TOKENIZER_FILE, load_model_config
from shards.ranges import whole_model
from shards.shard import Shard, load_shard

Pair = tuple[np.ndarray, np.ndarray]
"""Pixels uint8 (S, S, 3), token ids int32 (T,)."""

REDUCTION_MARGIN = 2  # a JPEG may be decoded at a scale that keeps twice the target, as the pipeline does


class PlainDecoder:
    """Files of a pair -> pixels and token ids, for models that squash pictures to a square."""

    def __init__(self, model: str | Path) -> None:
        config = load_model_config(model).preprocess
        if config.resize != "squash" or config.resampler != "pillow" or not config.reduced_decode:
            raise ValueError(f"{model}: the benchmark's own decoder only squashes, with Pillow, at reduced scales")
        self.side, self.filter = config.image_size, Image.Resampling[config.interpolation.upper()]
        self.tokenizer = Tokenizer.from_file(str(Path(model) / TOKENIZER_FILE))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(config.max_caption_tokens)

    def __call__(self, picture: Path) -> Pair:
        """Read and decode one pair, whose caption stands beside its picture."""
        return self.pixels(picture), self.token_ids(picture.with_suffix(".txt").read_text(encoding="utf-8"))

    def pixels(self, source: object) -> np.ndarray:
        """Decode a picture's file or open stream; uint8 (S, S, 3)."""
        with Image.open(source) as picture:  # type: ignore[arg-type]  # a path or a stream
            picture.draft(None, (REDUCTION_MARGIN * self.side,) * 2)
            upright = ImageOps.exif_transpose(picture)
            squashed = upright.convert("RGB").resize((self.side,) * 2, self.filter, reducing_gap=REDUCTION_MARGIN)
        return np.array(squashed)

    def token_ids(self, caption: str) -> np.ndarray:
        """Tokenise; int32 (T,)."""
        return np.array(self.tokenizer.encode(caption).ids, np.int32)


def as_batch(pairs: Sequence[Pair]) -> Batch:
    """One batch of pairs."""
    return packed_batch(np.stack([pixels for pixels, _ in pairs]), [ids for _, ids in pairs])


def packed_batch(pixels: np.ndarray, token_ids: Sequence[np.ndarray]) -> Batch:
    """One batch.

    Args:
        pixels: uint8 (B, S, S, 3).
        token_ids: int32 (T,) of each pair.
    """
    lengths = torch.tensor([len(ids) for ids in token_ids])
    vision = TowerState(torch.from_numpy(pixels), torch.ones(len(pixels), dtype=torch.int64))
    return Batch(vision, TowerState(torch.from_numpy(np.concatenate(token_ids)), lengths))


def load_whole(model: str, dtype: str, num_threads: int) -> Shard:
    """The whole model in one piece, and as many threads for it."""
    torch.set_num_threads(num_threads)
    return load_shard(model, whole_model(load_model_config(model)), dtype=dtype)


def embed_batch(model: torch.nn.Module, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of the pictures and of the captions; float32 (B, E) each."""
    with torch.inference_mode():
        encoded = model(batch)
    return encoded.vision.values.float().numpy(), encoded.text.values.float().numpy()
