"""Process of a servable's other interpreter, as the parent holds it: pipes, messages, limits in time, and its end."""

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedder.batch_schema import HUNG
from embedder.redaction import mask
from embedder.servables.errors import ServableError
from embedder.servables.interpreter_child import HEADER

CALL_S = LOAD_S = 3600.0
"""Seconds of a call, and of loading, where a servable names none."""

CHILD_SCRIPT = Path(__file__).parent / "interpreter_child.py"
MAX_REPLY_BYTES = 8 * 2**30
LAST_WORDS_BYTES = 8192
CLOSE_S = 5.0

PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
}
PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "VLLM_")
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


class ChildError(RuntimeError):
    """Batch that the child could not compute; it goes on, or is started again."""


class ChildDiedError(ChildError):
    """Batch during which the child died, hung, or sent what is no message."""


class ChildProcess:
    """Process with its pipes; it knows messages and time, and nothing of what they say."""

    def __init__(self, command: list[str], num_threads: int, where: str) -> None:
        """Start it.

        Args:
            command: the interpreter.
            num_threads: CPU threads of its libraries.
            where: the servable, for messages.

        Raises:
            ServableError: the interpreter can't be run.
        """
        child_reads, self._requests = os.pipe()
        self._replies, child_writes = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(CHILD_SCRIPT), str(child_reads), str(child_writes)],
                stdin=subprocess.PIPE,  # the lifeline: see `interpreter_child.py`
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_reads, child_writes),
                env=child_environment(os.environ, num_threads),
                start_new_session=True,  # so that it is ended with the processes that it started
            )
        except OSError as error:
            self._close_pipes()
            raise ServableError(
                f"{where}: python = {command[0]!r} can't be started ({error.strerror}); name a Python's executable"
            ) from None
        finally:
            os.close(child_reads)
            os.close(child_writes)
        for fd in (self._requests, self._replies):
            os.set_blocking(fd, False)
        self._output = b""
        self._reader = threading.Thread(target=self._keep_last_words, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, kind: bytes, payload: Any, limit_s: float) -> None:
        """Write a message.

        Args:
            kind: one byte.
            payload: bytes or an Arrow buffer.
            limit_s: seconds until it must have taken it.

        Raises:
            ChildDiedError: it is dead or takes nothing.
        """
        deadline = time.monotonic() + limit_s
        for part in (HEADER.pack(kind, len(payload)), payload):
            view = memoryview(part).cast("B")
            while view:
                self._wait(self._requests, select.POLLOUT, deadline, limit_s)
                try:
                    view = view[os.write(self._requests, view) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise self._death() from None

    def receive(self, limit_s: float) -> tuple[bytes, bytearray]:
        """Read a message: its kind and its content.

        Args:
            limit_s: seconds until it must be complete.

        Raises:
            ChildDiedError: it is dead, silent, or sends what is no message.
        """
        deadline = time.monotonic() + limit_s
        kind, length = HEADER.unpack(self._read(HEADER.size, deadline, limit_s))
        if length > MAX_REPLY_BYTES:
            raise ChildDiedError(f"its process sent {length} bytes, and {MAX_REPLY_BYTES} are the most of a message")
        return kind, self._read(length, deadline, limit_s)

    def close(self) -> None:
        """Close its pipe, give it a moment to free what it holds, and end it."""
        os.close(self._requests)
        self._requests = -1
        with contextlib.suppress(ChildDiedError):
            self._read(1, time.monotonic() + CLOSE_S, CLOSE_S)  # ends as soon as it has closed its own
        self.kill()

    def kill(self) -> None:
        """End it with all that it started, and free what it held; again is no harm."""
        if self._replies < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close_pipes()
        self._reader.join(CLOSE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not (pipe is self._process.stdout and self._reader.is_alive()):
                pipe.close()

    def _read(self, num_bytes: int, deadline: float, limit_s: float) -> bytearray:
        content, done = bytearray(num_bytes), 0
        view = memoryview(content)
        while done < num_bytes:
            self._wait(self._replies, select.POLLIN, deadline, limit_s)
            try:
                count = os.readv(self._replies, [view[done:]])
            except BlockingIOError:
                continue
            if not count:
                raise self._death()
            done += count
        view.release()
        return content

    def _wait(self, fd: int, events: int, deadline: float, limit_s: float) -> None:
        poll = select.poll()
        poll.register(fd, events)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise ChildDiedError(f"its process {HUNG} {limit_s:g} s and was ended{self._last_words()}")

    def _death(self) -> ChildDiedError:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return ChildDiedError(f"its process closed its pipes and was ended{self._last_words()}")
        self._reader.join(1.0)  # what it wrote last is still in the pipe; a process that it left may hold that open
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return ChildDiedError(f"its process {how}{self._last_words()}")

    def _keep_last_words(self) -> None:
        while self._process.stdout and (chunk := os.read(self._process.stdout.fileno(), 65536)):
            self._output = (self._output + chunk)[-LAST_WORDS_BYTES:]

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._output.decode(errors="replace").splitlines() if line.strip()]
        return mask(f": {' | '.join(lines[-3:])[-300:]}") if lines else ""

    def _close_pipes(self) -> None:
        for fd in (self._requests, self._replies):
            if fd >= 0:
                os.close(fd)
        self._requests = self._replies = -1


def child_environment(environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Return the variables that a child gets: those of the system and of devices, none with a secret's name.

    Args:
        environment: of this process.
        num_threads: CPU threads of its libraries.
    """
    passed = {
        name: value
        for name, value in environment.items()
        if (name in PASSED or name.startswith(PASSED_PREFIXES)) and not SECRET.search(name)
    }
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return passed | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
