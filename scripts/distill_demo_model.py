"""Distil a small student from the vectors of the shipped model alone, and train the same student without a teacher.

    python scripts/distill_demo_model.py DATA_FOLDER --work DIR [--styles DIR] [--share 0.1] [--held-out twemoji]

DATA_FOLDER holds twemoji.parquet, openmoji.parquet, fluent-flat.parquet and fluent-modern.parquet, and for the figures
noto.parquet; --styles is the --work of `train_demo_model.py`, with the tables of five more styles. The teacher embeds
the training styles into a store, as `embedder embed` does; the student, of half the layers and half the width in both
towers, learns from that store by `[teacher]`, and once more by CLIP's loss, its concepts being the emoji's codes. With
--held-out a training style is left out and judged instead of Noto: a recipe is chosen by that. R@10 is that of all
captions, each against all images of the style that is judged.

The last line has the figures as JSON. A part that is there already in --work is gone on with, or kept.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from demo_recipe.drawings import STYLES, read_concepts, read_drawings, table_of
from demo_recipe.more_styles import MORE_STYLES
from demo_recipe.texts import encode_texts
from embedder.config import load_config
from embedder.ingest.embed import embed
from embedder.plugins.train.config import load_train_config
from embedder.plugins.train.run import train
from embedder.plugins.train.trainer.forward import caption_features, image_features
from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import retrieval_at
from embedder.steps.captions import CaptionEncoder
from shards.config import load_model_config
from shards.reference import TwinTower

TEACHER = Path(__file__).resolve().parents[1] / "embedder" / "demo_model"
TEST_STYLE = "noto"
COLUMNS = {"id": "item_id", "image": "image", "caption": "caption"}
NUM_STEPS = 4200
BATCH_SIZE = 128
ROUNDS = 5
SPEED_ROWS = 256
DISTILLED, WITHOUT = STUDENTS = ("distilled", "without-teacher")
COSTS_FILE = "costs.json"

VISION = {"width": 96, "depth": 2, "num_heads": 3, "stem_channels": [16, 32, 64]}
TEXT = {
    "embedding_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
AUGMENTATION = {
    "rotate_deg": 12.0,
    "scale": 0.15,
    "translate": 0.06,
    "shear": 0.1,
    "brightness": 0.2,
    "contrast": 0.3,
    "saturation": 0.5,
    "hue": 0.08,
    "shade": 0.2,
    "grey": 0.1,
    "erase": 0.3,
}
WEIGHTS = {"vectors": 10.0, "similarities": 1.0, "temperature": 0.05, "pairs": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--styles", type=Path, help="folder with the tables of more styles")
    parser.add_argument("--held-out", choices=STYLES, help="training style to judge by, in place of Noto")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, to try it out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=STUDENTS, help="train this one alone, beside another process that does both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    tables = [options.data / f"{style}.parquet" for style in STYLES if style != options.held_out]
    if options.styles is not None:
        tables.append(with_captions(options.data, options.styles, options.work))
    judged = options.held_out or TEST_STYLE
    store = options.work / "teacher"
    if options.only != WITHOUT:
        embed(load_config(overrides=embedding(tables, store)))
    folders, costs = {"teacher": TEACHER}, {}
    for name in STUDENTS if options.only is None else [options.only]:
        out = options.work / name
        settings = training(tables, out, options, None if name == WITHOUT else {"store": str(store), **WEIGHTS})
        costs[name] = run(load_train_config(overrides=settings), out)
        folders[name] = out / "last"
    if options.only is not None:
        return
    figures = {name: judge(folder, options.data, judged, options.work) for name, folder in folders.items()}
    ratio = figures[DISTILLED]["R@10"] / figures["teacher"]["R@10"] if figures["teacher"]["R@10"] else None
    speeds = measure_speeds(folders["teacher"], folders[DISTILLED])
    print(json.dumps({"judged by": judged, "of teacher's R@10": ratio, **figures, "training": costs, **speeds}))


def with_captions(data: Path, styles: Path, work: Path) -> Path:
    """Write one table of the drawings of all further styles, each with its concept's caption, unless it is there.

    Args:
        data: folder of the styles' tables.
        styles: folder of the further styles' tables.
        work: folder to write into.
    """
    table, unfinished = work / "more-styles.parquet", work / "more-styles.part"
    if table.exists():
        return table
    captions = {concept["hexcode"]: concept["caption"] for concept in read_concepts(data)}
    drawn = [pq.read_table(table_of(style, data, styles)) for style in MORE_STYLES]
    rows = pa.concat_tables(drawn, promote_options="default").select(["item_id", "hexcode", "image"])
    rows = rows.append_column("caption", [[captions[hexcode] for hexcode in rows["hexcode"].to_pylist()]])
    pq.write_table(rows, unfinished)
    return unfinished.replace(table)


def embedding(tables: list[Path], store: Path) -> dict[str, Any]:
    """Configuration of the run that embeds the training styles with the teacher."""
    return {
        "model": str(TEACHER),
        "store": str(store),
        "source": sources(tables),
        "engine": "local",
        "device": "cpu",
        "index": {"build": False},
    }


def sources(tables: list[Path]) -> list[dict[str, Any]]:
    """The tables as sources."""
    return [{"path": str(table), "columns": COLUMNS, "name": table.stem} for table in tables]


def training(
    tables: list[Path], out: Path, options: argparse.Namespace, teacher: dict[str, Any] | None
) -> dict[str, Any]:
    """Configuration of a student's training; the two differ in the teacher alone."""
    of_teacher = json.loads((TEACHER / "config.json").read_text())
    architecture = {
        "name": "demo-emoji-small",
        "embedding_dim": of_teacher["embedding_dim"],
        "vision": of_teacher["vision"] | VISION,
        "text": of_teacher["text"] | TEXT,
        "preprocess": of_teacher["preprocess"],
    }
    return {
        "architecture": architecture,
        "tokenizer": str(TEACHER / "tokenizer.json"),
        "out": str(out),
        "source": sources(tables),
        "concept": "hexcode",
        "batch_size": min(BATCH_SIZE, 2 * pq.read_metadata(tables[0]).num_rows),
        "teacher": teacher,
        "engine": "local",
        "device": "cpu",
        "num_threads": options.threads,
        "validation": {"fraction": 0.0},
        "train": {
            "num_steps": max(1, round(NUM_STEPS * options.share)),
            "learning_rate": 2e-3,
            "ema_decay": 0.995,
            "dtype": "bfloat16",
            "augmentation": AUGMENTATION,
        },
    }


def run(config: Any, out: Path) -> dict[str, float]:
    """Train, or go on, or keep what is there; CPU time and wall clock of the process that trained it."""
    if (out / COSTS_FILE).exists():
        return dict(json.loads((out / COSTS_FILE).read_text()))
    began, cpu = time.monotonic(), cpu_s()
    report = train(config, resume=(out / "checkpoint.pt").exists())
    taken = {"steps": report.num_steps, "wall_s": round(time.monotonic() - began, 1), "cpu_s": round(cpu_s() - cpu, 1)}
    (out / COSTS_FILE).write_text(json.dumps(taken))
    print(f"{out.name}: {taken}", file=sys.stderr, flush=True)
    return taken


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def judge(folder: Path, data: Path, style: str, work: Path) -> dict[str, float]:
    """R@k of captions against the images of a style."""
    trainer = Trainer(folder, TrainSettings(ema_decay=0))
    preprocess = trainer.config.preprocess
    drawings = read_drawings(data, (style,), read_concepts(data), preprocess.image_size, work)
    rows = pq.read_table(data / f"{style}.parquet", columns=["caption"])["caption"].to_pylist()
    encoder = CaptionEncoder(str(trainer.tokenizer_json), preprocess.max_caption_tokens)
    images, numbers = trainer.encode_images(drawings.pixels).numpy(), np.arange(len(rows))
    found = retrieval_at(encode_texts(trainer, encoder, rows).numpy(), numbers, images, numbers)
    return {f"R@{k}": round(share, 4) for k, share in found.items()}


@torch.inference_mode()
def measure_speeds(teacher: Path, student: Path) -> dict[str, Any]:
    """Forward passes a second of both, in turns; the medians, and the ratios of the turns' medians."""
    models = {name: load(folder) for name, folder in (("teacher", teacher), ("student", student))}
    torch.set_num_threads(1)  # waiting threads would count as work
    found: dict[str, dict[str, list[float]]] = {side: {name: [] for name in models} for side in ("images", "captions")}
    side = next(iter(models.values())).config.preprocess.image_size
    pixels = torch.randint(0, 256, (SPEED_ROWS, side, side, 3), dtype=torch.uint8)
    lengths = torch.full((SPEED_ROWS,), 8)
    tokens = torch.randint(5, 1000, (int(lengths.sum()),), dtype=torch.int32)
    for _ in range(ROUNDS):
        for name, towers in models.items():
            began = time.process_time()
            towers.vision_head(image_features(towers, pixels))
            found["images"][name].append(SPEED_ROWS / (time.process_time() - began))
            began = time.process_time()
            towers.text_head(caption_features(towers, tokens, lengths))
            found["captions"][name].append(SPEED_ROWS / (time.process_time() - began))
    speeds = {kind: {name: float(np.median(each)) for name, each in of.items()} for kind, of in found.items()}
    ratios = {kind: round(of["student"] / of["teacher"], 2) for kind, of in speeds.items()}
    rounded = {kind: {name: round(value) for name, value in of.items()} for kind, of in speeds.items()}
    return {"passes per CPU second": rounded, "student's passes for one of the teacher": ratios}


def load(folder: Path) -> TwinTower:
    """Towers as a trainer holds them."""
    load_model_config(folder)
    return Trainer(folder, TrainSettings(ema_decay=0)).averaged


if __name__ == "__main__":
    main()
