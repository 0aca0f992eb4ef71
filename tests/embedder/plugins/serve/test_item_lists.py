"""Lists of items without a search, rejects, exports and duplicates by HTTP, over a folder as people have them."""

import csv
import io
import zipfile
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq
import pytest
from page_store import FOLDERS, LONG_NAME, NUM_IN_FOLDERS
from PIL import Image
from running_server import running
from served import Served

from embedder.config import load_config
from embedder.ingest.embed import embed
from embedder.plugins.serve.hand_on_routes import group_vectors
from embedder.plugins.serve.item_lists import remember

FIRST = f"{FOLDERS[0]}/{LONG_NAME}"


@pytest.fixture(scope="module")
def live(folder_config, tmp_path_factory):
    with running(folder_config.store, cache_dir=tmp_path_factory.mktemp("cache")) as url:
        yield Served(url, folder_config, None)


def listed(live, **asked):
    answer = live.get("/items?" + "&".join(f"{name}={quote(str(value))}" for name, value in asked.items()))
    assert answer.status == 200, answer.body
    return answer.json


def ids(found):
    return [each["item_id"] for each in found["items"]]


def number_of(item_id):
    return 0 if item_id == FIRST else int(item_id[-8:-4])


def test_items_are_listed_by_the_time_of_their_files_by_name_and_at_random(live):
    newest = listed(live, k=100)
    assert newest["num_items"] == NUM_IN_FOLDERS, "the reject that has a caption is no picture"
    assert [number_of(each) for each in ids(newest)] == [*range(NUM_IN_FOLDERS)][::-1]
    assert ids(listed(live, k=100, sort="oldest")) == ids(newest)[::-1]
    assert ids(listed(live, k=100, sort="name")) == sorted(ids(newest))
    first, second = (ids(listed(live, k=100, sort="random", seed=seed)) for seed in (1, 2))
    assert sorted(first) == sorted(second) == sorted(ids(newest))
    assert first != second
    assert ids(listed(live, k=100, sort="random", seed=1)) == first
    assert newest["items"][0]["score"] is None


def test_a_list_goes_on_and_takes_a_condition(live):
    page = listed(live, k=20)
    rest = listed(live, k=20, start=page["next"])
    assert (len(page["items"]), len(rest["items"]), rest["next"]) == (20, NUM_IN_FOLDERS - 20, None)
    assert not set(ids(page)) & set(ids(rest))
    inside = listed(live, where=f"folder = '{FOLDERS[2]}' AND file_date < '2026-03-10'", sort="name")
    assert [number_of(each) for each in ids(inside)] == [2, 5, 8]
    refused = live.get(f"/items?where={quote('prise < 3')}")
    assert (refused.status, refused.error["where"]) == (422, "query.where")
    assert live.get("/items?sort=colour").status == live.get("/items?k=0").status == 422


def test_folders_count_what_can_be_found(live):
    (folders,) = [each for each in live.get("/facets").json["columns"] if each["name"] == "folder"]
    assert {each["value"]: each["count"] for each in folders["values"]} == dict.fromkeys(FOLDERS, NUM_IN_FOLDERS // 3)


def test_rejects_are_listed_with_their_reason(live):
    found = live.get("/rejects").json
    assert found["num_rejects"] == 1
    (reject,) = found["rejects"]
    assert (reject["item_id"], reject["step"], reject["has_picture"]) == ("broken.jpg", "decode", False)
    assert reject["error"]


@pytest.mark.medium
def test_a_catalogue_shows_types_of_files_and_no_place_of_a_missing_one(tiny_model, tmp_path):
    scans = tmp_path / "secret" / "scans"
    scans.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 30), (80 * number, 90, 100)).save(scans / f"{number}.tif")
    rows = [f"1987.1.{n};Plate {n};secret/scans/{n}.tif" for n in range(4)]  # the last one is missing
    (tmp_path / "objects.csv").write_text("\n".join(["No.;Title;Image", *rows]))
    columns = {"id": "No.", "image": "Image", "caption": "Title"}
    given = {"model": str(tiny_model), "store": str(tmp_path / "store"), "engine": "local", "max_reject_fraction": 1.0}
    config = load_config(overrides=given | {"source": [{"path": str(tmp_path / "objects.csv"), "columns": columns}]})
    embed(config)
    with running(config.store) as url:
        live = Served(url, config, None)
        (reject,) = live.get("/rejects").json["rejects"]
        lost, kept = (live.get(f"/items/1987.1.{n}") for n in (3, 0))
        facets = {each["name"]: each.get("values") for each in live.get("/facets").json["columns"]}
    assert reject["item_id"] == "1987.1.3"
    assert reject["error"] == lost.json["item"]["error"] == "No such file or directory"
    assert facets["file_type"] == [{"value": "tif", "count": 3}]
    assert kept.json["item"]["modified"].endswith(" UTC")
    assert b"secret" not in lost.body + kept.body


def exported(live, form, *item_ids, status=200):
    answer = live.post("/export", {"items": list(item_ids), "format": form})
    assert answer.status == status, answer.body
    return answer


def test_items_are_exported_as_tables_and_paths_without_what_nobody_may_see(live, folder_config):
    second = f"{FOLDERS[1]}/IMG_0001.png"
    answer = exported(live, "csv", second, FIRST)
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert [row["item_id"] for row in rows] == [second, FIRST]
    assert rows[0]["caption"] == "two cats sleep in the sun 1"
    assert not {"uri", "score", "rank"} & set(rows[0])
    assert answer.headers["Content-Disposition"] == 'attachment; filename="items.csv"'
    table = pq.read_table(io.BytesIO(exported(live, "parquet", second).body))
    assert table["item_id"].to_pylist() == [second]
    assert exported(live, "paths", second, FIRST).body.decode() == f"{second}\n{FIRST}\n"
    assert folder_config.source[0].path not in exported(live, "jsonl", second).body.decode()
    gone = exported(live, "csv", second, "nothing", status=404)
    assert gone.error["where"] == "item"
    assert exported(live, "tar", second, status=422).error["where"] == "body.format"


def test_files_are_exported_as_an_archive_and_a_sheet(live, folder_config):
    source = folder_config.source[0].path
    with zipfile.ZipFile(io.BytesIO(exported(live, "zip", FIRST, f"{FOLDERS[1]}/IMG_0001.png").body)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names == [f"1-{LONG_NAME}", "2-IMG_0001.png"]
        assert archive.read(names[0]) == (Path(source) / FIRST).read_bytes()
    assert Image.open(io.BytesIO(exported(live, "sheet", FIRST).body)).format == "PNG"


def test_an_archive_says_which_file_is_another_one_since(live, folder_config, tmp_path):
    item_id = f"{FOLDERS[2]}/IMG_0002.png"
    path = Path(folder_config.source[0].path) / item_id
    away = path.rename(tmp_path / "away.png")
    path.symlink_to("/etc/hostname")
    try:
        with zipfile.ZipFile(io.BytesIO(exported(live, "zip", item_id, FIRST).body)) as archive:
            assert archive.namelist() == [f"2-{LONG_NAME}", "not-in-here.txt"]
            assert item_id in archive.read("not-in-here.txt").decode()
    finally:
        path.unlink()
        away.rename(path)


def test_duplicates_are_grouped_the_oldest_first(live):
    found = live.get("/duplicates?fold=0.9999").json
    pairs = [[number_of(each["item_id"]) for each in group] for group in found["groups"]]
    assert [5, 10, 11] in pairs or [10, 11] in pairs, "two files are the same"
    assert found["num_groups"] == len(pairs)
    none = live.get(f"/duplicates?fold=0.9999&where={quote('item_id = ' + repr(FIRST))}").json
    assert none["groups"] == []


def test_vectors_are_grouped_through_those_between_them():
    angles = np.radians([0, 40, 8, 16, 90, 90])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    groups = group_vectors(vectors, float(np.cos(np.radians(10))))
    assert [group.tolist() for group in groups] == [[0, 2, 3], [4, 5]]


def test_what_is_remembered_is_made_once_and_the_oldest_go_also_while_another_thread_forgets():
    made, known = [], {}

    def make(number):
        made.append(number)
        known.pop(number - 1, None)  # as another thread may
        return number

    for number in (1, 2, 3, 4, 4, 5):
        assert remember(known, number, partial(make, number), 2) == number
    assert made == [1, 2, 3, 4, 5] and len(known) <= 2
    assert remember({"none": None}, "none", partial(make, 6), 2) is None
