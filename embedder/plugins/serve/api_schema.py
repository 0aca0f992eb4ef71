"""Requests and answers of the HTTP API; requests are checked with these models, answers documented."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from embedder.retrieval.queries import DEFAULT_OPTIONS, INSTRUCTION_RULE, OPTIONS, SearchOptions

MAX_K = 1000
Sort = Literal["newest", "oldest", "name", "random", "embedded"]
MAX_QUERIES = 64
MAX_TEXT_CHARACTERS = 10_000
MAX_DIMENSIONS = 65_536
MAX_ID_CHARACTERS = 8_192
MAX_CURSOR_CHARACTERS = 1_000_000  # one of 100,000 hits, the largest `max_depth`, has 667,000
IMAGE_SIZES = (160, 320, 640, 1280)
MAX_EXAMPLES = 16  # of one query
KINDS = ("text", "vector", "item", "image", "upload")
LOOKS = ("item", "image", "upload")  # kinds that go together with a text

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS, pattern=r"\S")]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


def none_if_blank(text: str | None) -> str | None:
    """Take an empty condition as none, as the field of a form is empty."""
    return text if text is not None and text.strip() else None


class Strict(BaseModel):
    """Part of a request; unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageQuery(Strict):
    """An image to encode: exactly one of the two."""

    image: str | None = Field(None, description="the file's content in base64")
    upload: str | None = Field(None, max_length=200, description="name of the part of the form that holds the file")

    @property
    def num_given(self) -> int:
        """Number of the two that are given."""
        return (self.image is not None) + (self.upload is not None)


class Example(ImageQuery):
    """An example to stay away from: exactly one of text, vector, item, image and upload."""

    text: Text | None = Field(None, description="what images show")
    vector: list[FiniteFloat] | None = Field(
        None, min_length=1, max_length=MAX_DIMENSIONS, fail_fast=True, description="of the store's model, of unit norm"
    )
    item: ItemId | None = Field(None, description="id of an item of the store")
    segment: int = Field(0, ge=0, lt=1 << 31, description="of that item, if it is a video")

    @model_validator(mode="after")
    def _fitting_kinds(self) -> Self:
        if len(self.given) != 1 and not self._is_combined:
            more = f", or a text with one of {', '.join(LOOKS)}" if isinstance(self, Query) else ""
            raise ValueError(f"exactly one of {', '.join(KINDS)}{more}, and not {' and '.join(self.given) or 'none'}")
        return self

    @property
    def given(self) -> list[str]:
        """Names of the fields that are given, a text first."""
        return [name for name in KINDS if getattr(self, name) is not None]

    @property
    def _is_combined(self) -> bool:
        """Whether the parts may be searched with together."""
        return False


class Query(Example):
    """One query: exactly one of text, vector, item, image and upload, or a text with one of the last three."""

    text: Text | None = Field(None, description="what the images should show")
    item: ItemId | None = Field(None, description="id of an item of the store, for what is like it")
    also: list[Example] = Field(
        default_factory=list,
        max_length=MAX_EXAMPLES,
        fail_fast=True,
        description="further examples of what is searched for; all that are no text share what the text leaves",
    )
    away: list[Example] = Field(
        default_factory=list,
        alias="not",
        max_length=MAX_EXAMPLES,
        fail_fast=True,
        description="examples to stay away from: hits like them come later, and they themselves are no hits",
    )

    @property
    def _is_combined(self) -> bool:
        return len(self.given) == 2 and self.given[0] == "text" and self.given[1] in LOOKS


def _option(name: str, **own: Any) -> Any:
    """Field with the default, the bounds and the description of an option of a search, and with some of its own."""
    option = OPTIONS[name]
    described = {"default": getattr(DEFAULT_OPTIONS, name), "description": option.description}
    return Field(**described | dict(option.bounds) | own)


class SearchRequest(Strict):
    """Body of `POST /search`; the options are those of `SearchOptions`."""

    queries: list[Query] = Field(min_length=1, max_length=MAX_QUERIES, fail_fast=True)
    k: int = _option("k", default=20, le=MAX_K)
    where: str | None = _option("where", max_length=MAX_TEXT_CHARACTERS)
    hybrid: bool = _option("hybrid")
    group: bool = _option("group")
    fold: float | None = _option("fold")
    min_score: float | None = _option("min_score")
    text_weight: float = _option("text_weight")
    not_weight: float = _option("not_weight")
    instruction: str | None = _option("instruction", max_length=MAX_TEXT_CHARACTERS)
    rerank: int | None = _option("rerank", le=MAX_K)
    rerank_timeout_s: float = _option("rerank_timeout_s")
    cursor: str | None = Field(
        None, max_length=MAX_CURSOR_CHARACTERS, description="of the answer before, to continue from its last hit"
    )
    version: str | None = Field(None, max_length=300, description="publication to ask instead of the newest")
    model: str | None = Field(None, max_length=64, description="further model whose vectors are searched, by its name")
    sort: Sort | None = Field(None, description="order of the hits of one answer; by default the best come first")

    @property
    def options(self) -> SearchOptions:
        """Options of the search."""
        given = {name: getattr(self, name) for name in OPTIONS}
        blank = {name: none_if_blank(given[name]) for name in ("where", "instruction")}
        return SearchOptions(**given | blank)


class ExportRequest(Strict):
    """Body of `POST /export`: items, in the order in which they are written."""

    items: list[ItemId] = Field(min_length=1, max_length=MAX_K, description="ids of items of the store")
    format: Literal["csv", "parquet", "jsonl", "paths", "zip", "sheet"] = Field(
        description="a table, a text of paths, an archive of the files themselves, or a contact sheet in PNG"
    )
    version: str | None = Field(None, max_length=300, description="publication to ask instead of the newest")


class EmbedRequest(Strict):
    """Body of `POST /embed`: texts or images."""

    model: str | None = Field(None, max_length=64, description="further model that encodes them, by its name")

    texts: list[Text] | None = Field(None, min_length=1, max_length=MAX_QUERIES)
    instruction: str | None = _option("instruction", max_length=MAX_TEXT_CHARACTERS)
    images: list[ImageQuery] | None = Field(None, min_length=1, max_length=MAX_QUERIES)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.texts is None) == (self.images is None):
            raise ValueError("exactly one of texts and images")
        if self.instruction is not None and self.texts is None:
            raise ValueError("; ".join(INSTRUCTION_RULE))
        if self.instruction is not None and not self.instruction.strip():
            raise ValueError("the instruction is not empty; write one, or leave it out")
        if any(each.num_given != 1 for each in self.images or ()):
            raise ValueError("each image has exactly one of image and upload")
        return self


class ErrorDetails(BaseModel):
    """Reason of a refusal."""

    where: str = Field(description="part of the request that is to blame")
    what: str = Field(description="what was found there")
    rule: str = Field(description="what may stand there")
    cure: str = Field(description="what to do")


class ErrorAnswer(BaseModel):
    """Answer to a request that is refused."""

    error: ErrorDetails


class SegmentAnswer(BaseModel):
    """Another segment of a hit's video."""

    start_s: float | None
    end_s: float | None
    score: float


class DuplicateAnswer(BaseModel):
    """Item that was folded under a hit."""

    item_id: str
    score: float


class LinksAnswer(BaseModel):
    """Addresses of a hit, relative to the server's root."""

    item: str
    image: str
    clip: str | None


class HitAnswer(BaseModel):
    """One image, video or segment that was found."""

    item_id: str
    segment: int
    score: float | None = Field(description="cosine with the query; null where nothing was searched for")
    rank_score: float | None
    words_rank: int | None
    vector_rank: int | None
    rerank_score: float | None = Field(description="of the re-ranker, which orders the hits that it scored")
    probability: float | None
    modality: str
    uri: str | None = Field(description="null unless the server shows them")
    caption: str | None
    start_s: float | None
    end_s: float | None
    segments: list[SegmentAnswer]
    duplicates: list[DuplicateAnswer]
    carryover: dict[str, Any]
    medium: dict[str, Any] = Field(description="what the file says of itself; its place only if the server shows URIs")
    place: str | None = Field(description="city nearest to where it was made, as `Lisbon, PT`; null where not shown")
    since: str | None = Field(
        description="of an earlier publication: changed where picture or caption are others now, removed, or null"
    )
    links: LinksAnswer


class QueryAnswer(BaseModel):
    """Hits of one query, best first."""

    query: dict[str, Any]
    hits: list[HitAnswer]
    cursor: str | None = Field(description="sent with the same query, it asks for the hits that follow")
    note: str = Field(description="reason where there are no hits")
    warnings: list[str] = Field(
        description="why the hits may not be what was asked for: no word of it is known, or the re-ranker was too slow"
    )


class SearchAnswer(BaseModel):
    """Answer of `POST /search`, from one publication."""

    version: str
    publication: str
    model: str
    took_ms: float
    answers: list[QueryAnswer]


class ItemAnswer(BaseModel):
    """Answer of `GET /items/{id}`."""

    item: dict[str, Any]
    segments: list[dict[str, Any]]
    provenance: dict[str, Any]
    since: str | None = Field(description="as of a hit")
    neighbours: list[HitAnswer]
    version: str


class ItemsAnswer(BaseModel):
    """Answer of `GET /items`."""

    version: str
    num_items: int = Field(description="that fulfil the condition")
    items: list[HitAnswer] = Field(description="as hits, without scores")
    next: int | None = Field(description="`start` of the items that follow")


class RejectAnswer(BaseModel):
    """Item that could not be embedded, or not whole."""

    item_id: str
    step: str | None
    error_type: str | None
    code: str = Field(description="stable name of the kind of reason: docs/own-images.md lists them")
    error: str | None
    attempts: int | None
    updated_at: datetime | None
    has_picture: bool = Field(description="whether a picture of it is found all the same, as one that is cut off")


class RejectsAnswer(BaseModel):
    """Answer of `GET /rejects`."""

    version: str
    num_rejects: int
    rejects: list[RejectAnswer]


class DuplicatesAnswer(BaseModel):
    """Answer of `GET /duplicates`: groups of items that look nearly the same, the largest first."""

    version: str
    num_groups: int
    groups: list[list[HitAnswer]]


class ValueCount(BaseModel):
    """Value of a column, and how many rows have it."""

    value: Any
    count: int


class FacetColumn(BaseModel):
    """Column to filter by."""

    name: str
    type: str = Field(description="text, number, time, boolean, or list (of texts, whose values are its elements)")
    num_null: int
    values: list[ValueCount] | None = Field(
        description="the most frequent ones; null where nearly each row has its own"
    )
    min: Any
    max: Any


class FacetsAnswer(BaseModel):
    """Answer of `GET /facets`."""

    version: str
    num_rows: int
    columns: list[FacetColumn]


class EmbedAnswer(BaseModel):
    """Answer of `POST /embed`."""

    model: str
    dim: int
    vectors: list[list[float]]


class VersionsAnswer(BaseModel):
    """Answer of `GET /versions`, newest first."""

    versions: list[dict[str, Any]]


class ModelAnswer(BaseModel):
    """Further model of the publication."""

    name: str
    model: str = Field(description="fingerprint of the model")
    has_vectors: bool = Field(description="whether it can be searched")
    searched: str
    columns: dict[str, str] = Field(description="types of the columns NAME.COLUMN that it gives in addition to vectors")


class StatusAnswer(BaseModel):
    """Answer of `GET /status`."""

    name: str
    publication: str
    version: str
    published_at: str
    model: str
    model_uri: str | None
    dim: int | None
    encoder: str | None
    searched: str
    colour: str = Field(description="how numbers of pixels are read, of queries, too: srgb or raw")
    instruction: str | None = Field(
        description="of queries that give none; null where the model takes none, or none was encoded yet"
    )
    models: list[ModelAnswer]
    num_items: int
    num_vectors: int
    index: dict[str, Any]
    following: dict[str, Any]
    uptime_s: float
    limits: dict[str, Any]
