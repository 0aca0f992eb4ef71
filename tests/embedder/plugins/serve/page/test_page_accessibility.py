"""The search page for everyone: axe-core finds nothing in any state of it, light and dark."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from page_store import VIDEO_ID
from playwright.sync_api import expect

FILTERS = "#filters .choice"
STATES = {
    "start": ("", "#newest img"),
    "results": ("?q=car&in.group=trees", ".tile.settled.loaded"),
    "filters": ("?q=car&in.group=trees", FILTERS),
    "nothing": ("?q=car&where=price+%3C+-1", ".message h2"),
    "error": ("?q=car&where=prise+%3C+1", "[role=alert]"),
    "image": ("?q=car&item=shop%3Apictures%2F004", "#item .near"),
    "video": (f"?q=car&item={VIDEO_ID}", "#item .moment"),
    "like this": ("?like=shop%3Apictures%2F004", ".tile.settled.loaded"),
    "side by side": ("?q=car", "#right .tile.settled.loaded"),
    "help": ("?q=car", "#help[open]"),
    "archive": ("?page=archive", "#extra .near img"),
    "duplicates": ("?page=duplicates&fold=0.9", "#extra .group img"),
    "asking": ("?q=car&like=shop%3Apictures%2F004&also=shop%3Apictures%2F005&not=sea", "#examples .query-chip"),
    "selected": ("?sort=name&in.group=trees", ".tile.settled.loaded"),
    "enlarged": ("?q=car&item=shop%3Apictures%2F004", "#item .near"),
    "gone": ("?item=nothing", "#item [role=alert]"),
}


@pytest.mark.slow
def test_axe_finds_no_violation_in_either_scheme(open_page, url):
    found = {}
    page = open_page(url, color_scheme="light", reduced_motion="reduce")
    for name, (address, ready) in STATES.items():
        page.goto(f"{url}/{address}")
        page.wait_for_selector("html[data-ready]")
        if name == "filters" and page.is_hidden("#filters"):
            page.click("#filter-toggle")
        if name == "side by side":
            page.click("#compare-toggle")
            page.select_option("#right-version", index=1)
        if name == "help":
            page.click("#help-open")
        if name == "asking":
            page.click("#refine summary")
        expect(page.locator(ready).first).to_be_visible()
        if name == "selected":
            page.locator(".tile-link").first.focus()
            page.keyboard.press("x")
        if name == "enlarged":
            page.keyboard.press("z")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            violations = Axe().run(page).response["violations"]
            if violations:
                nodes = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations]
                found[name, scheme] = nodes
    assert not found


@pytest.mark.parametrize("chosen, scheme", [("dark", "light"), ("light", "dark")])
@pytest.mark.slow
def test_a_chosen_theme_goes_before_the_system_s(open_page, url, chosen, scheme):
    page = open_page(url, color_scheme=scheme)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    while page.get_attribute("#theme", "aria-label") != f"Theme: {chosen}":
        page.click("#theme")
    after = page.evaluate(colour)
    assert after != before
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate(colour) == after
