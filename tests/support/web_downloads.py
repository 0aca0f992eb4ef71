"""Downloads from a server on loopback, as the tests of the web client make them."""

import pytest
import samples

from embedder.sources.source_errors import FetchError
from embedder.sources.web.body import SizeLimits

LIMITS = SizeLimits(image_bytes=1 << 20, video_bytes=2 << 20)
PNG = samples.image_bytes(0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
ENDLESS = b"\x89PNG\r\n\x1a\n" + b"\0" * 65_536


def failure(client, address, limits=LIMITS):
    with pytest.raises(FetchError) as caught:
        client.download(address, limits)
    return caught.value


def asked(server, answer, path="/a.png"):
    """Serve an answer; gives its address."""
    server.routes[path] = answer
    return server.url + path
