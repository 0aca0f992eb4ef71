"""Facets, status, versions, metrics and health by HTTP."""

from urllib.parse import quote

import pyarrow as pa
import pytest
from running_server import running
from served import Served, make_store

import embedder
from embedder.ingest.embed import embed
from embedder.plugins.serve import info_routes
from embedder.plugins.serve.info_routes import describe_column, folder_values


def facet(answer, name):
    return next(column for column in answer.json["columns"] if column["name"] == name)


def test_facets_have_counts_and_ranges_of_the_rows_that_fulfil_a_condition(server):
    answer = server.get("/facets")
    assert answer.status == 200, answer.body
    rows = server.store.to_arrow().to_pylist()
    assert answer.json["num_rows"] == len(rows)
    counts = {each["value"]: each["count"] for each in facet(answer, "modality")["values"]}
    assert counts == {name: sum(row["modality"] == name for row in rows) for name in {row["modality"] for row in rows}}
    start = facet(answer, "start_s")
    assert (start["type"], start["min"], start["max"]) == ("number", 0.0, 0.0)
    assert start["num_null"] == sum(row["start_s"] is None for row in rows)
    assert "uri" not in {column["name"] for column in answer.json["columns"]}
    videos = server.get(f"/facets?where={quote('start_s >= 0')}")
    assert videos.json["num_rows"] == sum(row["start_s"] is not None for row in rows)


@pytest.mark.medium
def test_facets_count_no_reject_as_a_picture(tiny_model, tmp_path):
    config, source = make_store(tmp_path, tiny_model, num_clips=0, num_images=4)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "broken.txt").write_text("a caption of nothing")
    embed(config.model_copy(update={"max_reject_fraction": 1.0}))
    with running(config.store) as url:
        found = Served(url, config, source).get("/facets")
        chosen = Served(url, config, source).get(f"/facets?where={quote('NOT has_picture')}")
    assert found.json["num_rows"] == sum(
        row["image_embedding"] is not None for row in embedder.open_store(config.store).to_arrow().to_pylist()
    )
    captions = [each["value"] for each in facet(found, "caption")["values"]]
    assert captions and "a caption of nothing" not in captions
    assert chosen.json["num_rows"] == 0


def test_facets_refuse_what_is_no_condition(server):
    answer = server.get(f"/facets?where={quote('nothing = 1')}")
    assert (answer.status, answer.error["where"]) == (422, "query.where")
    by_path = "uri LIKE '/%'"
    hidden = server.get(f"/facets?where={quote(by_path)}")
    assert (hidden.status, hidden.error["where"]) == (422, "query.where"), "a path could be guessed letter by letter"
    assert server.search({"text": "a car"}, where=by_path).status == 422


def test_status_tells_publication_model_index_and_limits(server):
    found = server.get("/status").json
    store = server.store
    assert found["version"] == store.version
    assert found["model"] == store.info.model_fingerprint
    assert (found["num_items"], found["num_vectors"], found["dim"]) == (
        store.items().num_rows,
        len(store.to_arrow()),
        24,
    )
    assert found["index"]["recall_at_10"] == 1.0
    assert found["limits"]["image_sizes"] == [160, 320, 640, 1280]
    assert found["following"]["last_error"] is None


def test_versions_can_be_asked_and_others_not(server):
    (version,) = server.get("/versions").json["versions"]
    assert version["is_current"]
    assert server.search({"text": "a car"}, version=version["run_id"]).status == 200
    answer = server.search({"text": "a car"}, version="20200101-000000-none")
    assert (answer.status, answer.error["where"]) == (404, "version")


def test_metrics_count_requests_by_route_and_status(server):
    server.search({"text": "a metric"})
    server.search({"text": " "})
    server.get("/nothing/here")
    server.get("/status", host="evil.example")
    lines = server.get("/metrics").body.decode().splitlines()
    ends = ("/search", 200), ("/search", 422), ("other", 404), ("other", 421)
    for labels in (f'route="{route}",status="{status}"' for route, status in ends):
        (line,) = [each for each in lines if each.startswith(f"embedder_request_seconds_count{{{labels}}}")]
        assert float(line.split()[-1]) >= 1
    assert any(line.startswith("embedder_publication_info") and server.store.current.run_id in line for line in lines)
    assert "embedder_queue_queries 0.0" in lines
    assert "embedder_requests_in_flight 1.0" in lines, "the one that asks"


def test_the_documentation_describes_bodies_and_errors(server):
    document = server.get("/openapi.json").json
    body = document["paths"]["/search"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "multipart/form-data"}
    assert {"SearchRequest", "Query", "ErrorAnswer", "SearchAnswer"} <= set(document["components"]["schemas"])
    page = server.get("/docs")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"/search" in page.body
    assert b"http://" not in page.body.replace(server.url.encode(), b"")
    assert b"https://" not in page.body


def test_facets_tell_of_files_and_of_the_elements_of_lists():
    column = pa.chunked_array([[["a", "b"], ["a"], None, []]])
    found = describe_column("tags", column)
    assert (found["type"], found["num_null"]) == ("list", 1)
    assert found["values"] == [{"value": "a", "count": 2}, {"value": "b", "count": 1}]
    assert describe_column("numbers", pa.chunked_array([[[1, 2]]])) is None


def test_facets_of_times_leave_out_those_that_python_has_none_of():
    found = describe_column("far", pa.chunked_array([pa.array([1 << 62, 0, None], pa.timestamp("us"))]))
    assert (found["min"].year, found["max"], found["num_null"]) == (1970, None, 1)
    assert [(each["value"].year, each["count"]) for each in found["values"]] == [(1970, 1)]


def test_folders_are_cut_where_they_are_too_many(monkeypatch):
    column = pa.chunked_array([["a/b/c", "a/b/d", "a", "", "e/f", "e/f"]])
    assert folder_values(column) == [
        {"value": name, "count": count} for name, count in (("", 1), ("a", 1), ("a/b/c", 1), ("a/b/d", 1), ("e/f", 2))
    ]
    monkeypatch.setattr(info_routes, "MAX_DISTINCT", 4)
    assert {each["value"]: each["count"] for each in folder_values(column)} == {"": 1, "a": 1, "a/b": 2, "e/f": 2}


def test_facets_have_folders_names_and_times_of_files(server):
    answer = server.get("/facets")
    assert {each["value"] for each in facet(answer, "folder")["values"]} == {"pictures", "clips"}
    assert facet(answer, "file_type")["values"] == [{"value": "png", "count": 6}, {"value": "mp4", "count": 1}]
    assert facet(answer, "file_date")["min"] is not None
    assert facet(answer, "file_size")["min"] > 0
    where = quote("folder = 'pictures' AND file_date > '2020-01-01' AND file_name <> '0000.png' AND file_size > 0")
    assert server.get(f"/facets?where={where}").json["num_rows"] == 5
