"""What the page promises of its speed: bytes, round trips and CPU time; how soon answers are painted is timed."""

import statistics

import pytest
from browser_waits import wait_for_answers
from page_store import NUM_IMAGES

SLOW = {"offline": False, "latency": 150, "downloadThroughput": 1.5e6 / 8, "uploadThroughput": 0.75e6 / 8}
USABLE_MS, ON_SCREEN_MS = 2000, 200
WORDS = ("car", "tree", "blue bird", "red", "sea", "road", "green")
LOADED = """(until) => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
    .filter((each) => each.responseEnd <= until)
    .map((each) => [each.requestStart || each.startTime, each.responseEnd, each.transferSize])"""
MARK = "(name) => performance.getEntriesByName(`embedder:${name}`).at(-1).startTime"


@pytest.mark.slow
def test_usable_within_two_seconds_on_a_slow_connection(open_page, url):
    """Reckoned from round trips, bytes and the seconds of CPU of the page's thread: other processes change none."""
    page = open_page(url)
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    session.send("Network.emulateNetworkConditions", SLOW)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    page.wait_for_selector("html[data-ready]")
    loaded = page.evaluate(LOADED, page.evaluate(MARK, "ready"))
    rounds: list[tuple[float, int]] = []
    for began, ended, _ in sorted(loaded):
        rounds.append((ended, 1 + max((number for before, number in rounds if before <= began), default=0)))
    num_rounds, num_bytes = max(number for _, number in rounds), sum(size for *_, size in loaded)
    assert len(loaded) >= 15 and num_bytes > 10_000
    transfer_ms = num_rounds * SLOW["latency"] + num_bytes / SLOW["downloadThroughput"] * 1000
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    compute_ms = metrics["TaskDuration"] * 1000
    assert compute_ms > 0
    assert transfer_ms + compute_ms < USABLE_MS, (num_rounds, num_bytes, compute_ms)
    page.fill("#q", "car")
    page.wait_for_selector(".grid .tile:not(.skeleton)")


@pytest.mark.slow
def test_first_results_are_on_screen_soon_after_the_answer(open_page, url):
    page = open_page(url)
    times = []
    for number, words in enumerate(WORDS, 1):
        page.fill("#q", words)
        wait_for_answers(page, number)
        times.append(page.evaluate(MARK, "painted") - page.evaluate(MARK, "answer"))
    assert statistics.median(times) < ON_SCREEN_MS, times


@pytest.mark.medium
def test_the_page_is_small_and_only_what_is_near_is_loaded(open_page, url):
    page = open_page(f"{url}/?q=car")
    page.wait_for_selector(".tile.settled.loaded")
    entries = page.evaluate(
        "performance.getEntriesByType('resource').map(({name, encodedBodySize}) => [name, encodedBodySize])"
    )
    own = {name: size for name, size in entries if "/page/" in name}
    assert len(own) >= 15
    whole = sum(own.values()) + page.evaluate("performance.getEntriesByType('navigation')[0].encodedBodySize")
    assert 0 < whole <= 80_000, own
    assert not [name for name, _ in entries if not name.startswith(url)]
    assert 0 < len([name for name, _ in entries if "/image?" in name]) < NUM_IMAGES
