"""Comparison of two models on the same queries: stores, publications of one store, or models of one.

Both search the images that they have in common, exactly, so that only the vectors differ. What their indexes find of
that is reported next to it.

Legend: `Q` queries, `R` right answers, `E` embedding size of a side.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from embedder.config_toml.sections import CompareConfig
from embedder.errors import ConfigError
from embedder.installation import require
from embedder.plugins.evaluate.common_images import CommonImages, Values, best_items, common_ids, ndcg
from embedder.plugins.evaluate.comparison_report import (
    ComparedAnswer,
    ComparedQuery,
    Comparison,
    FigureDifference,
    Finding,
)
from embedder.plugins.evaluate.exact import Ints, RelevantPairs, right_rows, search_exactly
from embedder.plugins.evaluate.published_images import ImageTable
from embedder.plugins.evaluate.query_sets import QuerySet, check_counts, file_query_set, own_captions, read_query_file
from embedder.plugins.evaluate.sides import describe_side, open_side
from embedder.quantities import plural
from embedder.retrieval.paired import (
    PairedDifference,
    Thresholds,
    describe_failures,
    members_of,
    paired_difference,
    paired_differences,
)
from embedder.retrieval.rank_metrics import score_ranks
from embedder.retrieval.store_api import Store
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats

if TYPE_CHECKING:
    from embedder.servables.servable import Servable

LOG = logging.getLogger(__name__)
DEFAULT_NUM_CAPTIONS = 2000
DEPTH = 10
NUM_SHOWN_BEST = 5  # of each side, for a query that is shown
NUM_SHOWN_RIGHT = 3
SINGLE_METRICS = ("R@1", "R@5", "R@10", "MRR")
NDCG = "nDCG@10"


@dataclass(frozen=True)
class CompareOptions:
    """Queries of a comparison, and the rule of its verdict.

    Attributes:
        queries: file of queries, with grades or clicks if it has them; None for the stores' own captions.
        group: column to compare by, of the file or of the first side's table; None for that of `rule`.
        num_queries: most queries; by default all of a file, and 2,000 captions.
        num_shown: most queries to show among the wins, the losses, and the hard ones.
        rule: metric, allowed loss, and confidence.
        servables: as in `embedder.open_store`, for stores that are given by their addresses.
        allow_store_code: likewise.
    """

    queries: str | None = None
    group: str | None = None
    num_queries: int | None = None
    num_shown: int = 12
    rule: CompareConfig = field(default_factory=CompareConfig)
    servables: "Sequence[Servable | Mapping[str, Any]]" = ()
    allow_store_code: bool = False

    def __post_init__(self) -> None:
        """Refuse a number of queries below 1."""
        check_counts(num_queries=self.num_queries)


@dataclass(frozen=True)
class _Sides:
    """Both stores, by the names that they were given, with their images, and the ids of items that both have."""

    names: tuple[str, str]
    stores: tuple[Store, Store]
    tables: tuple[ImageTable, ImageTable]
    item_ids: pa.Array


@dataclass(frozen=True)
class _Questions:
    """Queries that both sides were asked, float32 (Q, E) of each, and their right answers among the common items.

    `right` has queries and common items, int64 (R,) each, each pair once; `gains`, float64 (R,), and `groups` go with
    it. `notes` are lines about what was left out.
    """

    source: str
    texts: list[str]
    vectors: tuple[Floats, Floats]
    right: tuple[Ints, Ints]
    gains: Values
    groups: list[str] | None
    notes: list[str]


@dataclass(frozen=True)
class _Results:
    """Answers of one side: ranks of the best right items (Q,), best items and their scores (Q, 10), nDCG@10 (Q,)."""

    ranks: Ints
    items: Ints
    scores: Floats
    ndcg: Values

    def metric(self, name: str) -> Values:
        """Metric of each query; float64 (Q,)."""
        return self.ndcg if name == NDCG else score_ranks(self.ranks, name)


def compare(
    before: str | Path | Store,
    after: str | Path | Store,
    options: CompareOptions | None = None,
    **keywords: Any,
) -> Comparison:
    """Compare two models on the same queries, and judge whether the second may replace the first.

    Args:
        before: a store, its address, a publication `STORE@RUN_ID`, or a model `STORE#NAME`.
        after: the other, likewise.
        options: see `CompareOptions`.
        keywords: fields of `CompareOptions`, which override those of `options`: `num_queries=500, group="modality"`.

    Raises:
        InstallationError: what encodes queries is not installed.
        SourceError: the file of queries can't be read.
        ConfigError: it breaks a rule, there is no such column to group by, or the two have nothing in common.
        StoreError: a side can't be opened, has no captions, or has a model of only one tower.
    """
    require("embed", "embedder compare")
    options = replace(options or CompareOptions(), **keywords)
    sides = _open_sides(before, after, options)
    questions = _questions(sides, options)
    num_items = len(sides.item_ids)
    LOG.info(f"asking {plural(len(questions.texts), 'query', 'queries')} of both, over {plural(num_items, 'item')}")
    one, other = (
        _answer(vectors, CommonImages(table, sides.item_ids), questions, num_items)
        for vectors, table in zip(questions.vectors, sides.tables, strict=True)
    )
    return _report(sides, questions, (one, other), options)


def _open_sides(before: str | Path | Store, after: str | Path | Store, options: CompareOptions) -> _Sides:
    """Open both stores as they are published; ConfigError if they have no item in common."""
    one, other = (
        open_side(each, servables=options.servables, allow_store_code=options.allow_store_code)
        for each in (before, after)
    )
    tables = _images(one), _images(other)
    names = _name(before), _name(after)
    item_ids = common_ids(*tables)
    if not len(item_ids):
        raise ConfigError(f"compare: {names[0]} and {names[1]} have no item in common; compare two of one source")
    return _Sides(names, (one, other), tables, item_ids)


def _report(
    sides: _Sides, questions: _Questions, results: tuple[_Results, _Results], options: CompareOptions
) -> Comparison:
    """Make figures of the answers, judge them, and choose the queries that are shown."""
    before, after = (
        describe_side(name, store, table, vectors.shape[1])
        for name, store, table, vectors in zip(sides.names, sides.stores, sides.tables, questions.vectors, strict=True)
    )
    shown = _Shown(questions, results, sides.item_ids, _addresses(sides.stores[1]), options.num_shown)
    found, found_after = results[0].items, results[1].items
    return Comparison(
        before=before,
        after=after,
        compared_at=datetime.now(UTC).isoformat(timespec="seconds"),
        queries=questions.source,
        num_queries=len(questions.texts),
        num_answers=len(questions.gains),
        num_items=len(sides.item_ids),
        metric=options.rule.metric,
        max_drop=options.rule.max_drop,
        confidence=options.rule.confidence,
        prove=options.rule.prove,
        kept_of_top_ten=_share_kept(found, found_after),
        same_first=float((found[:, 0] == found_after[:, 0]).mean()),
        wins=shown.most(gained=True),
        losses=shown.most(gained=False),
        hard=shown.hard(),
        notes=questions.notes,
        **_judge(questions, results, options.rule),
    )


def _judge(questions: _Questions, results: tuple[_Results, _Results], config: CompareConfig) -> dict[str, Any]:
    """Compare the metrics of both sides, query by query, and decide by the rule of `config`: fields of `Comparison`."""
    before, after = results
    rule = Thresholds(config.max_drop, config.confidence, config.prove)
    groups = {} if questions.groups is None else members_of(questions.groups, questions.right[0])
    found = paired_differences(before.metric(config.metric), after.metric(config.metric), groups, rule)
    overall = [
        paired_difference(before.metric(name), after.metric(name), rule, name) for name in (*SINGLE_METRICS, NDCG)
    ]
    failed = describe_failures(found, rule, config.metric)
    return {
        "metrics": [_to_difference(each) for each in overall],
        "groups": [_to_difference(each, fails=each.fails(rule)) for each in found],
        "passed": not failed,
        "verdict": failed or _describe_pass(found, rule, config.metric),
    }


def _name(side: str | Path | Store) -> str:
    return side.files.main.address if isinstance(side, Store) else str(side)


def _images(store: Store) -> ImageTable:
    return ImageTable(RecordTable(store.files, "embeddings", store.current.embeddings))


def _addresses(store: Store) -> dict[str, tuple[str, float | None]]:
    """Address of each item's file and, for a clip, the middle of its first segment in seconds."""
    names = ["item_id", "uri", "start_s", "end_s"]
    rows = RecordTable(store.files, "embeddings", store.current.embeddings).read(names)
    found: dict[str, tuple[str, float | None]] = {}
    for item_id, uri, start_s, end_s in zip(*(rows[name].to_pylist() for name in names), strict=True):
        found.setdefault(item_id, (uri or "", None if start_s is None or end_s is None else (start_s + end_s) / 2))
    return found


def _questions(sides: _Sides, options: CompareOptions) -> _Questions:
    """Queries of both sides, with the answers that both have; ConfigError without any, or without a column to group."""
    stores, tables, item_ids = sides.stores, sides.tables, sides.item_ids
    group = options.group or options.rule.group
    if options.queries is None:
        number = options.num_queries or DEFAULT_NUM_CAPTIONS
        asked = own_captions(stores[0], number, group), own_captions(stores[1], number)
    else:
        file = read_query_file(options.queries, group)
        first = file_query_set(file, stores[0], tables[0], options.num_queries, group)
        asked = first, file_query_set(file, stores[1], tables[1], options.num_queries, None)
    place = {item_id: number for number, item_id in enumerate(item_ids.to_pylist())}
    one, other = (_answers(query_set, place) for query_set in asked)
    shared = [key for key in one if key in other]
    if not shared:
        raise ConfigError("compare: no query has a right item that both sides have; give --queries FILE that fits both")
    numbers = {text: number for number, text in enumerate(dict.fromkeys(text for text, _ in shared))}
    rows = [_places(query_set.texts, numbers) for query_set in asked]
    notes = []
    if (num_left := len(asked[0].texts) - len(numbers)) > 0:
        notes.append(
            f"{plural(num_left, 'query', 'queries')} of {len(asked[0].texts):,} left out: the two have no right item "
            "in common for it, or other captions"
        )
    for side, table in zip(("first", "second"), tables, strict=True):
        if (num_more := len(table.item_ids) - len(item_ids)) > 0:
            notes.append(f"{plural(num_more, 'item')} only of the {side} side, left out of the search")
    return _Questions(
        source=asked[0].source,
        texts=list(numbers),
        vectors=(asked[0].vectors[rows[0]], asked[1].vectors[rows[1]]),
        right=(np.array([numbers[text] for text, _ in shared]), np.array([item for _, item in shared])),
        gains=np.array([one[key][0] for key in shared], np.float64),
        groups=None if asked[0].groups is None else [one[key][1] for key in shared],
        notes=notes,
    )


def _places(texts: list[str], wanted: Iterable[str]) -> list[int]:
    places = {text: number for number, text in enumerate(texts)}
    return [places[text] for text in wanted]


def _answers(query_set: QuerySet, place: dict[str, int]) -> dict[tuple[str, int], tuple[float, str]]:
    """Gain and group of each query with a common item that is right for it; the first of equal pairs counts."""
    gains = query_set.gains or [1.0] * len(query_set.item_ids)
    groups = query_set.groups or [""] * len(query_set.item_ids)
    found: dict[tuple[str, int], tuple[float, str]] = {}
    for query, item_id, gain, name in zip(query_set.queries.tolist(), query_set.item_ids, gains, groups, strict=True):
        if item_id in place:
            found.setdefault((query_set.texts[query], place[item_id]), (gain, name))
    return found


def _answer(vectors: Floats, images: CommonImages, questions: _Questions, num_items: int) -> _Results:
    right = right_rows(*questions.right, images.items)
    none = RelevantPairs(right.queries[:0], right.rows[:0])
    ranks = search_exactly(vectors, images.blocks, images.items, right, 1, none).ranks
    items, scores = best_items(vectors, images, questions.right, num_items, DEPTH)
    return _Results(ranks, items, scores, ndcg(items, questions.right, questions.gains, num_items, DEPTH))


def _share_kept(before: Ints, after: Ints) -> float:
    """Mean share of the first side's best ten that are among the second's."""
    return float((before[:, :, None] == after[:, None, :]).any(axis=2).mean())


def _to_difference(found: PairedDifference, *, fails: bool = False) -> FigureDifference:
    direction: Finding = "equal" if found.is_equal else "better" if found.difference > 0 else "worse"
    verdict = "too few" if found.is_small else direction
    return FigureDifference(**asdict(found), difference=found.difference, verdict=verdict, fails=fails)


def _describe_pass(found: list[PairedDifference], rule: Thresholds, metric: str) -> str:
    """Verdict in one line if nothing fails, with the loss that could have been detected."""
    what = "it is shown that no group lost" if rule.prove else "no group is shown to have lost"
    where = f"{plural(len(found) - 1, 'group')} and all queries" if len(found) > 1 else "all queries"
    weakest = min(found, key=lambda each: each.power)
    return (
        f"{metric}: {what} more than {rule.max_drop:g} at {rule.confidence:.0%} confidence, in {where}; a loss of "
        f"{rule.max_drop:g} would be seen with a probability of {found[0].power:.0%} in all queries, and of "
        f"{weakest.power:.0%} in {weakest.name}"
    )


@dataclass(frozen=True)
class _Shown:
    """Queries that are shown with their images."""

    questions: _Questions
    sides: tuple[_Results, _Results]
    item_ids: pa.Array
    addresses: dict[str, tuple[str, float | None]]
    num_shown: int

    def most(self, *, gained: bool) -> list[ComparedQuery]:
        """Queries whose reciprocal rank rose most, or fell most."""
        change = self.sides[1].metric("MRR") - self.sides[0].metric("MRR")
        change = change if gained else -change
        order = np.argsort(-change, kind="stable")[: self.num_shown]
        return [self._query(number) for number in order.tolist() if change[number] > 0]

    def hard(self) -> list[ComparedQuery]:
        """Queries whose right item is behind the tenth place on both sides; the latest first."""
        better = np.minimum(self.sides[0].ranks, self.sides[1].ranks)
        order = np.argsort(-better, kind="stable")[: self.num_shown]
        return [self._query(number) for number in order.tolist() if better[number] >= DEPTH]

    def _query(self, number: int) -> ComparedQuery:
        questions = self.questions
        right = questions.right[1][questions.right[0] == number]
        before, after = (self._best(side, number) for side in self.sides)
        return ComparedQuery(
            query=questions.texts[number],
            right=[self._item(item, None, is_right=True) for item in right[:NUM_SHOWN_RIGHT].tolist()],
            rank_before=int(self.sides[0].ranks[number]) + 1,
            rank_after=int(self.sides[1].ranks[number]) + 1,
            before=before,
            after=after,
        )

    def _best(self, side: _Results, number: int) -> list[ComparedAnswer]:
        items = side.items[number, :NUM_SHOWN_BEST]
        right = self.questions.right[1][self.questions.right[0] == number]
        return [
            self._item(item, score, is_right=item in right)
            for item, score in zip(items.tolist(), side.scores[number].tolist(), strict=False)
        ]

    def _item(self, item: int, score: float | None, *, is_right: bool) -> ComparedAnswer:
        item_id = self.item_ids[item].as_py()
        uri, at_s = self.addresses.get(item_id, ("", None))
        return ComparedAnswer(item_id=item_id, uri=uri, at_s=at_s, score=score, is_right=is_right)
