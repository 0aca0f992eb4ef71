"""Process of another interpreter: loads a servable's program, and answers batches over pipes.

Run by its path by `embedder.servables.interpreter`, isolated (`-I`), in an interpreter that has pyarrow and a framework
alone: it imports nothing of this package but `program.py` beside it, by its path, and is written for Python 3.9.

Messages, both ways: one byte of a kind, eight of a length (big-endian), and that many bytes of JSON or of an Arrow IPC
stream. Standard output goes where standard error goes, so that what a library prints breaks no message.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib.util
import json
import os
import platform
import select
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

PROTOCOL = 1
HEADER = struct.Struct(">cQ")
START, HELLO, READY, BATCH, TABLE, FAILED = b"S", b"H", b"R", b"B", b"T", b"F"
LIFELINE = 0  # standard input: a pipe that nothing is written to; its other end closes when the parent dies


def main() -> None:
    """Serve until the parent closes its pipe."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends what is in flight first
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests_fd, replies_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (requests_fd, replies_fd):
        os.set_inheritable(fd, False)
    with open(requests_fd, "rb") as requests, open(replies_fd, "wb") as replies:
        serve(requests, replies)


def die_with_parent() -> None:
    """Have the kernel end this process, whatever C code it hangs in, as soon as the parent is gone.

    The end of the lifeline pipe sends a signal. PR_SET_PDEATHSIG would not do: it fires when the *thread* that
    started the child ends. Libraries find an empty standard input.
    """
    lifeline = fcntl.fcntl(LIFELINE, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, LIFELINE)
    os.close(nothing)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if sys.platform == "linux":  # elsewhere it is SIGIO, which ends a process that isn't stopped
        fcntl.fcntl(lifeline, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)  # 10: Python 3.9 has no name for it
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # it died before this was set up
        os._exit(1)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Greet, load the program, and answer batch after batch.

    Args:
        requests: messages of the parent.
        replies: messages to it.
    """
    start = json.loads(receive(requests) or b"{}")
    try:
        import pyarrow as pa
    except ImportError as error:
        send(replies, HELLO, {**versions(None), "error": str(error)})
        return
    send(replies, HELLO, versions(pa.__version__))
    sys.path.extend(path for path in start["search_path"] if path not in sys.path)
    try:
        module = import_file(start["program_file"])
        program = module.ServableProgram(start["place"], start["class_name"], start["settings"])
        loaded = module.LoadedProgram(program, start["device"], start["num_threads"])
    except Exception as error:  # noqa: BLE001 - of any framework, or of the user's own code
        send(replies, FAILED, describe_error(error))
        return
    send(replies, READY, {})
    while (payload := receive(requests)) is not None:
        answer(loaded, payload, replies)
    loaded.close()


def answer(loaded: Any, payload: bytes, replies: BinaryIO) -> None:
    """Compute a batch and send its table, or why there is none.

    Args:
        loaded: the program.
        payload: the batch, an Arrow IPC stream.
        replies: messages to the parent.
    """
    import pyarrow as pa

    try:
        (batch,) = pa.ipc.open_stream(payload)
        table = loaded(batch)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    except Exception as error:  # noqa: BLE001 - of any framework, or of the user's own code
        send(replies, FAILED, describe_error(error))
    else:
        send(replies, TABLE, sink.getvalue())


def import_file(path: str) -> Any:
    """Import a file under a name that hides no installed module."""
    name = "servable_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def versions(pyarrow: str | None) -> dict[str, Any]:
    """Versions that the parent checks."""
    return {"protocol": PROTOCOL, "python": platform.python_version(), "pyarrow": pyarrow}


def describe_error(error: BaseException) -> dict[str, Any]:
    """Type and message of an error, and the module that it didn't find."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return {"type": type(error).__name__, "message": str(error), "missing": missing}


def receive(requests: BinaryIO) -> bytes | None:
    """Read a message; none once the parent has closed its pipe."""
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    _, length = HEADER.unpack(header)
    payload = requests.read(length)
    return payload if len(payload) == length else None


def send(replies: BinaryIO, kind: bytes, content: Any) -> None:
    """Write a message.

    Args:
        replies: messages to the parent.
        kind: one byte.
        content: an Arrow buffer; anything else as JSON.
    """
    payload = json.dumps(content).encode() if isinstance(content, dict) else memoryview(content)
    replies.write(HEADER.pack(kind, len(payload)))
    replies.write(payload)
    replies.flush()


if __name__ == "__main__":
    main()
