"""Fuzz a running query service with what its OpenAPI document allows and forbids: no 5xx but the deliberate 503.

    embedder serve --store runs/shop &
    python scripts/fuzz_serve.py http://127.0.0.1:8765 --seconds 300

Schemathesis makes the requests: valid ones, such with one mistake, and sequences whose later requests use earlier
answers. All statuses are counted from the server's own metrics; the last line is JSON.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness import ask

CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
CONFIGURATION = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]
"""
COUNT = re.compile(r'^embedder_request_seconds_count\{route="([^"]*)",status="(\d+)"\} (\S+)$', re.MULTILINE)
GRACE_S = 120
SEARCH = {"queries": [{"text": "a"}], "k": 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server")
    parser.add_argument("--seconds", type=int, default=300, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of what is made up")
    asked = parser.parse_args()
    url = asked.url.rstrip("/")
    before = statuses(url)
    item = json.loads(answer_of(f"{url}/search", SEARCH))["answers"][0]["hits"][0]["item_id"]
    # Made-up ids are of no item, so that half of the time all requests are about one that exists.
    known = f"[parameters]\nitem_id = {json.dumps(quote(item, safe=''))}\n"
    failed = [fuzz(asked, url, part) for part in ("", known)]
    by_status: dict[str, int] = {}
    for (route, status), count in statuses(url).items():
        new = count - before.get((route, status), 0)
        by_status[status] = by_status.get(status, 0) + new
    faults = sum(count for status, count in by_status.items() if status[0] == "5" and status != "503")
    found = {"seconds": asked.seconds, "requests": sum(by_status.values()), "by_status": by_status, "faults": faults}
    print(json.dumps(found | {"failed": sum(failed)}))
    return int(faults > 0 or any(failed))


def fuzz(asked: argparse.Namespace, url: str, parameters: str) -> bool:
    """Run Schemathesis for half of the time; returns whether it found anything."""
    seconds = max(1, asked.seconds // 2)
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "schemathesis.toml"
        configuration.write_text(parameters + CONFIGURATION, encoding="utf-8")
        command = [Path(sys.executable).with_name("schemathesis"), "--config-file", configuration, "run"]
        command += [f"{url}/openapi.json", "--url", url, "--max-time", str(seconds), "--checks", CHECKS]
        command += ["--workers", "1", "--seed", str(asked.seed), "--continue-on-failure"]  # four: a tenth of requests
        command += ["--suppress-health-check", "all", "--warnings", "off", "--request-timeout", "60", "--no-color"]
        command += ["--generation-database", "none"]
        done = subprocess.run(command, cwd=folder, timeout=seconds + GRACE_S, check=False)
    return done.returncode != 0


def statuses(url: str) -> dict[tuple[str, str], int]:
    text = answer_of(f"{url}/metrics").decode()
    return {(route, status): int(float(count)) for route, status, count in COUNT.findall(text)}


def answer_of(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Body of an answer that has to be 200."""
    status, content = ask(url, body)
    if status != 200:
        sys.exit(f"{url}: {status} {content[:300]!r}")
    return content


if __name__ == "__main__":
    sys.exit(main())
