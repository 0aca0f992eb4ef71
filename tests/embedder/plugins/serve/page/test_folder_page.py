"""The search page over a folder as people have it: start page, folders, originals, selection, archive, keys, phones."""

import csv
import io
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from browser_waits import wait_for_answers, wait_until
from page_store import FOLDERS, LONG_NAME, NUM_IN_FOLDERS, write_catalogue
from playwright.sync_api import expect
from running_server import running

import embedder
from embedder.ingest.embed import embed

pytestmark = pytest.mark.medium

TILES = "#left .grid .tile:not(.skeleton)"
LONG_ITEM = f"{FOLDERS[0]}/{LONG_NAME}"


@pytest.fixture(scope="module")
def folder_url(folder_config, tmp_path_factory):
    with running(folder_config.store, cache_dir=tmp_path_factory.mktemp("cache"), show_uris=True) as url:
        yield url


def item_ids(page):
    return [each.get_attribute("title") for each in page.locator(f"{TILES} .words").all()]


def test_the_start_shows_folders_what_is_newest_and_some_at_random(open_page, folder_url):
    page = open_page(folder_url)
    expect(page.locator("#welcome-count")).to_have_text(re.compile(f"^{NUM_IN_FOLDERS} pictures and videos"))
    expect(page.locator("#topics h2")).to_have_text("Folders")
    expect(page.locator(".topic-name .words")).to_have_text(["2024", "2025 Kyoto"])
    newest = page.locator("#newest a")
    expect(newest).to_have_count(12)
    expect(newest.first).to_have_attribute("href", re.compile("IMG_0023"))
    wait_until(page, "[...document.querySelectorAll('.topic img')].every((each) => each.naturalWidth > 0)")
    page.click("#random-all")
    expect(page.locator("#sort")).to_have_value("random")
    expect(page.locator(TILES)).to_have_count(NUM_IN_FOLDERS)
    page.select_option("#sort", "newest")
    expect(page.locator(f"{TILES} .words").first).to_have_attribute("title", re.compile("IMG_0023"))
    expect(page.locator("#count")).to_have_text(f"{NUM_IN_FOLDERS} results")


def test_filters_are_folders_names_dates_and_types_and_nothing_that_occurs_once(open_page, folder_url):
    page = open_page(folder_url)
    page.locator(".topic", has_text="2024").click()
    expect(page.locator(TILES)).to_have_count(16)
    page.click("#filter-toggle")
    expect(page.locator("#filters .folder .words")).to_have_text(["2024", "01 Lisbon", "07 Norway/raw", "2025 Kyoto"])
    page.locator("#filters .folder", has_text="Norway").click()
    expect(page.locator(TILES)).to_have_count(8)
    expect(page.locator("#chips .chip")).to_have_text(["in 2024/07 Norway/raw"])
    names = {name.lower() for name in page.locator("#filter-list > details > summary").all_inner_texts()}
    assert {"folder", "kind", "file date", "file type"} <= names
    assert not {"caption", "item id", "content version", "file name", "run id", "embedded at"} & names
    page.fill("#in-name", "img_001")
    page.press("#in-name", "Enter")
    expect(page.locator(TILES)).to_have_count(4)
    page.fill("#max-file_date", "2026-03-14")
    page.locator("#max-file_date").blur()
    expect(page.locator(TILES)).to_have_count(2)  # of the 14th, too
    assert "folder=2024%2F07+Norway%2Fraw" in page.url


def test_days_of_files_are_those_of_the_reader(open_page, folder_url):
    """What is of midnight in UTC is of the evening before in New York."""
    page = open_page(f"{folder_url}/?sort=name", timezone_id="America/New_York")
    page.click("#filter-toggle")
    for end, count in (("min", NUM_IN_FOLDERS - 13), ("max", 1)):
        page.fill(f"#{end}-file_date", "2026-03-13")
        page.locator(f"#{end}-file_date").blur()
        expect(page.locator(TILES)).to_have_count(count)
    assert "IMG_0013" in item_ids(page)[0]
    page.reload()
    expect(page.locator("#chips .chip")).to_have_text(["file date: 2026-03-13 to 2026-03-13"])
    for end in ("min", "max"):
        expect(page.locator(f"#{end}-file_date")).to_have_value("2026-03-13")
    expect(page.locator(TILES)).to_have_count(1)


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_shows_long_names_within_its_width(open_page, folder_url, width):
    page = open_page(f"{folder_url}/?folder=2024&name={LONG_NAME[:30]}", viewport={"width": width, "height": 640})
    expect(page.locator(TILES)).to_have_count(1)
    within = f"document.documentElement.scrollWidth <= {width}"
    assert page.evaluate(within)
    page.locator(TILES).locator(".tile-link").click()
    expect(page.locator("#item .near").first).to_be_visible()
    page.locator("#item .folded summary").click()
    assert page.evaluate(f"document.querySelector('#item-body').scrollWidth <= {width}")
    box = page.locator("#item-close").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.click("#item-close")
    for address in ("", "?page=archive", "?page=duplicates&fold=0.9"):
        page.goto(f"{folder_url}/{address}")
        expect(page.locator("#newest a, #extra h2").first).to_be_visible()
        assert page.evaluate(within), address


def test_the_original_is_opened_enlarged_downloaded_and_its_path_copied(open_page, folder_url, folder_config):
    page = open_page(f"{folder_url}/?folder=2024&item={LONG_ITEM}", permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#item .near").first).to_be_visible()
    path = Path(folder_config.source[0].path) / LONG_ITEM
    assert page.request.get(page.locator("#item-open").get_attribute("href")).body() == path.read_bytes()
    with page.expect_download() as download:
        page.click("#item-download")
    assert download.value.suggested_filename == LONG_NAME
    assert Path(download.value.path()).read_bytes() == path.read_bytes()
    page.click("#item-path")
    expect(page.locator(".toast")).to_contain_text("clipboard")
    assert page.evaluate("navigator.clipboard.readText()") == str(path)
    page.keyboard.press("z")
    expect(page.locator("#viewer")).to_be_visible()
    wait_until(page, "document.querySelector('#viewer-image').naturalWidth > 0")
    assert page.locator("#viewer-image").get_attribute("src").endswith("/file")
    page.keyboard.press("+")
    expect(page.locator("#viewer-scale")).to_have_text("1.5 ×")
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    expect(page.locator("#item")).to_be_visible()


def test_the_archive_tells_what_changed_last_and_what_was_rejected(open_page, folder_url):
    page = open_page(folder_url)
    page.click("#store")
    expect(page.locator("#extra h2")).to_have_text("This archive")
    lead = re.compile(f"^Last refreshed .+: {NUM_IN_FOLDERS + 1} files, 1 reject[.]")
    expect(page.locator("#extra .lead")).to_have_text(lead)
    expect(page.locator("#extra .near a")).to_have_count(NUM_IN_FOLDERS)
    expect(page.locator("#extra .rejects li")).to_contain_text("broken.jpg")
    page.keyboard.press("Escape")
    expect(page.locator("#welcome")).to_be_visible()


def test_results_are_selected_and_exported(open_page, folder_url):
    page = open_page(f"{folder_url}/?sort=name")
    expect(page.locator(TILES)).to_have_count(NUM_IN_FOLDERS)
    order = item_ids(page)
    page.locator(TILES).first.hover()
    page.locator(TILES).first.locator(".tile-choose").click()
    page.locator(TILES).nth(3).locator(".tile-link").click(modifiers=["Shift"])
    expect(page.locator("#selected")).to_have_text("4 selected")
    page.locator(TILES).nth(1).locator(".tile-link").click()
    expect(page.locator("#selected")).to_have_text("3 selected")
    with page.expect_download() as download:
        page.locator("#formats button", has_text="CSV").click()
    rows = csv.DictReader(io.StringIO(Path(download.value.path()).read_text()))
    assert {row["item_id"] for row in rows} == {order[0], order[2], order[3]}
    page.locator(TILES).nth(5).locator(".tile-link").focus()
    page.keyboard.press("Escape")
    expect(page.locator("#selection")).to_be_hidden()
    page.keyboard.press("x")
    expect(page.locator("#selected")).to_have_text("1 selected")
    page.keyboard.press("a")
    expect(page.locator("#selected")).to_have_text(f"{NUM_IN_FOLDERS} selected")


def test_duplicates_are_reviewed_in_groups(open_page, folder_url):
    page = open_page(f"{folder_url}/?page=duplicates&fold=1")
    group = page.locator(".group").first
    group.locator(".button").click()
    boxes = group.locator("input")
    expect(boxes.first).not_to_be_checked()
    expect(boxes.nth(1)).to_be_checked()
    expect(page.locator("#selection")).to_be_visible()


def test_words_pictures_and_what_to_stay_away_from_go_together(open_page, folder_url):
    page = open_page(f"{folder_url}/?q=a+red+car")
    wait_for_answers(page, 1)
    order = item_ids(page)
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith("/search") else None)
    page.locator(TILES).nth(1).locator(".tile-link").click()
    page.click("#item-also")
    wait_for_answers(page, 2)
    assert sent[-1]["queries"] == [{"text": "a red car", "item": order[1], "segment": 0}]
    page.goto(f"{page.url}&also={order[2]}&unlike={order[3]}")
    wait_for_answers(page, 1)
    expect(page.locator("#examples .query-chip b")).to_have_text(["and", "not"])
    page.click("#refine summary")
    page.fill("#not", "a boat")
    page.press("#not", "Enter")
    wait_for_answers(page, 2)
    wanted = {"text": "a red car", "item": order[1], "segment": 0, "also": [{"item": order[2]}]}
    assert sent[-1]["queries"] == [wanted | {"not": [{"text": "a boat"}, {"item": order[3]}]}]
    page.fill("#least", "-0.9")
    page.press("#least", "Enter")
    wait_for_answers(page, 3)
    assert sent[-1]["min_score"] == -0.9
    page.select_option("#sort", "name")
    wait_for_answers(page, 4)
    assert item_ids(page) == sorted(item_ids(page))
    page.select_option("#number", "100")
    wait_for_answers(page, 5)
    assert sent[-1]["k"] == 100
    page.locator("#chip .cross").click()
    wait_for_answers(page, 6)
    assert "item" not in sent[-1]["queries"][0]


def test_why_a_hit_was_found_stands_beside_it(open_page, folder_url, folder_config):
    words = f"{samples.SENTENCES[5]} 5"
    store = embedder.open_store(folder_config.store)
    hit = next(each for each in store.search(words, k=24, hybrid=True) if each.words_rank == 1)
    page = open_page(f"{folder_url}/?q={words}&hybrid=1")
    first = page.locator(TILES).first
    expect(first.locator(".words")).to_have_text(words)
    expected = f"1st by the words of its caption; {hit.vector_rank}"
    assert first.locator(".score").get_attribute("title").startswith(expected)
    first.locator(".tile-link").click()
    expect(page.locator("#item .facts > p")).to_contain_text(expected)


def test_keys_close_what_is_open_and_never_become_text(open_page, folder_url):
    page = open_page(f"{folder_url}/?q=car")
    wait_for_answers(page, 1)
    for key in ("/", "/", "?"):
        page.keyboard.press(key)
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    expect(page.locator("#q")).to_have_value("car")
    page.fill("#q", " //sea")
    page.wait_for_url("**?q=sea")
    page.fill("#q", "sea and/or sky")
    page.wait_for_url("**?q=sea+and%2For+sky")
    page.keyboard.press("Escape")
    page.locator("#q").blur()
    for toggle, opened in (("#filter-toggle", "#filters"), ("#compare-toggle", "#compare-bar")):
        page.click(toggle)
        expect(page.locator(opened)).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(opened)).to_be_hidden()
    page.click("#refine summary")
    page.locator("#not").focus()
    page.keyboard.press("Escape")
    expect(page.locator("#not")).to_be_hidden()


def test_a_link_to_what_is_gone_says_so_and_helps(open_page, folder_url):
    page = open_page(f"{folder_url}/?item=2024/gone.png")
    card = page.locator("#item [role=alert]")
    expect(card.locator("h2")).to_have_text("This picture is no longer in the archive, or never was.")
    expect(page.locator("#item-tools")).to_be_hidden()
    card.locator("button").click()
    page.wait_for_url("**?name=gone.png")
    page.goto(f"{folder_url}/?q=car&version=20200101T000000Z-none")
    expect(page.locator("#left h2").last).to_have_text("This publication is not there any more.")
    page.get_by_role("button", name="Show the latest").click()
    wait_for_answers(page, 1)


def test_a_neighbour_without_its_file_is_no_broken_picture(open_page, folder_url, folder_config, tmp_path):
    page = open_page(folder_url)
    lost = page.request.get(f"{folder_url}/items/{quote(LONG_ITEM, safe='')}").json()["neighbours"][0]["item_id"]
    path = Path(folder_config.source[0].path) / lost
    away = path.rename(tmp_path / "away.png")
    cache = tmp_path / "cache"
    try:
        with running(folder_config.store, cache_dir=cache) as url:
            page = open_page(f"{url}/?item={LONG_ITEM}")
            expect(page.locator("#item .near .broken")).to_have_count(1)
            expect(page.locator("#item .near img")).to_have_count(11)
            page.goto("about:blank")
    finally:
        away.rename(path)


def test_a_picture_replaced_since_is_not_shown_under_its_old_caption(open_page, page_config, tmp_path):
    store, catalogue = tmp_path / "store", tmp_path / "catalogue.parquet"
    shutil.copytree(page_config.store, store)
    write_catalogue(catalogue)
    shop = page_config.source[0].model_copy(update={"path": str(catalogue)})
    config = page_config.model_copy(update={"store": str(store), "source": (shop, page_config.source[1])})
    first = embedder.open_store(store).current.run_id
    rows, schema = pq.read_table(catalogue).to_pylist(), pq.read_schema(catalogue)
    rows[4]["photo"] = samples.image_bytes(999)
    pq.write_table(pa.Table.from_pylist(rows, schema), catalogue)
    embed(config)
    with running(store, cache_dir=tmp_path / "cache") as url:
        page = open_page(f"{url}/?q=car&vs={first}&count=100")
        expect(page.locator("#right .tile .broken")).to_have_text("changed since")
        expect(page.locator("#left .tile .broken")).to_have_count(0)
        expect(page.locator("#right .badge", has_text="changed since")).to_have_count(1)
        expect(page.locator("#summary")).to_have_text(re.compile("^61 of 61 on both sides"))
        page.goto("about:blank")
