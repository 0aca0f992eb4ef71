"""Child process that decodes, and the memory that it shares with this one."""

import json
import os
import resource
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedder.media.limits import PROGRESS_BYTES, DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec, Size
from embedder.process.child import ChildDiedError, ChildHungError, ChildProcess, module_search_path
from embedder.process.child_main import FAILED, JSON
from shards.file_schema import parse_json

Pixels = NDArray[np.uint8]
Message = dict[str, Any]

SERVER = Path(__file__).with_name("sandbox_server.py")
MAX_MESSAGE_BYTES = 1 << 20  # answers have a few hundred; more means a broken message
BROKEN_MESSAGE = "the decoding process sent a broken message"
START_TIMEOUT_S = 120.0  # normally 0.1 s; a swapping machine may take long
MAX_STARTS = 2
MAX_CRASHES = 2  # the file is blamed after its second crash
KEEP_INBOX_BYTES = 16 << 20
TORCH_MODULE = "torch_kernel.py"
"""A crash in this module, according to a child's last words, is no image's fault."""
MAX_BATCH_PIXEL_BYTES = 32 << 20


class DecoderProcess:
    """Child of one decoder, started when it is needed; `SandboxedDecoder` says what is asked of it."""

    def __init__(self, limits: DecodeLimits | None = None, medium_columns: Collection[str] = ()) -> None:
        self.medium_columns = tuple(medium_columns)
        self.limits = limits or DecodeLimits()
        self._child: ChildProcess | None = None
        self._may_use_torch = True  # until its library kills a child
        self._fds: tuple[int, int] | None = None
        self._turn = 0  # grows with each request, so that an abandoned video notices that it has ended
        self._is_busy = False  # an answer is pending: this child's next one would be for the wrong file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Return the process id of the decoding child, or None while there is none."""
        return None if self._child is None else self._child.pid

    def child_cpu_s(self) -> float:
        """Return the CPU seconds of all this process's children so far, including ended ones; precise to 10 ms."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + (0.0 if self._child is None else _cpu_s(self._child.pid))

    def close(self) -> None:
        """End the child and free the shared memory; the next file starts another child."""
        self._turn += 1
        self._kill_child()
        fds, self._fds = self._fds, None
        for fd in fds or ():
            os.close(fd)

    def _send(self, message: Message) -> None:
        child = self._get_child()
        self._is_busy = True
        child.send(JSON, json.dumps(message).encode(), START_TIMEOUT_S)

    def _receive(self, timeout_s: float, step: str, limit: str = "`timeout_s`") -> Message:
        try:
            answer = receive(self._get_child(), timeout_s)
        except ChildHungError:
            self._kill_child()
            raise self._timeout_error(step, timeout_s, limit) from None
        if answer.get("has_torch"):
            raise ChildDiedError("PyTorch's library leaves no memory")
        if (error := reported_error(answer)) is not None:
            self._is_busy = False
            if answer.get("last"):
                self._kill_child()
            raise error
        return answer

    @staticmethod
    def _timeout_error(step: str, timeout_s: float, limit: str) -> DecodeError:
        message = f"{step} took longer than {timeout_s:.3g} s ({limit}) and was ended"
        return DecodeError("TimeoutError", message, transient=True)

    def _blame(self, death: ChildDiedError, num_crashes: int) -> None:
        """Clean up after a dead child; after the last attempt, blame the file."""
        self._clean_up(death)
        if num_crashes >= MAX_CRASHES:
            message = f"{death} (tried {num_crashes} times)"
            raise DecodeError("DecoderCrashed", message, transient=death.was_killed) from None

    def _clean_up(self, end: ChildDiedError) -> None:
        self._kill_child()
        self._may_use_torch &= TORCH_MODULE not in str(end)

    def _collect(self, answer: Message, resize: ResizeSpec, max_images: int) -> Pixels:
        """Copy pixels out of the outbox: uint8 (F, H, W, 3).

        Raises a ChildDiedError if there are fewer than announced, or their size doesn't follow from the rule.
        """
        num_images, size, offset = answer.get("num_images"), answer.get("size"), answer.get("offset", 0)
        if not isinstance(num_images, int) or not 1 <= num_images <= max_images or not _is_size(size, resize):
            raise ChildDiedError(BROKEN_MESSAGE)
        if not isinstance(offset, int) or not 0 <= offset <= MAX_BATCH_PIXEL_BYTES + PROGRESS_BYTES:
            raise ChildDiedError(BROKEN_MESSAGE)
        width, height = size
        pixels = np.empty((num_images, height, width, 3), np.uint8)
        unfilled = pixels.data.cast("B")
        _, outbox_fd = self._shared_fds()
        while unfilled:
            num_bytes = _read_into(outbox_fd, unfilled, offset)
            if num_bytes == 0:
                raise ChildDiedError(BROKEN_MESSAGE)
            unfilled, offset = unfilled[num_bytes:], offset + num_bytes
        return pixels

    def _get_child(self) -> ChildProcess:
        if self._child is None:
            self._child = self._start_child()
        return self._child

    def _start_child(self) -> ChildProcess:
        """Start a child and wait until it is ready; a RuntimeError if it fails to start, unrelated to the file."""
        problem = None
        for _ in range(MAX_STARTS):
            child = self._spawn()
            try:
                receive(child, START_TIMEOUT_S)
            except ChildDiedError as error:
                problem = error
                child.kill()
            else:
                return child
        raise RuntimeError(
            f"the decoding process can't start: {problem}; check that Pillow can be imported and that "
            f"memory_bytes ({self.limits.memory_bytes}) leaves it room"
        )

    def _spawn(self) -> ChildProcess:
        inbox_fd, outbox_fd = self._shared_fds()
        server = {
            "inbox_fd": inbox_fd,
            "outbox_fd": outbox_fd,
            "max_pixels": self.limits.max_pixels,
            "max_file_bytes": self.limits.max_file_bytes,
            "may_use_torch": self._may_use_torch,
            "medium_columns": self.medium_columns,
        }
        return ChildProcess(
            # Without site-packages hooks, a third of the start-up time; the search path is passed on.
            [sys.executable, "-I", "-S"],
            SERVER,
            server,
            title="the decoder",
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # for NumPy's resize: several decoders share the machine
            sys_path=module_search_path(),
            memory_bytes=self.limits.memory_bytes,
            ignored=("SIGINT", "SIGTERM"),
            pass_fds=(inbox_fd, outbox_fd),
        )

    def _kill_child(self) -> None:
        self._is_busy = False
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _end_unfinished(self) -> None:
        """End a child that is still working on an abandoned video or an interrupted call."""
        if self._is_busy:
            self._kill_child()

    def _shared_fds(self) -> tuple[int, int]:
        if self._fds is None:
            self._fds = (_memory_file("inbox"), _memory_file("outbox"))
        return self._fds

    def _empty_inbox(self) -> None:
        """Free the memory of a large file; that of a small one is kept for the next."""
        if self._fds is not None and os.fstat(self._fds[0]).st_size > KEEP_INBOX_BYTES:
            os.ftruncate(self._fds[0], 0)


def receive(child: ChildProcess, timeout_s: float) -> Message:
    """Wait for a child's next message; ChildHungError if none comes in time, ChildDiedError if it ended."""
    kind, payload = child.receive(timeout_s, MAX_MESSAGE_BYTES)
    try:
        message = parse_json(bytes(payload))
    except ValueError:
        raise ChildDiedError(BROKEN_MESSAGE) from None
    if kind not in (JSON, FAILED) or not isinstance(message, dict):
        raise ChildDiedError(BROKEN_MESSAGE)
    if kind == FAILED:
        raise ChildDiedError(f"the decoder can't be imported: {message.get('type')}: {message.get('message')}")
    return message


def _cpu_s(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _read_into(fd: int, unfilled: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [unfilled], offset)
    data = os.pread(fd, len(unfilled), offset)
    unfilled[: len(data)] = data
    return len(data)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of some bytes at an offset of a file."""
    while data:
        num_bytes = os.pwrite(fd, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


def reported_error(answer: Message) -> DecodeError | None:
    """Return the error that a child reports for a file; None if it reports none."""
    if "error_type" not in answer:
        return None
    return DecodeError(str(answer["error_type"]), str(answer.get("message")), bool(answer.get("transient")))


def _is_size(size: Any, resize: ResizeSpec) -> TypeGuard[Size]:
    """Return whether a child's answer has a width and height that the rule can give."""
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(edge, int) and edge > 0 for edge in size):
        return False
    if resize.mode == "fit":
        return bool(max(size) <= resize.image_size)
    if resize.mode != "patches":
        return set(size) == {resize.image_size}
    (columns, spare_x), (rows, spare_y) = (divmod(edge, resize.patch_size) for edge in size)
    is_whole = spare_x == spare_y == columns % resize.merge_size == rows % resize.merge_size == 0
    return bool(is_whole and columns * rows <= resize.most_patches)


def _memory_file(name: str) -> int:
    """Open a nameless file in memory, or in the temporary folder if the system doesn't support those."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"embedder-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
