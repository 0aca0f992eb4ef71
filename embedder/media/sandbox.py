"""Sandboxed decoding of encoded bytes or a file to uint8 pixels, at a bounded cost whatever the bytes are.

A light child process with bounded memory does all decoding. It is killed when it takes too long and restarted when it
dies, so a file that hangs or crashes its decoder affects neither other files nor the caller.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embedder.media.decoder_process import (
    BROKEN_MESSAGE,
    MAX_BATCH_PIXEL_BYTES,
    MAX_CRASHES,
    START_TIMEOUT_S,
    DecoderProcess,
    Message,
    Pixels,
    receive,
    reported_error,
    write_all,
)
from embedder.media.limits import MAX_RANGE_BYTES, PROGRESS_BYTES
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec, max_bytes
from embedder.process.child import ChildDiedError, ChildHungError
from embedder.storage.file_adapter import ByteRanges

Source = bytes | bytearray | memoryview | str | Path
"""Encoded bytes, or the path of a local file."""
ImageRequest = tuple[Source, ResizeSpec]
"""Image, and the rule that it is resized by."""


MAX_BATCH_IMAGES, MAX_BATCH_BYTES = 8, 8 << 20
"""Limits of one message, with `MAX_BATCH_PIXEL_BYTES`: images, bytes of files; a larger one gets its own message."""


@dataclass(frozen=True)
class VideoSegment:
    """Images that represent one stretch of a video: number `segment`, which is `start_s // segment_s`.

    Times are in seconds from the first frame; `times_s`, at which the frames begin, from the segment's start, and 0 for
    one that is shown before it. `pixels` are uint8 (F, H, W, 3), RGB, all of one size; F is from 1 to
    `frames_per_segment`. `num_decoded` counts frames decoded since the previous segment; 0 for an animated image.
    `medium` has the values of the medium's columns, None if none were asked for.
    """

    segment: int
    start_s: float
    end_s: float
    pixels: Pixels
    times_s: tuple[float, ...]
    num_decoded: int = 0
    medium: Message | None = None


class DecodedImage(NamedTuple):
    """Decoded image, uint8 (H, W, 3), RGB; `note` says what is missing, None means nothing.

    `medium` has the values of the medium's columns, None if none were asked for.
    """

    pixels: Pixels
    note: str | None
    medium: Message | None = None


class SandboxedDecoder(DecoderProcess):
    """Decodes one file after another in its own child process.

    The child is started for the first file and kept; it dies with this process. Only one thread may use a decoder at a
    time; one process may hold several decoders.
    """

    def image(self, source: Source, resize: ResizeSpec) -> Pixels:
        """Decode one image: upright, flattened on white, resized; of an animated one, its first frame.

        Returns uint8 (H, W, 3), RGB, H = W = `resize.image_size`; in mode `patches`, multiples of `resize.patch_size`;
        in mode `fit`, the longer side is at most `resize.image_size`. Raises a DecodeError.
        """
        self._check_size(source)
        return self._one_image({"do": "image"}, source, resize).pixels

    def warm_up(self, resize: ResizeSpec) -> None:
        """Make the child load what it would load after some hundred images, so that costs are those of a long run."""
        self._turn += 1
        self._end_unfinished()
        try:
            self._send({"do": "warm_up", "resize": vars(resize)})
            self._receive(START_TIMEOUT_S, "the start of the decoder")
            self._is_busy = False
        except ChildDiedError as death:
            self._clean_up(death)
        except DecodeError:  # it took too long; decoding images will show why
            pass

    def images(self, requests: Sequence[ImageRequest]) -> Iterator[DecodedImage | DecodeError]:
        """Decode images as `image` does, many per message; a hostile one fails without affecting others.

        If the child dies or hangs, the image that it was processing is blamed, and the others are decoded again. Yields
        for each request its image, or the error that `image` would raise.
        """
        for batch in _batches(requests, self.limits.max_file_bytes):
            if len(batch) > 1:
                yield from self._batch(batch)
            else:
                yield self._image_or_error(*batch[0])

    def _check_size(self, source: Source) -> None:
        limit = self.limits.max_file_bytes
        if not isinstance(source, str | Path) and (num_bytes := memoryview(source).nbytes) > limit:
            raise DecodeError("FileTooLarge", f"the file has {num_bytes} bytes; {limit} are allowed (`max_file_bytes`)")

    def _image_or_error(self, source: Source, resize: ResizeSpec) -> DecodedImage | DecodeError:
        try:
            self._check_size(source)
            return self._one_image({"do": "image"}, source, resize)
        except DecodeError as error:
            return error

    def _batch(self, requests: Sequence[ImageRequest]) -> Iterator[DecodedImage | DecodeError]:
        """Decode images whose bytes fit the inbox together; yield them as they arrive."""
        num_found = 0
        while rest := requests[num_found:]:
            first = num_found
            try:
                self._ask_for_batch(rest)
                while num_found < len(requests) and self._child is not None:
                    found = self._receive_images(requests[num_found:])
                    num_found += len(found)
                    self._is_busy = num_found < len(requests) and self._child is not None
                    yield from found
            except ChildDiedError as end:
                number = max(first + self._number_at_end(len(rest)), num_found)
                self._clean_up(end)
                yield from (self._image_or_error(*each) for each in requests[num_found:number])
                if isinstance(end, ChildHungError):
                    yield self._timeout_error("decoding", self.limits.timeout_s, "`timeout_s`")
                else:  # retry the image that it died of
                    yield self._image_or_error(*requests[number])
                num_found = number + 1

    def _ask_for_batch(self, requests: Sequence[ImageRequest]) -> None:
        self._turn += 1
        self._end_unfinished()
        rules = list(dict.fromkeys(rule for _, rule in requests))
        inbox_fd, outbox_fd = self._shared_fds()
        os.pwrite(outbox_fd, bytes(PROGRESS_BYTES), 0)
        offset, files = 0, []
        for source, rule in requests:
            encoded = memoryview(source).cast("B")  # type: ignore[arg-type]  # `_batches` puts no paths here
            write_all(inbox_fd, encoded, offset)
            files.append((offset, encoded.nbytes, rules.index(rule)))
            offset += encoded.nbytes
        self._send({"do": "images", "resizes": [vars(rule) for rule in rules], "files": files})

    def _receive_images(self, requests: Sequence[ImageRequest]) -> list[DecodedImage | DecodeError]:
        """Take the next answers of a batch, as many as the child sends together; after its last, the child is gone."""
        message = receive(self._get_child(), self.limits.timeout_s)
        answers = message.get("images")
        if not isinstance(answers, list) or not 1 <= len(answers) <= len(requests):
            raise ChildDiedError(BROKEN_MESSAGE)
        found: list[DecodedImage | DecodeError] = []
        for answer, (_, rule) in zip(answers, requests, strict=False):
            if not isinstance(answer, dict):
                raise ChildDiedError(BROKEN_MESSAGE)
            found.append(reported_error(answer) or self._collect_image(answer, rule))
        if message.get("last"):
            self._kill_child()
            if answers[-1].get("has_torch"):  # a new process has more room for this one
                found.pop()
        return found

    def _number_at_end(self, num_asked: int) -> int:
        """Return which image of the last message the child was processing when it died or was given up."""
        _, outbox_fd = self._shared_fds()
        return min(int.from_bytes(os.pread(outbox_fd, PROGRESS_BYTES, 0), "little"), num_asked - 1)

    def frame_at(self, source: Source, resize: ResizeSpec, time_s: float) -> Pixels:
        """Decode the frame of a video or animated image shown `time_s` seconds after its first frame.

        Returns uint8 (H, W, 3), RGB; beyond either end, the first or the last frame. Raises a DecodeError if the video
        can't be decoded.
        """
        return self._one_image({"do": "frame", "time_s": time_s}, source, resize).pixels

    def header(self, ranges: ByteRanges, languages: Sequence[str] | None = None) -> Message:
        """Return the values of the medium's columns that a file's headers give; only what they take is read.

        With `languages`, which are those that are wanted of XMP's alternatives, return the `captions` by place and the
        `keywords` of a picture's metadata or an XMP sidecar instead. Raises a DecodeError; whatever `ranges` raises.
        """
        self._turn += 1
        self._end_unfinished()
        deadline_s = time.monotonic() + self.limits.timeout_s
        try:
            self._send({"do": "header", "num_bytes": ranges.size, "languages": languages})
            while True:
                answer = self._receive(max(0.0, deadline_s - time.monotonic()), "reading the header")
                if "read" not in answer:
                    self._is_busy = False
                    return _read_medium(answer) or {}
                wanted = answer["read"]
                if not (isinstance(wanted, list) and len(wanted) == 2 and all(type(each) is int for each in wanted)):
                    raise ChildDiedError(BROKEN_MESSAGE)
                data = ranges.read_at(max(0, wanted[0]), min(MAX_RANGE_BYTES, max(0, wanted[1])))
                write_all(self._shared_fds()[0], memoryview(data), 0)
                self._send({"num_bytes": len(data)})
        except ChildDiedError as death:
            self._blame(death, MAX_CRASHES)
            raise RuntimeError("the crash is blamed on the file") from None

    def video(
        self,
        source: Source,
        resize: ResizeSpec,
        *,
        segment_s: float,
        frames_per_segment: int,
        from_start: bool = False,
    ) -> Iterator[VideoSegment]:
        """Decode a video or an animated image segment by segment, in memory bounded by one segment.

        Each segment has `frames_per_segment` frames, spread evenly; `from_start` is as in `SegmentRule`. Segments come
        in order; stretches in which no frame begins have none. A request for another file ends the video; continuing it
        then raises a RuntimeError. A DecodeError in the middle comes after the whole segments before it; an image of
        one frame raises a `StillImage`.
        """
        command = {"do": "video", "segment_s": segment_s, "frames_per_segment": frames_per_segment}
        command["from_start"] = from_start
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
                    with contextlib.suppress(ChildDiedError):  # noticed when the next segment is requested
                        self._send({"next": True})
                    yield segment
            except ChildDiedError as death:
                self._blame(death, num_crashes)

    def _one_image(self, command: Message, source: Source, resize: ResizeSpec) -> DecodedImage:
        request = self._deliver(command, source, resize)
        try:
            for num_crashes in range(1, MAX_CRASHES + 1):
                try:
                    self._send(request)
                    answer = self._receive(self.limits.timeout_s, "decoding")
                    image = self._collect_image(answer, resize)
                    self._is_busy = False
                    return image
                except ChildDiedError as death:
                    self._blame(death, num_crashes)
            raise RuntimeError("the last crash is always blamed on the file")
        finally:
            self._empty_inbox()

    def _receive_segment(self, budget_s: float) -> Message:
        if budget_s < self.limits.timeout_s:
            whole = f"the whole video (at most {self.limits.video_timeout_s:g} s): what is left"
            return self._receive(budget_s, whole, "`video_timeout_s`")
        return self._receive(self.limits.timeout_s, "decoding a segment")

    def _deliver(self, command: Message, source: Source, resize: ResizeSpec) -> Message:
        """Send a request: end an open one, and pass the source to the child by path or through the inbox."""
        self._turn += 1
        self._end_unfinished()
        request = command | {"resize": vars(resize)}
        if isinstance(source, str | Path):
            return request | {"path": os.path.abspath(source)}  # noqa: PTH100 - resolves no links, takes str too
        encoded = memoryview(source).cast("B")
        write_all(self._shared_fds()[0], encoded, 0)
        return request | {"size": encoded.nbytes}

    def _collect_segment(self, answer: Message, resize: ResizeSpec, frames_per_segment: int) -> VideoSegment:
        pixels = self._collect(answer, resize, frames_per_segment)
        try:
            start_s, end_s = float(answer["start_s"]), float(answer["end_s"])
            number, num_decoded = int(answer["segment"]), int(answer["num_decoded"])
            times_s = tuple(map(float, answer["times_s"]))
            if len(times_s) != len(pixels) or not all(map(math.isfinite, times_s)):
                raise ChildDiedError(BROKEN_MESSAGE)
            return VideoSegment(number, start_s, end_s, pixels, times_s, num_decoded, _read_medium(answer))
        except (KeyError, TypeError, ValueError):
            raise ChildDiedError(BROKEN_MESSAGE) from None

    def _collect_image(self, answer: Message, resize: ResizeSpec) -> DecodedImage:
        note = answer.get("note")
        return DecodedImage(
            self._collect(answer, resize, 1)[0], None if note is None else str(note), _read_medium(answer)
        )


def _batches(requests: Sequence[ImageRequest], max_file_bytes: int) -> Iterator[list[ImageRequest]]:
    """Divide requests, in order, into messages; a path or a large file gets its own."""
    batch: list[ImageRequest] = []
    num_encoded = num_decoded = 0
    for source, rule in requests:
        size = None if isinstance(source, str | Path) else memoryview(source).nbytes
        is_small = size is not None and size <= min(max_file_bytes, MAX_BATCH_BYTES)
        num_encoded, num_decoded = num_encoded + (size or 0), num_decoded + max_bytes(rule)
        is_over = len(batch) == MAX_BATCH_IMAGES or num_encoded > MAX_BATCH_BYTES or num_decoded > MAX_BATCH_PIXEL_BYTES
        if batch and (is_over or not is_small):
            yield batch
            batch, num_encoded, num_decoded = [], size or 0, max_bytes(rule)
        if is_small:
            batch.append((source, rule))
        else:
            yield [(source, rule)]
            num_encoded = num_decoded = 0
    if batch:
        yield batch


def _read_medium(answer: Message) -> Message | None:
    """Return the values of the medium's columns that a child sends; the names it may send are checked on writing."""
    found = answer.get("medium")
    return found if isinstance(found, dict) else None
