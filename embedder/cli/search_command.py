"""`embedder search`: takes queries and options, returns a table and plain data for each query."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import AllowStoreCode, PublishedBy, ReadConfig, SearchedModel, StoreUri, command
from embedder.cli.results import Result, new_table
from embedder.errors import ConfigError
from embedder.quantities import plural
from embedder.retrieval.queries import DEFAULT_OPTIONS, SearchOptions
from embedder.storage.output_file import check_output_file
from embedder.storage.web_address import shown_uri
from embedder.store.layout import MAIN, is_model_name

if TYPE_CHECKING:
    import numpy as np

    from embedder.retrieval.hit_files import CopiedFiles
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
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each query.")] = DEFAULT_OPTIONS.k,
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that fulfil it: 'price < 10'.")] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Search with an image, alone or together with a text; several at once."),
    ] = None,
    not_texts: Annotated[
        list[str] | None, typer.Option("--not", metavar="TEXT", help="What to stay away from; repeatable.")
    ] = None,
    not_images: Annotated[
        list[Path] | None, typer.Option("--not-image", help="An image to stay away from; repeatable.")
    ] = None,
    text_weight: Annotated[
        float | None, typer.Option(help="Share of the text beside an image, from 0 to 1; by default 0.5.")
    ] = None,
    not_weight: Annotated[
        float | None, typer.Option(help="Weight of what to stay away from, from 0 to 1; by default 0.5.")
    ] = None,
    vector: Annotated[Path | None, typer.Option(help="Search with the vectors of a .npy file, (E,) or (Q, E).")] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Rank by the words of captions, too.")] = False,
    fold: Annotated[
        float | None, typer.Option(metavar="COSINE", help="Fold hits this near to a better one: 0.98.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(metavar="COSINE", help="Least score of a hit.")] = None,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="One hit per segment, not per video.")] = False,
    sheet: Annotated[
        Path | None, typer.Option(help="Draw the hits as a contact sheet: .png, .jpg, .webp or .pdf.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the hits as a table: .csv, .parquet or .jsonl.")] = None,
    copies: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy the files of the hits into a new folder.")
    ] = None,
    version: PublishedBy = None,
    model: SearchedModel = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Search by a query service (`embedder serve`) instead.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token of --server.")] = None,
    allow_store_code: AllowStoreCode = False,
) -> Result:
    """Find images and videos that fit a text, an image, both together, or a vector."""
    weights = {"text_weight": text_weight, "not_weight": not_weight}
    given = {name: weight for name, weight in weights.items() if weight is not None}
    options = SearchOptions(
        k=k, where=where, group=not all_segments, fold=fold, hybrid=hybrid, min_score=min_score, **given
    )
    run = read({"store": store})
    if (vector is not None) == bool(queries or images):
        raise ConfigError("what to search with: give a text, --image FILE, both together, or --vector FILE.npy alone")
    if text_weight is not None and not (queries and images):
        raise ConfigError("--text-weight is the share of a text beside an --image; give both, or leave it out")
    if not_weight is not None and not (not_texts or not_images):
        raise ConfigError("--not-weight is for --not and --not-image; give one of them, or leave it out")
    _check_outputs(sheet, out, copies)

    is_name = model in (None, MAIN) or is_model_name(model or "")
    if server is not None and (store or not is_name):
        raise ConfigError(
            "--server searches the service's store; leave out --store, and give --model the name of a model"
        )
    if server is not None and allow_store_code:
        raise ConfigError(
            "--allow-store-code is for a store that is opened here; a service is given it by its operator"
        )
    if server is None and token_file is not None:
        raise ConfigError("--token-file is for --server; give both, or neither")

    opened: RemoteStore | Store
    if server is not None:
        from embedder.retrieval.remote_store import connect

        opened = connect(server, token=_read_token(token_file) if token_file else None, version=version, model=model)
    else:
        from embedder.retrieval.store_api import open_store

        opened = open_store(
            run.required_store,
            model=model or run.main_model,
            version=version,
            servables=run.model_sections,
            allow_store_code=allow_store_code,
        )
    query = queries or (None if vector is None else _read_vectors(vector))
    answers = opened.search(
        query, options, image=images or None, not_text=not_texts or None, not_image=not_images or None
    )
    results = [
        {
            "query": hits.parts.text,
            "image": hits.parts.image,
            "vector": vector,
            "not": hits.parts.away.texts,
            "not_image": hits.parts.away.images,
            "hits": [asdict(hit) | {"uri": shown_uri(hit.uri)} for hit in hits],
            "note": hits.note,
            "warnings": hits.warnings,
        }
        for hits in answers
    ]
    shown: list[RenderableType] = []
    for hits in answers:
        warnings = [f"warning: {line}" for line in hits.warnings]
        shown += [*(["", hits.query] if len(answers) > 1 else []), *warnings, _format_hits(hits, options)]
    found = answers[0] if len(answers) == 1 else answers
    if sheet is not None:
        answers.save_sheet(sheet)
        shown.append(f"contact sheet: {sheet}")
    if out is not None:
        found.save(out)
        shown.append(f"hits: {out}")
    copied = found.copy_files(copies) if copies is not None else None
    if copied is not None:
        shown.append(f"copies: {copies} ({plural(copied.num_files, 'file')}, and the hits in hits.csv)")
    data = (results[0] if len(results) == 1 else {"results": results}) | {"sheet": sheet, "out": out}
    return Result(
        data | {"copies": None if copied is None else copied._asdict()}, shown, _failure(copied) if copied else ""
    )


def _check_outputs(sheet: Path | None, out: Path | None, copies: Path | None) -> None:
    """Refuse unwritable output files before the search: an unknown suffix, or a folder that is missing or not empty."""
    if sheet is not None:
        from embedder.media.contact_sheet import SHEET_FORMATS

        check_output_file(sheet, SHEET_FORMATS, "--sheet")
    if out is not None or copies is not None:
        from embedder.retrieval.hit_files import TABLE_FORMATS, check_copy_folder

        if out is not None:
            check_output_file(out, TABLE_FORMATS, "--out")
        if copies is not None:
            check_copy_folder(copies)


def _failure(copied: "CopiedFiles") -> str:
    if not copied.problems:
        return ""
    num_items = copied.num_files + len(copied.problems)
    first = copied.problems[0]
    return (
        f"copies {copied.folder}: {len(copied.problems):,} of {plural(num_items, 'item')} could not be copied; "
        f"hits.csv there says why; the first is {first}"
    )


def _read_token(path: Path) -> str:
    """Return the first token of a file, one per line; lines that begin with # are comments."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path}: {error}; give a text file with the token in a line") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"--token-file {path}: it has no token; write it in a line")
    return tokens[0]


def _read_vectors(path: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the vectors (Q, E) of a `.npy` file, which may hold a single one (E,)."""
    import numpy as np

    try:
        return np.atleast_2d(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"--vector {path}: {error}; give a file that numpy.save wrote from an array") from None


def _format_hits(hits: "Hits", options: SearchOptions) -> RenderableType:
    from embedder.retrieval.hit import describe_more

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
        row = (f"{hit.score:.3f}", hit.item_id, hit.caption or "", time, shown_uri(hit.uri))
        table.add_row(*row, *(cells[name] for name in optional))
    return table
