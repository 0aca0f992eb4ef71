"""`embedder serve` as a process: shows its address, drains on SIGTERM, and refuses in one line what it can't serve."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import samples
from command_runs import run_here
from served import Served, make_store
from store_samples import row
from store_states import new_store, publish_refresh

from embedder.plugins.serve.run_server import listening_problem
from embedder.plugins.serve.serve_settings import server_url

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "a.png").write_bytes(samples.image_bytes(0))
    files = new_store(folder / "store")
    publish_refresh(files, row("a.png", uri=str(folder / "a.png")))
    return folder / "store"


@contextmanager
def process(store, *options):
    """Run the command; gives the process and its address."""
    command = [sys.executable, "-m", "embedder", "serve", "--store", str(store), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            line = running.stdout.readline()
            assert line.startswith(f"serving {store} at http://127.0.0.1:"), line + running.stderr.read()
            yield running, line.split()[-1]
        finally:
            running.kill()


def refusal(store, *options):
    """The last line of a command that ends at once; before it stands at most that this store's model is gone."""
    ended = run_here("serve", "--store", store, *options)
    assert ended.code == 2, ended.stderr
    *before, line = ended.stderr.splitlines()
    assert len(before) <= 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return line


@pytest.mark.medium
def test_a_signal_first_turns_balancers_away_and_then_ends_the_process_well(tiny_model, tmp_path):
    config, _ = make_store(tmp_path / "made", tiny_model)
    query = {"vector": [1.0] + [0.0] * 23}
    with process(config.store, "--cache-dir", str(tmp_path), "--limit", "drain_s=3") as (running, url):
        served = Served(url, None, None)
        assert served.get("/readyz?token=hunter2secret").status == 200
        assert served.search(query).status == 200
        running.send_signal(signal.SIGTERM)
        for _ in range(100):
            if (answer := served.get("/readyz")).status == 503:
                break
            time.sleep(0.02)
        assert answer.error["where"] == "server"
        assert served.search(query).status == 200, "what still comes is answered"
        _, log = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [(line["route"], line["status"]) for line in lines] == [("/search", 200), ("/search", 200)]
    assert set(lines[0]) == {"time", "method", "path", "route", "status", "ms", "bytes", "client"}
    assert "hunter2" not in log


def test_other_machines_are_not_let_in_by_accident(store, tmp_path):
    assert "--token-file FILE, or --no-auth" in refusal(store, "--host", "0.0.0.0")
    token = tmp_path / "token"
    token.write_text("short\n")
    token.chmod(0o600)
    assert "16 or more" in refusal(store, "--host", "0.0.0.0", "--token-file", str(token))


def test_what_can_not_be_served_is_told_in_one_line(store, tmp_path):
    assert "no store.json there" in refusal(tmp_path / "nothing")
    assert "there is no such limit" in refusal(store, "--limit", "nonsense=1")
    assert "rate_per_s" in refusal(store, "--limit", "rate_per_s=-1")
    assert "seconds" not in refusal(store, "--limit", "rate_per_s=x")
    assert "an option sets it" in refusal(store, "--limit", "port=9000")
    assert "an option sets it" in refusal(store, "--limit", "show_uris=true")
    assert "can't listen there" in refusal(store, "--host", "a..b", "--no-auth", "--cache-dir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "another program listens there" in refusal(store, "--port", port, "--cache-dir", str(tmp_path))


def test_a_port_in_use_is_told_as_such():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listening_problem("127.0.0.1", port) == (
            "another program listens there; end it, or give another --port (0 takes a free one)"
        )
    assert listening_problem("192.0.2.1", port) == "can't listen there; give another --host or --port"


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("host", "http://host:80")]
)
def test_addresses_of_ipv6_have_brackets(host, url):
    assert server_url(host, 80) == url
