"""Hits of one or several searches, as tables, contact sheets, copies and HTML; and the shared method `search`."""

import base64
import html
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from embedder.errors import ConfigError
from embedder.installation import InstallationError
from embedder.media.decoder_process import Pixels
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME
from embedder.retrieval.hit import THUMBNAIL, Hit, decode_hits, describe
from embedder.retrieval.queries import DEFAULT_OPTIONS, QueryBatch, QueryParts, SearchOptions, read_search
from embedder.retrieval.rerank import check_reranker, image_size_of, rerank_hits
from embedder.storage.output_file import check_output_file
from embedder.storage.printable import printable

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import pyarrow as pa

    from embedder.retrieval.hit_files import CopiedFiles
    from embedder.retrieval.queries import Images, Query
    from embedder.steps.stage_contract import Stage

MAX_TEXT_CHARACTERS = 500  # in a line under an image


class SavedHits(ABC):
    """Hits as a table, in memory and as a file."""

    @abstractmethod
    def to_arrow(self) -> "pa.Table":
        """Return the hits as an Arrow table."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the hits as a data frame, with the columns of `to_arrow`.

        Raises:
            InstallationError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise InstallationError(
                f"{type(self).__name__}.to_pandas: needs pandas, which this installation lacks; pip install pandas, or "
                "use to_arrow()"
            )
        return self.to_arrow().to_pandas()

    def save(self, path: str | Path) -> None:
        """Write the hits as a table, in the format that the suffix names: .csv, .parquet or .jsonl.

        The columns are those of `to_arrow`. In a CSV file, an apostrophe precedes text that a spreadsheet would take
        for a formula.

        Raises:
            ConfigError: the suffix names another format, or the folder is missing.
        """
        from embedder.retrieval.hit_files import save_table

        save_table(Path(path), self.to_arrow())


class Hits(list[Hit], SavedHits):
    """Hits, best first.

    Attributes:
        query: the text or path searched with; empty for a vector.
        note: why there are no hits.
        parts: what was searched with, and what the search avoided.
        warnings: lines on why the hits may not fit the query, for example if the model knows none of its words.
        version: snapshot that answered: the run that published it, and its index.
        carried: names and types of the carried columns; None if unknown.
    """

    def __init__(self, hits: Iterable[Hit] = (), *, query: str = "", note: str = "") -> None:
        super().__init__(hits)
        self.query, self.note, self.version = query, note, ""
        self.parts = QueryParts()
        self.warnings: list[str] = []
        self.carried: pa.Schema | None = None

    def to_arrow(self) -> "pa.Table":
        """Return the hits as an Arrow table: `rank` from 1, the fields of `Hit`, and a column for each carried one.

        A carried column with the name of a field is called `carryover.NAME`. If the types of the carried columns are
        unknown, as from a query service, they are inferred from the values.
        """
        from embedder.retrieval.hit_files import hit_table

        return hit_table([self], carried_types([self]))

    def thumbnails(self) -> list[Pixels | None]:
        """Return the image of each hit, or the middle frame of its segment; uint8 (160, 160, 3), None if it is gone."""
        return list(self.decode_each(THUMBNAIL))

    def decode_each(self, resize: ResizeSpec, num_hits: int | None = None) -> Generator[Pixels | None]:
        """Yield the pixels of the first hits (None: of all), uint8 (H, W, 3); None for an image that is gone."""
        for pixels in decode_hits(self[:num_hits], resize):
            yield None if isinstance(pixels, Exception) else pixels

    def rerank(self, stage: "Stage", options: SearchOptions) -> None:
        """Order the first hits by a stage's scores, if it is quick enough, and keep `options.k`."""
        began_s, resize = time.monotonic(), image_size_of(stage)
        pixels = None if resize is None else self.decode_each(resize, options.rerank)
        late = rerank_hits(self, self.parts.text, stage, options, pixels, began_s)
        if pixels is not None:
            pixels.close()
        if late is not None:
            self.warnings.append(late)
        self.cut(options.k)

    def cut(self, num_hits: int) -> None:
        """Keep the first hits."""
        del self[num_hits:]

    def order_by(self, column: str) -> None:
        """Put the hits in the order of a column instead of their scores'; those without a value come last.

        Args:
            column: carried, of the medium (`taken_at`), or a field of `Hit`; with ` desc` the greatest value is first.

        Raises:
            ConfigError: no hit has such a column, or its values can't be compared.
        """
        name, _, direction = column.strip().rpartition(" ")
        is_falling = direction.lower() == "desc"
        name = name.strip() if name and direction.lower() in ("asc", "desc") else column.strip()
        known = {*BY_NAME, *(each.name for each in fields(Hit)), *(each for hit in self for each in hit.carryover)}
        if self and name not in known:
            raise ConfigError(
                f"sort {printable(column, 60)!r}: write a column of the hits, with ' desc' if the greatest value is "
                f"to be first; they have {', '.join(sorted(known))}"
            )
        values: list[tuple[Any, Hit]] = [({**vars(hit), **hit.medium, **hit.carryover}.get(name), hit) for hit in self]
        known_values = [each for each in values if not _is_none(each[0])]
        try:
            known_values.sort(key=lambda each: each[0], reverse=is_falling)
        except TypeError as error:
            raise ConfigError(f"sort {printable(column, 60)!r}: {error}; sort by times, numbers or texts") from None
        self[:] = [hit for _, hit in (*known_values, *(each for each in values if _is_none(each[0])))]

    def save_sheet(self, path: str | Path, title: str = "") -> None:
        """Write a contact sheet: the image that was searched with, then each hit with score, caption and time.

        Args:
            path: file to write; its suffix selects the format: .png, .jpg, .webp or .pdf.
            title: text above the images.

        Raises:
            ConfigError: the suffix names another format, the folder is missing, or there are too many hits.
        """
        _save_sheet(path, [(self, title)])

    def copy_files(self, folder: str | Path) -> "CopiedFiles":
        """Copy the file of each hit into a new folder, as `001-name.jpg` by rank, next to `hits.csv`, which names them.

        A video is copied whole, and once. A query service gives whole videos, and images in the sizes that it makes.

        Raises:
            ConfigError: the folder is not empty, its parent is missing, or it can't be written.
        """
        from embedder.retrieval.hit_files import copy_files

        return copy_files(Path(folder), [self], self.to_arrow())

    def _repr_html_(self) -> str:
        from embedder.media.contact_sheet import encode_png

        lines = [*self.warnings, *([] if self else [self.note])]
        figures = [f"<p>{_as_html(line)}</p>" for line in lines]
        for pixels, hit in zip(self.thumbnails(), self, strict=True):
            image = "" if pixels is None else base64.b64encode(encode_png(pixels)).decode()
            text = "<br>".join(_as_html(line) for line in describe(hit))
            figures.append(
                f'<figure style="display:inline-block;margin:4px;width:{THUMBNAIL.image_size}px;font-size:11px">'
                f'<img width="{THUMBNAIL.image_size}" src="data:image/png;base64,{image}">'
                f"<figcaption>{text}</figcaption></figure>"
            )
        return "".join(figures)


class Answers(list[Hits], SavedHits):
    """Hits of several queries, in their order."""

    def to_arrow(self) -> "pa.Table":
        """Return the hits of all queries as one Arrow table: `query_number` from 0, `query`, then `Hits.to_arrow`."""
        from embedder.retrieval.hit_files import hit_table

        return hit_table(self, carried_types(self), [hits.query for hits in self])

    def save_sheet(self, path: str | Path) -> None:
        """Write a contact sheet with a block for each query: its name, its image, its hits; see `Hits.save_sheet`."""
        _save_sheet(path, [(hits, hits.query) for hits in self])

    def copy_files(self, folder: str | Path) -> "CopiedFiles":
        """Copy the files of all hits, those of the first query as `q1-001-name.jpg`; see `Hits.copy_files`."""
        from embedder.retrieval.hit_files import copy_files

        return copy_files(Path(folder), self, self[0].to_arrow() if len(self) == 1 else self.to_arrow())

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{_as_html(hits.query)}</h4>{hits._repr_html_()}" for hits in self)


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def carried_types(answers: "Iterable[Hits]") -> "dict[str, pa.DataType]":
    """Return the types of the carried columns that are known, by name."""
    return {field.name: field.type for hits in answers for field in hits.carried or ()}


def _save_sheet(path: str | Path, titled: Sequence[tuple[Hits, str]]) -> None:
    from embedder.media.contact_sheet import SHEET_FORMATS, Block, Cell, save_sheet

    check_output_file(Path(path), SHEET_FORMATS, "contact sheet")
    blocks = []
    for hits, title in titled:
        cells = [Cell(pixels, describe(hit)) for pixels, hit in zip(hits.thumbnails(), hits, strict=True)]
        image = hits.parts.image
        query = None if image is None else Cell(_query_pixels(image), ["query"])
        blocks.append(Block(cells, title, query, hits.note))
    save_sheet(Path(path), blocks)


def _query_pixels(image: Path | bytes) -> Pixels | None:
    with SandboxedDecoder() as decoder:
        try:
            return decoder.image(image, THUMBNAIL)
        except DecodeError:
            return None


def _as_html(text: str) -> str:
    return html.escape(printable(text, MAX_TEXT_CHARACTERS))


H = TypeVar("H", bound=Hits)


class Searchable(ABC, Generic[H]):
    """What can be searched: a store, or the service that has it open."""

    @overload
    def search(self, query: str, options: SearchOptions | int = ..., **keywords: Any) -> H: ...
    @overload
    def search(
        self,
        query: "Query | None" = None,
        options: SearchOptions | int = ...,
        *,
        image: "Images | None" = None,
        not_text: str | Sequence[str] | None = None,
        not_image: "Images | None" = None,
        reranker: "Stage | None" = None,
        **keywords: Any,
    ) -> Any: ...
    def search(
        self,
        query: "Query | None" = None,
        options: SearchOptions | int = DEFAULT_OPTIONS,
        *,
        image: "Images | None" = None,
        not_text: str | Sequence[str] | None = None,
        not_image: "Images | None" = None,
        reranker: "Stage | None" = None,
        **keywords: Any,
    ) -> H | Answers:
        """Find the images and videos nearest to a text, an image, a vector, or a text and an image together.

        Negative examples move similar hits down and are never hits themselves.

        Args:
            query: a text; an image as a `Path`, the bytes of a file, a Pillow image or an array uint8 (H, W, 3); or a
                vector float32 (E,) from `encode_text` or `encode_image`. Several of one kind, as a list or as vectors
                float32 (Q, E), are searched at once.
            options: see `SearchOptions`; a number is `k`.
            image: an image to search with instead of or together with a text; a list of several goes with one text, or
                with as many texts. Here a `str` is a path, too.
            not_text: a text to avoid, or a list of several.
            not_image: an image to avoid, or a list of several.
            reranker: a `Stage` that is set up, which scores the first `rerank` hits again, `batch_size` of its
                `resources` at once (else 8). It gets some of the columns `query`, `caption`, `image` (on a white
                square, as `Hit.image` gives it, or in its proportions up to `max_side_px` of its `resources`),
                `item_id`, `segment` and `cosine`, and returns `score`, by which those hits are ordered
                (`Hit.rerank_score`); null where there is nothing to score. A query that it refuses by a ConfigError
                keeps its first order, and `Hits.warnings` says why.
            keywords: fields of `SearchOptions` that override `options`: `k=5, where="price < 10"`.

        Returns:
            Hits, best first; for several queries, a list of them. A notebook shows them as images. `Hits.warnings` says
            if the model knows no word of a text. `Hit.uri` is the address of an image at the service if that hides the
            items' own addresses.

        Raises:
            ConfigError: an option can't be fulfilled, a query is empty, an image can't be read, or the parts of a query
                can't be combined.
            ArgumentTypeError: a query or an option is of an unsupported type.
            index.RetrievalError: k is below 1, a vector is not of this model, or the index is damaged.
            TypeError: there is no option of that name.
            StoreError: the service can't be reached, or does not have what was asked for.
        """
        queries, options = read_search(query, image, options, keywords, not_text=not_text, not_image=not_image)
        wanted = options
        if reranker is not None:
            check_reranker(reranker, options.rerank)
            if "query" in reranker.columns_in and any(each.text is None for each in queries.parts):
                raise ConfigError(
                    f"{type(reranker).__name__}: it scores what fits a text; search with one, or without rerank"
                )
            usual_s = DEFAULT_OPTIONS.rerank_timeout_s  # so that a service, which may be older, isn't sent another
            wanted = replace(options, k=max(options.k, options.rerank or 0), rerank=0, rerank_timeout_s=usual_s)
        answers = self._answer(queries, wanted)
        for parts, hits in zip(queries.parts, answers, strict=True):
            hits.parts, hits.query = parts, parts.name
            if reranker is not None:
                hits.rerank(reranker, options)
        return answers[0] if queries.is_single else Answers(answers)

    @abstractmethod
    def _answer(self, queries: QueryBatch, options: SearchOptions) -> list[H]:
        """Return the hits of each query."""
