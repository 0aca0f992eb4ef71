import socket
import threading
from contextlib import contextmanager

import pytest

from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.executors.cluster_address import RAY_ADDRESS, find_cluster, find_problem, resolve_address
from embedder.ingest.embed import embed

SETTINGS_FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def listening(answer=None):
    """A port that takes connections; it answers the first bytes, or keeps silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with server.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(answer)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def refusal(configured, environ=None):
    with pytest.raises(ConfigError) as caught:
        resolve_address(configured, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_configuration_goes_before_the_environment():
    environ = {RAY_ADDRESS: "10.0.0.1:6379"}
    assert resolve_address(None, environ) == "10.0.0.1:6379"
    assert resolve_address("auto", environ) == "10.0.0.1:6379", "as Ray has it"
    assert resolve_address("10.0.0.2:6379", environ) == "10.0.0.2:6379"
    assert resolve_address("local", environ) is None
    assert resolve_address(None, {}) is None
    assert resolve_address(None, {RAY_ADDRESS: ""}) is None
    assert resolve_address("[::1]:6379", {}) == "[::1]:6379"


def test_a_ray_client_is_refused_with_the_address_that_works():
    message = refusal("ray://head.example:10001")
    assert message.startswith("ray_address ray://head.example:10001: ") and "with head.example:6379" in message
    assert refusal(None, {RAY_ADDRESS: "ray://h:10001"}).startswith("RAY_ADDRESS ray://h:10001: ")


@pytest.mark.parametrize("address", ["head", "head:", "head:0", "head:65536", "http://head:8265", "a b:6379", ":6379"])
def test_what_is_no_address_is_refused_with_the_forms_that_are(address):
    message = refusal(address)
    assert f"ray_address {address}: " in message and "HOST:PORT" in message and '"auto"' in message


def test_auto_on_a_machine_that_is_no_node_says_so(monkeypatch):
    monkeypatch.setattr("psutil.process_iter", lambda: iter(()))
    assert "none runs here" in refusal("auto")


def test_each_kind_of_silence_has_its_own_cause():
    assert find_problem(closed_port()) == "nothing listens there"
    assert find_problem("no-such-host.invalid:6379") == "no host of the name no-such-host.invalid is known here"
    assert find_problem("head..cluster:6379") == "no host of the name head..cluster is known here"
    with listening() as silent:
        assert find_problem(silent, timeout_s=0.2) == "no answer within 0.2 s"
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web_server:
        assert find_problem(web_server) == "something listens there, but it is no Ray"
    with listening(b"") as closes:
        assert find_problem(closes) == "something listens there, but it is no Ray"
    with listening(SETTINGS_FRAME) as server_of_grpc:
        assert find_problem(server_of_grpc) is None


def test_a_local_run_takes_no_notice_of_a_cluster_in_the_environment(monkeypatch):
    monkeypatch.setenv(RAY_ADDRESS, closed_port())
    assert find_cluster(None, "local") is None
    with pytest.raises(ConfigError, match="nothing listens there"):
        find_cluster(None, "auto")


def test_a_run_is_refused_before_it_makes_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv(RAY_ADDRESS, closed_port())
    store = tmp_path / "store"
    config = RunConfig(model="embedder/demo_model", store=str(store), source=({"path": str(tmp_path)},))
    with pytest.raises(ConfigError, match="check the address, and that the cluster's head runs"):
        embed(config)
    assert not store.exists()
