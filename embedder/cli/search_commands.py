"""What `embedder search` does: queries and options in, a table and plain data for each query out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.commands import Result, open_published
from embedder.config import RunConfig
from embedder.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from embedder.retrieval.hits import Hits
    from embedder.retrieval.options import SearchOptions


@dataclass(frozen=True)
class QueryArguments:
    """What the command line names: queries of one kind.

    Attributes:
        texts: queries in words.
        images: picture files.
        vector: a `.npy` file with one vector, or several.
    """

    texts: Sequence[str] = ()
    images: Sequence[Path] = ()
    vector: Path | None = None

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


def search(
    config: RunConfig, asked: QueryArguments, options: "SearchOptions", sheet: Path | None, version: str | None = None
) -> Result:
    """Search by texts, pictures or vectors."""
    asked.check(sheet)
    store = open_published(config, version)
    queries = list(asked.texts) or (None if asked.vector is None else read_vectors(asked.vector))
    answers = store.search(queries, image=list(asked.images) or None, **asdict(options))
    results = [_data(asked, hits) for hits in answers]
    shown: list[RenderableType] = []
    for hits in answers:
        shown += [*(["", hits.query] if len(answers) > 1 else []), *_shown(hits, options)]
    if sheet is not None:
        answers[0].save_sheet(sheet, answers[0].query)
        shown.append(f"contact sheet: {sheet}")
    return Result((results[0] if len(results) == 1 else {"results": results}) | {"sheet": sheet}, shown)


def read_vectors(path: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    """The vectors of a `.npy` file, one (E,) or several (Q, E), as several.

    Raises:
        ConfigError: there is no such file, or it holds no array of numbers.
    """
    import numpy as np

    try:
        return np.atleast_2d(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"--vector {path}: {error}; give a file that numpy.save wrote from an array") from None


def _data(asked: QueryArguments, hits: "Hits") -> dict[str, Any]:
    return {
        "query": hits.query if asked.texts else None,
        "image": hits.query if asked.images else None,
        "vector": asked.vector,
        "hits": [asdict(hit) for hit in hits],
        "note": hits.note,
    }


def _shown(hits: "Hits", options: "SearchOptions") -> list[RenderableType]:
    """A table, or the line that says why there is none."""
    from embedder.retrieval.hits import describe_more

    if not hits:
        return [f"nothing found: {hits.note}"]
    more = [describe_more(hit) for hit in hits]
    table = Table(box=None, pad_edge=False, header_style="dim")
    optional = [*(["words"] if options.hybrid else []), *(["more"] if any(more) else [])]
    for name in ("score", "item", "caption", "time", "uri", *optional):
        table.add_column(name, overflow="fold")
    for hit, of_hit in zip(hits, more, strict=True):
        time = "" if hit.start_s is None or hit.end_s is None else f"{hit.start_s:.1f}-{hit.end_s:.1f} s"
        cells = {"words": "" if hit.words_rank is None else f"#{hit.words_rank}", "more": of_hit}
        table.add_row(
            f"{hit.score:.3f}",
            hit.item_id,
            hit.caption or "",
            time,
            hit.uri,
            *(cells[name] for name in optional),
        )
    return [table]
