"""Parent's side of a sandbox process: start it, exchange messages with a deadline, end it."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

from embedder.media.limits import DecodeLimits
from shards.schema import parse_json

Message = dict[str, Any]

CHILD_SCRIPT = Path(__file__).with_name("sandbox_main.py")
PACKAGE_ROOT = Path(__file__).parents[2]
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # answers have a few hundred; more is a broken message
STDERR_BYTES = 1 << 14  # only the end of the child's output is kept
BROKEN_MESSAGE = "the decoding process sent a broken message"
REAP_S = 5.0  # a killed process that hangs in the kernel (a dead network disk) is not waited for any longer


class SandboxCrashError(Exception):
    """Error of a child that ended without an answer, or sent a broken message; the text has the details.

    Attributes:
        was_killed: by SIGKILL, which comes from outside: from a machine out of memory, or from a user.
    """

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class SandboxProcess:
    """Running sandbox process.

    Args:
        limits: limits that the child sets for itself.
        inbox_fd: open file of the encoded bytes.
        outbox_fd: open file of the pixels.
        may_use_torch: whether the child may load PyTorch's library.
    """

    def __init__(self, limits: DecodeLimits, inbox_fd: int, outbox_fd: int, *, may_use_torch: bool = True) -> None:
        self._received = self._stderr = b""
        self._control, child_end = socket.socketpair()
        with child_end:
            self._process = _spawn(limits, child_end.fileno(), inbox_fd, outbox_fd, may_use_torch)
        self._stderr_fd = cast(IO[bytes], self._process.stderr).fileno()
        os.set_blocking(self._stderr_fd, False)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._stderr_fd, select.POLLIN)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds of the child so far; 0 once it has ended."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            SandboxCrashError: the child has ended.
        """
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._death() from None

    def receive(self, timeout_s: float) -> Message:
        """Wait for the next message.

        Raises:
            TimeoutError: there was none in time; the child still runs.
            SandboxCrashError: the child ended, or sent a broken message.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE_BYTES:
                raise self._death()
            self._read_some(deadline)
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = parse_json(line)
        except ValueError:
            raise self._death() from None
        if not isinstance(message, dict):
            raise self._death()
        return message

    def kill(self) -> None:
        """Kill the child, and close everything that belongs to it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        self._control.close()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_some(self, deadline: float) -> None:
        remaining_ms = (deadline - time.monotonic()) * 1000
        events = self._poll.poll(max(0.0, remaining_ms))
        if not events and remaining_ms <= 0:
            raise TimeoutError
        for fd, _ in events:
            if fd == self._stderr_fd:
                if not self._read_stderr():  # closed, as at its end; the control socket shows whether the child ended
                    self._poll.unregister(fd)
                continue
            try:
                received = self._control.recv(READ_BYTES)
            except OSError:
                raise self._death() from None
            if not received:
                raise self._death()
            self._received += received

    def _read_stderr(self) -> bool:
        """Empty the pipe, and keep the end of the output for the error message of a crash.

        Returns:
            Whether there was any output.
        """
        try:
            output = os.read(self._stderr_fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._stderr = (self._stderr + output)[-STDERR_BYTES:]
        return bool(output)

    def _death(self) -> SandboxCrashError:
        """Describe how the child ended; one that sent a broken message is ended here."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # it has closed its end: its exit status follows at once
        code = self._process.poll()
        if code is None:
            self._process.kill()
            return SandboxCrashError(BROKEN_MESSAGE)
        while self._read_stderr():  # ends: the writer is dead
            pass
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        last_words = _last_words(self._stderr.decode(errors="replace"))
        message = f"the decoder {how}" + (f": {last_words}" if last_words else "")
        return SandboxCrashError(message, was_killed=code == -signal.SIGKILL)


def _spawn(
    limits: DecodeLimits, control_fd: int, inbox_fd: int, outbox_fd: int, may_use_torch: bool
) -> "subprocess.Popen[bytes]":
    server = {
        "control_fd": control_fd,
        "inbox_fd": inbox_fd,
        "outbox_fd": outbox_fd,
        "max_pixels": limits.max_pixels,
        "max_file_bytes": limits.max_file_bytes,
        "may_use_torch": may_use_torch,
    }
    start = {"memory_bytes": limits.memory_bytes, "sys_path": _module_search_path(), "server": server}
    # -I -S: no site-packages hooks (a third of the start-up); the search path is handed over instead.
    command = [sys.executable, "-I", "-S", str(CHILD_SCRIPT), json.dumps(start)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # the lifeline: see `sandbox_main.py`
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(control_fd, inbox_fd, outbox_fd),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(output: str) -> str:
    """One line of a dead child's output: the place of the crash (faulthandler), else the end of the output."""
    _, is_crash, stack = output.rpartition("(most recent call first):")
    if is_crash:
        return "in " + stack.strip().partition("\n")[0].strip()
    return " ".join(output.split())[-300:]


def _module_search_path() -> list[str]:
    """Module search path of this process, as absolute folders, and the folder of this package."""
    folders = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" means the working folder
    return folders if str(PACKAGE_ROOT) in folders else [*folders, str(PACKAGE_ROOT)]
