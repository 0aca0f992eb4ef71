"""An S3 server on this machine, from the package moto, in its own process: `bucket_server.py` prints its URL.

moto checks If-Match and If-None-Match and then writes; between the two another request could come. Requests are
therefore served one at a time, which makes its conditional writes as atomic as those of S3.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from embedder.storage import object_stores

KEY, SECRET = "canary-access-key", "canary/secret+with=signs"


def serve(obeys_conditions: bool, log: Path | None) -> None:
    """Answer until killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ, start_response):
        if not obeys_conditions:
            environ = {name: value for name, value in environ.items() if not name.startswith("HTTP_IF_")}
        with one_at_a_time:
            body = b"".join(moto(environ, start_response))
            if log is not None:
                with log.open("a") as file:
                    print(environ["REQUEST_METHOD"], environ["PATH_INFO"], len(body), file=file)
            return [body]

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


@contextlib.contextmanager
def running_server(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start a server; yields its URL and process."""
    process = subprocess.Popen([sys.executable, str(Path(__file__)), *options], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def make_bucket(url: str, name: str) -> None:
    """Make an empty bucket."""
    connection = HTTPConnection(urlsplit(url).netloc)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def bucket_on(url, monkeypatch):
    """Make a bucket on a server, and set the environment for it."""
    name = f"team-{secrets.token_hex(4)}"
    make_bucket(url, name)
    for variable in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    settings = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    for variable, value in settings.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("EMBEDDER_LEASE_S", "3")
    object_stores.bucket_store.cache_clear()
    yield f"s3://{name}"
    object_stores.bucket_store.cache_clear()


if __name__ == "__main__":
    logged = [Path(option.removeprefix("--log=")) for option in sys.argv if option.startswith("--log=")]
    serve("--ignore-conditions" not in sys.argv, logged[0] if logged else None)
