"""A screenshot of the search page over a store, as the README shows it.

    python scripts/screenshot_page.py runs/demo/store --query 'smiling cat' --out docs/images/search-page.png

It serves the store on a free port of localhost, opens the page in Debian's Chromium, and waits until all images that
are on screen are there. `embedder demo` makes the store of the default.
"""

import argparse
import io
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from embedder.plugins.serve.run_server import DrainingServer
from embedder.plugins.serve.settings import ServeSettings

WHOLE = """() => {
  const images = [...document.querySelectorAll("main img")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.top < innerHeight && box.width > 0;
  });
  return images.length > 0 && images.every((each) => each.complete && each.naturalWidth > 0);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("store", nargs="?", default="runs/demo/store", help="folder of the store")
    parser.add_argument("--query", default="smiling cat", help="text to search for; an empty one shows the start")
    parser.add_argument("--out", type=Path, default=Path("docs/images/search-page.png"), help="PNG file to write")
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    options = parser.parse_args()
    listening, urls = threading.Event(), list[str]()
    settings = ServeSettings(store=options.store, port=0, drain_s=0)
    server = DrainingServer(settings, lambda url: (urls.append(url), listening.set()))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not listening.wait(0.1):
            if not thread.is_alive():
                sys.exit(f"{options.store}: the service did not start")
        shoot(urls[0], options)
    finally:
        server.should_exit = True
        thread.join()
    print(f"screenshot: {options.out}")


def shoot(url: str, options: argparse.Namespace) -> None:
    """Open the page and keep what it shows.

    Args:
        url: of the server.
        options: of the command.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        viewport = {"width": options.width, "height": options.height}
        page: Page = browser.new_page(viewport=viewport, color_scheme=options.theme)
        page.goto(f"{url}/?{urlencode({'q': options.query})}" if options.query else url)
        for _ in range(600):  # the page's policy forbids what `wait_for_function` does
            if page.evaluate(WHOLE):
                break
            page.wait_for_timeout(100)
        page.wait_for_timeout(1500)  # the fading in of the last ones
        options.out.parent.mkdir(parents=True, exist_ok=True)
        pixels = page.screenshot()
        browser.close()
    with Image.open(io.BytesIO(pixels)) as image:  # 256 colours: a third of the bytes, and nobody sees it
        image.convert("RGB").quantize(256).save(options.out, optimize=True)


def chromium() -> str:
    """Path of the browser."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("there is no chromium: install Debian's package (apt-get install chromium)")
    return path


if __name__ == "__main__":
    main()
