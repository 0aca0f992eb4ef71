"""`embedder demo`: the shipped emoji through three stages on Ray, an index, R@k of text queries, a contact sheet."""

import json
import threading
from functools import partial
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import Force, ReadConfig, command
from embedder.cli.results import Result, new_table
from embedder.cli.terminal import Terminal, item_bar
from embedder.entry_points import COMMANDS, find_plugins, load_plugin
from embedder.installation import command_here, require
from embedder.quantities import duration_text, plural
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.retrieval.store_api import Store

QUERIES = ("red heart", "slice of pizza", "cat crying with laughter", "flag of Japan", "medical doctor", "snow")
SHEET_QUERY = "smiling cat"
UNSEEN_TAGS = "openmoji_tags"  # a second set of human tags, which no training has used
KS = (1, 5, 10)


@command
def demo(
    read: ReadConfig,
    out: Annotated[Path, typer.Option(help="Folder for the store and the contact sheet.")] = Path("runs/demo"),
    force: Force = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Then serve the store, and open its search page in a browser.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="With --serve, open no browser.")] = False,
) -> Result:
    """Embed the shipped emoji through three stages, index them, and search."""
    config, store = read(), out / "store"
    require("embed", "embedder demo")
    if serve:
        require("serve", "embedder demo --serve")
        load_plugin(COMMANDS, "serve", "embedder demo --serve")

    from embedder.cli.render_report import report_parts
    from embedder.ingest.embed import embed
    from embedder.retrieval.store_api import open_store
    from embedder.sources.demo_source import shipped_source

    # A second run finds everything done.
    with as_file(files("embedder") / "demo_model") as model, shipped_source((UNSEEN_TAGS, "group")) as source:
        engine = "ray" if config.engine == "auto" else config.engine
        own = {"model": config.model or str(model), "store": str(store), "source": (source,), "engine": engine}
        report = embed(config.model_copy(update=own), item_bar, forced=force or ())
        index = _index_line(StoreFiles(store))
        opened = open_store(store)
        recalls = _measure(opened)
        shown = [*report_parts(report), index, "", _recall_table(recalls), "", *_search(opened, out)]
    return Result(
        {"report": json.loads(report.model_dump_json()), "store": store, "recalls": recalls},
        shown,
        afterwards=partial(_serve, store, opens_browser=not no_browser) if serve else None,
    )


def _serve(store: Path, *, opens_browser: bool) -> None:
    """Serve the store on a free port of localhost until Ctrl-C, and open the search page."""
    import webbrowser

    def show_address(url: str) -> None:
        Terminal(stderr=True).print(f"search page of {store}: {url} (Ctrl-C ends it)", soft_wrap=True)
        if opens_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # it may wait for the browser

    import_module(find_plugins(COMMANDS)["serve"].module).serve_store(str(store), show_address)


def _index_line(store: StoreFiles) -> str:
    from embedder.store.store_info import read_published
    from embedder.store_index.index_versions import manifest_of

    number = read_published(store).index
    manifest = manifest_of(store, number) if number is not None else None
    if manifest is None:
        return "no index: search compares with every vector"
    vectors = plural(manifest.num_vectors, "vector")
    return f"index {number}: {manifest.kind}, {vectors}, built in {duration_text(round(manifest.build_s, 1))}"


def _measure(store: "Store") -> list[dict[str, Any]]:
    """Measure text-to-image R@k over all emoji: by caption, without flags, and by tags that no training has used.

    The only right answer to a text is its own emoji.
    """
    import numpy as np
    import pyarrow.compute as pc

    from embedder.retrieval.rank_metrics import retrieval_at
    from embedder.store.tables.arrow_tensors import unpack_vectors

    rows = store.to_arrow()
    rows = rows.filter(pc.is_valid(rows["image_embedding"])).combine_chunks()
    is_flag = pc.equal(rows["group"], "flags").to_numpy(zero_copy_only=False)
    # The first thousand emoji have no such tags, so the column of lists arrived as JSON texts.
    tags = [", ".join(json.loads(words)) for words in rows[UNSEEN_TAGS].to_pylist()]
    has_tags = np.array([bool(words) for words in tags])
    tag_queries = store.encode_text([words for words in tags if words])
    captions, images = (unpack_vectors(rows[name]) for name in ("text_embedding", "image_embedding"))
    numbers = np.arange(rows.num_rows)
    asked = {
        "caption": (numbers, captions),
        "caption, without flags": (numbers[~is_flag], captions[~is_flag]),
        "caption, flags only": (numbers[is_flag], captions[is_flag]),
        "tags unseen in training": (numbers[has_tags], tag_queries),
    }
    return [
        {"queries": name, "num_queries": len(own), "recall": retrieval_at(queries, own, images, numbers, KS)}
        for name, (own, queries) in asked.items()
    ]


def _recall_table(recalls: list[dict[str, Any]]) -> Table:
    heading = "text -> image, by"
    rows = [
        (each["queries"], f"{each['num_queries']:,}", *(f"{each['recall'][k]:.3f}" for k in KS)) for each in recalls
    ]
    return new_table(heading, "queries", *(f"R@{k}" for k in KS), left=(heading,), rows=rows)


def _search(store: "Store", out: Path) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for query in QUERIES:
        hits = store.search(query, k=4)
        lines.append(f"{query!r:26} {', '.join(f'{hit.caption} ({hit.score:.2f})' for hit in hits)}")
    sheet = out / "sheet.png"
    store.search(SHEET_QUERY, k=10).save_sheet(sheet, SHEET_QUERY)
    more = f"{command_here()} search 'loud music' --store {out / 'store'}"
    return [*lines, f"contact sheet: {sheet}", f"search more: {more}"]
