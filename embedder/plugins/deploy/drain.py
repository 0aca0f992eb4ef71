"""End of a pod or node: the command that runs here is asked to stop, and Ray moves this node's work elsewhere."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

LOG = logging.getLogger(__name__)
JOBS = ("embed", "refresh", "train", "evaluate")
LOOK_S = 0.5
ANSWER_S = 20.0  # in which Ray's head has to accept; it may be gone already


@dataclass(frozen=True)
class NodeHere:
    """This machine's or pod's node of a cluster: its raylet, Ray's id, and the head's GCS address (HOST:PORT)."""

    process: psutil.Process
    node_id: str
    address: str


def drain(within_s: float) -> list[str]:
    """Stop what runs here and leave the cluster within a time; return what was done, a line each.

    A command of `JOBS` gets SIGTERM once: it finishes what is in flight and keeps it. A worker's node is drained: it
    gets no new blocks. Both are waited for; what is not done in time is left to the pod's end.
    """
    deadline_s = time.monotonic() + within_s
    commands, nodes = _commands(), list(_nodes())
    done = [f"{len(commands)} commands asked to stop"] if commands else []
    for command in commands:
        with suppress(psutil.Error):
            command.terminate()
    left = _wait(commands, deadline_s)
    done += [f"process {process.pid} still runs" for process in left]
    for node in nodes:
        if _leave(node, deadline_s - time.monotonic()):
            is_left = _wait([node.process], deadline_s)
            done.append(f"node {node.node_id[:8]} is drained" + (", and still runs" if is_left else ""))
    return done or ["nothing runs here"]


def is_job(words: Sequence[str]) -> bool:
    """Whether a process is a command that knows how to stop: `embedder embed`, or the module by Python."""
    for number, word in enumerate(words[:-1]):
        if number <= 2 and PurePath(word).name == "embedder":  # python -m embedder has it as the third word
            return words[number + 1] in JOBS
    return False


def option(words: Sequence[str], name: str) -> str | None:
    """Value of an option that is written as `--name=value`."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def _commands() -> list[psutil.Process]:
    """Commands that run here, without their children of the same command line."""
    found = {process.pid: process for process, words in _processes() if is_job(words)}
    return [process for process in found.values() if process.info["ppid"] not in found]


def _nodes() -> Iterator[NodeHere]:
    """Workers' nodes that run here; the head is not drained, as its work can't move elsewhere."""
    for process, words in _processes():
        if PurePath(words[0]).name == "raylet" and "--head" not in words:
            node_id, address = option(words, "node_id"), option(words, "gcs-address")
            if node_id and address:
                yield NodeHere(process, node_id, address)


def _processes() -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in psutil.process_iter(["ppid"]):
        with suppress(psutil.Error):
            if words := process.cmdline():
                yield process, words


def _leave(node: NodeHere, within_s: float) -> bool:
    """Report to the head that this node leaves; False if it doesn't accept."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "drain-node", "--address", node.address, "--node-id", node.node_id]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is stopped"]
    seconds = ["--deadline-remaining-seconds", str(max(1, int(within_s)))]
    try:
        found = subprocess.run([*command, *reason, *seconds], capture_output=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        LOG.warning(f"node {node.node_id[:8]} is not drained: {error}")
        return False
    if found.returncode:
        LOG.warning(f"node {node.node_id[:8]} is not drained: the head {node.address} does not accept it, or is gone")
    return found.returncode == 0


def _wait(processes: Iterable[psutil.Process], deadline_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; return those that are left at the deadline."""
    left = list(processes)
    while (left := [each for each in left if each.is_running() and _is_alive(each)]) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    return left


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
