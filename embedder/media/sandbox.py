"""Sandboxed decoding: encoded bytes or a file -> uint8 pixels, at a bounded cost whatever the bytes are.

All decoding is done by a light child process with bounded memory, which is killed when it takes too long and
restarted when it dies; so a file that hangs or crashes its decoder affects neither other files nor the caller.
"""

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec, Size
from embedder.media.sandbox_process import BROKEN_MESSAGE, Message, SandboxCrashError, SandboxProcess

Source = bytes | bytearray | memoryview | str | Path
"""Encoded bytes, or the path of a local file."""
Pixels = NDArray[np.uint8]

START_TIMEOUT_S = 120.0  # it takes 0.1 s; a machine that swaps may take long
MAX_STARTS = 2
MAX_CRASHES = 2  # a process that dies gets the same file once more before the file is blamed
KEEP_INBOX_BYTES = 16 << 20


@dataclass(frozen=True)
class VideoSegment:
    """Images that represent one stretch of a video.

    Attributes:
        segment: number of the stretch: `start_s // segment_s`.
        start_s, end_s: its times in seconds, counted from the first frame.
        pixels: uint8 (F, H, W, 3), RGB, all frames of one size; F from 1 to `frames_per_segment`.
    """

    segment: int
    start_s: float
    end_s: float
    pixels: Pixels


class SandboxedDecoder:
    """Decoder of one file after another in a child process of its own.

    The child is started for the first file and kept; it dies with this process. One thread uses a decoder at a time;
    one process may hold several decoders.

    Args:
        limits: limits on the cost of one file.

    Attributes:
        note: what is missing of the last image that was decoded; None: nothing.
    """

    def __init__(self, limits: DecodeLimits | None = None) -> None:
        self.limits = limits or DecodeLimits()
        self.note: str | None = None
        self._child: SandboxProcess | None = None
        self._fds: tuple[int, int] | None = None
        self._turn = 0  # grows with each request, so that an abandoned video notices that it has ended
        self._is_busy = False  # an answer is awaited: the next one of a child in this state would be of the wrong file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Process id of the decoding child, or None while there is none."""
        return None if self._child is None else self._child.pid

    def child_cpu_s(self) -> float:
        """CPU seconds of this process's children so far, those that ended included, with the system's 10 ms ticks."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + (0.0 if self._child is None else self._child.cpu_s())

    def close(self) -> None:
        """End the child and free the shared memory; the next file starts another child."""
        self._turn += 1
        self._kill_child()
        fds, self._fds = self._fds, None
        for fd in fds or ():
            os.close(fd)

    def image(self, source: Source, resize: ResizeSpec) -> Pixels:
        """Decode one image: upright, flattened on white, resized; of an animated one, its first frame.

        Args:
            source: encoded bytes, or the path of a local file.
            resize: the rule.

        Returns:
            uint8 (H, W, 3), RGB, H = W = `resize.image_size`; of mode `patches`, multiples of `resize.patch_size`; of
            mode `fit`, the longer of the two `resize.image_size` at most.

        Raises:
            DecodeError: the file can't be decoded.
        """
        limit = self.limits.max_file_bytes
        if not isinstance(source, str | Path) and (num_bytes := memoryview(source).nbytes) > limit:
            raise DecodeError("FileTooLarge", f"the file has {num_bytes} bytes; {limit} are allowed (`max_file_bytes`)")
        return self._one_image({"do": "image"}, source, resize)

    def frame_at(self, source: Source, resize: ResizeSpec, time_s: float) -> Pixels:
        """Decode the frame of a video, or of an animated image, that is shown `time_s` seconds after its first frame.

        Args:
            source: encoded bytes, or the path of a local file.
            resize: the rule.
            time_s: seconds after the first frame.

        Returns:
            uint8 (H, W, 3), RGB; beyond either end, the first or the last frame.

        Raises:
            DecodeError: the video can't be decoded.
        """
        return self._one_image({"do": "frame", "time_s": time_s}, source, resize)

    def video(
        self, source: Source, resize: ResizeSpec, *, segment_s: float, frames_per_segment: int
    ) -> Iterator[VideoSegment]:
        """Decode a video, or an animated image, segment by segment, in memory bounded by one segment.

        A request for another file ends the video; going on with it then raises RuntimeError.

        Args:
            source: encoded bytes, or the path of a local file.
            resize: rule for the frames.
            segment_s: length of a segment, in seconds.
            frames_per_segment: frames of each segment, spread evenly.

        Yields:
            Segments in order. Stretches in which no frame begins have none.

        Raises:
            DecodeError: the video can't be decoded; after its whole segments when it breaks in the middle. Of type
                `StillImage` for an image of one frame.
        """
        command = {"do": "video", "segment_s": segment_s, "frames_per_segment": frames_per_segment}
        request = self._deliver(command, source, resize)
        turn = self._turn
        try:
            for segment in self._segments(request, resize, frames_per_segment):
                yield segment
                if turn != self._turn:
                    raise RuntimeError("this video is over: its decoder was closed or decoded another file meanwhile")
        finally:
            if turn == self._turn:
                self._end_unfinished()
                self._empty_inbox()

    def _segments(self, request: Message, resize: ResizeSpec, frames_per_segment: int) -> Iterator[VideoSegment]:
        """Segments from the child; one that crashes is replaced once, and the new one skips what was delivered."""
        budget_s, num_delivered = self.limits.video_timeout_s, 0
        for num_crashes in range(1, MAX_CRASHES + 1):
            try:
                self._send(request | {"num_delivered": num_delivered})
                while True:
                    began = time.monotonic()
                    answer = self._receive_segment(budget_s)
                    budget_s -= time.monotonic() - began
                    if "end" in answer:
                        self._is_busy = False
                        return
                    if "passed_over" in answer:
                        continue
                    segment = self._collect_segment(answer, resize, frames_per_segment)
                    num_delivered += 1
                    with contextlib.suppress(SandboxCrashError):  # noticed when the next segment is asked for
                        self._send({"next": True})
                    yield segment
            except SandboxCrashError as death:
                self._blame(death, num_crashes)

    def _one_image(self, command: Message, source: Source, resize: ResizeSpec) -> Pixels:
        request = self._deliver(command, source, resize)
        try:
            for num_crashes in range(1, MAX_CRASHES + 1):
                try:
                    self._send(request)
                    answer = self._receive(self.limits.timeout_s, "decoding")
                    pixels: Pixels = self._collect(answer, resize, 1)[0]
                    self.note = str(answer["note"]) if "note" in answer else None
                    self._is_busy = False
                    return pixels
                except SandboxCrashError as death:
                    self._blame(death, num_crashes)
            raise RuntimeError("the last crash is always blamed on the file")
        finally:
            self._empty_inbox()

    def _send(self, message: Message) -> None:
        child = self._get_child()
        self._is_busy = True
        child.send(message)

    def _receive_segment(self, budget_s: float) -> Message:
        if budget_s < self.limits.timeout_s:
            whole = f"the whole video (at most {self.limits.video_timeout_s:g} s): what is left"
            return self._receive(budget_s, whole, "`video_timeout_s`")
        return self._receive(self.limits.timeout_s, "decoding a segment")

    def _receive(self, timeout_s: float, step: str, limit: str = "`timeout_s`") -> Message:
        """Receive one answer of the child; raise the errors that it reports."""
        try:
            answer = self._get_child().receive(timeout_s)
        except TimeoutError:
            self._kill_child()
            message = f"{step} took longer than {timeout_s:.3g} s ({limit}) and was ended"
            raise DecodeError("TimeoutError", message, transient=True) from None
        if "error_type" in answer:
            self._is_busy = False
            if answer.get("last"):
                self._kill_child()
            raise DecodeError(str(answer["error_type"]), str(answer["message"]), bool(answer.get("transient")))
        return answer

    def _blame(self, death: SandboxCrashError, num_crashes: int) -> None:
        """Clean up after a dead child; after the last attempt, blame the file."""
        self._kill_child()
        if num_crashes >= MAX_CRASHES:
            message = f"{death} (tried {num_crashes} times)"
            raise DecodeError("DecoderCrashed", message, transient=death.was_killed) from None

    def _deliver(self, command: Message, source: Source, resize: ResizeSpec) -> Message:
        """Make a request: end an open one, and pass the source to the child by path or through the inbox."""
        self._turn += 1
        self._end_unfinished()
        request = command | {"resize": vars(resize)}
        if isinstance(source, str | Path):
            return request | {"path": os.path.abspath(source)}  # noqa: PTH100 - resolves no links, takes str too
        encoded = memoryview(source).cast("B")
        inbox_fd, _ = self._shared_fds()
        offset = 0
        while offset < encoded.nbytes:
            offset += os.pwrite(inbox_fd, encoded[offset:], offset)
        return request | {"size": encoded.nbytes}

    def _collect_segment(self, answer: Message, resize: ResizeSpec, frames_per_segment: int) -> VideoSegment:
        pixels = self._collect(answer, resize, frames_per_segment)
        try:
            return VideoSegment(int(answer["segment"]), float(answer["start_s"]), float(answer["end_s"]), pixels)
        except (KeyError, TypeError, ValueError):
            raise SandboxCrashError(BROKEN_MESSAGE) from None

    def _collect(self, answer: Message, resize: ResizeSpec, max_images: int) -> Pixels:
        """Copy pixels out of the outbox: uint8 (F, H, W, 3).

        Raises:
            SandboxCrashError: there are fewer than announced, or of a size that the rule doesn't give.
        """
        num_images, size = answer.get("num_images"), answer.get("size")
        if not isinstance(num_images, int) or not 1 <= num_images <= max_images or not _is_size(size, resize):
            raise SandboxCrashError(BROKEN_MESSAGE)
        width, height = size
        pixels = np.empty((num_images, height, width, 3), np.uint8)
        unfilled, offset = pixels.data.cast("B"), 0
        _, outbox_fd = self._shared_fds()
        while unfilled:
            num_bytes = os.preadv(outbox_fd, [unfilled], offset)
            if num_bytes == 0:
                raise SandboxCrashError(BROKEN_MESSAGE)
            unfilled, offset = unfilled[num_bytes:], offset + num_bytes
        return pixels

    def _get_child(self) -> SandboxProcess:
        if self._child is None:
            self._child = self._start_child()
        return self._child

    def _start_child(self) -> SandboxProcess:
        """Start a child and wait until it is ready.

        Raises:
            RuntimeError: it doesn't start, for a reason that has nothing to do with the file.
        """
        problem: Exception | None = None
        for _ in range(MAX_STARTS):
            child = SandboxProcess(self.limits, *self._shared_fds())
            try:
                child.receive(START_TIMEOUT_S)
            except (SandboxCrashError, TimeoutError) as error:
                problem = error
                child.kill()
            else:
                return child
        raise RuntimeError(
            f"the decoding process can't start: {problem or 'no answer'}; check that Pillow can be imported and that "
            f"memory_bytes ({self.limits.memory_bytes}) leaves it room"
        )

    def _kill_child(self) -> None:
        self._is_busy = False
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _end_unfinished(self) -> None:
        """End a child that still works on an abandoned video or an interrupted call."""
        if self._is_busy:
            self._kill_child()

    def _shared_fds(self) -> tuple[int, int]:
        """Inbox and outbox, as open files in memory."""
        if self._fds is None:
            self._fds = (_memory_file("inbox"), _memory_file("outbox"))
        return self._fds

    def _empty_inbox(self) -> None:
        """Free the memory of a large file; that of a small one is kept for the next."""
        if self._fds is not None and os.fstat(self._fds[0]).st_size > KEEP_INBOX_BYTES:
            os.ftruncate(self._fds[0], 0)


def _is_size(size: Any, resize: ResizeSpec) -> TypeGuard[Size]:
    """Whether a child's answer has a width and height that the rule can give."""
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(edge, int) and edge > 0 for edge in size):
        return False
    if resize.mode == "fit":
        return bool(max(size) <= resize.image_size)
    if resize.mode != "patches":
        return set(size) == {resize.image_size}
    (columns, spare_x), (rows, spare_y) = (divmod(edge, resize.patch_size) for edge in size)
    return bool(spare_x == spare_y == 0 and columns * rows <= resize.max_patches)


def _memory_file(name: str) -> int:
    """Open a nameless file in memory; where the system lacks those, in the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"embedder-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
