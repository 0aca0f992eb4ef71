"""`embedder search`: queries and options in, a table and plain data for each query out."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import AsJson, ConfigFile, ModelUri, PublishedBy, Settings, StoreUri
from embedder.cli.results import Result, print_result
from embedder.cli.store_access import open_published
from embedder.cli.tables import new_table
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.retrieval.options import SearchOptions

if TYPE_CHECKING:
    import numpy as np

    from embedder.retrieval.hits import Hits


def search(
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="What the pictures should show; several at once.")
    ] = None,
    store: StoreUri = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each query.")] = 10,
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that fulfil it: 'price < 10'.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="Search with a picture instead of a text; several at once.")
    ] = None,
    vector: Annotated[Path | None, typer.Option(help="Search with the vectors of a .npy file, (E,) or (Q, E).")] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Rank by the words of captions, too.")] = False,
    fold: Annotated[
        float | None, typer.Option(metavar="COSINE", help="Fold hits this near to a better one: 0.98.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(metavar="COSINE", help="Least score of a hit.")] = None,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="A hit a segment, not a video.")] = False,
    sheet: Annotated[Path | None, typer.Option(help="Write the hits as a contact sheet (PNG).")] = None,
    version: PublishedBy = None,
    model: ModelUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find pictures and videos that fit a text, a picture or a vector."""
    options = SearchOptions(k=k, where=where, group=not all_segments, fold=fold, hybrid=hybrid, min_score=min_score)
    run = load_config(config, {"store": store, "model": model}, settings or ())
    arguments = _QueryArguments(queries or [], images or [], vector)
    arguments.check(sheet)
    opened = open_published(run, version)
    query = arguments.texts or (None if vector is None else _read_vectors(vector))
    answers = opened.search(query, options, image=arguments.images or None)
    results = [_data(arguments, hits) for hits in answers]
    shown: list[RenderableType] = []
    for hits in answers:
        shown += [*(["", hits.query] if len(answers) > 1 else []), _shown(hits, options)]
    if sheet is not None:
        answers[0].save_sheet(sheet, answers[0].query)
        shown.append(f"contact sheet: {sheet}")
    print_result(as_json, Result((results[0] if len(results) == 1 else {"results": results}) | {"sheet": sheet}, shown))


@dataclass(frozen=True)
class _QueryArguments:
    """Queries of one kind.

    Attributes:
        texts: queries in words.
        images: image files.
        vector: a `.npy` file with one vector, or several.
    """

    texts: list[str]
    images: list[Path]
    vector: Path | None

    def check(self, sheet: Path | None) -> None:
        """Refuse what can't be one search.

        Raises:
            ConfigError: no query, queries of two kinds, or a sheet of several.
        """
        kinds = [bool(self.texts), bool(self.images), self.vector is not None]
        if sum(kinds) != 1:
            raise ConfigError(
                "search with a text or with --image FILE: give one of the two, or --vector FILE.npy by itself"
            )
        if sheet is not None and len(self.texts) + len(self.images) > 1:
            raise ConfigError("--sheet draws the hits of one query; give one text or one --image with it")


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


def _data(arguments: _QueryArguments, hits: "Hits") -> dict[str, Any]:
    return {
        "query": hits.query if arguments.texts else None,
        "image": hits.query if arguments.images else None,
        "vector": arguments.vector,
        "hits": [asdict(hit) for hit in hits],
        "note": hits.note,
    }


def _shown(hits: "Hits", options: SearchOptions) -> RenderableType:
    """A table, or the line that says why there is none."""
    from embedder.retrieval.hits import describe_more

    if not hits:
        return f"nothing found: {hits.note}"
    more = [describe_more(hit) for hit in hits]
    optional = [*(["words"] if options.hybrid else []), *(["more"] if any(more) else [])]
    table = new_table("score", "item", "caption", "time", "uri", *optional)
    for hit, of_hit in zip(hits, more, strict=True):
        time = "" if hit.start_s is None or hit.end_s is None else f"{hit.start_s:.1f}-{hit.end_s:.1f} s"
        cells = {"words": "" if hit.words_rank is None else f"#{hit.words_rank}", "more": of_hit}
        row = (f"{hit.score:.3f}", hit.item_id, hit.caption or "", time, hit.uri)
        table.add_row(*row, *(cells[name] for name in optional))
    return table
