"""`embedder search`: queries and options in, a table and plain data for each query out."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import ModelUri, PublishedBy, ReadConfig, StoreUri, command
from embedder.cli.results import Result, new_table
from embedder.errors import ConfigError
from embedder.retrieval.queries import SearchOptions

if TYPE_CHECKING:
    import numpy as np

    from embedder.retrieval.hits import Hits
    from embedder.retrieval.remote_store import RemoteStore
    from embedder.retrieval.store_api import Store


@command
def search(
    read: ReadConfig,
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="What the images should show; several at once.")
    ] = None,
    store: StoreUri = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each query.")] = 10,
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that fulfil it: 'price < 10'.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="Search with an image instead of a text; several at once.")
    ] = None,
    vector: Annotated[Path | None, typer.Option(help="Search with the vectors of a .npy file, (E,) or (Q, E).")] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Rank by the words of captions, too.")] = False,
    fold: Annotated[
        float | None, typer.Option(metavar="COSINE", help="Fold hits this near to a better one: 0.98.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(metavar="COSINE", help="Least score of a hit.")] = None,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="One hit per segment, not per video.")] = False,
    sheet: Annotated[Path | None, typer.Option(help="Write the hits as a contact sheet (PNG).")] = None,
    version: PublishedBy = None,
    model: ModelUri = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Search by a query service (`embedder serve`) instead.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token of --server.")] = None,
) -> Result:
    """Find images and videos that fit a text, an image or a vector."""
    options = SearchOptions(k=k, where=where, group=not all_segments, fold=fold, hybrid=hybrid, min_score=min_score)
    run = read({"store": store, "model": model})
    if sum([bool(queries), bool(images), vector is not None]) != 1:
        raise ConfigError("search with a text or with --image FILE: give one of the two, or only --vector FILE.npy")
    if sheet is not None and len(queries or images or ()) > 1:
        raise ConfigError("--sheet draws the hits of one query; give one text or one --image with it")

    if server is not None and (store or model):
        raise ConfigError("--server searches the store and the model of the service; leave out --store and --model")
    if server is None and token_file is not None:
        raise ConfigError("--token-file is for --server; give both, or neither")

    opened: RemoteStore | Store
    if server is not None:
        from embedder.retrieval.remote_store import connect

        opened = connect(server, token=_read_token(token_file) if token_file else None, version=version)
    else:
        from embedder.retrieval.store_api import open_store

        opened = open_store(run.required_store, model=run.model, version=version)
    query = queries or (None if vector is None else _read_vectors(vector))
    answers = opened.search(query, options, image=images or None)
    results = [
        {
            "query": hits.query if queries else None,
            "image": hits.query if images else None,
            "vector": vector,
            "hits": [asdict(hit) for hit in hits],
            "note": hits.note,
        }
        for hits in answers
    ]
    shown: list[RenderableType] = []
    for hits in answers:
        shown += [*(["", hits.query] if len(answers) > 1 else []), _shown(hits, options)]
    if sheet is not None:
        answers[0].save_sheet(sheet, answers[0].query)
        shown.append(f"contact sheet: {sheet}")
    return Result((results[0] if len(results) == 1 else {"results": results}) | {"sheet": sheet}, shown)


def _read_token(path: Path) -> str:
    """First token of a file, one a line, in which lines that begin with # are comments.

    Raises:
        ConfigError: there is no such file, or no token in it.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path}: {error}; give a text file with the token in a line") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"--token-file {path}: it has no token; write it in a line")
    return tokens[0]


def _read_vectors(path: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    """Vectors (Q, E) of a `.npy` file, which may hold a single one (E,).

    Raises:
        ConfigError: there is no such file, or it holds no array of numbers.
    """
    import numpy as np

    try:
        return np.atleast_2d(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"--vector {path}: {error}; give a file that numpy.save wrote from an array") from None


def _shown(hits: "Hits", options: SearchOptions) -> RenderableType:
    """A table, or the line that says why there is none."""
    from embedder.retrieval.hits import describe_more

    if not hits:
        return f"nothing found: {hits.note}"
    more = [describe_more(hit) for hit in hits]
    has_probabilities = any(hit.probability is not None for hit in hits)
    optional = [
        *(["probability"] if has_probabilities else []),
        *(["words"] if options.hybrid else []),
        *(["more"] if any(more) else []),
    ]
    table = new_table("score", "item", "caption", "time", "uri", *optional)
    for hit, of_hit in zip(hits, more, strict=True):
        time = "" if hit.start_s is None or hit.end_s is None else f"{hit.start_s:.1f}-{hit.end_s:.1f} s"
        cells = {
            "probability": "" if hit.probability is None else f"{hit.probability:.3g}",
            "words": "" if hit.words_rank is None else f"#{hit.words_rank}",
            "more": of_hit,
        }
        row = (f"{hit.score:.3f}", hit.item_id, hit.caption or "", time, hit.uri)
        table.add_row(*row, *(cells[name] for name in optional))
    return table
