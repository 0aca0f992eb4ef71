"""`embedder search`: takes queries and options, returns a table and plain data for each query."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import AllowStoreCode, PublishedBy, ReadConfig, SearchedModel, StoreUri, command
from embedder.cli.results import Result, new_table
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.quantities import plural
from embedder.retrieval.queries import DEFAULT_OPTIONS, SearchOptions
from embedder.storage.output_file import check_output_file
from embedder.storage.web_address import shown_uri
from embedder.store.layout import MAIN, is_model_name

if TYPE_CHECKING:
    import numpy as np

    from embedder.encoders.yes_no_reranker import YesNoReranker
    from embedder.retrieval.hit_files import CopiedFiles
    from embedder.retrieval.hits import Answers, Hits
    from embedder.retrieval.remote_store import RemoteStore
    from embedder.retrieval.store_api import Store


CHECK_S, CHECK_BYTES = 0.2, 200 << 20
"""Seconds that a search waits for the check of whole hashes, and the most bytes that are read meanwhile.

What is larger is checked by services, and by `store check --deep`."""


@dataclass(frozen=True)
class QueryOptions:
    """Options that say what is searched with, and what is stayed away from."""

    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="What the images should show; several at once.")
    ] = None
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Search with an image, alone or together with a text; several at once."),
    ] = None
    not_texts: Annotated[
        list[str] | None, typer.Option("--not", metavar="TEXT", help="What to stay away from; repeatable.")
    ] = None
    not_images: Annotated[
        list[Path] | None, typer.Option("--not-image", help="An image to stay away from; repeatable.")
    ] = None
    text_weight: Annotated[
        float | None, typer.Option(help="Share of the text next to an image, from 0 to 1; by default 0.5.")
    ] = None
    not_weight: Annotated[
        float | None, typer.Option(help="Weight of what to stay away from, from 0 to 1; by default 0.5.")
    ] = None
    instruction: Annotated[
        str | None,
        typer.Option(help="What texts ask for, in place of the model's own instruction: 'Find invoices'."),
    ] = None
    vector: Annotated[Path | None, typer.Option(help="Search with the vectors of a .npy file, (E,) or (Q, E).")] = None

    def check(self) -> None:
        """Refuse (ConfigError) options that give nothing to search with, or do not go together."""
        if (self.vector is not None) == bool(self.queries or self.images):
            raise ConfigError(
                "what to search with: give a text, --image FILE, both together, or only --vector FILE.npy"
            )
        if self.text_weight is not None and not (self.queries and self.images):
            raise ConfigError("--text-weight is the share of a text next to an --image; give both, or leave it out")
        if self.not_weight is not None and not (self.not_texts or self.not_images):
            raise ConfigError("--not-weight is for --not and --not-image; give one of them, or leave it out")
        if self.instruction is not None and not self.queries:
            raise ConfigError("--instruction stands before a text; give one, or leave it out")


@dataclass(frozen=True)
class HitOptions:
    """Options that say how many hits there are, of which rows, and how they are ranked."""

    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each query.")] = DEFAULT_OPTIONS.k
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that fulfil it: 'price < 10'.")] = None
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Rank by the words of captions, too.")] = False
    fold: Annotated[float | None, typer.Option(metavar="COSINE", help="Fold hits this near to a better one: 0.98.")] = (
        None
    )
    min_score: Annotated[float | None, typer.Option(metavar="COSINE", help="Least score of a hit.")] = None
    all_segments: Annotated[bool, typer.Option("--all-segments", help="One hit per segment, not per video.")] = False
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Order the hits by it: taken_at, 'taken_at desc'.")
    ] = None

    def search_options(self, query: QueryOptions, rerank: "RerankOptions") -> SearchOptions:
        """Return them with the weights of a query, as a store takes them; raises `ConfigError` if one breaks a rule."""
        weights = {"text_weight": query.text_weight, "not_weight": query.not_weight}
        given = {name: weight for name, weight in weights.items() if weight is not None}
        return SearchOptions(
            k=self.k,
            where=self.where,
            group=not self.all_segments,
            fold=self.fold,
            hybrid=self.hybrid,
            min_score=self.min_score,
            instruction=query.instruction,
            rerank=rerank.rerank,
            rerank_timeout_s=rerank.rerank_timeout_s,
            **given,
        )


@dataclass(frozen=True)
class RerankOptions:
    """Options of a second model, which scores the first hits again."""

    rerank: Annotated[
        int | None,
        typer.Option(min=0, help="First hits that --reranker, or that of --server, scores again, as 50; 0: none."),
    ] = None
    reranker: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Model folder of a re-ranker (`embedder model import --reranker`)."),
    ] = None
    rerank_timeout_s: Annotated[
        float, typer.Option(help="Seconds that a query's hits may take; then their first order is kept.")
    ] = DEFAULT_OPTIONS.rerank_timeout_s

    def load(self, *, is_remote: bool = False) -> "YesNoReranker | None":
        """Load the re-ranker, if any; raises `ConfigError` if it, or how many hits it scores, is missing."""
        if (self.reranker is None) == bool(self.rerank) and not (is_remote and self.reranker is None):
            raise ConfigError("--rerank N and --reranker DIR go together; give both, or neither")
        if self.reranker is None:
            return None
        from embedder.encoders.yes_no_reranker import YesNoReranker

        return YesNoReranker(self.reranker).load()


@dataclass(frozen=True)
class OutputFiles:
    """Options that name the files which hits are written to."""

    sheet: Annotated[Path | None, typer.Option(help="Draw the hits as a contact sheet: .png, .jpg, .webp or .pdf.")] = (
        None
    )
    out: Annotated[Path | None, typer.Option(help="Write the hits as a table: .csv, .parquet or .jsonl.")] = None
    copies: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy the files of the hits into a new folder.")
    ] = None

    def check(self) -> None:
        """Refuse (ConfigError) what can't be written: an unknown suffix, a folder that is missing or not empty."""
        if self.sheet is not None:
            from embedder.media.contact_sheet import SHEET_FORMATS

            check_output_file(self.sheet, SHEET_FORMATS, "--sheet")
        if self.out is not None or self.copies is not None:
            from embedder.retrieval.hit_files import TABLE_FORMATS, check_copy_folder

            if self.out is not None:
                check_output_file(self.out, TABLE_FORMATS, "--out")
            if self.copies is not None:
                check_copy_folder(self.copies)


@dataclass(frozen=True)
class SearchPlace:
    """Options that say where is searched: in a store that is opened here, or by the service that has it open."""

    store: StoreUri = None
    version: PublishedBy = None
    model: SearchedModel = None
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Search by a query service (`embedder serve`) instead.")
    ] = None
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token of --server.")] = None
    allow_store_code: AllowStoreCode = False

    def check(self) -> None:
        """Refuse (ConfigError) options of a store along with a service, and those of a service without one."""
        if self.server is None:
            if self.token_file is not None:
                raise ConfigError("--token-file is for --server; give both, or neither")
            return
        is_name = self.model in (None, MAIN) or is_model_name(self.model or "")
        if self.store or not is_name:
            raise ConfigError(
                "--server searches the service's store; leave out --store, and give --model the name of a model"
            )
        if self.allow_store_code:
            raise ConfigError(
                "--allow-store-code is for a store that is opened here; a service is given it by its operator"
            )

    def open(self, run: RunConfig) -> "RemoteStore | Store":
        """Connect to the service, or open the store that the options or the configuration name."""
        if self.server is not None:
            from embedder.retrieval.remote_store import connect

            token = _read_token(self.token_file) if self.token_file else None
            return connect(self.server, token=token, version=self.version, model=self.model)
        from embedder.retrieval.store_api import open_store

        return open_store(
            run.required_store,
            model=self.model or run.main_model,
            version=self.version,
            servables=run.model_sections,
            allow_store_code=self.allow_store_code,
        )


@command
def search(
    read: ReadConfig,
    *,
    query: QueryOptions,
    hits: HitOptions,
    rerank: RerankOptions,
    files: OutputFiles,
    place: SearchPlace,
) -> Result:
    """Find images and videos that fit a text, an image, both together, or a vector."""
    options = hits.search_options(query, rerank)
    run = read({"store": place.store})
    for each in (query, files, place):
        each.check()
    opened = place.open(run)
    local: Store | None = None if place.server is not None else opened  # type: ignore[assignment]
    answers = opened.search(
        query.queries or (None if query.vector is None else _read_vectors(query.vector)),
        options,
        image=query.images or None,
        not_text=query.not_texts or None,
        not_image=query.not_images or None,
        reranker=rerank.load(is_remote=place.server is not None),
    )
    if hits.sort is not None:
        for found in answers:
            found.order_by(hits.sort)
    if local is not None:
        _check_damage(local)
    results = [_hits_data(each, query.vector) for each in answers]
    shown: list[RenderableType] = []
    for each in answers:
        warnings = [f"warning: {line}" for line in each.warnings]
        shown += [*(["", each.query] if len(answers) > 1 else []), *warnings, _format_hits(each, options)]
    copied = _write_files(answers, files)
    shown += _file_lines(files, copied)
    data = (results[0] if len(results) == 1 else {"results": results}) | {"sheet": files.sheet, "out": files.out}
    return Result(
        data | {"copies": None if copied is None else copied._asdict()}, shown, _failure(copied) if copied else ""
    )


def _check_damage(store: "Store") -> None:
    """Raise what the check of whole hashes has found, where a search may wait for it."""
    if store.searcher.snapshot.checked_bytes <= CHECK_BYTES and (damage := store.find_damage(CHECK_S)) is not None:
        raise damage


def _hits_data(hits: "Hits", vector: Path | None) -> dict[str, Any]:
    """Return a query and its hits, for `--json`; `vector` is the file that they were searched with."""
    return {
        "query": hits.parts.text,
        "image": hits.parts.image,
        "vector": vector,
        "not": hits.parts.away.texts,
        "not_image": hits.parts.away.images,
        "hits": [asdict(hit) | {"uri": shown_uri(hit.uri), "place": hit.place} for hit in hits],
        "note": hits.note,
        "warnings": hits.warnings,
    }


def _write_files(answers: "Answers", files: OutputFiles) -> "CopiedFiles | None":
    """Write the contact sheet and the table, and copy the files of the hits, as far as they were asked for."""
    found = answers[0] if len(answers) == 1 else answers
    if files.sheet is not None:
        answers.save_sheet(files.sheet)
    if files.out is not None:
        found.save(files.out)
    return None if files.copies is None else found.copy_files(files.copies)


def _file_lines(files: OutputFiles, copied: "CopiedFiles | None") -> list[str]:
    lines = [f"contact sheet: {files.sheet}"] if files.sheet is not None else []
    lines += [f"hits: {files.out}"] if files.out is not None else []
    if copied is not None:
        lines.append(f"copies: {files.copies} ({plural(copied.num_files, 'file')}, and the hits in hits.csv)")
    return lines


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
        vectors = np.atleast_2d(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "it holds no plain array of numbers"
        raise ConfigError(f"--vector {path}: {problem}; give a file that numpy.save wrote from an array") from None
    if vectors.dtype == np.uint8:  # which `Store.search` takes as pixels
        raise ConfigError(f"--vector {path}: it holds bytes, as pictures are; give floats, or a picture with --image")
    return vectors


def _format_hits(hits: "Hits", options: SearchOptions) -> RenderableType:
    from embedder.retrieval.hit import describe_more

    if not hits:
        return f"nothing found: {hits.note}"
    more = [describe_more(hit) for hit in hits]
    has_probabilities = any(hit.probability is not None for hit in hits)
    optional = [
        *(["rerank"] if any(hit.rerank_score is not None for hit in hits) else []),
        *(["probability"] if has_probabilities else []),
        *(["words"] if options.hybrid else []),
        *(["more"] if any(more) else []),
    ]
    table = new_table("score", "item", "caption", "time", "uri", *optional)
    for hit, of_hit in zip(hits, more, strict=True):
        time = "" if hit.start_s is None or hit.end_s is None else f"{hit.start_s:.1f}-{hit.end_s:.1f} s"
        cells = {
            "rerank": "" if hit.rerank_score is None else f"{hit.rerank_score:.3g}",
            "probability": "" if hit.probability is None else f"{hit.probability:.3g}",
            "words": "" if hit.words_rank is None else f"#{hit.words_rank}",
            "more": of_hit,
        }
        row = (f"{hit.score:.3f}", hit.item_id, hit.caption or "", time, shown_uri(hit.uri))
        table.add_row(*row, *(cells[name] for name in optional))
    return table
