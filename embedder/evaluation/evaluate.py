"""Evaluate what a store has published: the model alone, its index, and the two together."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from embedder.errors import USER_MISTAKES
from embedder.evaluation.exact import ExactNeighbours, Ints, RelevantPairs, right_rows, search_exactly
from embedder.evaluation.index_search import IndexAnswers, ask_index, index_figures
from embedder.evaluation.metrics import GroupFigures, by_group, mean_reciprocal_rank, recalls
from embedder.evaluation.pictures import PictureTable
from embedder.evaluation.query_file import QueryFile, file_questions, known_only, read_query_file
from embedder.evaluation.query_sets import OWN_CAPTIONS, QuerySet, own_captions
from embedder.evaluation.report import Evaluation, ModelFigures, QueryFigures
from embedder.evaluation.timing import Latency, time_each
from embedder.retrieval.store_api import Store
from embedder.store.tables import RecordTable

# R@10 is known to +-0.02 at worst, and exact search of 1,000,000 pictures takes half a minute.
DEFAULT_NUM_CAPTIONS = 2000
KS = (1, 5, 10)
NUM_ENCODED = 200  # texts that the encoder is timed with


@dataclass(frozen=True)
class EvaluationOptions:
    """What to ask, and how the answers are split.

    Attributes:
        queries: file of queries; the store's own captions without one.
        k: a depth to report, beside 1, 5 and 10.
        group: column to split by, of the file or of the embeddings table.
        num_queries: how many to ask at most; by default all of a file, and 2,000 captions.
    """

    queries: str | None = None
    k: int = 10
    group: str | None = None
    num_queries: int | None = None

    @property
    def ks(self) -> list[int]:
        """The depths to report."""
        return sorted({*KS, self.k})


def evaluate(store: Store, options: EvaluationOptions, say: Callable[[str], None]) -> Evaluation:
    """Measure retrieval by exact search and through the index, recall of the index, speed and memory.

    Args:
        store: what is published.
        options: what to ask.
        say: is told what is being done.

    Raises:
        SourceError: the file of queries can't be read.
        ConfigError: it breaks a rule, or there is no such column to group by.
        StoreError: there is nothing to ask.
    """
    file = None if options.queries is None else read_query_file(options.queries, options.group)
    say("reading ids and queries")
    pictures = PictureTable(RecordTable(store.files, "embeddings", store.current.embeddings))
    file = None if file is None else known_only(file, pictures)
    questions = _questions(store, options, file)
    right_items = pictures.numbers_of(pa.array(questions.item_ids, pa.string()))
    asked = _ask_index(store, pictures, questions, right_items, options, say)
    say(f"comparing {len(questions.texts):,} queries with all {len(pictures):,} pictures")
    exact = _search_exactly(pictures, questions, right_items, asked, options)
    encoding, failure = _time_encoding(store, questions.texts[:NUM_ENCODED])
    return Evaluation(
        store=store.files.address,
        run_id=store.current.run_id,
        embeddings_version=store.current.embeddings,
        model_fingerprint=store.info.model_fingerprint,
        evaluated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_pictures=len(pictures),
        num_items=len(pictures.item_ids),
        queries=_query_figures(questions, file),
        model=ModelFigures(r_at=recalls(exact.ranks, options.ks), mrr=mean_reciprocal_rank(exact.ranks)),
        index=None if asked is None else index_figures(asked, exact, questions.vectors, options.ks),
        encoding=encoding,
        groups=_groups(questions, exact, asked, options),
        notes=[*_notes(questions, file, asked, options), *failure],
    )


def _questions(store: Store, options: EvaluationOptions, file: QueryFile | None) -> QuerySet:
    if file is not None:
        return file_questions(file, store, options.num_queries, options.group)
    return own_captions(store, options.num_queries or DEFAULT_NUM_CAPTIONS, options.group)


def _ask_index(
    store: Store,
    pictures: PictureTable,
    questions: QuerySet,
    right_items: Ints,
    options: EvaluationOptions,
    say: Callable[[str], None],
) -> IndexAnswers | None:
    number = store.current.index
    if number is None:
        return None
    say(f"searching index {number}")
    return ask_index(store, number, pictures, questions.vectors, questions.queries, right_items, max(options.ks))


def _search_exactly(
    pictures: PictureTable,
    questions: QuerySet,
    right_items: Ints,
    asked: IndexAnswers | None,
    options: EvaluationOptions,
) -> ExactNeighbours:
    right = right_rows(questions.queries, right_items, pictures.items)
    found = RelevantPairs(right.queries[:0], right.rows[:0]) if asked is None else asked.pairs()
    return search_exactly(questions.vectors, pictures.blocks, pictures.items, right, max(options.ks), found)


def _groups(
    questions: QuerySet, exact: ExactNeighbours, asked: IndexAnswers | None, options: EvaluationOptions
) -> list[GroupFigures]:
    if questions.groups is None:
        return []
    through_index = None if asked is None else asked.ranks
    return by_group(questions.queries, questions.groups, exact.ranks, through_index, options.ks)


def _time_encoding(store: Store, texts: list[str]) -> tuple[Latency | None, list[str]]:
    """Time of encoding one text, or a note why it is not known: the captions' vectors are there without the model."""
    try:
        return time_each(lambda text: store.encode_text([text]), texts), []
    except USER_MISTAKES as error:
        return None, [f"encoding was not timed: {error}"]


def _query_figures(questions: QuerySet, file: QueryFile | None) -> QueryFigures:
    return QueryFigures(
        source=questions.source,
        num_queries=len(questions.texts),
        num_answers=len(questions.item_ids),
        num_unknown=0 if file is None else file.num_unknown,
    )


def _notes(
    questions: QuerySet, file: QueryFile | None, asked: IndexAnswers | None, options: EvaluationOptions
) -> list[str]:
    notes = []
    limit = options.num_queries or (DEFAULT_NUM_CAPTIONS if questions.source == OWN_CAPTIONS else None)
    if limit == len(questions.texts):
        notes.append(f"at most {limit:,} queries are asked, those with the lowest hashes; --num-queries asks more")
    if file is not None and file.num_unknown:
        notes.append(f"{file.num_unknown:,} rows of the file were left out: the store has no picture of their items")
    if asked is None:
        notes.append("there is no index: search is exact; `embedder index build` makes one")
    return notes
