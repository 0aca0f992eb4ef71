"""Real reverse proxies with TLS on this machine, of a configuration as documented, and a client of them."""

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import free_port

NAME = "search.example.org"
CLIENT = "127.0.0.2"  # another address than the proxy's own, so that the service can distinguish them
TIMEOUT_S = 60.0
POLL_S = 0.05


def program(name: str) -> str:
    """Path of a program of Debian's package of that name; without it the test is skipped."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(
            f"no {name}: install Debian's package (apt-get install {name}) to test what docs/serve.md says of it"
        )
    return found


def put(text: str, values: dict[str, str]) -> str:
    """Put other values in the place of some that a text must have."""
    for old, new in values.items():
        assert old in text, f"the documentation does not say {old!r} any more"
        text = text.replace(old, new)
    return text


class ProxyClient:
    """Client of a proxy by its name, from its own address; each request has its own connection."""

    def __init__(self, port: int, certificates: Path) -> None:
        self.port = port
        self._context = ssl.create_default_context(cafile=certificates)

    def ask(self, method: str, path: str, body=None, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request; status, headers and body of the answer."""
        connection = http.client.HTTPConnection(NAME, self.port, timeout=TIMEOUT_S)
        plain = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S, (CLIENT, 0))
        connection.sock = self._context.wrap_socket(plain, server_hostname=NAME)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, {"Host": NAME} | named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@contextmanager
def nginx(server: str, service: str, folder: Path) -> Iterator[ProxyClient]:
    """Run nginx with a `server` block of the documentation."""
    command, openssl = program("nginx"), program("openssl")
    certificate, key, port = folder / "certificate.pem", folder / "key.pem", free_port()
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    live = f"/etc/letsencrypt/live/{NAME}"
    values = {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        f"{live}/fullchain.pem": str(certificate),
        f"{live}/privkey.pem": str(key),
        "127.0.0.1:8765": service,
    }
    folders = "".join(
        f"{each}_temp_path {folder / each};\n" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""  # else its workers could not enter the test's folder
    (folder / "nginx.conf").write_text(
        f"{user} worker_processes 1; daemon off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{folders}{put(server, values)}}}\n"
    )
    with _running([command, "-p", folder, "-c", folder / "nginx.conf"], folder, port, certificate):
        yield ProxyClient(port, certificate)


@contextmanager
def caddy(site: str, service: str, folder: Path) -> Iterator[ProxyClient]:
    """Run Caddy with a site of the documentation; it makes its certificate itself, as no authority knows the name."""
    command, port = program("caddy"), free_port()
    options = [
        "admin off",
        "local_certs",
        "skip_install_trust",
        "auto_https disable_redirects",
        "default_bind 127.0.0.1",
        f"https_port {port}",
        f"storage file_system {folder}",
    ]
    text = "{\n" + "".join(f"    {each}\n" for each in options) + "}\n" + put(site, {"127.0.0.1:8765": service})
    (folder / "Caddyfile").write_text(text)
    root = folder / "pki" / "authorities" / "local" / "root.crt"
    arguments = ["run", "--config", folder / "Caddyfile", "--adapter", "caddyfile"]
    with _running([command, *arguments], folder, port, root):
        yield ProxyClient(port, root)


@contextmanager
def _running(command: list[str | Path], folder: Path, port: int, certificates: Path) -> Iterator[None]:
    """Run a proxy until the end, from when a handshake with its certificate succeeds."""
    log = folder / "log"
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not _is_ready(port, certificates):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(POLL_S)
            yield
        finally:
            process.terminate()


def _is_ready(port: int, certificates: Path) -> bool:
    try:
        context = ssl.create_default_context(cafile=certificates)
        with (
            socket.create_connection(("127.0.0.1", port), 1) as plain,
            context.wrap_socket(plain, server_hostname=NAME),
        ):
            return True
    except OSError:  # of a certificate that is not made yet, too
        return False
