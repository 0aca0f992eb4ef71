"""Address of a Ray cluster: where it is named, its form, and whether a Ray answers there. Imports no Ray."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

from embedder.errors import ConfigError

RAY_ADDRESS = "RAY_ADDRESS"
LOCAL = ("", "local")
TIMEOUT_S = 5.0  # for a connection, and for the first answer
HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")

# First bytes of an HTTP/2 client, such as gRPC, with empty settings (RFC 9113, 3.4). A server sends its own settings
# first to anyone, without a token.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
FRAME_BYTES, FRAME_TYPE, SETTINGS = 9, 3, 4


def find_cluster(configured: str | None, engine: str) -> str | None:
    """Return the address of the cluster to use, once something answers there; None for this machine.

    The engine `local` ignores the environment and waits for no answer. Raises `ConfigError` if the address is
    malformed, or no Ray answers there.
    """
    address = resolve_address(configured, {} if engine == "local" else os.environ)
    if address is not None and engine != "local":
        check_answer(address)
    return address


def resolve_address(configured: str | None, environ: Mapping[str, str]) -> str | None:
    """Return HOST:PORT, or None for a Ray started on this machine.

    `configured` (HOST:PORT, `auto` or `local`) overrides RAY_ADDRESS in `environ`. Raises `ConfigError` if the address
    has another form, or `auto` finds no cluster.
    """
    key, address = "ray_address", configured
    if address in (None, "auto") and environ.get(RAY_ADDRESS):
        key, address = RAY_ADDRESS, environ[RAY_ADDRESS]
    if address is None or address in LOCAL:
        return None
    if address == "auto":
        return _of_node_here()
    if address.startswith("ray://"):
        host = address.removeprefix("ray://").rpartition(":")[0] or "HOST"
        raise ConfigError(
            f"{key} {address}: this is the address of a Ray Client, which can't run a pipeline; run this command on a "
            f"node of the cluster, with {host}:6379 (the port of `ray start --head`)"
        )
    found = HOST_AND_PORT.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ConfigError(
            f'{key} {address}: this is no address of a cluster; write HOST:PORT, as 10.0.0.1:6379, "auto" for the one '
            'that this machine is a node of, or "local" for none'
        )
    return address


def check_answer(address: str) -> None:
    """Refuse an address where no Ray answers, with a `ConfigError`."""
    if problem := find_problem(address):
        raise ConfigError(f"ray_address {address}: {problem}; check the address, and that the cluster's head runs")


def find_problem(address: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Connect to an address, and return what is wrong; None if a gRPC server answers."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):  # needs a handshake first
                return None
            connection.sendall(HELLO)
            answer = b""
            while len(answer) < FRAME_BYTES and (more := connection.recv(FRAME_BYTES - len(answer))):
                answer += more
    except (socket.gaierror, UnicodeError):  # of a name with an empty or too long part
        return f"no host of the name {host} is known here"
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return f"it can't be reached ({error.strerror or error})"
    is_grpc = len(answer) == FRAME_BYTES and answer[FRAME_TYPE] == SETTINGS
    return None if is_grpc else "something listens there, but it is no Ray"


def _of_node_here() -> str:
    """Return the address of the cluster that this machine is a node of.

    Raises `ConfigError` if it belongs to none, or to several.
    """
    addresses: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "raylet":
                words = (word for word in process.cmdline() if word.startswith("--gcs-address="))
                addresses |= {word.partition("=")[2] for word in words}
    if len(addresses) == 1:
        return addresses.pop()
    found = (
        f"nodes of {len(addresses)} clusters run here ({', '.join(sorted(addresses))})"
        if addresses
        else "none runs here"
    )
    raise ConfigError(
        f'ray_address "auto": {found}; it means the cluster that this machine is a node of: start one here with `ray '
        "start --address=HOST:PORT`, or name the address"
    )
