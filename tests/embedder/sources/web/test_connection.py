"""Connections: which addresses are of the open internet, what TLS verifies, what a proxy is asked for."""

import base64
import contextlib
import select
import socket
import ssl

import pytest
import samples
from certificates import make_certificate
from web_server import image, web_server

from embedder.sources.source_errors import FetchError
from embedder.sources.web.body import SizeLimits
from embedder.storage import http
from embedder.storage.http import is_public

LIMITS = SizeLimits(1 << 20, 1 << 20)
NAME = "photos.example"
PUBLIC = ("8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::")
PRIVATE = """
    10.0.0.1 172.16.0.1 192.168.1.1 127.0.0.1 0.0.0.0 169.254.169.254 100.64.0.1 100.100.100.200 192.0.0.192 192.0.2.1
    198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 168.63.129.16 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1
    ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::7f00:1 2002:7f00:1:: 2002:a9fe:a9fe:: 2001::1
    2001:db8::1 3fff::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1
"""


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_open_internet(address):
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_of_private_networks_of_clouds_and_of_nobody(address):
    assert not is_public(address)


@pytest.fixture
def named(monkeypatch):
    """Has every name lead to loopback."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda host, port, **options: look_up("127.0.0.1", port, **options))


@pytest.fixture
def secure(server, tmp_path, monkeypatch):
    """A server with TLS, whose certificate for NAME is trusted."""
    pem = make_certificate(tmp_path, NAME)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.names = []
    context.sni_callback = lambda _, name, __: server.names.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.routes["/a.png"] = image(0)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    return server


def test_a_certificate_is_verified_for_the_name_not_for_the_ip_address_connected_to(secure, client, named):
    address = f"https://{NAME}:{secure.server_port}/a.png"
    for _ in range(3):
        assert client.download(address, LIMITS).data == samples.image_bytes(0)
    assert secure.names == [NAME]  # one handshake, with the name of the address (SNI)
    assert secure.num_connections == 1
    with pytest.raises(FetchError, match="BadCertificate"):
        client.download(f"https://other.example:{secure.server_port}/a.png", LIMITS)


def test_a_certificate_that_nobody_vouches_for_is_refused_and_not_tried_again(secure, client, named, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(FetchError) as caught:
        client.download(f"https://{NAME}:{secure.server_port}/a.png", LIMITS)
    assert (caught.value.error_type, caught.value.transient) == ("BadCertificate", False)
    assert len(secure.names) == 1


def test_a_server_that_drips_over_tls_wins_no_time(secure, make_client, named):
    secure.routes["/slow.png"] = lambda handler: handler.drip(b"H")
    with pytest.raises(FetchError, match="no whole answer within"):
        make_client(timeout_s=0.5).download(f"https://{NAME}:{secure.server_port}/slow.png", LIMITS)


def test_a_server_that_never_finishes_the_handshake_wins_no_time(server, make_client, named):
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(FetchError, match="no byte within"):
        client = make_client(idle_timeout_s=0.2, max_tries=1)
        client.download(f"https://{NAME}:{mute.getsockname()[1]}/a.png", LIMITS)


def tunnel(handler):
    """Answer CONNECT, as a proxy does: to this server itself, whatever is named."""
    handler.server.requests.append((handler.command, handler.path, dict(handler.headers)))
    handler.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    with socket.create_connection(handler.server.behind) as behind:
        pair = {handler.connection: behind, behind: handler.connection}
        while not handler.server.is_closing.is_set():
            for ready in select.select(list(pair), [], [], 0.05)[0]:
                data = ready.recv(65_536)
                if not data:
                    return
                pair[ready].sendall(data)


@pytest.fixture
def proxy(monkeypatch):
    """A proxy with a name and a password, named by the environment."""
    with web_server() as proxy:
        handler = proxy.RequestHandlerClass
        monkeypatch.setattr(handler, "do_CONNECT", tunnel, raising=False)
        yield proxy


def use(proxy, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy.url.replace("://", "://me:p%40ss@"))


AUTHORIZATION = f"Basic {base64.b64encode(b'me:p@ss').decode()}"


def test_a_proxy_is_used_where_it_is_allowed_and_told_of_where_it_is_not(proxy, make_client, monkeypatch):
    plain, proxied = make_client(max_tries=1), make_client(use_proxy=True, allow_private=False)
    use(proxy, monkeypatch)
    proxy.routes["http://photos.example/a.png"] = image(1)
    assert proxied.download("http://photos.example/a.png", LIMITS).data == samples.image_bytes(1)
    (method, path, headers) = proxy.requests[0]
    assert (method, path, headers["Host"]) == ("GET", "http://photos.example/a.png", NAME)
    assert headers["Proxy-Authorization"] == AUTHORIZATION
    with pytest.raises(FetchError, match="web.use_proxy = true connects through it|which web.use_proxy = true"):
        plain.download("http://127.0.0.1:1/a.png", LIMITS)
    assert len(proxy.requests) == 1


def test_a_proxy_is_not_asked_for_a_private_address(proxy, make_client, monkeypatch):
    client = make_client(use_proxy=True, allow_private=False)
    use(proxy, monkeypatch)
    with pytest.raises(FetchError, match="PrivateAddress"):
        client.download("http://169.254.169.254/latest/meta-data", LIMITS)
    assert proxy.num_connections == 0


def test_tls_goes_through_a_proxy_verified_and_without_its_password(secure, proxy, make_client, monkeypatch):
    proxy.behind = secure.server_address
    client = make_client(use_proxy=True)
    use(proxy, monkeypatch)
    address = f"https://{NAME}:{secure.server_port}/a.png"
    assert client.download(address, LIMITS).data == samples.image_bytes(0)
    (method, path, headers) = proxy.requests[0]
    assert (method, path) == ("CONNECT", f"{NAME}:{secure.server_port}")
    assert headers["Proxy-Authorization"] == AUTHORIZATION
    assert "Proxy-Authorization" not in secure.requests[0][2]
    with contextlib.closing(client), pytest.raises(FetchError, match="BadCertificate"):
        client.download(address.replace(NAME, "other.example"), LIMITS)


@pytest.mark.parametrize("proxy", ["http://me:SECRET@proxy:port", "me:SECRET@", "http://[::1", "http://a b:3128", "//"])
def test_a_proxy_that_is_no_address_is_named_without_its_password(make_client, monkeypatch, proxy):
    client = make_client(use_proxy=True, max_tries=1)
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(FetchError) as caught:
        client.download(f"https://{NAME}/a.png", LIMITS)
    assert (caught.value.error_type, caught.value.transient) == ("NetworkError", True)
    assert "https_proxy of the environment has no valid host and port" in caught.value.message
    assert "SECRET" not in caught.value.message
