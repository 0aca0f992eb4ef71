"""Further models of a store: searched by their own vectors, their columns next to the rows of every model."""

import pyarrow as pa
import pytest
from model_stores import LABELS, add_model, code_section, label_row, vector_row
from search_stores import QUERY, ids, picture, searchable, towards, video

from embedder.errors import ArgumentTypeError, ConfigError, StoreError
from embedder.retrieval.store_api import open_store
from embedder.retrieval.store_follower import follow_store
from embedder.storage import spill_file
from embedder.store.tables import tables
from embedder.store.tables.models import model_files

NAMES = ["a.png", "b.png", "c.png", "d.png"]


def kinds_of(*names: str) -> pa.Array:
    """Labels with scores, the best first."""
    return pa.array([[{"label": name, "score": 0.9}, {"label": "other", "score": 0.1}] for name in names], LABELS)


@pytest.fixture(scope="module", params=["in memory", "mapped, two rows at a time"])
def address(request, tmp_path_factory):
    """Four pictures and a clip; `clip` orders them the other way round and lacks one; `labels` has no vectors."""
    with pytest.MonkeyPatch.context() as changed:
        if request.param != "in memory":
            changed.setattr(spill_file, "MEMORY_BYTES", 0)
            changed.setattr(tables, "ROWS_PER_PIECE", 1)
        yield stored(tmp_path_factory.mktemp("models") / "s")


def stored(folder):
    pictures = [picture(name, 10 * number) for number, name in enumerate(NAMES)]
    clip = video("film.mp4", 50, 60)
    store = searchable(folder, *pictures, *clip, price=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    files = store.files
    add_model(
        files,
        "clip",
        *(vector_row(name, towards(30 - 10 * number)) for number, name in enumerate(NAMES) if name != "b.png"),
        vector_row("only-clip.png", towards(80)),
    )
    segments = [label_row("film.mp4", segment=number, modality="video", num_vectors=2) for number in (0, 1)]
    add_model(
        files,
        "labels",
        *(label_row(name) for name in NAMES[:3]),
        *segments,
        has_vectors=False,
        top=pa.array(["cat", "dog", "cat", "street", "cat"]),
        kinds=kinds_of("cat", "dog", "cat", "street", "cat"),
        count=pa.array([1, 2, 3, 4, 5], pa.int64()),
    )
    return files.address


def test_a_store_names_its_models_and_each_is_searched_by_its_own_vectors(address):
    store = open_store(address)
    assert (store.model, store.models) == ("", ("clip", "labels"))
    assert ids(store.search(QUERY, k=3)) == NAMES[:3]
    further = open_store(address, model="clip")
    assert (further.model, further.models) == ("clip", ("clip", "labels"))
    assert ids(further.search(QUERY, k=10)) == ["d.png", "c.png", "a.png", "only-clip.png"]
    assert ids(open_store(address, model="main").search(QUERY, k=3)) == NAMES[:3]
    assert ids(store.of_model("clip").search(QUERY, k=2)) == ["d.png", "c.png"]
    assert ids(further.of_model("main").search(QUERY, k=2)) == NAMES[:2]


def test_the_version_of_the_hits_names_publication_model_and_index(address):
    store = open_store(address)
    run_id = store.current.run_id
    assert store.search(QUERY, k=1).version == f"{run_id}/index 1"
    assert store.of_model("clip").search(QUERY, k=1).version == f"{run_id}/clip exact"


@pytest.mark.parametrize("model", ["main", "clip"])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("labels.top = 'cat'", {"a.png", "c.png", "film.mp4"}),
        ("LABELS.Top = 'cat' AND labels.count < 3", {"a.png"}),
        ("\"labels.top\" = 'dog'", {"b.png"}),
        ("labels.\"top\" = 'dog'", {"b.png"}),
        ("embeddings.price < 2.5", {"a.png", "b.png"}),
        ("list_contains(list_transform(labels.kinds, lambda k: k.label), 'street')", {"film.mp4"}),
        ("labels.kinds[1].label = 'cat' AND price < 4", {"a.png", "c.png"}),
        ("labels.top IS NULL", {"d.png", "only-clip.png"}),
        ("'labels.top' = 'labels.top' AND labels.count = 2 -- labels.top", {"b.png"}),
    ],
)
def test_conditions_read_the_columns_of_other_models_whatever_is_searched(address, model, where, expected):
    store = open_store(address, model=model)
    held = {"main": {*NAMES, "film.mp4"}, "clip": {"a.png", "c.png", "d.png", "only-clip.png"}}[model]
    assert set(ids(store.search(QUERY, k=10, where=where))) == expected & held


def test_hits_carry_the_columns_of_other_models_and_null_where_a_model_has_no_such_row(address):
    hits = open_store(address).search(QUERY, k=5)
    found = {hit.item_id: hit.carryover for hit in hits}
    assert found["a.png"]["labels.top"] == "cat"
    assert found["a.png"]["labels.kinds"][0] == {"label": "cat", "score": pytest.approx(0.9)}
    assert found["d.png"] == {"price": 4.0, "labels.top": None, "labels.kinds": None, "labels.count": None}
    assert (found["film.mp4"]["labels.top"], found["film.mp4"]["labels.count"]) == ("street", 4)
    table = hits.to_arrow()
    assert table.schema.field("labels.count").type == pa.int64()
    only = open_store(address, model="clip").search(towards(80), k=1)[0]
    assert (only.item_id, only.carryover["price"], only.carryover["labels.top"]) == ("only-clip.png", None, None)


def test_to_arrow_joins_the_models_by_item_and_segment(address):
    table = open_store(address).to_arrow(["item_id", "segment", "price", "clip.image_embedding", "labels.top"])
    assert table.column_names == ["item_id", "segment", "price", "clip.image_embedding", "labels.top"]
    rows = {(row["item_id"], row["segment"]): row for row in table.to_pylist()}
    assert len(rows) == table.num_rows == 6
    assert rows["a.png", 0]["clip.image_embedding"] == pytest.approx(towards(30).tolist())
    assert rows["b.png", 0]["clip.image_embedding"] is None
    assert [rows["film.mp4", number]["labels.top"] for number in (0, 1)] == ["street", "cat"]
    whole = open_store(address).to_arrow()
    assert {"image_embedding", "clip.image_embedding", "clip.text_embedding", "labels.kinds"} <= {*whole.column_names}
    assert "labels.image_embedding" not in whole.column_names, "it has no vectors"
    assert open_store(address).to_arrow(["labels.top"]).column_names == ["labels.top"]


@pytest.mark.parametrize("model", [None, "clip"])
def test_to_arrow_refuses_a_column_that_no_model_has_and_a_name_in_the_place_of_a_list(address, model):
    store = open_store(address, model=model)
    with pytest.raises(ConfigError, match=r"^to_arrow: there is no column 'pric'; columns are item_id, .*labels\.top"):
        store.to_arrow(["item_id", "pric"])
    with pytest.raises(ArgumentTypeError, match=r"^to_arrow: columns: found str; give a list of names"):
        store.to_arrow("price")


def test_to_arrow_of_a_further_model_has_its_rows_and_the_main_models_columns_beside_them(address):
    table = open_store(address, model="clip").to_arrow()
    rows = {row["item_id"]: row for row in table.to_pylist()}
    assert set(rows) == {"a.png", "c.png", "d.png", "only-clip.png"}
    assert rows["a.png"]["image_embedding"] == pytest.approx(towards(30).tolist())
    assert rows["a.png"]["main.image_embedding"] == pytest.approx(towards(0).tolist())
    assert (rows["c.png"]["price"], rows["c.png"]["labels.top"]) == (3.0, "cat")
    assert rows["only-clip.png"]["main.image_embedding"] is None
    labels = open_store(address, model="labels").to_arrow()
    assert labels["labels.top"].to_pylist() == ["cat", "dog", "cat", "street", "cat"]
    assert "image_embedding" not in labels.column_names
    assert "clip.image_embedding" in labels.column_names


def test_an_unknown_model_is_refused_with_the_names_that_there_are(address):
    with pytest.raises(StoreError, match=r"no model 'clp' is published in it; it has main, clip, labels"):
        open_store(address, model="clp")
    with pytest.raises(StoreError, match=r"no model 'nothing'"):
        open_store(address).of_model("nothing")


def test_a_model_without_vectors_is_not_searched_and_says_what_it_gives(address):
    store = open_store(address, model="labels")
    with pytest.raises(StoreError, match=r"model labels has no vectors to compare, it gives labels\.top \(string\)"):
        store.search(QUERY)


def test_an_unknown_column_of_a_model_is_refused_with_the_one_that_may_be_meant(address):
    for model in ("main", "clip"):
        with pytest.raises(ConfigError, match=r"no column 'labels\.topp'; did you mean labels\.top "):
            open_store(address, model=model).search(QUERY, where="labels.topp = 'cat'")


def test_conditions_of_strangers_read_the_columns_of_models_and_no_vectors(address):
    store = open_store(address)
    row_filter = store.searcher.snapshot.metadata.filter
    row_filter.remember("labels.top = 'cat' AND labels.kinds[1].score > 0.5", 10)
    with pytest.raises(ConfigError, match=r"no column 'clip\.image_embedding'"):
        row_filter.remember("clip.image_embedding IS NULL", 10)
    with pytest.raises(ConfigError, match=r"no column 'labels\.nothing'"):
        row_filter.remember("labels.nothing = 1", 10)


def test_a_column_of_a_models_name_keeps_its_fields_and_one_of_the_whole_name_its_values(tmp_path):
    store = searchable(
        tmp_path / "s",
        picture("a.png", 0),
        picture("b.png", 10),
        index=False,
        tags=[{"top": "own"}, {"top": "field"}],
        **{"kind.top": ["carried", "carried"]},
    )
    for name in ("tags", "kind"):
        rows = [label_row("a.png"), label_row("b.png")]
        add_model(store.files, name, *rows, has_vectors=False, top=pa.array(["of model", "of model"]))
    store = open_store(store.files.address)
    assert ids(store.search(QUERY, where="tags.top = 'field'")) == ["b.png"]
    assert ids(store.search(QUERY, where="\"tags.top\" = 'of model'")) == ["a.png", "b.png"]
    assert ids(store.search(QUERY, where="kind.top = 'carried'")) == ["a.png", "b.png"]
    found = store.search(QUERY, k=1)[0].carryover
    assert (found["kind.top"], found["models.kind.top"]) == ("carried", "of model")


def test_an_earlier_publication_has_the_models_that_it_had(tmp_path):
    store = searchable(tmp_path / "s", picture("a.png", 0), picture("b.png", 10), index=False)
    first = store.current.run_id
    second = add_model(store.files, "clip", vector_row("a.png", towards(5)))
    add_model(store.files, "clip", vector_row("b.png", towards(40)), retired=True)
    address = store.files.address
    assert open_store(address, version=first).models == ()
    with pytest.raises(StoreError, match="it has main"):
        open_store(address, model="clip", version=first)
    assert ids(open_store(address, model="clip", version=second.run_id).search(QUERY)) == ["a.png"]
    assert ids(open_store(address, model="clip").search(QUERY)) == ["b.png"]


def test_a_followed_store_takes_over_what_a_further_model_publishes(tmp_path):
    store = searchable(tmp_path / "s", picture("a.png", 0), picture("b.png", 10), index=False)
    add_model(store.files, "clip", vector_row("a.png", towards(5)))
    with follow_store(store.files.address, every_s=3600, model="clip") as following:
        assert ids(following.search(QUERY)) == ["a.png"]
        assert not following.look()
        add_model(store.files, "clip", vector_row("b.png", towards(0)))
        assert following.look()
        assert ids(following.search(QUERY)) == ["b.png", "a.png"]


def test_of_a_model_and_a_folder_of_one_name_the_folder_is_written_as_a_path(tmp_path, monkeypatch, tiny_model):
    store = searchable(tmp_path / "s", picture("a.png", 0), index=False)
    add_model(store.files, "clip", vector_row("a.png", towards(5)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip").symlink_to(tiny_model)
    assert open_store(store.files.address, model="clip").model == "clip"
    assert open_store(store.files.address, model="./clip").model == ""
    assert model_files(store.files, "clip").address.endswith("/models/clip")


@pytest.fixture
def with_code(tmp_path):
    """Address of a store whose model `own` is a class of a file, and the section that names it."""
    store = searchable(tmp_path / "s", *(picture(name, 10 * n) for n, name in enumerate(NAMES)), index=False)
    section = code_section(tmp_path)
    add_model(store.files, "own", *(vector_row(name, towards(30 * n)) for n, name in enumerate(NAMES)), section=section)
    return store.files.address, section


def test_a_search_runs_no_code_of_the_store_but_with_leave_or_from_the_readers_configuration(with_code, tmp_path):
    address, section = with_code
    store = open_store(address, model="own")
    assert ids(store.search(towards(90), k=1)) == ["d.png"], "vectors need no code"
    with pytest.raises(StoreError, match=r"^model own of the store: it is of the kind python, which would run code"):
        store.search("upwards")
    assert not (tmp_path / "ran").exists()
    for leave in ({"servables": [section]}, {"allow_store_code": True}):
        for opened in (open_store(address, model="own", **leave), open_store(address, **leave).of_model("own")):
            assert ids(opened.search("upwards", k=1)) == ["d.png"]
            (tmp_path / "ran").unlink()


def test_a_followed_store_runs_no_code_of_the_store_but_with_leave(with_code, tmp_path):
    address, _ = with_code
    with follow_store(address, model="own") as following, pytest.raises(StoreError, match="of the kind python"):
        following.search("upwards")
    assert not (tmp_path / "ran").exists()
    with follow_store(address, every_s=3600, model="own", allow_store_code=True) as following:
        assert ids(following.search("upwards", k=1)) == ["d.png"]
        add_model(following.files.main, "own", vector_row("e.png", towards(90)), section=code_section(tmp_path))
        assert following.look()
        assert ids(following.search("upwards", k=1)) == ["d.png"]
