"""The search page of a really running service, in Debian's Chromium."""

import shutil

import pytest
from page_store import make_page_store
from playwright.sync_api import expect, sync_playwright
from running_server import running

TIMEOUT_MS = 20_000
FOLLOW_S = 0.05
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def page_config(tiny_model, tmp_path_factory):
    """Configuration of a store of images of several shapes and a video, which tests may only read or copy."""
    return make_page_store(tmp_path_factory.mktemp("page"), tiny_model)


@pytest.fixture(scope="module")
def url(page_config, tmp_path_factory):
    """Address of a server over it."""
    with running(page_config.store, follow_s=FOLLOW_S, cache_dir=tmp_path_factory.mktemp("cache")) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    """A browser; for one file only, as its event loop stands in the way of others."""
    if CHROMIUM is None:
        pytest.skip("no chromium: install Debian's package (apt-get install chromium) to test the search page")
    with sync_playwright() as playwright:
        expect.set_options(timeout=TIMEOUT_MS)
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser):
    """Opens the page at an address; a script that fails, or that the policy refuses, fails the test."""
    contexts, problems = [], []

    def open_it(address, **how):
        options = {"viewport": {"width": 1280, "height": 860}, "locale": "en-GB"} | how
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if "Policy" in message.text else None)
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not problems
