"""One decoding child process, seen from its parent: start it, talk to it with a deadline, end it."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedder.media.limits import DecodeLimits

Message = dict[str, Any]

CHILD_SCRIPT = Path(__file__).with_name("child.py")
PACKAGE_ROOT = Path(__file__).parents[2]
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # answers have some hundred; more comes from no sane child
STDERR_BYTES = 1 << 14  # of what the child prints, only the end is kept
REAP_S = 5.0  # a killed process that hangs in the kernel (a dead network disk) is not waited for any longer


class SandboxCrashError(Exception):
    """The child ended without an answer; the message says how.

    Attributes:
        was_killed: by SIGKILL, which comes from outside: from a machine out of memory, or from somebody.
    """

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class SandboxTimeoutError(Exception):
    """The child did not answer in time."""


@dataclass
class SandboxProcess:
    """A running decoding child.

    Args:
        limits: bounds that the child sets itself.
        inbox_fd: open file that encoded bytes come in.
        outbox_fd: open file that pixels go out in.
    """

    limits: DecodeLimits
    inbox_fd: int
    outbox_fd: int
    _control: socket.socket = field(init=False)
    _process: "subprocess.Popen[bytes]" = field(init=False)
    _received: bytes = field(default=b"", init=False)
    _stderr: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(theirs.fileno())
        os.set_blocking(self._stderr_fd, False)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._stderr_fd, select.POLLIN)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds that the child has taken so far; none once it has ended."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            SandboxCrashError: there is nobody to read it.
        """
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._death() from None

    def receive(self, timeout_s: float) -> Message:
        """Wait for the next message.

        Raises:
            SandboxTimeoutError: there was none in time; the child still runs.
            SandboxCrashError: the child ended, or what it says is no message.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE_BYTES:
                raise self._death()
            self._read_some(deadline)
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            raise self._death() from None
        if not isinstance(message, dict):
            raise self._death()
        return message

    def kill(self) -> None:
        """End the child at once, whatever it does, and let go of everything that belongs to it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        self._control.close()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _spawn(self, control_fd: int) -> "subprocess.Popen[bytes]":
        start = {
            "control_fd": control_fd,
            "inbox_fd": self.inbox_fd,
            "outbox_fd": self.outbox_fd,
            "memory_bytes": self.limits.memory_bytes,
            "max_pixels": self.limits.max_pixels,
            "max_file_bytes": self.limits.max_file_bytes,
            "sys_path": _module_search_path(),
        }
        # -I -S: no site-packages hooks (a third of the start-up); the search path is handed over instead.
        command = [sys.executable, "-I", "-S", str(CHILD_SCRIPT), json.dumps(start)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # the lifeline: see `child.py`
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(control_fd, self.inbox_fd, self.outbox_fd),
        )

    @property
    def _stderr_fd(self) -> int:
        if self._process.stderr is None:
            raise ValueError("the child's standard error is always a pipe")
        return self._process.stderr.fileno()

    def _read_some(self, deadline: float) -> None:
        remaining_ms = (deadline - time.monotonic()) * 1000
        events = self._poll.poll(max(0.0, remaining_ms))
        if not events and remaining_ms <= 0:
            raise SandboxTimeoutError
        for fd, _ in events:
            if fd == self._stderr_fd:
                if not self._read_stderr():  # closed, as at its end; the control socket tells what became of the child
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
        """Keep the pipe from filling up, and the end of what is said for the error message of a crash.

        Returns:
            Whether there was anything.
        """
        try:
            said = os.read(self._stderr_fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._stderr = (self._stderr + said)[-STDERR_BYTES:]
        return bool(said)

    def _death(self) -> SandboxCrashError:
        """Say how the child ended; one that talks nonsense is ended here."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # it has closed its end: its exit status follows at once
        code = self._process.poll()
        if code is None:
            self._process.kill()
            return SandboxCrashError("the decoder lost its way")
        while self._read_stderr():  # ends: nobody writes any more
            pass
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        last_words = _last_words(self._stderr.decode(errors="replace"))
        message = f"the decoder {how}" + (f": {last_words}" if last_words else "")
        return SandboxCrashError(message, was_killed=code == -signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(said: str) -> str:
    """One line of what a dying child printed: where it was in a crash (faulthandler), else the end of it."""
    _, is_crash, stack = said.rpartition("(most recent call first):")
    if is_crash:
        return "in " + stack.strip().partition("\n")[0].strip()
    return " ".join(said.split())[-300:]


def _module_search_path() -> list[str]:
    """Where this process finds modules, as absolute folders; and where it found this package."""
    folders = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" means the working folder
    return folders if str(PACKAGE_ROOT) in folders else [*folders, str(PACKAGE_ROOT)]
