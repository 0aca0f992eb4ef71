"""Train the twin tower that the package ships, on drawings of emoji; Noto's are never seen.

    python scripts/train_demo_model.py DATA_FOLDER --out embedder/demo_model [--work DIR]

DATA_FOLDER holds twemoji.parquet, openmoji.parquet, fluent-flat.parquet, fluent-modern.parquet, and for the figures at
the end noto.parquet. Of `openmoji_tags` nothing is read before those. Five more styles and vectors of words are
fetched by npm from packages pinned by their SHA-256, unless their tarballs lie in --work.

1. Images: the ViT learns to tell the 1,923 concepts apart, each drawing varied anew every time; first at 48 px over
   the four styles, then at 64 px, then over all nine: twice, and averaged with what they began with.
2. Texts: the ALBERT learns to hit the middle of its concept's images, by caption, by tags, by both; and to point a
   word of no caption at the concepts whose words are near to it.
3. The model teaches a fresh picture tower of its own size, to which the ALBERT is fitted once more.

One drawing of every eighth concept that has three or more is held out; what finds those is what a recipe may be chosen
by. A run that was ended goes on at its last checkpoint in --work. Everything follows from the seed.
"""

import argparse
import json
from pathlib import Path

import torch

from demo_recipe.drawings import read_concepts
from demo_recipe.figures import figures_on
from demo_recipe.images import CONFIG, train_images
from demo_recipe.more_styles import make_tables
from demo_recipe.student import train_student
from demo_recipe.texts import train_texts
from demo_recipe.training import log
from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer

TEST_STYLE = "noto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("train-demo"))
    parser.add_argument("--threads", type=int, default=1, help="another number changes last bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, to try it out")
    help_text = "model folder that stands for what 1 and 2 would make"
    parser.add_argument("--begin-with", type=Path, metavar="MODEL", help=help_text)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    concepts = read_concepts(options.data)
    log(f"{len(concepts):,} concepts")
    make_tables(concepts, options.data, options.work)
    made = options.data, concepts, options.work, options.seed, options.share
    if options.begin_with is None:
        teacher = train_texts(train_images(*made), *made)
    else:
        teacher = Trainer(options.begin_with, TrainSettings(ema_decay=0))
    model = train_texts(train_student(teacher, *made), *made, checkpoint="texts-student")
    model.export(options.out, CONFIG.name, dtype="float16", replace=True)
    log(f"{options.out}: written")
    if (options.data / f"{TEST_STYLE}.parquet").exists():
        log(json.dumps(figures_on(TEST_STYLE, options.out, options.data, concepts, options.work)))


if __name__ == "__main__":
    main()
