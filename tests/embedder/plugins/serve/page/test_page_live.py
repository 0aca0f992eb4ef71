"""The search page over time: a server that restarts, publications that follow one another, tokens."""

import csv
import io
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from browser_waits import wait_for_answers, wait_until
from page_store import NUM_IMAGES, write_catalogue
from playwright.sync_api import expect
from running_server import running

import embedder
from embedder.ingest.embed import embed

pytestmark = pytest.mark.medium

TILES = ".grid .tile:not(.skeleton)"
FOLLOW_S = 0.05
TOKEN = "a-token-of-more-than-32-characters-0123456789"


@pytest.fixture
def grown(page_config, tmp_path):
    """A copy of the store with a second publication: two images more."""
    folder = Path(page_config.store).parent
    store = tmp_path / "store"
    shutil.copytree(page_config.store, store)
    write_catalogue(tmp_path / "catalogue.parquet", NUM_IMAGES + 2)
    shop = page_config.source[0].model_copy(update={"path": str(tmp_path / "catalogue.parquet")})
    first = embedder.open_store(store).current.run_id
    config = page_config.model_copy(update={"store": str(store), "source": (shop, page_config.source[1])})
    assert folder != tmp_path
    return config, first


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for(open_page, page_config, tmp_path):
    with running(page_config.store, cache_dir=tmp_path) as url:
        port = int(url.rsplit(":", 1)[1])
        page = open_page(f"{url}/?q=car")
        expect(page.locator(TILES).first).to_be_visible()
    page.fill("#q", "green tree")
    expect(page.locator(".banner")).to_contain_text("does not answer")
    with running(page_config.store, cache_dir=tmp_path, port=port):
        wait_for_answers(page, 2)
        expect(page.locator(".banner")).to_have_count(0)
        expect(page.locator(TILES).first).to_be_visible()
        page.goto("about:blank")


def test_a_new_publication_is_offered_and_compared_with_the_old(open_page, grown, tmp_path):
    config, first = grown
    with running(config.store, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        page = open_page(f"{url}/?q=car")
        expect(page.locator("#store")).to_contain_text(f"{NUM_IMAGES + 1} items")
        embed(config)
        second = embedder.open_store(config.store).current.run_id
        wait_until(page, f"fetch('/status').then((r) => r.json()).then((s) => s.publication === '{second}')")
        page.evaluate("dispatchEvent(new Event('online'))")
        page.click("text=Show it")
        wait_for_answers(page, 2)
        expect(page.locator("#store")).to_contain_text(f"{NUM_IMAGES + 3} items")
        page.click("#compare-toggle")
        page.select_option("#right-version", first)
        expect(page.locator("#right .tile").first).to_be_visible()
        expect(page.locator("#right .side-model")).to_contain_text("model ")
        expect(page.locator("#summary")).to_contain_text("on both sides")
        new, old = (page.locator(f"{side} {TILES} .words").all_inner_texts() for side in ("#left", "#right"))
        marks = page.locator(f"#left {TILES} .mark").all_inner_texts()
        assert len(new) == len(old), "both sides are loaded to one depth"
        shared, others = [name for name in new if name in old], [name for name in old if name in new]
        for rank, name in enumerate(new):
            if name not in old:
                assert marks[rank] == "only here"
            else:
                moved = others.index(name) - shared.index(name)
                assert marks[rank] == (f"▲ {moved}" if moved > 0 else f"▼ {-moved}" if moved < 0 else "")
        page.locator(f"#left {TILES}").last.scroll_into_view_if_needed()
        expect(page.locator(f"#left {TILES}")).to_have_count(NUM_IMAGES + 3)
        expect(page.locator(f"#right {TILES}")).to_have_count(NUM_IMAGES + 1)  # loaded as deep as the other side
        expect(page.locator("#summary")).to_contain_text(f"{NUM_IMAGES + 1} of {NUM_IMAGES + 3} on both sides")
        page.reload()
        expect(page.locator("#right .tile").first).to_be_visible()
        page.click("#compare-toggle")
        expect(page.locator("#right")).to_be_hidden()
        page.goto("about:blank")


def test_a_list_goes_on_in_the_publication_that_it_began_in(open_page, grown, tmp_path):
    config, first = grown
    wanted = sorted(set(embedder.open_store(config.store).to_arrow(["item_id"])["item_id"].to_pylist()))
    with running(config.store, follow_s=FOLLOW_S, cache_dir=tmp_path / "cache") as url:
        page = open_page(url)
        page.evaluate(
            """async () => {
              const { Results } = await import("/page/results.js");
              const hooks = { open() {}, more() {}, changed() {}, empty: () => null, cure: () => null, side: "" };
              globalThis.listed = new Results(document.createElement("div"), hooks);
              await listed.show("a list", { where: null, k: 20, sort: "name", seed: 0 }, null, "");
            }"""
        )
        embed(config)
        assert embedder.open_store(config.store).current.run_id != first
        wait_until(page, f"fetch('/status').then((r) => r.json()).then((s) => s.publication !== '{first}')")
        found = page.evaluate(
            """async () => {
              while (listed.page.cursor) await listed.more();
              return listed.grid.hits.map((hit) => hit.item_id);
            }"""
        )
        assert found == wanted
        page.goto("about:blank")


def test_differences_name_what_one_side_has_and_how_the_others_moved(open_page, url):
    page = open_page(url)
    found = page.evaluate(
        """async () => {
          const { differences, sharedDepth, summary } = await import("/page/compare.js");
          const hits = (ids) => [...ids].map((id) => ({ item_id: id }));
          const side = ([ids, cursor]) => ({ hits: hits(ids), cursor });
          const pairs = [[["ab", 1], ["abcd", 1]], [["ab", null], ["abcd", 1]], [["ab", null], ["abcd", null]]];
          const depths = pairs.map(([one, other]) => sharedDepth(side(one), side(other)));
          return [
            [...differences(hits("abcd"), hits("bax"))],
            summary(hits("abcd"), hits("bax")),
            [...differences(hits("xyab"), hits("ab"))].map(([, { text }]) => text),
            summary(hits("xyab"), hits("ab")),
            depths.map(String),
          ];
        }"""
    )
    assert found[0] == [
        ["a", {"text": "▲ 1", "kind": "up"}],
        ["b", {"text": "▼ 1", "kind": "down"}],
        ["c", {"text": "only here", "kind": "only"}],
        ["d", {"text": "only here", "kind": "only"}],
    ]
    assert found[1] == "2 of 4 on both sides, 0 at the same rank"
    assert found[2:4] == [["only here", "only here", "", ""], "2 of 4 on both sides, 2 at the same rank"]
    assert found[4] == ["2", "4", "Infinity"], "more may follow of the shorter, of only the longer, of none"


def test_the_token_is_asked_for_once_and_opens_images_too(open_page, page_config, tmp_path):
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    (tmp_path / "tokens").chmod(0o600)
    with running(page_config.store, token_file=tmp_path / "tokens", cache_dir=tmp_path / "cache") as url:
        page = open_page(f"{url}/?q=car")
        page.fill("#token input", "a wrong one")
        page.click("#token button")
        expect(page.locator("#token .why")).to_contain_text("token")
        expect(page.locator("#token")).to_be_visible()
        page.fill("#token input", TOKEN)
        page.click("#token button")
        expect(page.locator("#token")).to_be_hidden()
        page.wait_for_selector(".tile.settled.loaded img")
        page.reload()
        page.wait_for_selector(".tile.settled.loaded img")
        expect(page.locator("#token")).to_be_hidden()
        page.goto("about:blank")


def test_a_busy_server_is_asked_again(open_page, url):
    page = open_page(url)
    refused = threading.Event()

    def refuse_once(route):
        if refused.is_set():
            return route.continue_()
        refused.set()
        problem = {"where": "server", "what": "busy", "rule": "a short queue", "cure": "ask again"}
        return route.fulfill(status=503, json={"error": problem}, headers={"Retry-After": "1"})

    page.route("**/search", refuse_once)
    page.fill("#q", "car")
    expect(page.locator(TILES).first).to_be_visible()
    assert refused.is_set()


def test_a_server_that_is_never_ready_for_texts_is_not_waited_for(open_page, url):
    page = open_page(f"{url}/?q=car")
    expect(page.locator(TILES).first).to_be_visible()
    page.route("**/readyz", lambda route: route.fulfill(status=503, json={"error": {"what": "no text can be encoded"}}))
    lost = []

    def lose_once(route):
        if lost:
            return route.continue_()
        lost.append(route)
        return route.abort()

    page.route("**/search", lose_once)
    page.fill("#q", "green tree")
    wait_for_answers(page, 2)
    assert lost
    expect(page.locator(".banner")).to_have_count(0)


def test_what_is_chosen_on_a_side_is_exported_of_its_publication(open_page, grown, tmp_path):
    config, first = grown
    embed(config)
    second = embedder.open_store(config.store).current.run_id
    old, new = "shop:pictures/001", f"shop:pictures/{NUM_IMAGES + 1:03d}"
    with running(config.store, cache_dir=tmp_path / "cache") as url:
        where = quote(f"item_id IN ('{old}', '{new}')")
        page = open_page(f"{url}/?q=car&version={first}&vs={second}&where={where}")
        expect(page.locator(f"#left {TILES}")).to_have_count(1)
        expect(page.locator(f"#right {TILES}")).to_have_count(2)
        written = []
        page.on("download", lambda each: written.append(Path(each.path()).read_text()))
        page.click("#left .tile-choose", force=True)
        page.locator(f"#right {TILES}", has_text=f" {NUM_IMAGES + 1}").locator(".tile-choose").click(force=True)
        expect(page.locator("#selected")).to_have_text("2 selected")
        page.locator("#formats button", has_text="CSV").click()
        for _ in range(200):
            page.wait_for_timeout(50)
            if len(written) == 2:
                break
        assert sorted(row["item_id"] for text in written for row in csv.DictReader(io.StringIO(text))) == [old, new]
        page.goto("about:blank")
