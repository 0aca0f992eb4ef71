"""The search page as people use it: words, images, filters, the address, the keyboard, narrow screens."""

import io
import json
import re

import pytest
import samples
from browser_waits import wait_for_answers, wait_until
from page_store import GROUPS, MARKUP, MARKUP_ID, NUM_IMAGES, VIDEO_ID
from playwright.sync_api import expect

WORDS = "a red car"
PAGE = 40  # results that are asked for at once
TILES = ".grid .tile:not(.skeleton)"


def tiles(page):
    return page.locator(f"#left {TILES}")


def captions(page):
    """Captions of the first page of results; on a large screen the second is loaded at once."""
    return page.locator(f"#left {TILES} .words").all_inner_texts()[:PAGE]


def searched(page):
    expect(tiles(page).first).to_be_visible()
    expect(page.locator("#left .grid[aria-busy]")).to_have_count(0)


def params(page):
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")


def expected(url, page, query, **options):
    """Item ids that the server answers, asked directly."""
    body = {"queries": [query], "k": PAGE} | options
    answer = page.request.post(f"{url}/search", data=json.dumps(body), headers={"Content-Type": "application/json"})
    return [hit["caption"] or hit["item_id"] for hit in answer.json()["answers"][0]["hits"]]


def test_typing_searches_and_the_address_holds_it(open_page, url):
    page = open_page(url)
    expect(page.locator("#welcome .display")).to_be_visible()
    page.locator("#q").press_sequentially(WORDS)
    searched(page)
    page.wait_for_url(re.compile(r"\?q=a\+red\+car$"))
    expect(page.locator("#live")).to_have_text(re.compile(r"^\d+ results"))
    assert captions(page) == expected(url, page, {"text": WORDS})
    images = page.locator(f"#left {TILES}.settled.loaded img")
    expect(images.first).to_be_visible()
    assert "160w" in images.first.get_attribute("srcset")


@pytest.mark.medium
def test_more_results_come_as_one_scrolls(open_page, url):
    page = open_page(f"{url}/?q=car")
    searched(page)
    page.mouse.move(600, 500)
    for _ in range(8):
        page.mouse.wheel(0, 2500)
        page.wait_for_timeout(100)
    expect(tiles(page)).to_have_count(NUM_IMAGES + 1)
    assert len(set(page.locator(f"#left {TILES} .words").all_inner_texts())) == NUM_IMAGES + 1


@pytest.mark.medium
def test_a_search_of_before_is_offered_again(open_page, url):
    page = open_page(url)
    for words in ("a blue bird", "green tree"):
        page.fill("#q", words)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**?q={words.replace(' ', '+')}")
    page.fill("#q", "")
    expect(page.locator("#history li")).to_have_text(["green tree", "a blue bird"])
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**?q=a+blue+bird")
    expect(page.locator("#history")).to_be_hidden()


@pytest.mark.medium
def test_filters_have_counts_and_quote_what_they_are_made_of(open_page, url):
    page = open_page(f"{url}/?q=car")
    page.click("#filter-toggle")
    group = page.locator("#filters details", has_text="Group").first
    expect(group.locator(".choice")).to_have_count(4)  # and the video, which has none
    row = group.locator(".choice", has_text=GROUPS[2])
    expect(row.locator(".count")).to_have_text("20")
    row.locator("input").check()
    expect(tiles(page)).to_have_count(20)
    page.locator("#filters summary", has_text="Price").click()
    price = page.locator("#min-price")
    price.fill("15")
    price.press("Enter")
    expect(tiles(page)).to_have_count(10)
    expect(page.locator("#chips .chip")).to_have_text([f"group: {GROUPS[2]}", "price: from 15"])
    video = page.locator("#filters .choice", has_text="video").locator(".count")
    expect(video).to_have_text("0")
    page.fill("#where", "price < 20 -- half of them")
    page.click("#own button")
    expect(tiles(page)).to_have_count(3)
    page.click("#reset")
    expect(tiles(page).nth(PAGE - 1)).to_be_attached()


@pytest.mark.medium
def test_what_is_typed_stays_when_counts_arrive(open_page, url):
    page = open_page(f"{url}/?q=car")
    page.click("#filter-toggle")
    group = page.locator("#filters details", has_text="Group").first
    row = group.locator(".choice", has_text=GROUPS[2])
    expect(row.locator(".count")).to_have_text("20")
    held = []

    def hold(route):
        held.append(route)

    page.route("**/facets?where=*", hold)
    row.locator("input").check()
    expect(tiles(page)).to_have_count(20)
    page.fill("#where", "price < 20")
    assert held
    for route in held:
        route.continue_()
    video = page.locator("#filters .choice", has_text="video").locator(".count")
    expect(video).to_have_text("0")  # the counts have come
    assert page.input_value("#where") == "price < 20"
    page.click("#own button")
    expect(page.locator("#chips .chip")).to_have_text([f"group: {GROUPS[2]}", "price < 20"])
    page.click("#reset")
    expect(page.locator("#where")).to_have_value("")


@pytest.mark.medium
def test_every_kind_of_column_filters(open_page, url):
    page = open_page(f"{url}/?q=car&in.is_new=true&none.is_new=1&min.taken=2026-03-05T00:00:00.000Z&max.price=6")
    expect(tiles(page)).to_have_count(6)  # 4, 6, 7, 8, 10, 12 by price and newness; 4 is of March 5th
    page.goto(f"{url}/?none.group=1")
    expect(tiles(page)).to_have_count(1)
    expect(page.locator("#count")).to_have_text("1 result, all that fits the filters")


@pytest.mark.medium
def test_a_column_filters_whose_name_every_object_of_javascript_has(open_page, url):
    makers = [{"value": name, "count": 2} for name in ("Ferrari", "McLaren")]
    facet = {"name": "constructor", "type": "text", "num_null": 0, "values": makers, "min": None, "max": None}

    def with_makers(route):
        found = route.fetch().json()
        route.fulfill(json=found | {"columns": [*found["columns"], facet]})

    page = open_page(f"{url}/?q=car")
    page.route("**/facets", with_makers)
    page.click("#filter-toggle")
    choice = page.locator("#filters .choice", has_text="Ferrari").locator("input")
    choice.evaluate("box => box.click()")  # its column may be folded
    chip = page.locator("#chips .chip")
    expect(chip).to_have_text(["constructor: Ferrari"])
    page.reload()
    expect(chip).to_have_text(["constructor: Ferrari"])


@pytest.mark.medium
def test_a_condition_that_is_none_is_explained(open_page, url):
    page = open_page(f"{url}/?q=car&where=prise+%3C+3")
    card = page.locator("[role=alert]")
    expect(card.locator("h2")).to_have_text("There is no column 'prise'.")
    expect(card.locator("p")).to_have_text(re.compile("^Did you mean price[?] Write one condition"))
    page.goto(f"{url}/?q=car&in.group=trees&where=prise+%3C+3")
    expect(card.locator("h2")).to_have_text("There is no column 'prise'.")  # and nothing of what the page made of it
    page.goto(f"{url}/?q=car&in.group=trees&where=price+%3C")
    expect(card.locator("h2")).to_have_text("The condition is not complete.")
    expect(card).not_to_contain_text("body")
    page.goto(f"{url}/?q=car&where=price+%3C+-3")
    expect(page.locator(".message h2")).to_have_text("Nothing found")
    page.click("text=Remove the filters")
    searched(page)


@pytest.mark.slow
def test_an_image_is_dropped_pasted_and_chosen(open_page, url):
    page = open_page(url)
    content = list(samples.image_bytes(5))
    send = """([bytes, kind]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], "mine.png", {type: "image/png"}));
      const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: data, bubbles: true})
        : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
      document.body.dispatchEvent(event);
    }"""
    page.evaluate(send, [content, "dragenter"])
    expect(page.locator("#drop")).to_be_visible()
    page.evaluate(send, [content, "drop"])
    expect(page.locator("#drop")).to_be_hidden()
    searched(page)
    expect(page.locator("#chip")).to_have_text("your image")
    dropped = captions(page)
    page.reload()
    searched(page)  # the tab has kept it
    assert captions(page) == dropped
    page.evaluate(send, [content, "paste"])
    wait_for_answers(page, 2)
    assert captions(page) == dropped
    large = io.BytesIO()
    samples.make_image(5, 2400, 1800).save(large, "PNG")
    page.locator("#file").set_input_files({"name": "b.png", "mimeType": "image/png", "buffer": large.getvalue()})
    wait_for_answers(page, 3)
    page.locator("#file").set_input_files({"name": "c.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.locator("[role=alert]")).to_be_visible()


@pytest.mark.medium
def test_more_like_this_back_and_forward(open_page, url):
    page = open_page(f"{url}/?q=car")
    searched(page)
    before, name = captions(page), captions(page)[1]
    tiles(page).nth(1).hover()
    tiles(page).nth(1).locator(".tile-more").click()
    expect(page.locator("#chip")).to_have_text("like this")
    wait_for_answers(page, 2)
    assert captions(page)[0] == name
    assert page.locator("#hybrid").is_disabled()
    tiles(page).nth(2).locator("a").click()
    expect(page.locator("#item")).to_be_visible()
    page.go_back()
    expect(page.locator("#item")).to_be_hidden()
    page.go_back()
    page.wait_for_url("**?q=car")
    assert captions(page) == before
    page.go_forward()
    page.go_forward()
    expect(page.locator("#item")).to_be_visible()


@pytest.mark.medium
def test_the_panel_shows_row_provenance_and_neighbours(open_page, url):
    page = open_page(f"{url}/?q=car&item=shop%3Apictures%2F004")
    page.wait_for_selector("#item .near")
    expect(page.locator("#item-name")).to_have_text(re.compile(" 4$"))
    for name in ("price", "group", "model", "publication", "content version"):
        expect(page.locator("#item dt", has_text=re.compile(f"^{name}$"))).to_have_count(1)
    expect(page.locator("#item .near").last.locator("a")).to_have_count(12)
    first = page.locator("#item .near a").first
    name = first.locator("img").get_attribute("alt")
    first.click()
    expect(page.locator("#item-name")).to_have_text(name)
    page.click("#item-close")
    expect(page.locator("#item")).to_be_hidden()
    assert params(page) == {"q": "car"}


@pytest.mark.medium
def test_a_video_opens_at_its_moment_with_the_others_beside(open_page, url):
    page = open_page(f"{url}/?q=car&in.modality=video")
    expect(tiles(page)).to_have_count(1)
    expect(tiles(page).locator(".badge").last).to_have_text("+2 moments")
    tiles(page).locator("a").click()
    moments = page.locator("#item .moment")
    expect(moments).to_have_count(3)
    shown = int(params(page).get("at", 0))
    at = "document.querySelector('#item video').currentTime"
    wait_until(page, f"Math.abs({at} - {2 * shown}) < 0.3")
    last = 2 if shown != 2 else 0
    moments.nth(last).click()
    wait_until(page, f"{at} >= {2 * last} && {at} < {2 * last + 2}")
    assert params(page) == {"q": "car", "in.modality": "video", "item": VIDEO_ID} | ({"at": str(last)} if last else {})


@pytest.mark.medium
def test_everything_is_done_by_keyboard(open_page, url):
    page = open_page(f"{url}/?q=car")
    searched(page)
    page.wait_for_selector(".tile.settled.loaded")
    page.keyboard.press("/")
    page.keyboard.type("tree")
    page.keyboard.press("Enter")
    page.wait_for_url("**?q=tree")
    wait_for_answers(page, 2)
    page.keyboard.press("ArrowDown")
    focused = "document.activeElement.querySelector('.words')?.textContent"
    names = captions(page)
    assert page.evaluate(focused) == names[0]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    below = page.evaluate(focused)
    assert below in names[2:]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.locator("#item")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#item-place")).to_have_text(re.compile(r"of \d\d$"))
    page.keyboard.press("Escape")
    expect(page.locator("#item")).to_be_hidden()
    opened = page.evaluate(focused)
    assert opened in names
    page.keyboard.press("m")
    expect(page.locator("#chip")).to_have_text("like this")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#filter-toggle").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#filters")).to_be_visible()


@pytest.mark.medium
def test_a_narrow_screen_is_as_usable(open_page, url):
    page = open_page(f"{url}/?q=car", viewport={"width": 360, "height": 720}, has_touch=True)
    searched(page)
    page.wait_for_selector(".tile.settled.loaded")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.tap("#filter-toggle")
    page.locator("#filters .choice", has_text=GROUPS[0]).tap()
    page.tap("#filters-close")
    expect(tiles(page)).to_have_count(20)
    tiles(page).first.locator("a").tap()
    page.wait_for_selector("#item .near")
    assert page.evaluate("document.querySelector('#item').scrollWidth") <= 360


@pytest.mark.medium
def test_markup_in_captions_and_ids_stays_text(open_page, url):
    page = open_page(f"{url}/?like=shop%3Apictures%2F002&where=caption+LIKE+%27%25script%25%27")
    expect(page.locator("[role=alert], .message").first).to_be_visible()  # of an item that is not there
    page.goto(f"{url}/?q=car&where=caption+LIKE+%27%25script%25%27")
    expect(tiles(page)).to_have_count(1)
    assert captions(page) == [MARKUP]
    tiles(page).locator("a").click()
    page.wait_for_selector("#item .near")
    expect(page.locator("#item-name")).to_have_text(MARKUP)
    expect(page.locator("#item dd", has_text=MARKUP_ID)).to_have_count(1)
    wait_until(page, "document.querySelector('#item img.still').naturalWidth > 0")
    assert page.locator("main script, dialog script, main img[src=x], dialog img[src=x]").count() == 0
    assert "attacked" not in page.title()


@pytest.mark.medium
@pytest.mark.parametrize("switch, changes", [("hybrid", {"hybrid": True}), ("fold", {"fold": 0.95})])
def test_switches_change_the_search(open_page, url, switch, changes):
    page = open_page(f"{url}/?q=car")
    searched(page)
    page.locator(f"#{switch}").check()
    wait_for_answers(page, 2)
    assert captions(page) == expected(url, page, {"text": "car"}, **changes)
    page.reload()
    searched(page)
    assert page.locator(f"#{switch}").is_checked()


@pytest.mark.medium
def test_a_time_of_a_link_that_is_none_is_a_filter_that_can_be_taken_away(open_page, url):
    page = open_page(f"{url}/?min.taken=yesterday&max.taken=2026-99-99T00:00:00Z")
    expect(page.locator("#chips .chip")).to_have_text(["taken: yesterday to 2026-99-99T00:00:00Z"])
    expect(page.locator("#filters")).to_be_visible()
    for end in ("min", "max"):
        expect(page.locator(f"#{end}-taken")).to_have_value("")
    page.locator("#chips .chip").click()
    expect(tiles(page)).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


@pytest.mark.medium
def test_times_with_a_zone_are_shown_and_filtered_by_the_clock_of_the_reader(open_page, url):
    page = open_page(f"{url}/?min.taken=2026-03-05T00:00:00.000Z", timezone_id="America/New_York")
    expect(page.locator("#min-taken")).to_have_value("2026-03-04T19:00")
    expect(page.locator("#chips .chip")).to_have_text(["taken: from 4 Mar 2026, 19:00"])
    expect(page.locator("#count")).to_have_text("56 results, all that fits the filters")
    page.locator("#max-taken").evaluate("field => field.closest('details').open = true")
    page.fill("#max-taken", "20260-03-04T19:00")
    page.locator("#max-taken").blur()
    expect(page.locator("#chips .chip")).to_have_text(["taken: from 4 Mar 2026, 19:00"])
    page.fill("#max-taken", "2026-03-04T19:00")
    page.locator("#max-taken").blur()
    expect(page.locator("#count")).to_have_text("1 result, all that fits the filters")
    days = page.evaluate(
        """async () => {
          const { date } = await import("/page/dom.js");
          return ["2026-03-05", "2026-03-05T08:00:00", "2026-03-05T00:00:00Z"].map(date);
        }"""
    )
    assert days == ["5 Mar 2026", "5 Mar 2026, 08:00", "4 Mar 2026, 19:00"]


@pytest.mark.medium
def test_a_panel_that_the_browser_closes_is_closed_in_the_address_too(open_page, url):
    """On Esc without a click before, and on a phone's gesture, it may close a dialog without asking the page."""
    page = open_page(f"{url}/?q=car&item=shop%3Apictures%2F004")
    expect(page.locator("#item .near").first).to_be_visible()
    page.evaluate("document.querySelector('#item').close()")
    page.wait_for_url("**/?q=car")
    link = tiles(page).first.locator(".tile-link")
    link.click()
    expect(page.locator("#item")).to_be_visible()
    page.evaluate("document.querySelector('#item').close()")
    link.click()
    expect(page.locator("#item")).to_be_visible()


@pytest.mark.medium
def test_back_takes_words_away_that_were_just_typed(open_page, url):
    page = open_page(f"{url}/?q=car")
    searched(page)
    page.fill("#q", "a blue bird")
    page.wait_for_url("**?q=a+blue+bird")
    page.go_back()
    expect(page.locator("#q")).to_have_value("car")
    page.locator("#q").press_sequentially("s")
    page.wait_for_url("**?q=cars")
    page.go_back()
    page.wait_for_url("**?q=car")
