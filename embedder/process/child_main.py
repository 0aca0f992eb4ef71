"""The child's side of `embedder.process`: ties its life to the parent's, limits itself, then serves messages.

It is run by its path, isolated (`-I`), in this interpreter or another: it imports only the standard library, and is
written for Python 3.9. It serves the function `serve(channel, **arguments)` of a file that the parent names; the
arguments are the first message, as JSON. Output goes to the parent, which shows its end if the child dies.

Messages in both directions have one byte of a kind, eight of a length (big-endian), and that many bytes.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
from pathlib import Path
from typing import Any

HEADER = struct.Struct(">cQ")
START, FAILED, JSON = b"S", b"F", b"J"
"""Kinds of messages: the first one, an error, and other JSON messages; the served function may have others."""
LIFELINE = 0  # standard input: an unused pipe, whose other end closes when the parent dies


def main() -> None:
    """Serve until the parent closes the channel."""
    start = json.loads(sys.argv[1])
    die_with_parent()
    for name in start["ignored"]:  # the parent first finishes work in progress
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if start["memory_bytes"] is not None:
        bound_memory(start["memory_bytes"])
    faulthandler.enable()  # prints the place of a crash
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if start["sys_path"] is not None:
        sys.path[:] = start["sys_path"]
    channel = Channel(start["channel_fd"])
    try:
        serve = import_file(start["entry"]).serve
    except Exception as error:  # noqa: BLE001 - of what this interpreter has or lacks
        channel.send_error(error)
    else:
        serve(channel, **json.loads(channel.receive() or b"{}"))


def die_with_parent() -> None:
    """Make the kernel end this process as soon as the parent is gone, whatever C code it hangs in.

    The end of the lifeline pipe sends a signal. PR_SET_PDEATHSIG wouldn't work: it fires when the *thread* that started
    the child ends, and callers may be short-lived threads. Libraries find an empty standard input.
    """
    lifeline = fcntl.fcntl(LIFELINE, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, LIFELINE)
    os.close(nothing)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if sys.platform == "linux":  # elsewhere SIGIO, whose default action may end the process
        fcntl.fcntl(lifeline, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)  # 10: Python 3.9 has no name for it
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # the parent died before this was set up
        os._exit(1)


def bound_memory(num_bytes: int) -> None:
    """Limit the address space, so that excessive use is an error here and not the end of the machine.

    macOS refuses any limit; `embedder.placement.hardware.FEATURES` says what is lost.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if allowed == resource.RLIM_INFINITY else min(num_bytes, allowed)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except ValueError:
        if sys.platform == "linux":
            raise


def import_file(path: str) -> Any:
    """Import a file under a name that hides no installed module."""
    name = "child_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Channel:
    """Messages from and to the parent."""

    def __init__(self, fd: int) -> None:
        """Take over an open socket; processes started by this one don't inherit it."""
        os.set_inheritable(fd, False)
        self._requests = open(fd, "rb", closefd=False)  # noqa: SIM115 - open until the end
        self._replies = open(fd, "wb", closefd=False)  # noqa: SIM115

    def receive(self) -> bytes | None:
        """Read the content of a message; None once the parent has closed its end."""
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        _, length = HEADER.unpack(header)
        payload = self._requests.read(length)
        return payload if len(payload) == length else None

    def send(self, kind: bytes, content: Any) -> None:
        """Write a message; a BrokenPipeError if the parent has closed its end."""
        payload = json.dumps(content).encode() if isinstance(content, dict) else memoryview(content)
        self._replies.write(HEADER.pack(kind, len(payload)))
        self._replies.write(payload)
        self._replies.flush()

    def send_error(self, error: BaseException) -> None:
        """Report an error's type and message, the module that it didn't find, and this Python's version."""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        python = ".".join(map(str, sys.version_info[:3]))
        self.send(FAILED, {"type": type(error).__name__, "message": str(error), "missing": missing, "python": python})


if __name__ == "__main__":
    main()
