"""Child's side of the sandbox: serves requests until the parent closes the channel.

`embedder.process` runs this file; requests and answers are JSON messages. Encoded bytes come through the inbox, pixels
go through the outbox: files in memory that both processes hold open.
"""

import errno
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from typing import Any, BinaryIO

from embedder.media.images import decode_image, prepare_pillow
from embedder.media.limits import MAX_RANGE_BYTES, PROGRESS_BYTES
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec, SizedPixels
from embedder.media.segments import PickedSegment, SegmentRule
from embedder.media.sniff import HEAD_BYTES, sniff
from embedder.process.child_main import JSON, Channel
from embedder.storage.file_adapter import RangeFile

Message = dict[str, Any]

MAX_ERROR_CHARACTERS = 500
HEADER_BYTES, MAX_PAGES = 1 << 15, 64  # of a page, fetched at a time while a header is read; pages kept
ANSWER_S = 0.1  # how long a batch's answers are gathered before they are sent


def serve(channel: Channel, **settings: Any) -> None:
    """Serve requests until the parent closes the channel; `settings` are those of `Server`."""
    Server(channel, **settings).run()


class SandboxClosedError(Exception):
    """The parent has closed the channel."""


@dataclass
class Server:
    """Serves one request after another.

    `inbox_fd` has the encoded bytes, `outbox_fd` takes the pixels. `max_pixels` limits one image or frame,
    `max_file_bytes` the encoded size of one image. `may_use_torch` allows PyTorch's library to be loaded.
    `medium_columns` are those of the medium to fill.
    """

    channel: Channel
    inbox_fd: int
    outbox_fd: int
    max_pixels: int
    max_file_bytes: int
    may_use_torch: bool = True
    medium_columns: Collection[str] = ()
    _outbox_is_full: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.may_use_torch:
            from embedder.media.resample import forbid_faster_kernel

            forbid_faster_kernel()

    def run(self) -> None:
        """Report that this process is ready, then serve until the parent closes the channel or memory runs out."""
        prepare_pillow()
        try:
            answer: Message = {"ready": True}
            while not answer.get("last"):
                self._send(answer)
                request = self._receive()
                of_no_file = {"images": self._images, "warm_up": self._warm_up}
                answer = of_no_file.get(request["do"], self._answer)(request)
            self._send(answer)
        except (SandboxClosedError, BrokenPipeError):
            return

    def _answer(self, request: Message) -> Message:
        handlers = {"image": self._image, "video": self._video, "frame": self._frame, "header": self._header}
        try:
            with self._source(request) as file:
                return handlers[request["do"]](request, file)
        except SandboxClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where files are decoded: broken ones raise anything
            return _answer_of(error)

    def _images(self, request: Message) -> Message:
        """Decode a batch: each file's answer is its pixels' place in the outbox, or its error.

        Answers are sent in groups, the last ones by the caller. A process that has run out of memory sends what it has,
        and leaves the rest to its successor.
        """
        resizes = [_read_resize(each) for each in request["resizes"]]
        answers: list[Message] = []
        place, sent_s = PROGRESS_BYTES, time.monotonic()
        for number, (offset, size, rule) in enumerate(request["files"]):
            os.pwrite(self.outbox_fd, number.to_bytes(PROGRESS_BYTES, "little"), 0)
            if answers and time.monotonic() - sent_s > ANSWER_S:
                self._send({"images": answers})
                answers, sent_s = [], time.monotonic()
            try:
                encoded = os.pread(self.inbox_fd, size, offset)
                image = decode_image(encoded, resizes[rule], self.max_pixels, self.medium_columns)
                answers.append(self._post_image(image, place))
                place += len(image.data)
            except Exception as error:  # noqa: BLE001 - as in `_answer`
                answers.append(_answer_of(error))
                if answers[-1].get("last"):
                    return {"images": answers, "last": True}
        return {"images": answers}

    @staticmethod
    def _warm_up(request: Message) -> Message:
        if _read_resize(request["resize"]).resampler == "torchvision":
            from embedder.media.resample import load_faster_kernel

            load_faster_kernel()
        return {"ready": True}

    def _image(self, request: Message, file: BinaryIO) -> Message:
        resize = _read_resize(request["resize"])
        encoded = read_whole(file, self.max_file_bytes)
        return self._post_image(decode_image(encoded, resize, self.max_pixels, self.medium_columns))

    def _video(self, request: Message, file: BinaryIO) -> Message:
        """Send one message per segment, with images only of those that the parent doesn't have yet."""
        for number, segment in enumerate(self._segments(request, file)):
            if number < request["num_delivered"]:
                self._send({"passed_over": number})  # resets the deadline, which is that of one segment
            else:
                self._await_emptied()
                times = {"start_s": float(segment.start_s), "end_s": float(segment.end_s)}
                numbers: Message = {"segment": segment.segment, "num_decoded": segment.num_decoded}
                numbers |= {"times_s": [max(float(each - segment.start_s), 0.0) for each in segment.times_s]}
                self._send(self._post(segment.images) | times | numbers | {"medium": self._medium_of(segment)})
                self._outbox_is_full = True
        return {"end": True}

    def _segments(self, request: Message, file: BinaryIO) -> Iterator[PickedSegment[SizedPixels]]:
        resize, segment_s = _read_resize(request["resize"]), Fraction(str(request["segment_s"]))
        frames_per_segment, from_start = request["frames_per_segment"], request["from_start"]
        if _is_image(file):
            from embedder.media.animations import animation_segments

            encoded = read_whole(file, self.max_file_bytes)
            rule = SegmentRule(segment_s, frames_per_segment, from_start=from_start)
            return animation_segments(encoded, resize, rule, self.max_pixels, self.medium_columns)
        from embedder.media.videos import read_segments

        return read_segments(
            file,
            resize,
            segment_s=segment_s,
            frames_per_segment=frames_per_segment,
            max_pixels=self.max_pixels,
            medium_columns=self.medium_columns,
            from_start=from_start,
        )

    def _medium_of(self, segment: PickedSegment[SizedPixels]) -> Message | None:
        """Return the values of the medium's columns of a segment, those of pixels from its middle image."""
        if not self.medium_columns:
            return None
        from embedder.media.medium_values import pixel_values

        of_file = segment.images[0].medium or {}
        return of_file | pixel_values(segment.images[len(segment.images) // 2], self.medium_columns)

    def _frame(self, request: Message, file: BinaryIO) -> Message:
        resize, time_s = _read_resize(request["resize"]), request["time_s"]
        if _is_image(file):
            from embedder.media.animations import animation_frame

            encoded = read_whole(file, self.max_file_bytes)
            return self._post([animation_frame(encoded, resize, time_s, self.max_pixels)])
        from embedder.media.videos import read_frame_at

        return self._post([read_frame_at(file, resize, time_s, self.max_pixels)])

    def _header(self, request: Message, file: BinaryIO) -> Message:
        from embedder.media.medium_headers import header_texts, header_values

        if (languages := request.get("languages")) is not None:
            return {"medium": header_texts(file, self.max_pixels, self.max_file_bytes, languages)}
        return {"medium": header_values(file, self.max_pixels, self.max_file_bytes, self.medium_columns)}

    def _ask(self, offset: int, length: int) -> bytes:
        """Ask the parent for a range of the file of a request `header`, which comes through the inbox."""
        self._send({"read": [offset, min(length, MAX_RANGE_BYTES)]})
        return os.pread(self.inbox_fd, self._receive()["num_bytes"], 0)

    def _source(self, request: Message) -> BinaryIO:
        if request["do"] == "header":
            return io.BufferedReader(RangeFile(AskedRanges(request["num_bytes"], self._ask)))
        if "path" in request:
            return open_regular(request["path"])
        if request["do"] == "image":  # truncating the inbox for each would take 70 microseconds
            return io.BytesIO(os.pread(self.inbox_fd, request["size"], 0))
        os.ftruncate(self.inbox_fd, request["size"])  # an earlier file may have been longer
        return open(self.inbox_fd, "rb", buffering=0, closefd=False)

    def _post_image(self, image: SizedPixels, offset: int = 0) -> Message:
        said: Message = {name: value for name in ("note", "medium") if (value := getattr(image, name)) is not None}
        return self._post([image], offset) | {"offset": offset} | said

    def _post(self, images: list[SizedPixels], offset: int = 0) -> Message:
        """Write images of one size into the outbox; return the answer with their number and size."""
        for image in images:
            unwritten = memoryview(image.data)
            while unwritten:
                num_bytes = os.pwrite(self.outbox_fd, unwritten, offset)
                unwritten, offset = unwritten[num_bytes:], offset + num_bytes
        return {"num_images": len(images), "size": images[0].size}

    def _await_emptied(self) -> None:
        if self._outbox_is_full:
            self._receive()
            self._outbox_is_full = False

    def _send(self, message: Message) -> None:
        self._await_emptied()
        self.channel.send(JSON, message)

    def _receive(self) -> Message:
        request = self.channel.receive()
        if request is None:
            raise SandboxClosedError
        message: Message = json.loads(request)
        return message


class AskedRanges:
    """File of which the parent reads the ranges that are asked for, page by page; the last pages are kept."""

    def __init__(self, size: int, ask: Callable[[int, int], bytes]) -> None:
        self.size, self.version = size, ""
        self._ask, self._pages = ask, dict[int, bytes]()

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the file's end."""
        if length > HEADER_BYTES:
            return self._ask(offset, length)
        start = offset - offset % HEADER_BYTES
        pages = b"".join(self._page(place) for place in range(start, min(offset + length, self.size), HEADER_BYTES))
        return pages[offset - start : offset - start + length]

    def _page(self, place: int) -> bytes:
        if place not in self._pages:
            if len(self._pages) == MAX_PAGES:
                self._pages.clear()
            self._pages[place] = self._ask(place, HEADER_BYTES)
        return self._pages[place]

    def close(self) -> None:
        """Do nothing: the file is the parent's."""


def _is_image(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(HEAD_BYTES)
    return sniff(head) == "image"


def _read_resize(values: Message) -> ResizeSpec:
    """Read the resize rule; its imports happen now, before an image fills the memory."""
    resize = ResizeSpec(**values)
    if resize.resampler == "torchvision":
        import_module("embedder.media.resample")
    return resize


def _answer_of(error: Exception) -> Message:
    if isinstance(error, DecodeError):
        return _error_answer(error.error_type, error.message, error.transient)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        # A new process takes over, because this one's memory may be fragmented.
        message = "decoding it takes more memory than `memory_bytes` allows"
        return _error_answer("MemoryError", message) | {"last": True, "has_torch": _has_torch()}
    return _error_answer(type(error).__name__, getattr(error, "strerror", None) or str(error))


def _has_torch() -> bool:
    """Return whether PyTorch's library takes memory that a new process would have for an image."""
    resample = sys.modules.get("embedder.media.resample")
    return resample is not None and resample.has_faster_kernel()


def _error_answer(error_type: str, message: str, transient: bool = False) -> Message:
    one_line = " ".join(message.split())[:MAX_ERROR_CHARACTERS]
    return {"error_type": error_type, "message": one_line or "no reason given", "transient": transient}


def open_regular(path: str) -> BinaryIO:
    """Open a file on disk, unbuffered; pipes and devices, which may never end, are refused.

    Raises a transient DecodeError if it can't be opened, since its content isn't to blame.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DecodeError("NotAFile", "this is a folder, a pipe or a device, not a file")
    return open(fd, "rb", buffering=0)  # noqa: PTH123 - it is open already


def read_whole(file: BinaryIO, max_bytes: int) -> bytes:
    """Read a whole file; a DecodeError if it is larger than `max_bytes` or can't be read."""
    size = file.seek(0, os.SEEK_END)
    if size > max_bytes:
        raise DecodeError("FileTooLarge", f"the file has {size} bytes; {max_bytes} are allowed (`max_file_bytes`)")
    file.seek(0)
    try:
        return file.read()
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError | ValueError) -> DecodeError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DecodeError(type(error).__name__, f"the file can't be read: {reason}", transient=True)
