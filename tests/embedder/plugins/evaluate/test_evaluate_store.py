"""`embedder evaluate` on small stores whose answers are known: captions, files of queries, clips, groups, mistakes."""

import json
import re
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from search_stores import picture, searchable
from store_samples import MODEL, publish_rows, row
from store_states import build_store_index, new_store
from typer.testing import CliRunner

from embedder.cli import app
from embedder.config import RunConfig
from embedder.errors import ConfigError, EmbedderError, StoreError
from embedder.observability import trackers
from embedder.plugins.evaluate.compare import CompareOptions
from embedder.plugins.evaluate.evaluate import EvaluationOptions, evaluate, evaluate_tracked
from embedder.plugins.evaluate.evaluate_command import evaluation_parts, save_evaluation
from embedder.plugins.evaluate.evaluate_report import Evaluation
from embedder.plugins.evaluate.query_sets import NO_GROUP, item_groups
from embedder.retrieval.store_api import Store
from embedder.steps.stage_contract import Stage
from index.index_errors import RetrievalError

NUM = 40


def on_arc(share):
    """A unit vector somewhere on a quarter of a circle."""
    return [float(np.cos(share * np.pi / 2)), float(np.sin(share * np.pi / 2))]


def pictures(num=NUM, **changes):
    """Pictures along an arc, each with a caption of its own that lies on it."""
    return [
        row(
            f"{number:03d}.png",
            modality="pair",
            caption=f"number {number}",
            image_embedding=on_arc(number / num),
            text_embedding=on_arc(number / num),
        )
        | {name: value(number) for name, value in changes.items()}
        for number in range(num)
    ]


@pytest.fixture
def make_store(tmp_path):
    """Makes an opened store of some rows, with an index of a kind; encodes `at S` as the place S of the arc."""

    def make(rows, kind="flat"):
        files = new_store(tmp_path / "store")
        publish_rows(files, *rows)
        if kind is not None:
            build_store_index(files, kind=kind)
        store = Store(files)
        store.encode_text = lambda texts: np.array([on_arc(float(text.split()[1])) for text in texts], np.float32)
        return store

    return make


def run(store, **options) -> Evaluation:
    return evaluate(store, EvaluationOptions(**options))


def values(figures):
    return {k: figure.value for k, figure in figures.items()}


def test_captions_on_their_pictures_are_found_first_exactly_and_through_the_index(make_store):
    found = run(make_store(pictures()))
    assert (found.queries.num_queries, found.num_pictures, found.num_items) == (NUM, NUM, NUM)
    assert values(found.model.r_at) == values(found.index.r_at) == {1: 1, 5: 1, 10: 1}
    assert (found.model.mrr.value, found.model.mrr.low < 1, found.model.mrr.high) == (1, True, 1)
    assert values(found.index.recall_at) == {1: 1, 5: 1, 10: 1}
    assert found.model_fingerprint == MODEL
    assert [point.is_published for point in found.index.curve] == [True]


def test_captions_that_all_lie_at_one_end_rank_the_pictures_by_distance(make_store):
    found = run(make_store(pictures(text_embedding=lambda number: on_arc(0))), k=20)
    assert values(found.model.r_at) == values(found.index.r_at) == {k: k / NUM for k in (1, 5, 10, 20)}
    assert found.model.mrr.value == pytest.approx(np.mean(1 / np.arange(1, NUM + 1)))
    assert [each.rank for each in found.hard] == list(range(NUM, NUM - 20, -1))
    assert found.hard[0].query == f"number {NUM - 1}" and found.model.ndcg_at_10 is None
    assert any("hard queries" in str(getattr(part, "columns", [""])[0]) for part in evaluation_parts(found))
    ten = found.model.r_at[10]
    assert 0 < ten.low < ten.value < ten.high < 1


def test_identical_captions_are_one_query_and_any_of_their_pictures_is_right(make_store):
    rows = pictures(
        caption=lambda number: f"pair {number // 2}", text_embedding=lambda number: on_arc(number // 2 / 20)
    )
    found = run(make_store(rows))
    assert (found.queries.num_queries, found.queries.num_answers) == (NUM // 2, NUM)
    assert values(found.model.r_at)[1] == 1  # the even ones lie on their captions


def test_pictures_without_captions_and_captions_without_pictures_do_not_ask(make_store):
    rows = pictures()
    rows[0] |= {"caption": None, "text_embedding": None}
    rows[1] |= {"modality": "text", "image_embedding": None}
    found = run(make_store(rows))
    assert (found.queries.num_queries, found.num_pictures) == (NUM - 2, NUM - 1)


def test_the_segments_of_a_clip_are_one_answer(make_store):
    clip = {"modality": "video", "caption": "clip 99", "text_embedding": on_arc(0.99)}
    segments = [
        row("clip.mp4", **clip, segment=number, image_embedding=on_arc(0.97 + number / 1000), num_vectors=15)
        for number in range(15)
    ]
    rows = [*segments, *pictures(20, text_embedding=lambda number: on_arc(0.98))]
    found = run(make_store(rows))
    assert (found.queries.num_queries, found.num_pictures, found.num_items) == (21, 35, 21)
    # The clip is first for everyone; picture n has the 19 - n pictures above it and the clip before it.
    expected = {1: 1 / 21, 5: 5 / 21, 10: 10 / 21}
    assert values(found.model.r_at) == pytest.approx(expected)
    assert values(found.index.r_at) == pytest.approx(expected)


def test_without_index_and_model_the_exact_part_is_whole_and_the_rest_is_said_to_be_missing(make_store, tmp_path):
    store = make_store(pictures(), kind=None)
    del store.encode_text  # its model folder is not there
    found = run(store)
    assert (values(found.model.r_at)[1], found.index, found.encoding) == (1, None, None)
    assert any("embedder index build" in note for note in found.notes)
    assert any(note.startswith("encoding was not timed") for note in found.notes)
    save_evaluation(found, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation.json"]


@pytest.mark.medium
def test_a_graph_gives_a_curve_from_fast_to_thorough_which_is_saved_with_its_picture(make_store, tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((400, 2)) + 1e-9
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    store = make_store(pictures(400, image_embedding=lambda number: vectors[number]), kind="hnsw")
    found = run(store, num_queries=50)
    assert found.queries.num_queries == 50
    assert any("--num-queries" in note for note in found.notes)
    search_params = [point.parameters["ef_search"] for point in found.index.curve]
    assert search_params == sorted(search_params)
    assert len(search_params) > 4
    assert sum(point.is_published for point in found.index.curve) == 1
    assert found.index.curve[-1].recall_at_10.value > 0.95
    lines = save_evaluation(found, tmp_path / "out")
    assert len(lines) == 2
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (content["format_version"], Evaluation.model_validate(content)) == (1, found)
    with Image.open(tmp_path / "out" / "recall_latency.png") as picture:
        assert len(np.unique(np.asarray(picture).reshape(-1, 4), axis=0)) > 20
    assert evaluation_parts(found)


def test_grades_of_a_file_weigh_in_ndcg(make_store, tmp_path):
    columns = {"query": ["at 0", "at 0", "at 0"], "item_id": ["000.png", "003.png", "003.png"], "relevance": [1, 3, 2]}
    pq.write_table(pa.table(columns), tmp_path / "judged.parquet")
    found = run(make_store(pictures()), queries=str(tmp_path / "judged.parquet"))
    reached, best = 1 + 7 / np.log2(5), 7 + 1 / np.log2(3)
    assert found.model.ndcg_at_10.value == pytest.approx(reached / best) and not found.hard
    assert evaluation_parts(found)


@pytest.mark.medium
def test_a_tracker_is_told_the_figures_the_curve_and_both_files(make_store, tmp_path, monkeypatch):
    client = NotedRun()
    monkeypatch.setattr(trackers, "require", lambda extra, where: None)
    monkeypatch.setattr(trackers, "load_plugin", lambda *_: lambda config: client)
    store = make_store(pictures())
    config = RunConfig(store=str(tmp_path / "store"), tracker={"kind": "mlflow", "uri": "sqlite:///nowhere.db"})
    found = evaluate_tracked(store, config, EvaluationOptions(num_queries=30), tmp_path / "out")
    assert client.parameters == {"store": str(tmp_path / "store"), "evaluate.num_queries": "30", "evaluate.k": "10"}
    assert client.tags["embedder.run_id"] == found.run_id and client.tags["embedder.kind"] == "evaluate"
    assert client.values[0]["model/r_at_1"] == 1 and client.values[0]["index/recall_at_10"] == 1
    assert [sorted(each) for each in client.values[1:]] == [["curve/p50_ms", "curve/p99_ms", "curve/recall_at_10"]]
    assert json.loads(client.files["evaluation.json"]) == json.loads(found.model_dump_json())
    assert client.files["recall_latency.png"].startswith(b"\x89PNG") and client.ended == [True]
    assert json.loads((tmp_path / "out" / "tracker.json").read_text()) == {"id": "run-7"}


class NotedRun:
    """Client of a tracker that notes what it gets."""

    def __init__(self):
        self.values, self.files, self.ended = [], {}, []

    def begin(self, name, parameters, tags):
        self.parameters, self.tags = parameters, tags
        return "run-7"

    def log(self, values, step):
        self.values.append(values)

    def add_files(self, files):
        self.files |= files

    def end(self, *, succeeded):
        self.ended.append(succeeded)


@pytest.mark.medium
def test_the_command_prints_one_json_document_and_saves_the_same(make_store, tmp_path):
    make_store(pictures())
    arguments = ["evaluate", "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out"), "-k", "3", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert sorted(map(int, printed["model"]["r_at"])) == [1, 3, 5, 10]
    shown = CliRunner().invoke(app, arguments[:3]).stdout
    assert re.search(r"model, exact search +1\.000 \(0\.912-1\.000\)", shown)
    assert "recall@k, index / exact" in shown


def write(path, rows):
    """Rows as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(str(value) for value in each.values()) for each in rows)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["queries.parquet", "queries.csv", "queries.jsonl"])
def test_a_file_asks_with_several_right_items_a_query_and_groups(make_store, tmp_path, name):
    rows = [
        {"query": "at 0.0", "item_id": "000.png", "group": "low"},
        {"query": "at 0.0", "item_id": "039.png", "group": "low"},
        {"query": "at 0.5", "item_id": "020.png", "group": "low"},
        {"query": "at 0.5", "item_id": "000.png", "group": "low"},
        {"query": "at 0.9", "item_id": "000.png", "group": "high"},
        {"query": "at 0.8", "item_id": "000.png", "group": "high"},
    ]
    found = run(make_store(pictures()), queries=write(tmp_path / name, rows))
    assert (found.queries.num_queries, found.queries.num_answers) == (4, 6)
    assert values(found.model.r_at)[1] == values(found.index.r_at)[1] == 0.5
    groups = {group.name: group for group in found.groups}
    assert {name: group.num_queries for name, group in groups.items()} == {"low": 2, "high": 2}
    assert (values(groups["low"].r_at)[1], values(groups["high"].r_at)[1]) == (1, 0)
    assert found.encoding.num_queries == 4


def test_captions_and_files_are_grouped_by_a_column_of_the_store(make_store, tmp_path):
    store = make_store(pictures(modality=lambda number: "pair" if number < 10 else "image"))
    by_caption = run(store, group="modality")
    assert {group.name: group.num_queries for group in by_caption.groups} == {"image": 30, "pair": 10}
    path = write(tmp_path / "q.csv", [{"query": f"at 0.{n}", "item_id": f"{4 * n:03d}.png"} for n in range(1, 6)])
    by_file = run(store, queries=path, group="modality")
    assert {group.name: group.num_queries for group in by_file.groups} == {"pair": 2, "image": 3}


def test_a_few_unknown_items_are_left_out_and_said(make_store, tmp_path):
    rows = [{"query": f"at {n / NUM}", "item_id": f"{n:03d}.png"} for n in range(NUM)]
    path = write(tmp_path / "q.jsonl", [*rows, {"query": "at 0.3", "item_id": "gone.png"}])
    found = run(make_store(pictures()), queries=path)
    assert (found.queries.num_queries, found.queries.num_unknown) == (NUM, 1)
    assert any("1 row of the file left out" in note for note in found.notes)


MISTAKES = {
    "no such column": ([{"query": "at 0", "item": "000.png"}], "no column 'item_id', only query, item"),
    "empty query": ([{"query": "at 0", "item_id": "1"}, {"query": " ", "item_id": "1"}], "row 2: the query is empty"),
    "no item": ([{"query": "at 0", "item_id": None}], "row 1: item_id is empty"),
    "unknown items": ([{"query": "at 0", "item_id": "cat.png"}] * 3, "no image of 3 of 3 item ids, such as cat.png"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_named(make_store, tmp_path, mistake):
    rows, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        run(make_store(pictures(), kind=None), queries=write(tmp_path / "q.jsonl", rows))


@pytest.mark.parametrize(("name", "content"), [("q.csv", ""), ("q.csv", "query,item_id\n"), ("q.jsonl", "")])
def test_an_empty_file_is_refused(make_store, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(EmbedderError, match=rf"{name}: (it holds no query|the file is empty|there is no column)"):
        run(make_store(pictures(), kind=None), queries=str(tmp_path / name))


def test_numbers_of_hits_and_queries_below_one_are_refused_as_by_the_command():
    for options in (EvaluationOptions, CompareOptions):
        for number in (0, -5):
            with pytest.raises(ConfigError, match=f"^num_queries is {number}; give a whole number above 0"):
                options(num_queries=number)
        with pytest.raises(TypeError, match="num_queries: found float"):
            options(num_queries=2.5)
    with pytest.raises(ConfigError, match="^k is 0;"):
        EvaluationOptions(k=0)


def test_other_mistakes_are_named(make_store, tmp_path):
    store = make_store(pictures())
    with pytest.raises(ConfigError, match="--group colour: there is no such column; group by one of item_id"):
        run(store, group="colour")
    with pytest.raises(ConfigError, match="--group image_embedding"):
        run(store, group="image_embedding")
    with pytest.raises(EmbedderError, match="nowhere.csv"):
        run(store, queries=str(tmp_path / "nowhere.csv"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out .*file: "):
        save_evaluation(run(store), tmp_path / "file")


def test_a_store_without_captions_asks_for_a_file(make_store):
    rows = [each | {"caption": None, "text_embedding": None} for each in pictures()]
    with pytest.raises(StoreError, match="give --queries FILE"):
        run(make_store(rows))


def test_an_index_of_another_model_is_refused(make_store):
    store = make_store(pictures())
    store.info = store.info.model_copy(update={"model_fingerprint": "another"})
    with pytest.raises(RetrievalError, match="another"):
        run(store)


class Nearest(Stage):
    """Re-ranker that knows the numbers in captions; with a factor of -1 it puts the right one last."""

    columns_in = ("query", "item_id")
    columns_out: ClassVar = {"score": "float32"}

    def __init__(self, factor=1.0, refused=""):
        self.factor, self.refused = factor, refused

    def process(self, rows):
        if self.refused in rows["query"].to_pylist():
            raise ConfigError("the query fills what it reads; shorten it")
        pairs = zip(rows["query"].to_pylist(), rows["item_id"].to_pylist(), strict=True)
        return {"score": [-self.factor * abs(int(query.split()[1]) - int(name[:3])) for query, name in pairs]}


@pytest.fixture
def make_far_store(make_store):
    """Makes a store whose captions all lie at one end, its pictures along the arc unless `rows` change that."""

    def make(**rows):
        store = make_store(pictures(text_embedding=lambda number: on_arc(0), **rows))
        store.encode_text = lambda texts, instruction=None: np.array([on_arc(0) for _ in texts], np.float32)
        vars(store)["encoder"] = SimpleNamespace(
            warning=lambda *_: None, probability=lambda _: None, describe_cut=lambda _: None
        )
        return store

    return make


def test_a_reranker_is_measured_before_and_after(make_far_store):
    """The first order has each picture at its number, the re-ranker each of its first."""
    store = make_far_store()
    found = run(store, rerank=10, reranker=Nearest()).rerank
    assert (found.num_hits, found.num_queries, found.num_late) == (10, NUM, 0)
    assert values(found.r_at_before) == {k: k / NUM for k in (1, 5, 10)}
    assert values(found.r_at) == dict.fromkeys((1, 5, 10), 10 / NUM)
    assert found.mrr_before.value == pytest.approx(sum(1 / rank for rank in range(1, 11)) / NUM)
    assert found.mrr.value == pytest.approx(10 / NUM)
    assert found.seconds.num_queries == NUM and 0 < found.seconds.p50_ms <= found.seconds.p99_ms
    worse = run(store, rerank=10, reranker=Nearest(-1.0)).rerank
    assert values(worse.r_at)[1] == 0 and values(worse.r_at_before) == values(found.r_at_before)
    late = run(store, rerank=10, reranker=Nearest(), rerank_timeout_s=1e-9)
    assert late.rerank.num_late == NUM
    assert values(late.rerank.r_at) == values(late.rerank.r_at_before)
    lines = [str(part.columns[0].header) for part in evaluation_parts(late) if hasattr(part, "columns")]
    assert f"re-ranker of 10 hits, {NUM} late" in lines
    assert run(store).rerank is None
    with pytest.raises(ConfigError, match="rerank and reranker go together"):
        run(store, rerank=10)
    for options in ({"rerank": 0, "reranker": Nearest()}, {"reranker": Nearest()}):
        with pytest.raises(ConfigError, match="rerank and reranker go together"):
            run(store, **options)


def test_a_query_that_the_reranker_refuses_is_counted_and_has_its_first_order(make_far_store):
    store = make_far_store()
    whole = run(store, rerank=10, reranker=Nearest())
    found = run(store, rerank=10, reranker=Nearest(refused="number 7"))
    assert (found.rerank.num_refused, found.rerank.num_late, found.rerank.num_queries) == (1, 0, NUM)
    assert (whole.rerank.num_refused, whole.rerank.num_late) == (0, 0)
    assert found.rerank.mrr.value == pytest.approx(whole.rerank.mrr.value - (1 - 1 / 8) / NUM)
    lines = [str(part.columns[0].header) for part in evaluation_parts(found) if hasattr(part, "columns")]
    assert "re-ranker of 10 hits, 1 refused" in lines


def test_equal_cosines_count_in_the_order_of_the_search(make_far_store):
    """The re-ranker's own order must not be taken for the one before it."""
    store = make_far_store(image_embedding=lambda number: on_arc(number // 5 / 8))
    ranks = [[hit.item_id for hit in store.search("x", k=10)].index(f"{number:03d}.png") for number in range(10)]
    expected = sum(1 / (rank + 1) for rank in ranks) / NUM
    for factor in (1.0, -1.0):
        assert run(store, rerank=10, reranker=Nearest(factor)).rerank.mrr_before.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rerank": -5}, "^rerank is -5; give the number of first hits"),
        ({"rerank": 10, "rerank_timeout_s": -1}, "^rerank_timeout_s is -1.0; give seconds above 0"),
    ],
)
def test_a_mistake_in_the_options_of_the_reranker_is_named_before_any_search(make_far_store, options, message):
    store = make_far_store()
    with pytest.raises(ConfigError, match=message):
        run(store, reranker=Nearest(), queries="nowhere.csv", **options)


def test_the_command_takes_no_reranker_for_zero_hits(make_store, tmp_path):
    make_store(pictures())
    given = ["evaluate", "--store", str(tmp_path / "store"), "--rerank", "0"]
    done = CliRunner().invoke(app, [*given, "--json"])
    assert (done.exit_code, json.loads(done.stdout.splitlines()[-1])["rerank"]) == (0, None), done.output
    done = CliRunner().invoke(app, [*given, "--reranker", "folder"])
    assert isinstance(done.exception, ConfigError) and "--rerank N and --reranker DIR go" in str(done.exception)


def test_items_whose_time_python_has_none_of_are_a_group_without_a_name(tmp_path):
    far = pa.array([1 << 62, 0], pa.timestamp("us", "UTC"))
    store = searchable(tmp_path / "s", picture("a", 0), picture("b", 10), far=far)
    assert item_groups(store, ["a", "b"], "far") == [NO_GROUP, "1970-01-01 00:00:00+00:00"]
