"""A query service in a thread of the test's process, on a free port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from embedder.plugins.serve.run_server import DrainingServer
from embedder.plugins.serve.serve_settings import ServeSettings

START_TIMEOUT_S = 60.0


@contextmanager
def running(store, **settings) -> Iterator[str]:
    """Serve a store; yields the address."""
    urls: list[str] = []
    listening = threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        listening.set()

    server = DrainingServer(ServeSettings(**({"store": str(store), "port": 0, "drain_s": 0} | settings)), tell)
    thread = threading.Thread(target=server.run, name="query service")
    thread.start()
    try:
        assert listening.wait(START_TIMEOUT_S), "the service did not start"
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
    assert not thread.is_alive(), "the service did not end"
