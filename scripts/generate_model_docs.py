#!/usr/bin/env python3
"""Write the tables of docs/models.md: published models with their sizes and cuts, and kinds of checkpoints.

python scripts/generate_model_docs.py
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from published_models import PUBLISHED

from shards.convert.transformers_model import read_tower
from shards.costs import count_parameters
from shards.model_config import ModelConfig
from shards.plan import plan_shards
from shards.tensor_shapes import model_shapes
from shards.towers.registry import CLASSES, IMPORTS, ONE_TOWERS
from shards.towers.tower_kinds import TextTower, VisionTower

PAGE = Path(__file__).parents[1] / "docs/models.md"
BLOCK = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of the table -->)", re.DOTALL)
COLUMNS = (
    "model", "`embedder model import` of", "image, px", "its tokens", "caption tokens", "languages",
    "parameters", "licence", "three stages",
)  # fmt: skip


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    tables = _table(COLUMNS, map(_cells, PUBLISHED)), _table(("of transformers", "`model_type`"), _kinds())
    return BLOCK.sub(lambda _: "\n".join(["", *tables[0], "", *tables[1], "", ""]), text)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _kinds() -> Iterator[list[str]]:
    """Kinds of checkpoints of transformers: with two towers, and of either side."""
    towers = {name: read_tower(name, "", {}, frozenset(), Path("config.json")) for name in IMPORTS}
    kinds = {
        "two towers": list(CLASSES),
        "one tower for both": list(ONE_TOWERS),
        "a tower for images": [name for name, tower in towers.items() if isinstance(tower, VisionTower)],
        "a tower for texts": [name for name, tower in towers.items() if isinstance(tower, TextTower)],
    }
    for kind, names in kinds.items():
        yield [kind, ", ".join(f"`{name}`" for name in sorted(names))]


def _cells(name: str) -> list[str]:
    model = PUBLISHED[name]
    with TemporaryDirectory() as folder:
        config = model.describe(Path(folder))
    *sizes, parameters = _sizes(config)
    source = model.source if model.source.startswith("path/") else f"hf:{model.source}"
    return [name, f"`{source}`", *sizes, model.languages, parameters, model.licence, _cut(config)]


def _sizes(config: ModelConfig) -> list[str]:
    image = ["", ""]
    if config.vision is not None:
        side = str(config.vision.side_px) if config.vision.patch_px is None else "own proportions"
        image = [side, f"{config.vision.num_tokens // config.vision.merge_size**2:,}"]
    caption = "" if config.text is None else str(config.preprocess.max_caption_tokens)
    return [*image, caption, f"{count_parameters(model_shapes(config)) / 1e6:,.0f} M"]


def _cut(config: ModelConfig) -> str:
    """Layers of each tower that a stage holds, by side, where three devices of one kind hold a stage each."""
    stages = plan_shards(config, 3, dtype="bfloat16").stages
    ranges = {"image": [stage.spec.vision for stage in stages], "text": [stage.spec.text for stage in stages]}
    shown = {side: [f"{each.start}-{each.stop}" if len(each) else "none" for each in ranges[side]] for side in ranges}
    return "; ".join(f"{side} {', '.join(found)}" for side, found in shown.items() if {*found} != {"none"})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
