"""What a written model finds in a style that no training saw."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from demo_recipe.drawings import STYLES, Concept, Drawings, read_drawings
from demo_recipe.texts import encode_texts
from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import best_ranks
from embedder.steps.captions import CaptionEncoder

KS = (1, 5, 10)


def figures_on(style: str, folder: Path, data: Path, concepts: list[Concept], work: Path) -> dict[str, Any]:
    """R@k by caption, by unseen tags, and image to image.

    Texts are ranked against all images of the style; R@k counts queries whose own image is among the best k. Of
    the unseen tags, those of one concept are one query, joined by commas. Images are also ranked against all training
    drawings: whether one of the first k concepts is theirs; and so are plain pixels, 18 x 18.

    Args:
        style: that no training saw.
        folder: of the model.
        data: folder of the styles' tables.
        concepts: that training knows.
        work: folder that keeps what was decoded.
    """
    trainer = Trainer(folder, TrainSettings(ema_decay=0))
    preprocess = trainer.config.preprocess
    encoder = CaptionEncoder(str(trainer.tokenizer_json), preprocess.max_caption_tokens)
    test = read_drawings(data, (style,), concepts, preprocess.image_size, work)
    train = read_drawings(data, STYLES, concepts, preprocess.image_size, work)
    rows = pq.read_table(data / f"{style}.parquet", columns=["caption", "openmoji_tags", "group"]).to_pylist()
    images, numbers = trainer.encode_images(test.pixels).numpy(), np.arange(len(rows))
    is_flag = np.array([row["group"] == "flags" for row in rows])
    tags = [", ".join(row["openmoji_tags"] or ()) for row in rows]
    has_tags = np.array([bool(text) for text in tags])

    def ranks_of(texts: list[str], asks: Any) -> Any:
        return best_ranks(encode_texts(trainer, encoder, texts).numpy(), numbers[asks], images, numbers)

    by_caption = ranks_of([row["caption"] for row in rows], slice(None))
    by_tags = ranks_of([text for text in tags if text], has_tags)
    embeddings = trainer.encode_images(train.pixels).numpy()
    return {
        "caption": recalls(by_caption),
        "caption, flags": recalls(by_caption[is_flag]),
        "caption, no flags": recalls(by_caption[~is_flag]),
        "unseen tags": recalls(by_tags),
        "unseen tags, no flags": recalls(by_tags[~is_flag[has_tags]]),
        "picture to picture": recalls(concept_ranks(images, test, embeddings, train)),
        "picture to picture, pixels 18 x 18": recalls(
            concept_ranks(plain_pixels(test), test, plain_pixels(train), train)
        ),
    }


def recalls(ranks: Any) -> dict[str, float]:
    """R@k of ranks from 0 up."""
    return {f"R@{k}": round(float((ranks < k).mean()), 4) for k in KS} | {"queries": len(ranks)}


def plain_pixels(drawings: Drawings) -> Any:
    """18 x 18 pixels, centred and of length 1: what no model knows anything of."""
    small = torch.nn.functional.interpolate(
        drawings.pixels.permute(0, 3, 1, 2).float(), size=18, mode="bilinear", antialias=True, align_corners=False
    ).flatten(1)
    return torch.nn.functional.normalize(small - small.mean(1, keepdim=True), dim=-1).numpy()


def concept_ranks(queries: Any, test: Drawings, candidates: Any, train: Drawings) -> Any:
    """For each query, how many other concepts have a drawing as near as the best of its own, or nearer.

    Args:
        queries: vectors of the test's drawings; float32 (Q, E).
        test: the drawings asked with.
        candidates: vectors of the training drawings; float32 (N, E).
        train: those drawings.
    """
    scores = torch.from_numpy(queries @ candidates.T)
    best = torch.full((len(scores), int(train.concepts.max()) + 1), -torch.inf)
    best.scatter_reduce_(1, train.concepts[None].expand(len(scores), -1), scores, "amax")
    own = best.gather(1, test.concepts[:, None])
    return ((best >= own).sum(1) - 1).numpy()
