"""Hits as tables of Arrow and pandas: each hit a row, types of the store's columns kept, names never lost."""

import datetime
import decimal
import sys

import numpy as np
import pyarrow as pa
import pytest
from search_stores import QUERY, picture, searchable, towards, video

from embedder.installation import InstallationError
from embedder.retrieval.hit import Hit
from embedder.retrieval.hit_files import HIT
from embedder.retrieval.hits import Answers, Hits

DAY = datetime.date(2024, 2, 29)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three pictures and a clip, with carried columns of many types; two have names of the table's own columns."""
    return searchable(
        tmp_path_factory.mktemp("tables") / "s",
        *(picture(f"{number}.png", 10 * number, caption="grün" if number else None) for number in range(3)),
        *video("clip.mp4", 50, 60),
        price=pa.array([1, None, 3, 4, 5], pa.int16()),
        cost=pa.array([decimal.Decimal("1.50")] * 5),
        day=pa.array([DAY, None, None, DAY, DAY]),
        tags=pa.array([["a"], [], None, ["b", "c"], ["b"]]),
        place=pa.array([{"city": "Bonn"}] * 5),
        score=pa.array(["mine"] * 5),
        rank=pa.array([9, 8, 7, 6, 5], pa.uint8()),
        **{"carryover.score": pa.array([1.0] * 5, pa.float32())},
    )


def test_each_hit_is_a_row_and_types_are_those_of_the_store(store):
    hits = store.search(QUERY, k=4, fold=0.999)
    table = hits.to_arrow()
    assert table.column_names[: len(HIT)] == HIT.names
    assert table.schema.field("price").type == pa.int16()
    assert table["rank"].to_pylist() == [1, 2, 3, 4]
    for name in ("score", "item_id", "uri", "caption", "modality", "start_s", "words_rank"):
        assert table[name].to_pylist() == [getattr(hit, name) for hit in hits]
    assert table["price"].to_pylist() == [1, None, 3, 4]
    assert table["cost"].to_pylist() == [decimal.Decimal("1.50")] * 4
    assert table["day"].to_pylist() == [DAY, None, None, DAY]
    assert table["tags"].to_pylist() == [["a"], [], None, ["b", "c"]]
    assert table["place"].to_pylist()[0] == {"city": "Bonn"}
    assert table["segments"].to_pylist()[3] == [{"start_s": 5.0, "end_s": 10.0, "score": hits[3].segments[0].score}]
    assert table["duplicates"].to_pylist() == [[], [], [], []]


def test_a_carried_column_with_the_name_of_another_is_kept_under_its_own(store):
    table = store.search(QUERY, k=2).to_arrow()
    assert len(set(table.column_names)) == len(table.column_names)
    assert table["carryover.rank"].to_pylist() == [9, 8]
    assert table["carryover.carryover.score"].to_pylist() == ["mine", "mine"]
    assert table["carryover.score"].to_pylist() == [1.0, 1.0]


def test_a_time_that_python_has_none_of_is_null_and_ends_no_search(tmp_path):
    far = pa.array([1 << 62, 0], pa.timestamp("us", "UTC"))
    days = pa.array([[2_932_897], [0]], pa.list_(pa.date32()))
    hits = searchable(tmp_path / "s", picture("a", 0), picture("b", 10), far=far, days=days).search(QUERY)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert [hit.carryover for hit in hits] == [{"far": None, "days": None}, {"far": epoch, "days": [epoch.date()]}]
    assert hits.to_arrow().schema.field("far").type == far.type


def test_no_hits_are_a_table_of_the_same_columns(store):
    nothing = store.search(QUERY, k=4, where="item_id = 'none'").to_arrow()
    assert nothing.num_rows == 0
    assert nothing.schema == store.search(QUERY, k=4).to_arrow().schema


def test_several_queries_are_one_table_with_their_numbers(store):
    answers = store.search(np.stack([QUERY, towards(50), QUERY]), k=2, where="item_id <> '1.png'")
    table = answers.to_arrow()
    assert table.column_names[:3] == ["query_number", "query", "rank"]
    assert table["query_number"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert table["query"].to_pylist() == ["vector 0"] * 2 + ["vector 1"] * 2 + ["vector 2"] * 2
    assert table["rank"].to_pylist() == [1, 2] * 3
    assert table["item_id"].to_pylist() == [hit.item_id for hits in answers for hit in hits]
    assert Answers([]).to_arrow().num_rows == 0


def test_hits_of_a_service_have_the_types_of_their_values():
    hits = Hits(
        [_hit("a", number=1, text="x", mixed=1), _hit("b", number=2.5, text=None, mixed=["y"])], query="caf\udce9"
    )
    table = hits.to_arrow()
    assert table.schema.field("number").type == pa.float64()
    assert table["text"].to_pylist() == ["x", None]
    assert table["mixed"].to_pylist() == ["1", '["y"]'], "values without a common type, as JSON"
    assert Answers([hits]).to_arrow()["query"].to_pylist() == ["caf\\xe9"] * 2


def test_a_data_frame_has_the_columns_of_the_table(store):
    pytest.importorskip("pandas")
    hits = store.search(QUERY, k=3)
    frame = hits.to_pandas()
    assert list(frame.columns) == hits.to_arrow().column_names
    assert frame["item_id"].tolist() == [hit.item_id for hit in hits]
    assert Answers([hits, hits]).to_pandas()["query_number"].tolist() == [0, 0, 0, 1, 1, 1]


def test_without_pandas_a_line_says_what_is_missing(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    hits = store.search(QUERY, k=1)
    for make in (hits.to_pandas, Answers([hits]).to_pandas):
        with pytest.raises(InstallationError, match="needs pandas, .*; pip install pandas, or use to_arrow"):
            make()
    assert hits.to_arrow().num_rows == 1


def _hit(item_id: str, **carryover) -> Hit:
    return Hit(0.5, item_id, 0, "image", f"/{item_id}", None, None, None, carryover)
