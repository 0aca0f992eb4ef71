"""Chooses the frames that represent each stretch of a video, only from their times, in one pass. Pure.

Times are exact fractions of a second, counted from the first frame.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Generic, NamedTuple, TypeVar

Frame = TypeVar("Frame")
Image = TypeVar("Image")


class TimedFrame(NamedTuple, Generic[Frame]):
    """Frame with the time at which it is first shown, and its duration if nothing follows."""

    time_s: Fraction
    shown_s: Fraction
    frame: Frame


@dataclass
class FrameClock:
    """Gives each frame a strictly growing time, whatever its timestamp says.

    A missing timestamp, or one that isn't later than its predecessor's, is replaced by the predecessor's plus one
    frame. `time_base` is the seconds per unit of the timestamps, `frame_s` the duration of a frame that declares none.
    Times and durations that are within `tolerance_s` of whole frames are these: some containers round to 1 ms.
    """

    time_base: Fraction
    frame_s: Fraction
    tolerance_s: Fraction = Fraction(0)
    _first: int | None = None
    _last_s: Fraction | None = None
    _last_shown_s: Fraction = Fraction(0)

    def tick(self, timestamp: int | None, duration: int | None) -> tuple[Fraction, Fraction]:
        """Return the next frame's time and how long it is shown, both in seconds."""
        shown_s = self.snap(duration * self.time_base) if duration and duration > 0 else self.frame_s
        if self._first is None and timestamp is not None:
            self._first = timestamp
        time_s = Fraction(0)
        if timestamp is not None and self._first is not None:
            time_s = self.snap((timestamp - self._first) * self.time_base)
        if self._last_s is not None and time_s <= self._last_s:
            time_s = self._last_s + self._last_shown_s
        self._last_s, self._last_shown_s = time_s, shown_s
        return time_s, shown_s

    def snap(self, time_s: Fraction) -> Fraction:
        """Return the time of the nearest whole frame, if it is within the tolerance; else the time itself."""
        whole_s = round(time_s / self.frame_s) * self.frame_s
        return whole_s if abs(whole_s - time_s) <= self.tolerance_s else time_s


@dataclass(frozen=True)
class PickedSegment(Generic[Image]):
    """Images that represent the video between two times, and the times at which their frames begin.

    `num_decoded` counts frames decoded since the previous segment; 0 if they aren't counted.
    """

    segment: int
    start_s: Fraction
    end_s: Fraction
    images: list[Image]
    times_s: list[Fraction]
    num_decoded: int = 0


@dataclass
class _OpenSegment(Generic[Frame, Image]):
    """Segment that is being filled; `targets` are the times still to be answered, last first."""

    segment: int
    start_s: Fraction
    end_s: Fraction
    targets: list[Fraction]
    convert: Callable[[Frame], Image]
    images: list[Image] = field(default_factory=list)
    times_s: list[Fraction] = field(default_factory=list)

    def answer(self, shown: TimedFrame[Frame], until_s: Fraction) -> None:
        """Assign `shown` to all targets before `until_s`; a frame for several targets is taken once."""
        while self.targets and self.targets[-1] < until_s:
            self.targets.pop()
            self._take(shown)

    def close(self, end_s: Fraction, shown: TimedFrame[Frame]) -> PickedSegment[Image]:
        if not self.images:
            self._take(shown)
        return PickedSegment(self.segment, self.start_s, min(end_s, self.end_s), self.images, self.times_s)

    def _take(self, shown: TimedFrame[Frame]) -> None:
        if not self.times_s or self.times_s[-1] != shown.time_s:
            self.times_s.append(shown.time_s)
            self.images.append(self.convert(shown.frame))


@dataclass(frozen=True)
class SegmentRule:
    """Rule by which a video is cut; each segment's targets are spread evenly, at (i + 1/2) / n of its length.

    With `duration_s`, if the header has it, the last segment spreads its targets over the remainder. With `from_start`,
    targets are at i / n.
    """

    segment_s: Fraction
    frames_per_segment: int
    duration_s: Fraction | None = None
    from_start: bool = False

    def targets(self, segment: int) -> list[Fraction]:
        """Return the target times of a segment, last first."""
        start_s, length_s = segment * self.segment_s, self.segment_s
        if self.duration_s is not None and 0 < self.duration_s - start_s < length_s:
            length_s = self.duration_s - start_s
        num, first = self.frames_per_segment, 0 if self.from_start else 1
        return [start_s + length_s * (2 * i + first) / (2 * num) for i in reversed(range(num))]


def pick_segments(
    frames: Iterable[TimedFrame[Frame]], convert: Callable[[Frame], Image], rule: SegmentRule
) -> Iterator[PickedSegment[Image]]:
    """Cut a stream of frames into segments, holding one frame and the images of one segment at a time.

    A target is answered by the frame shown at that time: the last one that begins no later. Segments in which no frame
    begins are left out (so a stream that claims a gap of years costs nothing); a segment has between one and
    `rule.frames_per_segment` images, all different. `frames` have growing times. Each segment comes once a frame beyond
    it is seen; when `frames` raises, the open segment is lost.
    """
    segment: _OpenSegment[Frame, Image] | None = None
    shown: TimedFrame[Frame] | None = None
    for frame in frames:
        if segment is not None and shown is not None:
            segment.answer(shown, frame.time_s)
            if frame.time_s >= segment.end_s:
                yield segment.close(segment.end_s, shown)
                segment = None
        if segment is None:
            segment = _open_segment(frame.time_s, convert, rule)
            if shown is not None:
                segment.answer(shown, frame.time_s)
        shown = frame
    if segment is not None and shown is not None:
        end_s = shown.time_s + shown.shown_s
        segment.answer(shown, end_s)
        yield segment.close(end_s, shown)


def _open_segment(time_s: Fraction, convert: Callable[[Frame], Image], rule: SegmentRule) -> _OpenSegment[Frame, Image]:
    segment = time_s // rule.segment_s
    start_s = segment * rule.segment_s
    return _OpenSegment(segment, start_s, start_s + rule.segment_s, rule.targets(segment), convert)
