"""Downloads ahead of who takes them: in order, bounded, and gone when nobody wants them any more."""

import threading

import pytest
import samples
from web_server import image, slowly, status

from embedder.config_toml.run_sections import WebConfig
from embedder.sources.fetch import Fetcher
from embedder.sources.source_errors import FetchError
from embedder.sources.web import body
from embedder.sources.web.ahead import DEPTH, DownloadsAhead
from embedder.sources.web.body import SizeLimits

LIMITS = SizeLimits(1 << 20, 1 << 20)
PNG = samples.image_bytes(0)


@pytest.fixture
def fetcher(make_client):
    with Fetcher(WebConfig(allow_private=True, parallel=3, parallel_per_host=3)) as fetcher:
        yield fetcher


def test_items_come_in_their_order_in_parallel_and_a_failure_is_that_of_its_own_item(server, fetcher, tmp_path):
    (tmp_path / "local.png").write_bytes(PNG)
    addresses = server.add_images(9)
    server.routes["/0.png"] = slowly(image(0), 0.2)
    server.routes["/4.png"] = status(404)
    uris = [*addresses[:6], str(tmp_path / "local.png"), *addresses[6:], addresses[0]]
    found = []
    with fetcher.ahead(uris, max_bytes=1 << 20):
        for uri in uris:
            try:
                with fetcher.fetch(uri, max_bytes=1 << 20) as fetched:
                    found.append(fetched.data if fetched.path is None else fetched.path.read_bytes())
            except FetchError as error:
                found.append(error.error_type)
    numbers = [0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 0]
    assert found == ["NotFound" if number == 4 else samples.image_bytes(number) for number in numbers]
    assert 2 <= server.most_at_once <= 3
    assert len(server.requests) == 10


def test_no_more_is_fetched_ahead_than_a_few(server, make_client):
    client = make_client(parallel=2)
    addresses = server.add_images(20)
    downloads = DownloadsAhead(client, addresses, LIMITS)
    assert downloads.take(addresses[0]).data == PNG
    assert downloads.take("http://127.0.0.1/another.png") is None
    downloads._pool.submit(int).result()  # what was begun before is through, or in the other thread
    downloads.close()
    assert len(server.requests) <= DEPTH * 2 + 1


def test_what_nobody_took_leaves_no_file_and_what_hangs_is_ended(server, make_client, downloads, monkeypatch):
    monkeypatch.setattr(body, "HELD_BYTES", 10)
    hangs = threading.Event()

    def hang(handler):
        hangs.set()
        handler.server.is_closing.wait()

    addresses = [*server.add_images(3), f"{server.url}/hangs.png"]
    server.routes["/hangs.png"] = hang
    ahead = DownloadsAhead(make_client(parallel=4), addresses, LIMITS)
    with ahead.take(addresses[0]) as first:
        hangs.wait()
        for _, download in list(ahead._under_way)[:2]:
            download.result()
        assert len(list(downloads.iterdir())) == 3
        ahead.close()  # within the idle time of 5 s, or the test's own limit ends it
        assert list(downloads.iterdir()) == [first.path]
    assert list(downloads.iterdir()) == []


def test_a_reader_of_a_store_reaches_private_addresses_only_where_the_environment_says_so(server, monkeypatch):
    (address,) = server.add_images(1)
    monkeypatch.delenv("EMBEDDER_ALLOW_PRIVATE", raising=False)
    with Fetcher() as fetcher, pytest.raises(FetchError, match="PrivateAddress"):
        fetcher.fetch(address, max_bytes=1 << 20)
    monkeypatch.setenv("EMBEDDER_ALLOW_PRIVATE", "1")
    with Fetcher() as fetcher:
        assert fetcher.fetch(address, max_bytes=1 << 20).data == PNG
