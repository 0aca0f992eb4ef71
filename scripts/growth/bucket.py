"""Many objects in a bucket on this machine, as a listing sees them.

    python -m growth.bucket 2000000 0      # serves them until it is ended; prints its address first

The server speaks what a listing asks of S3 (ListObjectsV2 with prefix, delimiter and continuation, HEAD) and makes each
page up when it is asked for: there are no objects, so that two million take no memory. Each answer waits a while, as
those of a bucket do.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from corpus import DEMO_MODEL, write_config
from growth.names import CHANGED_EVERY, check, take, to_embed
from harness import EMBEDDER, environment

PER_FOLDER = 10_000
PAGE = 1000
LATENCY_S = 0.02
FOLDER = "pictures"
XML = "<ListBucketResult><Name>many</Name><KeyCount>{count}</KeyCount><IsTruncated>{more}</IsTruncated>{content}{next}"


class ManyObjects(BaseHTTPRequestHandler):
    """Answers of a bucket with `num_objects` objects, thousands in each folder of `pictures/`."""

    num_objects: ClassVar[int]  # their number
    changed_every: ClassVar[int]  # one in so many has changed; 0: none
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Answer that there is no object of just this name."""
        self._send(404, "")

    def do_GET(self) -> None:
        """Answer a request for a page of names."""
        time.sleep(LATENCY_S)
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self._send(200, self.page(query.get("prefix", ""), query.get("delimiter"), query.get("continuation-token")))

    def page(self, prefix: str, delimiter: str | None, token: str | None) -> str:
        """Make a page of names, or of folders: answers to the prefixes that a listing of `pictures` asks for."""
        folder = prefix.removeprefix(f"{FOLDER}/").rstrip("/")
        if delimiter and not folder:
            folders = range(0, self.num_objects, PER_FOLDER)
            names = (f"{FOLDER}/{number // PER_FOLDER:06d}/" for number in folders)
            content = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names)
            return XML.format(count=len(folders), more="false", content=content, next="</ListBucketResult>")
        first = int(folder) * PER_FOLDER if folder.isdigit() else 0
        end = min(first + PER_FOLDER, self.num_objects) if folder.isdigit() else 0 if folder else self.num_objects
        start = first if token is None else int(token)
        stop = min(start + PAGE, end)
        following = f"<NextContinuationToken>{stop}</NextContinuationToken>" if stop < end else ""
        content = "".join(map(self._object, range(start, stop)))
        more = str(stop < end).lower()
        return XML.format(count=stop - start, more=more, content=content, next=following + "</ListBucketResult>")

    def _object(self, number: int) -> str:
        key = f"{FOLDER}/{number // PER_FOLDER:06d}/{number:09d}.jpg"
        is_changed = self.changed_every and number % self.changed_every == 0
        return (
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{number:031x}{'f' if is_changed else '0'}&quot;</ETag><Size>{1000 + number % 997}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


class ManyConnections(ThreadingHTTPServer):
    """Server whose connections may come all at once."""

    request_queue_size = 64


@contextlib.contextmanager
def served(num_objects: int, changed_every: int = 0) -> Iterator[dict[str, str]]:
    """Serve a bucket in a process of its own; yields the variables by which clients find it."""
    command = [sys.executable, "-m", "growth.bucket", str(num_objects), str(changed_every)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        url = process.stdout.readline().strip() if process.stdout is not None else ""
        settings = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": "none", "SECRET_ACCESS_KEY": "none"}
        yield {f"AWS_{name}": value for name, value in settings.items()}
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def measure_bucket(root: Path, num_names: int) -> list[dict[str, Any]]:
    """List objects that are all new, make the store of them, list them unchanged, and with 1 % changed.

    Returns:
        What each command took, as of `growth.names.measure_names`.
    """
    root.mkdir()
    source = f"s3://many/{FOLDER}"
    config = write_config(root / "nightly.toml", DEMO_MODEL, root / "store", source, index={"build": False})
    refresh = [*EMBEDDER, "refresh", str(config), "--json"]
    taken = []

    def run(what: str, command: Sequence[str], changed_every: int = 0) -> dict[str, Any]:
        with served(num_names, changed_every) as variables:
            figures, found = take(command, variables)
        taken.append({"num_names": num_names, "what": f"bucket: {what}", **figures})
        return found

    check(to_embed(run("all new, --dry-run", [*refresh, "--dry-run"])) == {"new": num_names}, "all objects are new")
    run("make the store", [sys.executable, "-m", "growth.made_up", "make", str(config)])
    check(run("unchanged", refresh)["num_unchanged"] == num_names, "nothing has changed")
    found = run("1 % changed, --dry-run", [*refresh, "--dry-run"], CHANGED_EVERY)
    num_changed = -(-num_names // CHANGED_EVERY)
    check(to_embed(found) == {"content changed": num_changed}, "one in a hundred has changed")
    return taken


def main() -> None:
    """Serve until killed."""
    ManyObjects.num_objects, ManyObjects.changed_every = map(int, sys.argv[1:3])
    server = ManyConnections(("127.0.0.1", 0), ManyObjects)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
