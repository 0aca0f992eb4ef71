"""Turns a video file into segments of a few RGB images of one size, streaming with PyAV, in the sandbox process.

FFmpeg gets no file names: the file is opened here, and a demuxer that asks for another one is refused.
"""

import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, BinaryIO

import av
import av.filter
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Discard, Disposition
from av.video.reformatter import VideoReformatter
from PIL import Image

from embedder.media.colour import CICP, to_rgb
from embedder.media.declared_size import declared_bytes
from embedder.media.images import check_pixels, resize_image, upright
from embedder.media.media_errors import DecodeError
from embedder.media.picture_groups import PARTIAL_FRAME, FrameOnDemand, GroupedFrames
from embedder.media.resize import ResizeSpec, Size, SizedPixels, clip_size
from embedder.media.segments import FrameClock, PickedSegment, SegmentRule, TimedFrame, pick_segments

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf"
WITHOUT_INDEX = frozenset({"mpegts", "mpeg", "mpegvideo", "flv", "asf"})
"""Formats in which seeking may end between two key frames."""
COUNTED_FROM_ZERO = frozenset({"matroska,webm", "asf"})
"""Formats whose declared length begins at time 0, even if the first frame is shown later."""
READ_BYTES = 1 << 18
DEFAULT_RATE = Fraction(25)
NEAR_RATE = Fraction(1, 20)  # 1,000/33 frames a second are 30
ROUNDED_S = Fraction(3, 2000)  # times of Matroska and FLV are in ms, an MP4's duration may be; three make a length
MAX_TAG_CHARACTERS = 1 << 15  # of one text
MAX_SEGMENT = 2**31 - 1  # segments are stored as int32
MAX_PIXEL_ASPECT = 8  # a pixel beyond 8:1 means a broken header
DEINTERLACING = "mode=frame:deint=all"  # by edge slopes within one frame
NOT_VIDEO = Disposition.attached_pic | Disposition.timed_thumbnails
"""Streams that are images about the file: cover art, thumbnails."""

ORIENTATIONS = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}
"""Maps signs of a display matrix (a, b, c, d: x' = a x + c y, y' = b x + d y) to the EXIF orientation."""


def read_segments(
    file: BinaryIO,
    resize: ResizeSpec,
    *,
    segment_s: Fraction,
    frames_per_segment: int,
    max_pixels: int,
    medium_columns: Collection[str] = (),
    from_start: bool = False,
) -> Iterator[PickedSegment[SizedPixels]]:
    """Decode a seekable video one segment at a time; all images have one size. `from_start` is as in `SegmentRule`.

    The first image of each segment has the values of the clip's `medium_columns`.

    A damaged or cut-off file raises after its whole segments: a DecodeError, or whatever else PyAV raises.
    """
    missing_bytes = (declared_bytes(file) or 0) - file.seek(0, 2)
    length_s = _find_length_s(file, max_pixels) if from_start else None
    with _open(file) as container:
        stream = _video_stream(container, max_pixels)
        duration_s = _duration_s(container, stream)
        rule = SegmentRule(segment_s, frames_per_segment, length_s or duration_s, from_start)
        grouped = GroupedFrames(_packets(container, stream), stream)
        frames, num_counted = _timed_frames(grouped, _clock(stream, is_exact=from_start)), 0
        if missing_bytes > 0:
            frames = _until_cut(frames, missing_bytes, duration_s)
        resizer = _Resizer(stream, resize)
        for segment in pick_segments(frames, lambda frame: resizer(_decode(frame, max_pixels)), rule):
            if segment.segment > MAX_SEGMENT:
                raise DecodeError("BadTimestamps", f"a frame is said to be shown at {float(segment.start_s):.0f} s")
            num_decoded = grouped.decoded.num_packets
            if medium_columns:
                medium = _medium_of(container, stream, resizer.orientation, medium_columns)
                segment.images[0] = segment.images[0]._replace(medium=medium)
            yield replace(segment, num_decoded=num_decoded - num_counted)
            num_counted = num_decoded


def read_clip_values(file: BinaryIO, max_pixels: int, medium_columns: Collection[str]) -> dict[str, Any]:
    """Return the values of a clip's columns from its header, and its orientation from the first frame.

    `file` must be seekable. Raises like `read_segments`.
    """
    with _open(file) as container:
        stream = _video_stream(container, max_pixels)
        first = next(_decoded_frames(container, stream, max_pixels), None)
        return _medium_of(container, stream, 1 if first is None else _orientation(first), medium_columns)


def read_tags(file: BinaryIO) -> dict[str, str]:
    """Return the tags of a clip's container; `file` must be seekable. Raises like `read_segments`."""
    with _open(file) as container:
        return {name: str(text)[:MAX_TAG_CHARACTERS] for name, text in container.metadata.items()}


def _medium_of(container: Any, stream: Any, orientation: int, columns: Collection[str]) -> dict[str, Any]:
    from embedder.media.medium_values import clip_values

    width, height = stream.codec_context.width, stream.codec_context.height
    return clip_values(container, stream, (height, width) if orientation > 4 else (width, height), orientation, columns)


def read_frame_at(file: BinaryIO, resize: ResizeSpec, time_s: float, max_pixels: int) -> SizedPixels:
    """Decode the frame shown `time_s` seconds after the first; beyond either end, the first or last frame.

    `file` must be seekable, at any position. Raises like `read_segments`.
    """
    with _open(file) as container:
        stream = _video_stream(container, max_pixels)
        frames = _timed_frames(_decoded_frames(container, stream, max_pixels), _clock(stream))
        shown = first = next(frames)
        if _has_index(container):  # others are read on: some can't even go back to their beginning
            frames = _frames_near(container, stream, first, time_s, max_pixels)
        for frame in frames:
            if frame.time_s > time_s:
                break
            shown = frame
        return _Resizer(stream, resize)(shown.frame)


def _open(file: BinaryIO) -> Any:
    file.seek(0, 2)
    if file.tell() == 0:
        raise DecodeError("EmptyFile", "the file is empty")
    file.seek(0)
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
    return av.open(
        file, "r", options=options, io_open=_refuse_to_open, metadata_errors="replace", buffer_size=READ_BYTES
    )


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> BinaryIO:
    raise DecodeError("ForeignReference", f"the file refers to another one, {url!r}, which is not opened")


def _video_stream(container: Any, max_pixels: int) -> Any:
    """Choose and configure the first stream of moving images; the demuxer drops all others."""
    streams = [stream for stream in container.streams.video if not stream.disposition & NOT_VIDEO]
    if not streams:
        raise DecodeError("NoVideoStream", "the file holds no video stream")
    chosen = next((stream for stream in streams if stream.disposition & Disposition.default), streams[0])
    if chosen.codec_context is None:
        raise DecodeError("DecoderNotFoundError", "there is no decoder for the video stream's codec")
    for stream in container.streams:
        if stream is not chosen:
            stream.discard = Discard.all
    check_pixels((chosen.codec_context.width, chosen.codec_context.height), max_pixels)
    chosen.codec_context.options = {"max_pixels": str(max_pixels)}
    chosen.thread_type = "NONE"  # several decoders share the machine
    chosen.thread_count = 1
    return chosen


def _duration_s(container: Any, stream: Any) -> Fraction | None:
    """Return the declared time from the first frame to the end; None if there is none."""
    if stream.duration and stream.duration > 0:
        duration_s = Fraction(stream.duration * stream.time_base)
    elif container.duration and container.duration > 0:
        duration_s = Fraction(container.duration, av.time_base)
    else:
        return None
    late_s = (stream.start_time or 0) * stream.time_base if container.format.name in COUNTED_FROM_ZERO else 0
    return duration_s - late_s if 0 < late_s < duration_s else duration_s


def _find_length_s(file: BinaryIO, max_pixels: int) -> Fraction | None:
    """Return the time from the first frame to the last one's end, by packets where the stream doesn't declare it.

    The container's duration counts its other streams, and without an index a stream's is FFmpeg's estimate. None if
    nothing is found.
    """
    with _open(file) as container:
        stream = _video_stream(container, max_pixels)
        clock, start, has_index = _clock(stream, is_exact=True), stream.start_time or 0, _has_index(container)
        frame = round(clock.frame_s / stream.time_base)
        last = (start + (max(stream.duration or 0, 0) if has_index else 0), 0)
        if last[0] == start:
            try:
                if container.duration and has_index:
                    container.seek(int(Fraction(container.duration, av.time_base) / stream.time_base), stream=stream)
                for packet in container.demux(stream):
                    if packet.size:
                        last = max(last, (packet.pts or 0, packet.duration or frame))
            except (av.FFmpegError, OverflowError):
                pass  # damage is found and reported where frames are decoded
        return clock.snap((sum(last) - start) * stream.time_base) or None


def _has_index(container: Any) -> bool:
    return container.format.name not in WITHOUT_INDEX


def _clock(stream: Any, *, is_exact: bool = False) -> FrameClock:
    """Return the clock of a stream's frames; an exact one takes off what a container rounds.

    A container that declares no rate has an average by rounded times; FFmpeg's guess is the common rate next to it.
    """
    average, guessed = stream.average_rate, stream.guessed_rate
    is_near = bool(average and guessed) and abs(guessed / average - 1) < NEAR_RATE
    rate = guessed if is_exact and is_near else average or guessed or DEFAULT_RATE
    frame_s = 1 / rate
    return FrameClock(stream.time_base, frame_s, min(ROUNDED_S, frame_s / 8) if is_exact else Fraction(0))


def _timed_frames(frames: Iterable[Any], clock: FrameClock) -> Iterator[TimedFrame[Any]]:
    """Give frames, decoded or on demand, growing times; damage raises where it is found.

    Raises a DecodeError if there is no frame at all, or the decoder invented parts of one.
    """
    num_frames = 0
    for frame in frames:
        num_frames += 1
        yield TimedFrame(*clock.tick(frame.pts, frame.duration), frame)
    if num_frames == 0:
        raise DecodeError("NoFrames", "the video stream holds no frame")


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise DecodeError("DamagedVideo", "a packet is damaged or cut off")
        if packet.size:
            yield packet


def _decode(frame: Any, max_pixels: int) -> Any:
    if isinstance(frame, FrameOnDemand):
        frame = frame.decode()
        if frame is None:
            raise DecodeError("DamagedVideo", "a frame could not be decoded")
    check_pixels((frame.width, frame.height), max_pixels)
    return frame


def _decoded_frames(container: Any, stream: Any, max_pixels: int) -> Iterator[Any]:
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise DecodeError("DamagedVideo", "a packet is damaged or cut off")
        for frame in packet.decode():
            if frame.is_corrupt:
                raise DecodeError("DamagedVideo", PARTIAL_FRAME)
            check_pixels((frame.width, frame.height), max_pixels)
            yield frame


def _until_cut(
    frames: Iterator[TimedFrame[Any]], missing_bytes: int, duration_s: Fraction | None
) -> Iterator[TimedFrame[Any]]:
    """Yield the frames of a truncated file, and raise at its end unless only its last tables are missing."""
    end_s = Fraction(0)
    for frame in frames:
        end_s = frame.time_s + 2 * frame.shown_s  # one frame of grace: headers round durations
        yield frame
    if duration_s is None or end_s < duration_s:
        raise DecodeError("TruncatedVideo", f"the file was cut off: {missing_bytes} bytes of it are missing")


def _frames_near(
    container: Any, stream: Any, first: TimedFrame[Any], time_s: float, max_pixels: int
) -> Iterator[TimedFrame[Any]]:
    """Yield frames from a key frame at or before the time; from the beginning if seeking fails."""
    if time_s <= 0:
        return
    frames = _seeked_frames(container, stream, first, time_s, max_pixels)
    start = next(frames, None)
    if start is not None and start.time_s <= time_s:
        yield start
        yield from frames
    else:
        container.seek(0)
        yield from _timed_frames(_decoded_frames(container, stream, max_pixels), _clock(stream))


def _seeked_frames(
    container: Any, stream: Any, first: TimedFrame[Any], time_s: float, max_pixels: int
) -> Iterator[TimedFrame[Any]]:
    """Yield frames after a seek, with times counted from the first frame; none if it fails."""
    if first.frame.pts is None:
        return
    try:
        container.seek(first.frame.pts + int(time_s / stream.time_base), stream=stream)
    except (av.FFmpegError, OverflowError):
        return
    for frame in _decoded_frames(container, stream, max_pixels):
        if frame.pts is not None:
            yield TimedFrame((frame.pts - first.frame.pts) * stream.time_base, first.shown_s, frame)


class _Resizer:
    def __init__(self, stream: Any, resize: ResizeSpec) -> None:
        self._resize = resize
        self._aspect: Fraction | None = None if resize.mode == "squash" else stream.sample_aspect_ratio
        self._reformatter = VideoReformatter()
        self.orientation = 0  # not known yet
        self._size: Size | None = None

    def __call__(self, frame: Any) -> SizedPixels:
        """Return pixels of the size of the resized first frame; some streams change theirs."""
        if not self.orientation:  # read once: PyAV's side data keeps its frame alive until garbage is collected
            self.orientation = _orientation(frame)
        if self._resize.colour == "srgb" and frame.interlaced_frame:
            frame = _deinterlace(frame)
        image = _square_pixels(to_rgb(self._to_image(frame), self._resize.colour), self._aspect)
        image = upright(image, self.orientation)
        if self._resize.mode == "patches":
            self._size = self._size or clip_size(image.size, self._resize)
        return resize_image(image, self._resize, self._size)

    def _to_image(self, frame: Any) -> Image.Image:
        """Convert to 8-bit RGB, or RGBA if the frame has an alpha channel, respecting its colour space and range."""
        mode = "RGBA" if any(component.is_alpha for component in frame.format.components) else "RGB"
        reformatted = self._reformatter.reformat(frame, format="rgba" if mode == "RGBA" else "rgb24", threads=1)
        plane = reformatted.planes[0]
        direction = 1 if plane.line_size > 0 else -1  # bottom-up frames have negative line sizes
        size, line_bytes = (frame.width, frame.height), abs(plane.line_size)
        image = Image.frombytes(mode, size, bytes(plane), "raw", mode, line_bytes, direction)
        image.info[CICP] = (int(frame.color_primaries), int(frame.color_trc))
        return image


def _deinterlace(frame: Any) -> Any:
    """Keep only one moment's lines and interpolate the others; in a few frames the neighbours are kept.

    The frame is unchanged if FFmpeg has no such filter for its pixel format.
    """
    try:
        graph = av.filter.Graph()
        source = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or Fraction(1, 25)
        )
        graph.link_nodes(source, graph.add("estdif", DEINTERLACING), graph.add("buffersink")).configure()
        graph.push(frame)
        graph.push(None)
        found = graph.pull()
    except (av.FFmpegError, ValueError):
        return frame
    for name in ("color_range", "colorspace", "color_primaries", "color_trc"):
        setattr(found, name, getattr(frame, name))
    return found


def _square_pixels(image: Image.Image, aspect: Fraction | None) -> Image.Image:
    """Widen an image whose pixels aren't square, as in DV and DVD clips."""
    if not aspect or aspect == 1 or not 1 / MAX_PIXEL_ASPECT <= aspect <= MAX_PIXEL_ASPECT:
        return image
    return image.resize((max(1, round(image.width * aspect)), image.height), Image.Resampling.BILINEAR)


def _orientation(frame: Any) -> int:
    for data in frame.side_data:
        if data.type == SideDataType.DISPLAYMATRIX:
            a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
            scale = max(abs(a), abs(b), abs(c), abs(d)) or 1
            return ORIENTATIONS.get((round(a / scale), round(b / scale), round(c / scale), round(d / scale)), 1)
    return 1
