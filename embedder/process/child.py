"""Child process as its parent holds it: its start, messages with a deadline, how it died, and its end.

`child_main.py` is the other side. The child dies with this process, whatever ends that.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from embedder.batch_schema import HUNG
from embedder.process.child_main import HEADER, START
from embedder.redaction import mask

CHILD_SCRIPT = Path(__file__).with_name("child_main.py")
PACKAGE_ROOT = str(Path(__file__).parents[2])
MAX_REPLY_BYTES = 8 << 30
OUTPUT_BYTES = 1 << 14  # only the end of the child's output is kept
READ_BYTES = 1 << 16
START_S = 60.0  # until it has taken its arguments
CLOSE_S = 5.0  # until a closed child is killed, and until a killed one that hangs in the kernel is left alone
LOOK_S = 1.0  # until a silent child is looked at: where it is dead, what it forked may keep its channel open
CRASH = re.compile(r"(?:Current thread 0x|Stack )[^\n]*\(most recent call first\):\n\s*([^\n]+)")
"""Place of a crash in what `faulthandler` prints."""


class ChildError(RuntimeError):
    """Call that a child could not answer; it continues, or another follows."""


class ChildDiedError(ChildError):
    """Call during which the child ended, hung, or sent what is no message; the text says how.

    Attributes:
        was_killed: by SIGKILL, which comes from outside: from a machine out of memory, or from a user.
    """

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class ChildHungError(ChildDiedError):
    """Call that was not answered in time; whoever called ends the child."""


class ChildProcess:
    """Process that serves messages; it knows time and death, and nothing of what the messages say.

    One thread uses it at a time.
    """

    def __init__(
        self,
        command: Sequence[str],
        entry: str | Path,
        arguments: Mapping[str, Any],
        *,
        title: str = "its process",
        env: Mapping[str, str] | None = None,
        sys_path: Sequence[str] | None = None,
        memory_bytes: int | None = None,
        ignored: Sequence[str] = ("SIGINT",),
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it; of an entry that can't be imported its first message is an error (`FAILED`).

        Args:
            command: an interpreter with its options.
            entry: file with a function `serve(channel, **arguments)`.
            arguments: of that function; values that JSON has.
            title: the process, for messages.
            env: its environment; left out: this process's.
            sys_path: its module search path; left out: the interpreter's own.
            memory_bytes: most address space.
            ignored: names of signals that it ignores.
            pass_fds: open files that it inherits.

        Raises:
            OSError: the interpreter can't be run.
        """
        self._title, self._output, self._is_closed = title, b"", False
        self._event, self._received = select.POLLIN, bytearray()
        start = {"entry": str(entry), "sys_path": sys_path, "memory_bytes": memory_bytes, "ignored": ignored}
        self._process, self._channel = _start_process(command, start, env, pass_fds)
        self._output_fd = cast(IO[bytes], self._process.stdout).fileno()
        os.set_blocking(self._output_fd, False)
        self._poll = select.poll()
        self._poll.register(self._output_fd, select.POLLIN)
        self._poll.register(self._channel, select.POLLIN)
        with contextlib.suppress(ChildDiedError):  # which the first `receive` reports
            self.send(START, json.dumps(dict(arguments)).encode(), START_S)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, kind: bytes, payload: Any, limit_s: float) -> None:
        """Write a message.

        Args:
            kind: one byte.
            payload: bytes or a buffer.
            limit_s: seconds until it must have taken it.

        Raises:
            ChildDiedError: it is dead or takes nothing.
        """
        deadline = time.monotonic() + limit_s
        header = HEADER.pack(kind, len(payload))
        for part in (header, payload) if len(payload) > READ_BYTES else (header + bytes(payload),):
            view = memoryview(part).cast("B")
            while view:
                try:
                    view = view[self._channel.send(view) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline, limit_s)
                except OSError:
                    raise self._death() from None

    def receive(self, limit_s: float, max_bytes: int = MAX_REPLY_BYTES) -> tuple[bytes, bytearray]:
        """Read a message: its kind and its content.

        Args:
            limit_s: seconds until it must be complete.
            max_bytes: of its content; more is a broken message.

        Raises:
            ChildHungError: it is not there in time; the child still runs.
            ChildDiedError: it is dead, or sends what is no message.
        """
        deadline = time.monotonic() + limit_s
        while len(self._received) < HEADER.size:  # what is there comes in one call, mostly a whole message
            self._wait(select.POLLIN, deadline, limit_s)
            self._received += self._take(READ_BYTES)
        kind, length = HEADER.unpack_from(self._received)
        if length > max_bytes:
            raise ChildDiedError(f"{self._title} sent {length} bytes, and {max_bytes} are the most of a message")
        content = self._received[HEADER.size : HEADER.size + length]
        del self._received[: HEADER.size + len(content)]
        return kind, content if len(content) == length else self._read_rest(content, length, deadline, limit_s)

    def close(self) -> None:
        """Close the channel to it, give it a moment to free what it holds, and end it."""
        with contextlib.suppress(ChildDiedError, OSError):
            self._channel.shutdown(socket.SHUT_WR)
            self._read_rest(
                bytearray(), 1, time.monotonic() + CLOSE_S, CLOSE_S
            )  # ends as soon as it has closed its own
        self.kill()

    def kill(self) -> None:
        """End it with all that it started, and free what it held; again is no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._channel.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _take(self, num_bytes: int) -> bytes:
        """Take what has arrived."""
        try:
            if received := self._channel.recv(num_bytes):
                return received
        except BlockingIOError:
            return b""
        except OSError:
            pass
        raise self._death()

    def _read_rest(self, begin: bytearray, length: int, deadline: float, limit_s: float) -> bytearray:
        """Read a content of which the beginning has arrived."""
        content = bytearray(length)
        content[: len(begin)] = begin
        view = memoryview(content)[len(begin) :]
        while view:
            self._wait(select.POLLIN, deadline, limit_s)
            try:
                count = self._channel.recv_into(view)
            except BlockingIOError:
                continue
            except OSError:
                raise self._death() from None
            if not count:
                raise self._death()
            view = view[count:]
        return content

    def _wait(self, event: int, deadline: float, limit_s: float) -> None:
        """Wait until the channel is ready; what the child prints meanwhile is read, so that it never waits for that."""
        if event != self._event:
            self._poll.modify(self._channel, event)
            self._event = event
        while True:
            remaining_s = deadline - time.monotonic()
            ready = {fd for fd, _ in self._poll.poll(max(0.0, min(remaining_s, LOOK_S)) * 1e3)}
            if not ready and self._process.poll() is not None and not self._poll.poll(0):
                raise self._death()
            if self._output_fd in ready and not self._read_output():
                self._poll.unregister(self._output_fd)
            if self._channel.fileno() in ready:
                return
            if remaining_s <= 0:
                raise ChildHungError(f"{self._title} {HUNG} {limit_s:g} s and was ended{self._last_words()}")

    def _read_output(self) -> bool:
        """Empty the pipe; returns whether more may come."""
        try:
            output = os.read(self._output_fd, READ_BYTES)
        except BlockingIOError:
            return True
        self._output = (self._output + output)[-OUTPUT_BYTES:]
        return bool(output)

    def _death(self) -> ChildDiedError:
        """Say how it ended."""
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return ChildDiedError(f"{self._title} closed its channel and was ended{self._last_words()}")
        self._read_output()  # the pipe holds no more; a process that it left may continue to write
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return ChildDiedError(f"{self._title} {how}{self._last_words()}", was_killed=code == -signal.SIGKILL)

    def _last_words(self) -> str:
        """Place of a crash, else the last lines of its output."""
        output = self._output.decode(errors="replace")
        if crash := CRASH.search(output):
            return f": in {crash[1]}"
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return mask(f": {' | '.join(lines[-3:])[-300:]}") if lines else ""


def module_search_path() -> list[str]:
    """Return this process's module search path as absolute folders, and the folder of this package."""
    folders = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" means the working folder
    return folders if PACKAGE_ROOT in folders else [*folders, PACKAGE_ROOT]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _start_process(
    command: Sequence[str], start: Mapping[str, Any], env: Mapping[str, str] | None, pass_fds: Sequence[int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the child's script with `start`, and return it with our end of its channel, which doesn't block."""
    channel, child_end = socket.socketpair()
    with child_end:
        try:
            process = subprocess.Popen(
                [*command, str(CHILD_SCRIPT), json.dumps({"channel_fd": child_end.fileno(), **start})],
                stdin=subprocess.PIPE,  # the lifeline
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(), *pass_fds),
                env=env,
                start_new_session=True,  # so that it is ended with the processes that it started
            )
        except BaseException:
            channel.close()
            raise
    channel.setblocking(False)
    return process, channel
