"""The demo: the shipped emoji through three stages on Ray, an index, a few queries, a contact sheet."""

import json
import tarfile
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import RenderableType

from embedder.commands import Result
from embedder.config import RunConfig, SourceConfig
from embedder.display import TerminalWatcher, report_parts
from embedder.embed import embed
from embedder.retrieval.indexing import build_store_index
from embedder.retrieval.opened_store import open_store
from embedder.store.files import StoreFiles
from embedder.store.publish import read_current
from embedder.training.tokenizer import VOCABULARY, train_tokenizer
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig

QUERIES = ("red heart", "cat", "flag", "fruit")
UNTRAINED = (
    "This model is untrained (random weights, seed 0): the pipeline is real, its answers are chance. "
    "Bring a trained one with `embedder model import`."
)


def run_demo(config: RunConfig, out: Path) -> Result:
    """Run the whole system on shipped data; a second run finds everything done."""
    model, store = out / "model", out / "store"
    with as_file(files("embedder") / "demo_data" / "noto.tar") as tar:
        if not (model / "config.json").exists():
            make_demo_model(tar, model)
        run = config.model_copy(
            update={
                "model": str(model),
                "store": str(store),
                "source": (SourceConfig(path=str(tar), kind="webdataset"),),
                "engine": "ray" if config.engine == "auto" else config.engine,
            }
        )
        report = embed(run, TerminalWatcher())
        index = _ensure_index(StoreFiles(store))
        shown = [*report_parts(report), index, "", UNTRAINED, "", *_search(store, out)]
    return Result({"report": json.loads(report.model_dump_json()), "store": store, "index": index}, shown)


def _ensure_index(store: StoreFiles) -> str:
    current = read_current(store)
    if current is not None and current.index is not None:
        return f"index {current.index} is published"
    number, manifest = build_store_index(store)
    return f"index {number}: {manifest.kind}, {manifest.num_vectors:,} vectors, built in {manifest.build_s:.1f} s"


def _search(store: Path, out: Path) -> list[RenderableType]:
    """Answer the queries a person might type, and draw the first as a contact sheet."""
    opened = open_store(store)
    lines: list[RenderableType] = []
    for query in QUERIES:
        hits = opened.search(query, k=5)
        lines.append(f"{query!r:14} {', '.join(f'{hit.caption} ({hit.score:.2f})' for hit in hits)}")
    sheet = out / "sheet.png"
    opened.search(QUERIES[0], k=10).save_sheet(sheet, QUERIES[0])
    return [*lines, f"contact sheet: {sheet}", f"search more: embedder search 'smiling cat' --store {store}"]


def make_demo_model(tar: Path, folder: Path) -> None:
    """Write a small seeded, untrained twin tower, with a tokeniser made from the shipped captions."""
    from shards.towers import init_model

    config = ModelConfig(
        name="demo-untrained",
        trained=False,
        embedding_dim=128,
        vision=VisionConfig(image_size=72, patch_size=12, width=192, depth=6, num_heads=3),
        text=TextConfig(
            vocab_size=VOCABULARY,
            embedding_size=64,
            hidden_size=192,
            num_hidden_layers=6,
            num_attention_heads=3,
            intermediate_size=768,
        ),
        preprocess=PreprocessConfig(image_size=72, max_caption_tokens=32),
    )
    init_model(config, folder, seed=0, tokenizer_json=train_tokenizer(_captions(tar)))


def _captions(tar: Path) -> list[str]:
    with tarfile.open(tar) as members:
        found = (members.extractfile(member) for member in members if member.name.endswith(".json"))
        return [json.load(file)["caption"] for file in found if file is not None]
