"""Pages of hits never repeat one, though the search of each page is deeper than the last."""

import pytest
from index_stores import NO_FIRST_INDEX, indexed_run, indexed_store, item, unit, vector_of
from running_server import running
from served import Served
from store_states import new_store

from embedder.config_toml.sections import IndexConfig

NUM_ITEMS, K = 1000, 20
QUERY = {"vector": vector_of("the query").tolist()}
# One of 16 lists is read until a page is so deep that all rows are compared: early pages miss many of the nearest.
COARSE = IndexConfig(kind="IVF16,Flat", recall=0.01, min_recall=0.0)


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """A store whose index finds few of the nearest."""
    files = indexed_store(tmp_path_factory.mktemp("coarse") / "store", NUM_ITEMS, config=COARSE)
    return files.address


@pytest.fixture(scope="module")
def servers(coarse, tmp_path_factory):
    """Two servers over it, each with a cache of its own."""
    with (
        running(coarse, cache_dir=tmp_path_factory.mktemp("cache")) as one,
        running(coarse, cache_dir=tmp_path_factory.mktemp("cache")) as other,
    ):
        yield [Served(url, None, None) for url in (one, other)]


def pages(servers, **options):
    """Pages of ids from the first to the last, asked of the servers in turn."""
    found, cursor = [], None
    while cursor is not None or not found:
        server = servers[len(found) % len(servers)]
        answer = server.search(QUERY, cursor=cursor, **options)
        assert answer.status == 200, answer.body
        (page,) = answer.json["answers"]
        found.append([hit["item_id"] for hit in page["hits"]])
        cursor = page["cursor"]
    return found


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"fold": 0.999}, {"group": False}, {"where": "item_id < '0350.jpg'"}])
def test_pages_of_an_approximate_index_have_each_item_once(servers, options):
    found = pages(servers, k=K, **options)
    whole = [hit["item_id"] for hit in servers[0].search(QUERY, k=NUM_ITEMS, **options).json["answers"][0]["hits"]]
    ids = [each for page in found for each in page]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(whole)
    assert all(len(page) == K for page in found[:-2]), "only the end is shorter"
    if not options:  # folding searches deeper at once, and a condition is compared with all rows that fulfil it
        assert ids != whole, "the first pages missed some of the nearest, else this would show nothing"


def test_pages_of_equal_scores_have_each_item_once(tmp_path):
    files = new_store(tmp_path / "store")
    same = unit(vector_of("the query") + vector_of("another")).tolist()
    rows = [item(number, image_embedding=same) for number in range(57)]
    indexed_run(files, *rows, config=NO_FIRST_INDEX)
    with running(files.address, cache_dir=tmp_path / "cache") as url:
        found = pages([Served(url, None, tmp_path)], k=7)
    ids = [each for page in found for each in page]
    assert sorted(ids) == [row["item_id"] for row in rows]


def test_cursors_end_at_the_depth_that_is_allowed(coarse, tmp_path):
    with running(coarse, cache_dir=tmp_path, max_depth=25) as url:
        found = pages([Served(url, None, tmp_path)], k=K)
    assert [len(page) for page in found] == [K, K]
