"""Queries of a search (texts, images, both together, or vectors; one or several at once) and its options."""

import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from embedder.errors import ArgumentTypeError, ConfigError, check_argument
from embedder.media.given_inputs import ARRAY_RULE, EXPECTED, file_or_content, is_array, is_pillow_image
from index.index_errors import RetrievalError
from index.vectors import Floats

if TYPE_CHECKING:
    from embedder.media.given_inputs import GivenImage

    Images = GivenImage | Sequence[GivenImage]
    Query = str | Sequence[str] | Floats | Images

Kind = Literal["text", "image", "vector"]

VECTOR_RULE = "a vector is an array of floats, (E,) or several (Q, E)"
QUERIES = f"a text, an image ({EXPECTED}), a vector float32 (E,), or a list of one of these kinds"
HYBRID_RULE = "hybrid search ranks by words", "search with a text"
"""Rule of `SearchOptions.hybrid`, and what to do if it is broken."""
INSTRUCTION_RULE = "an instruction stands before a text", "search with a text, or leave it out"


class Option(NamedTuple):
    """What a field of `SearchOptions` accepts wherever it is given: in Python, in a command, in a request.

    `kind` is the class that values are converted to, `expected` the accepted values in words. `bounds` have Pydantic's
    names (`ge`, `gt`, `le`); out of them, `error` is raised with the message `broken`.
    """

    kind: type[bool | float | int | str]
    expected: str
    description: str
    bounds: tuple[tuple[str, float], ...] = ()
    broken: str = ""
    error: type[Exception] = ConfigError


KINDS: dict[type, Any] = {int: Integral, float: Real, str: str, bool: bool | np.bool_}
"""Accepted classes by the class that values are converted to: NumPy numbers become Python's, which JSON accepts."""
SHARE, SHARE_BROKEN = (("ge", 0), ("le", 1)), "{} is {}; give a number from 0 to 1, as 0.5"
OPTIONS = {
    "k": Option(
        int,
        "a whole number, as 10",
        "hits of each query",
        (("ge", 1),),
        "{} is {}; ask for 1 result or more",
        RetrievalError,
    ),
    "where": Option(str, "a condition as a text, as 'price < 10'", "SQL condition over the columns"),
    "group": Option(bool, "True or False", "one hit for each video, else one for each segment"),
    "fold": Option(
        float,
        "a cosine, as 0.98",
        "cosine from which on near-duplicates are folded",
        (("gt", 0), ("le", 1)),
        "{} is {}; give a cosine above 0 and up to 1, as 0.98",
    ),
    "hybrid": Option(bool, "True or False", "rank by the words of captions, too; for texts only"),
    "min_score": Option(
        float,
        "a cosine, as 0.2",
        "least cosine of a hit",
        (("ge", -1), ("le", 1)),
        "the minimum score is {1}; give a cosine between -1 and 1, as 0.2",
    ),
    "text_weight": Option(
        float,
        "a share of the whole, as 0.5",
        "share of the text in a query that has an image, too",
        SHARE,
        SHARE_BROKEN,
    ),
    "not_weight": Option(
        float,
        "a number from 0 to 1, as 0.5",
        "weight of what is stayed away from; the query's is 1",
        SHARE,
        SHARE_BROKEN,
    ),
    "instruction": Option(str, "a text", "what texts ask for, in the place of the model's own instruction"),
    "rerank": Option(
        int,
        "a whole number, as 50",
        "first hits that a re-ranker scores again; 0 for none",
        (("ge", 0),),
        "{} is {}; give the number of first hits to score again, as 50",
    ),
    "rerank_timeout_s": Option(
        float,
        "a number of seconds, as 5",
        "seconds that scoring them again may take; then they come in their first order, with a warning",
        (("gt", 0),),
        "{} is {}; give seconds above 0, as 5",
    ),
}


@dataclass(frozen=True)
class SearchOptions:
    """Options of `Store.search`, for one query or a batch of them.

    Attributes:
        k: hits of each query, if that many exist.
        where: SQL condition over the columns of `Store.to_arrow()` except the vectors, such as `"price < 10"`; only
            rows that fulfil it are found, and k of them if k exist.
        group: one hit for each video, its best segment, with the others in `Hit.segments`; else a hit for each segment.
        fold: cosine, such as 0.98, from which on a hit is folded under a better one; None folds nothing.
        hybrid: fuse the ranking by vectors with the one by the words of captions; for texts only.
        min_score: least cosine of a hit with its query.
        text_weight: share of the text in a query of a text and an image; the rest is the image's.
        not_weight: weight of all negative examples together; that of what is searched for is 1.
        instruction: what texts ask for, such as "Find invoices", in the place of the model's own instruction; for
            models that take one.
        rerank: first hits that the search's re-ranker scores again, such as 50, or the service's, which by default
            does what it was started for; 0 for none.
        rerank_timeout_s: seconds that this may take for each query. After them its hits come in their first order,
            and `Hits.warnings` says so; a batch that is being scored, or an image that is being decoded, may end.
    """

    k: int = 10
    where: str | None = None
    group: bool = True
    fold: float | None = None
    hybrid: bool = False
    min_score: float | None = None
    text_weight: float = 0.5
    not_weight: float = 0.5
    instruction: str | None = None
    rerank: int | None = None
    rerank_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse options that are out of range or of another type.

        Raises:
            RetrievalError: k is below 1.
            ConfigError: another option is out of its range.
            ArgumentTypeError: an option is of another type.
        """
        given = [name for name in OPTIONS if getattr(self, name) is not None or getattr(type(self), name) is not None]
        for name in given:
            kind, value = OPTIONS[name].kind, getattr(self, name)
            if not isinstance(value, KINDS[kind]) or (kind is not bool and isinstance(value, bool)):
                found = f"found {value!r} ({type(value).__name__})"
                raise ArgumentTypeError(f"{name}: {found}; give {OPTIONS[name].expected}")
            object.__setattr__(self, name, kind(value))
        for name, what in (("where", "a condition"), ("instruction", "one")):
            if (text := getattr(self, name)) is not None and not text.strip():
                raise ConfigError(f"{name} {text!r}: it is empty; write {what}, or leave it out")
        for name in given:
            option, value = OPTIONS[name], getattr(self, name)
            if not all(getattr(operator, rule)(value, bound) for rule, bound in option.bounds):
                raise option.error(option.broken.format(name, value))


DEFAULT_OPTIONS = SearchOptions()


@dataclass(frozen=True)
class Examples:
    """Texts and images that a search avoids."""

    texts: tuple[str, ...] = ()
    images: tuple[Path | bytes, ...] = ()

    @property
    def name(self) -> str:
        """Names of the examples, for people."""
        return " or ".join([*self.texts, *(_image_name(image) for image in self.images)])


NO_EXAMPLES = Examples()


class QueryParts(NamedTuple):
    """One query: its name for people (empty for a vector), its text and image if any, and the examples to avoid."""

    name: str = ""
    text: str | None = None
    image: Path | bytes | None = None
    away: Examples = NO_EXAMPLES


@dataclass(frozen=True)
class QueryBatch:
    """Queries of one kind: Q texts, paths and file contents, or vectors float32 (Q, E).

    `is_single` says whether one was given, not a list. `images` are Q images that are searched with together with the
    texts, if any. `away` is what all queries avoid.
    """

    kind: Kind
    values: Any
    is_single: bool
    images: Sequence[Path | bytes] | None = None
    away: Examples = NO_EXAMPLES

    @property
    def is_combined(self) -> bool:
        """Whether a query is more than a text, an image or a vector."""
        return self.images is not None or self.away != NO_EXAMPLES

    @property
    def parts(self) -> list[QueryParts]:
        """Parts of each query, and its name."""
        return [self._parts(number, value) for number, value in enumerate(self.values)]

    def _parts(self, number: int, value: Any) -> QueryParts:
        numbered = None if self.is_single else number
        text, image = value if self.kind == "text" else None, value if self.kind == "image" else None
        if self.images is not None:
            image = self.images[number]
        names = [*([] if text is None else [text]), *([] if image is None else [_image_name(image, numbered)])]
        name = " + ".join(names) or ("" if self.is_single else f"vector {number}")
        if self.away != NO_EXAMPLES:
            name = f"{name or 'a vector'} but not {self.away.name}"
        return QueryParts(name, text, image, self.away)


def read_search(
    query: "Query | None",
    image: "Images | None",
    options: SearchOptions | int,
    keywords: dict[str, Any],
    *,
    not_text: str | Sequence[str] | None = None,
    not_image: "Images | None" = None,
) -> tuple[QueryBatch, SearchOptions]:
    """Convert the queries and options of a search from any accepted form.

    In `query` a `str` is a text, in `image` a path; each may be one or several. `keywords` override `options`, of which
    a number is `k`.

    Raises:
        ConfigError: an option is out of range or doesn't suit the queries, there is no query, texts and images can't be
            paired, or an image is invalid.
        RetrievalError: k is below 1, or an array is neither vectors nor an image.
        ArgumentTypeError: a query or an option is of another type, or queries of several kinds are in one list.
        TypeError: there is no option of that name.
    """
    options = read_options(options, keywords)
    queries = replace(read_queries(query, image), away=_examples(not_text, not_image))
    if options.hybrid and queries.kind != "text":
        raise ConfigError(f"{'; '.join(HYBRID_RULE)}, not with a given {queries.kind}")
    if options.instruction is not None and queries.kind != "text":
        raise ConfigError(f"{'; '.join(INSTRUCTION_RULE)}, not with a given {queries.kind}")
    return queries, options


def read_options(options: SearchOptions | int, keywords: dict[str, Any]) -> SearchOptions:
    """Return options overridden by `keywords`; a number is `k`.

    Raises `ArgumentTypeError` if the options are neither, or one of them is of another type.
    """
    if not isinstance(options, SearchOptions):
        check_argument("options", options, (SearchOptions, Integral), "SearchOptions, or a number of hits")
        return SearchOptions(**{"k": options, **keywords})
    return replace(options, **keywords)


def read_queries(query: "Query | None", image: "Images | None") -> QueryBatch:
    """Convert queries from any accepted form; a text and an image are searched with together.

    One text goes with each of several images, and one image with each of several texts. Raises `ConfigError` if nothing
    was given, an image comes with something other than texts, the numbers of texts and images differ, or an image is
    invalid; `RetrievalError` if an array is neither vectors nor an image; `ArgumentTypeError` if a query is of another
    type, or a list has queries of several kinds.
    """
    if query is None:
        if image is None:
            raise ConfigError(
                "there is no query; search with a text, an image, a vector, or a text and an image together"
            )
        return _of_images(image, "image")
    return _of_query(query) if image is None else _join_queries(_of_query(query), _of_images(image, "image"))


def _of_images(image: Any, name: str) -> QueryBatch:
    if _is_one_image(image):
        return QueryBatch("image", [file_or_content(image, name)], True)
    return _image_batch(_to_list(image, name, f"{EXPECTED}, or a list of these"), name)


def _of_query(query: Any) -> QueryBatch:
    if isinstance(query, str):
        return QueryBatch("text", [query], True)
    if is_array(query):
        return _of_array(np.asarray(query))
    if _is_one_image(query):
        return QueryBatch("image", [file_or_content(query, "query")], True)
    return _of_list(_to_list(query, "query", QUERIES))


def _join_queries(texts: QueryBatch, images: QueryBatch) -> QueryBatch:
    if texts.kind != "text":
        raise ConfigError(f"image=... goes together with a text, and the query is a given {texts.kind}; leave one out")
    num_texts, num_images = len(texts.values), len(images.values)
    if num_texts != num_images and 1 not in (num_texts, num_images):
        raise ConfigError(
            f"{num_texts} texts and {num_images} images: give one text for all images, one image for all texts, or as "
            "many of the one as of the other"
        )
    pairs = texts.values * num_images if num_texts == 1 else texts.values
    pictures = images.values * num_texts if num_images == 1 else images.values
    return QueryBatch("text", pairs, texts.is_single and images.is_single, pictures)


def _examples(texts: str | Sequence[str] | None, images: "Images | None") -> Examples:
    """Convert examples from any accepted form; raises the errors of `read_queries`."""
    given = [] if texts is None else texts
    listed = [given] if isinstance(given, str) else _to_list(given, "not_text", "a text, or a list of texts")
    for text in listed:
        if not isinstance(text, str):
            raise ArgumentTypeError(f"not_text: found {type(text).__name__}; give a text, or a list of texts")
        if not text.strip():
            raise ConfigError("not_text: it is empty; write what the images should not show, or leave it out")
    contents = [] if images is None else _of_images(images, "not_image").values
    return Examples(tuple(listed), tuple(contents))


def _image_name(image: Path | bytes, number: int | None = None) -> str:
    unnamed = "an image" if number is None else f"image {number}"
    return str(image) if isinstance(image, Path) else unnamed


def _is_one_image(value: Any) -> bool:
    if is_array(value):
        return np.ndim(value) != 4
    return isinstance(value, str | os.PathLike | bytes | bytearray | memoryview) or is_pillow_image(value)


def _is_pixels(array: Any) -> bool:
    """Whether an array is meant as pixels: uint8 with at least two dimensions; all others are meant as vectors."""
    array = np.asarray(array)
    return bool(array.dtype == np.uint8 and array.ndim >= 2)


def _to_list(values: Any, name: str, expected: str) -> list[Any]:
    if isinstance(values, dict | set | frozenset) or not isinstance(values, Iterable):
        raise ArgumentTypeError(f"{name}: found {type(values).__name__}; give {expected}")
    return list(values)


def _image_batch(images: Iterable[Any], name: str) -> QueryBatch:
    return QueryBatch("image", [file_or_content(each, f"{name}[{place}]") for place, each in enumerate(images)], False)


def _of_array(array: np.ndarray[Any, Any]) -> QueryBatch:
    if _is_pixels(array):
        is_one = _is_one_image(array)
        return QueryBatch("image", [file_or_content(array, "query")], True) if is_one else _image_batch(array, "query")
    return _of_list(array.tolist()) if array.dtype.kind in "UTO" and array.ndim == 1 else _vectors(array)


def _of_list(queries: list[Any]) -> QueryBatch:
    """Convert a list of queries of one kind; a list of numbers is one vector."""
    kinds = {_kind(each) for each in queries} or {"text"}
    if kinds == {"text"}:
        return QueryBatch("text", queries, False)
    if kinds == {"image"}:
        return _image_batch(queries, "query")
    if kinds == {"vector"}:
        return _vectors(queries)
    found = " and ".join(sorted({type(each).__name__ for each in queries}))
    raise ArgumentTypeError(f"query: found a list of {found}; give {QUERIES}")


def _kind(query: Any) -> Kind | None:
    """Return the kind of one query of a list; None for what is not a query."""
    if isinstance(query, str):
        return "text"
    if is_array(query):
        return "image" if _is_pixels(query) else "vector"
    if _is_one_image(query):
        return "image"
    if isinstance(query, bool):
        return None
    return "vector" if isinstance(query, Real | list | tuple) else None


def _vectors(values: Any) -> QueryBatch:
    try:
        values = np.asarray(values)
    except ValueError:  # rows of different lengths
        values = np.asarray(values, object)
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiu" or values.dtype == np.uint8:
        raise RetrievalError(f"query: found {values.dtype} of shape {values.shape}; {VECTOR_RULE}, and {ARRAY_RULE}")
    with np.errstate(over="ignore"):  # what float32 has no number for is refused as not finite
        return QueryBatch("vector", np.atleast_2d(values.astype(np.float32)), values.ndim == 1)
