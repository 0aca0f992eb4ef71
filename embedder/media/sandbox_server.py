"""Child's side of the sandbox: requests in, pixels and answers out, until the parent closes the socket.

Requests and answers are one JSON line each on the control socket. Encoded bytes come through the inbox, pixels go
through the outbox: files in memory that both processes hold open.
"""

import json
import os
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from typing import Any, BinaryIO, cast

from embedder.media.errors import DecodeError
from embedder.media.images import decode_image, prepare_pillow
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox_files import InboxFile, open_regular, read_whole

Message = dict[str, Any]

LINE_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 500


class SandboxClosedError(Exception):
    """End of the control socket, which the parent has closed."""


class Server:
    """Server of one request after another."""

    def __init__(self, control_fd: int, inbox_fd: int, outbox_fd: int, max_pixels: int, max_file_bytes: int) -> None:
        """Take over the open files and the limits.

        Args:
            control_fd: socket of requests and answers.
            inbox_fd: file of the encoded bytes.
            outbox_fd: file of the pixels.
            max_pixels: pixels of one image or frame.
            max_file_bytes: encoded size of one image.
        """
        self._control_fd = control_fd
        self._inbox_fd = inbox_fd
        self._outbox_fd = outbox_fd
        self._max_pixels = max_pixels
        self._max_file_bytes = max_file_bytes
        self._received = b""
        self._outbox_is_full = False
        self._handlers: dict[str, Callable[[Message, BinaryIO], Message]] = {
            "image": self._image,
            "video": self._video,
            "frame": self._frame,
        }

    def run(self) -> None:
        """Report that this process is ready, then serve until the parent closes the socket or memory runs out."""
        prepare_pillow()
        try:
            answer: Message = {"ready": True}
            while not answer.get("last"):
                self._send(answer)
                answer = self._answer(self._receive())
            self._send(answer)
        except (SandboxClosedError, BrokenPipeError):
            return

    def _answer(self, request: Message) -> Message:
        try:
            with self._source(request) as file:
                return self._handlers[request["do"]](request, file)
        except SandboxClosedError:
            raise
        except DecodeError as error:
            return _error_answer(error.error_type, error.message, error.transient)
        except MemoryError:  # a fresh process takes over: this one's memory may be fragmented
            return _error_answer("MemoryError", "decoding it takes more memory than `memory_bytes` allows") | {
                "last": True
            }
        except Exception as error:  # noqa: BLE001 - the one place where files are decoded: broken ones raise anything
            return _error_answer(type(error).__name__, getattr(error, "strerror", None) or str(error))

    def _image(self, request: Message, file: BinaryIO) -> Message:
        fit = _read_fit(request)
        encoded = read_whole(file, self._max_file_bytes)
        self._post([decode_image(encoded, fit, self._max_pixels)])
        return {"num_images": 1}

    def _video(self, request: Message, file: BinaryIO) -> Message:
        """Send one message per segment; images only of those that the parent doesn't have already."""
        from embedder.media.videos import read_segments

        segments = read_segments(
            file,
            _read_fit(request),
            segment_s=Fraction(str(request["segment_s"])),
            frames_per_segment=request["frames_per_segment"],
            max_pixels=self._max_pixels,
        )
        for number, segment in enumerate(segments):
            if number < request["num_delivered"]:
                self._send({"passed_over": number})  # resets the deadline, which is that of one segment
            else:
                self._await_emptied()
                self._post(segment.images)
                self._send(
                    {
                        "segment": segment.segment,
                        "start_s": float(segment.start_s),
                        "end_s": float(segment.end_s),
                        "num_images": len(segment.images),
                    }
                )
                self._outbox_is_full = True
        return {"end": True}

    def _frame(self, request: Message, file: BinaryIO) -> Message:
        from embedder.media.videos import read_frame_at

        self._post([read_frame_at(file, _read_fit(request), request["time_s"], self._max_pixels)])
        return {"num_images": 1}

    def _source(self, request: Message) -> BinaryIO:
        """Open the file of a request: one on disk, or the content of the inbox."""
        if "path" in request:
            return open_regular(request["path"])
        return cast(BinaryIO, InboxFile(self._inbox_fd, request["size"]))

    def _post(self, images: list[bytes]) -> None:
        """Write the images into the outbox, one after the other."""
        unwritten, offset = memoryview(b"".join(images)), 0
        while unwritten:
            num_bytes = os.pwrite(self._outbox_fd, unwritten, offset)
            unwritten, offset = unwritten[num_bytes:], offset + num_bytes

    def _await_emptied(self) -> None:
        """Wait until the parent has copied the last segment out of the outbox."""
        if self._outbox_is_full:
            self._receive()
            self._outbox_is_full = False

    def _send(self, message: Message) -> None:
        self._await_emptied()
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._control_fd, line) :]

    def _receive(self) -> Message:
        while b"\n" not in self._received:
            received = os.read(self._control_fd, LINE_BYTES)
            if not received:
                raise SandboxClosedError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        message: Message = json.loads(line)
        return message


def _read_fit(request: Message) -> ResizeSpec:
    """Read the resize rule; its imports happen now, before an image fills the memory."""
    fit = ResizeSpec(**request["fit"])
    if fit.resampler == "torchvision":
        import_module("embedder.media.resample")
    return fit


def _error_answer(error_type: str, message: str, transient: bool = False) -> Message:
    one_line = " ".join(message.split())[:MAX_ERROR_CHARACTERS]
    return {"error_type": error_type, "message": one_line or "no reason given", "transient": transient}
