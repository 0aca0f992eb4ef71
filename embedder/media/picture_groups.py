"""Groups of pictures of a video that can be decoded separately; their frames are decoded only on demand.

A group starts with a picture before which nothing is needed to decode it or what follows: an IDR picture (H.264, HEVC),
a key frame (VP9), any frame of a codec without prediction. From the first picture that isn't known to fit, everything
is decoded in sequence.

Source: ITU-T H.264 7.4.1.2.4 and table 7-1; ITU-T H.265 table 7-1; VP9 Bitstream Specification 0.6, 7.2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from embedder.media.media_errors import DecodeError

PARTIAL_FRAME = "a frame could be decoded in part only"
WITH_TIMES = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"})
START_CODE = re.compile(rb"\x00\x00\x01")
MAX_PACKETS, MAX_BYTES = 1200, 64 << 20  # of one group held in memory
AVC_SLICE, AVC_IDR, AVC_PARAMETERS = 1, 5, frozenset({7, 8, 13, 15})
AVC_PARTITIONS = frozenset({2, 3, 4})
HEVC_IDR, HEVC_SLICES, HEVC_PARAMETERS = frozenset({19, 20}), range(32), frozenset({32, 33, 34})
VP9_MARKER_MASK, VP9_MARKER = 0b1100_0000, 0b1000_0000


class Picture(NamedTuple):
    """The picture in a packet: nothing before it is needed if `begins_group`; others may need it if `is_reference`."""

    begins_group: bool
    is_reference: bool = True
    parameters: frozenset[bytes] = frozenset()


def picture_reader(codec_context: Any) -> "PictureReader | None":
    """Return a reader of a stream's pictures; None for a codec that is decoded in sequence."""
    codec = codec_context.codec
    name, extradata = codec.canonical_name, codec_context.extradata or b""
    if name in ("h264", "hevc"):
        is_avc, is_prefixed = name == "h264", extradata[:1] == b"\x01"
        at = 4 if is_avc else 21  # of the byte whose last bits are the size of a length, less one
        length_bytes = (extradata[at] & 3) + 1 if is_prefixed and len(extradata) > at else 0
        return PictureReader(name, length_bytes)
    return PictureReader(name) if name == "vp9" or codec.intra_only else None


@dataclass(frozen=True)
class PictureReader:
    """Reads what a packet holds.

    `length_bytes` is the size of the lengths before NAL units; 0 if start codes separate them.
    """

    codec: str
    length_bytes: int = 0

    def read(self, packet: Any) -> Picture | None:
        """Read the facts about a packet's picture; None if it holds none, or something unknown."""
        if self.codec == "h264":
            return _avc_picture(list(self._units(bytes(packet))))
        if self.codec == "hevc":
            return _hevc_picture(list(self._units(bytes(packet))))
        if self.codec == "vp9":
            return _vp9_picture(bytes(packet)[:1])
        return Picture(begins_group=True)

    def _units(self, data: bytes) -> Iterator[bytes]:
        if not self.length_bytes:
            starts = [found.end() for found in START_CODE.finditer(data)]
            for start, stop in zip(starts, [*starts[1:], len(data) + 3], strict=True):
                yield data[start : stop - 3].rstrip(b"\0")
            return
        offset = 0
        while offset < len(data):
            size = int.from_bytes(data[offset : offset + self.length_bytes], "big")
            offset += self.length_bytes
            yield data[offset : offset + size]
            offset += size


def _avc_picture(units: list[bytes]) -> Picture | None:
    kinds = [unit[0] & 31 if unit else 0 for unit in units]
    slices = [unit for unit, kind in zip(units, kinds, strict=True) if kind in (AVC_SLICE, AVC_IDR)]
    if not slices or AVC_PARTITIONS & set(kinds):
        return None
    parameters = frozenset(unit for unit, kind in zip(units, kinds, strict=True) if kind in AVC_PARAMETERS)
    is_reference = any(unit[0] & 0x60 for unit in slices)
    return Picture(slices[0][0] & 31 == AVC_IDR, is_reference, parameters)


def _hevc_picture(units: list[bytes]) -> Picture | None:
    kinds = [unit[0] >> 1 & 63 if unit else 63 for unit in units]
    slices = [kind for kind in kinds if kind in HEVC_SLICES]
    if not slices:
        return None
    parameters = frozenset(unit for unit, kind in zip(units, kinds, strict=True) if kind in HEVC_PARAMETERS)
    return Picture(slices[0] in HEVC_IDR, True, parameters)


def _vp9_picture(head: bytes) -> Picture | None:
    """Read a VP9 frame's first byte (profiles 0 to 2): marker, profile, shows an earlier frame, kind."""
    if not head or head[0] & VP9_MARKER_MASK != VP9_MARKER or head[0] & 0b0011_0000 == 0b0011_0000:
        return None
    shows_earlier, is_inter = head[0] & 0b1000, head[0] & 0b0100
    return Picture(begins_group=not shows_earlier and not is_inter)


@dataclass
class FrameOnDemand:
    """Frame that is decoded when it is first requested."""

    pts: int
    duration: int
    group: "PictureGroup"
    _frame: Any = None

    def decode(self) -> Any:
        """Return the decoded frame; None if the decoder produces none up to this time in its group."""
        if self._frame is None:
            self._frame = self.group.frame(self.pts)
        return self._frame


@dataclass
class DecodedCount:
    """Counts the decoded packets of a stream; each holds one picture, except hidden ones."""

    num_packets: int = 0


@dataclass
class PictureGroup:
    """Packets from one that starts a group to the last before the next; complete before frames are requested.

    Frames are requested in the order of their times, and before any of a later group. `packets` are in decoding order,
    each with what it holds; `decoded` counts the decoded packets of the stream.
    """

    stream: Any
    decoded: "DecodedCount"
    packets: list[tuple[Any, Picture]] = field(default_factory=list)
    num_bytes: int = 0
    _num_sent: int = 0
    _is_drained: bool = False
    _ready: list[Any] = field(default_factory=list)
    _last: Any = None

    def add(self, packet: Any, picture: Picture) -> None:
        """Add the next packet."""
        self.packets.append((packet, picture))
        self.num_bytes += packet.size

    @property
    def is_full(self) -> bool:
        """Return whether the group has reached the size limit."""
        return len(self.packets) >= MAX_PACKETS or self.num_bytes >= MAX_BYTES

    def frames(self) -> list[FrameOnDemand]:
        """Return the frames in display order."""
        packets = sorted((packet for packet, _ in self.packets), key=lambda packet: packet.pts)
        return [FrameOnDemand(packet.pts, packet.duration, self) for packet in packets]

    def frame(self, pts: int) -> Any:
        """Decode up to a frame; of the earlier ones, which nobody requests any more, only those that others need."""
        if self._num_sent == 0:
            self.stream.codec_context.flush_buffers()
        while True:
            for frame in self._ready:
                if frame.pts is not None and frame.pts <= pts:
                    self._last = frame
            self._ready = [frame for frame in self._ready if frame.pts is None or frame.pts > pts]
            if self._is_drained or (self._last is not None and (self._last.pts == pts or self._ready)):
                return self._last
            self._ready += self._send_next(pts)

    def _send_next(self, pts: int) -> list[Any]:
        if self._num_sent == len(self.packets):
            self._is_drained = True
            return list(self.stream.decode(None))
        packet, picture = self.packets[self._num_sent]
        self._num_sent += 1
        if packet.pts < pts and not picture.is_reference:
            return []
        self.decoded.num_packets += 1
        frames = list(packet.decode())
        if any(frame.is_corrupt for frame in frames):
            raise DecodeError("DamagedVideo", PARTIAL_FRAME)
        return frames


class GroupedFrames:
    """Frames of a stream in order, each already decoded or a `FrameOnDemand`.

    A group's frames are on demand if its packets give the times of all of them and its parameter sets are those of the
    first group; from the first other packet on, all are decoded in sequence. `packets` starts with the stream's first;
    `decoded` counts those that were decoded.
    """

    def __init__(self, packets: Iterator[Any], stream: Any) -> None:
        self._packets, self._stream = packets, stream
        self.decoded = DecodedCount()
        self._reader = picture_reader(stream.codec_context) if _has_times(stream) else None
        self._parameters: frozenset[bytes] | None = None
        self._shown: FrameOnDemand | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the frames; DecodeError for one decoded only partly, else what `packets` or the decoder raise."""
        group = PictureGroup(self._stream, self.decoded)
        for packet in _until_error(self._packets):
            if isinstance(packet, Exception):
                yield from self._frames_before_damage(group)
                raise packet
            picture = self._picture(packet, group)
            if group.packets and (picture is None or picture.begins_group):
                if picture is None or not self._is_on_demand(group):
                    yield from self._in_sequence(group, packet)
                    return
                yield from self._take(group.frames())
                group = PictureGroup(self._stream, self.decoded)
            if picture is None:
                yield from self._in_sequence(group, packet)
                return
            group.add(packet, picture)
        if group.packets and not self._is_on_demand(group):
            yield from self._in_sequence(group)
        else:
            yield from self._take(group.frames())

    def _picture(self, packet: Any, group: PictureGroup) -> Picture | None:
        """Return a packet's facts if it can continue or start a group; None: decode in sequence from here on."""
        if self._reader is None or group.is_full or packet.pts is None or packet.is_discard:
            return None
        if packet.has_sidedata("new_extradata"):
            return None
        picture = self._reader.read(packet)
        return picture if picture is not None and (picture.begins_group or group.packets) else None

    def _is_on_demand(self, group: PictureGroup) -> bool:
        """Return whether a whole group's packets predict its frames; for the first group the decoder confirms it."""
        times = [packet.pts for packet, _ in group.packets]
        parameters = frozenset[bytes]().union(*(picture.parameters for _, picture in group.packets))
        if len(set(times)) < len(times) or min(times) < times[0]:
            return False
        if self._shown is not None:
            return times[0] > self._shown.pts and parameters <= (self._parameters or frozenset())
        self._parameters = parameters
        first = group.frames()[0]
        frame = first.decode()
        return frame is not None and (frame.pts, frame.duration or 0) == (first.pts, first.duration or 0)

    def _take(self, frames: list[FrameOnDemand]) -> Iterator[FrameOnDemand]:
        for frame in frames:
            self._shown = frame
            yield frame

    def _frames_before_damage(self, group: PictureGroup) -> Iterator[Any]:
        """Yield the frames of an unfinished group that no missing frame can precede."""
        last_dts = group.packets[-1][0].dts if group.packets else None
        if last_dts is not None and self._is_on_demand(group):
            yield from self._take([frame for frame in group.frames() if frame.pts <= last_dts])

    def _in_sequence(self, group: PictureGroup, *further: Any) -> Iterator[Any]:
        if self._shown is not None:
            self._shown.decode()  # before the decoder leaves its group
        if self._stream.codec_context.is_open:
            self._stream.codec_context.flush_buffers()
        for packet in chain((packet for packet, _ in group.packets), further, self._packets, [None]):
            self.decoded.num_packets += packet is not None
            for frame in self._stream.decode(packet) if packet is None else packet.decode():
                if frame.is_corrupt:
                    raise DecodeError("DamagedVideo", PARTIAL_FRAME)
                yield frame


def _has_times(stream: Any) -> bool:
    """Return whether the container stores display times; others, such as AVI, have only the decoding order."""
    container = stream.container.format.name
    is_avi_inside = container == "matroska,webm" and stream.codec_context.codec_tag.strip("\0")
    return stream.codec_context.codec.intra_only or (container in WITH_TIMES and not is_avi_inside)


def _until_error(packets: Iterator[Any]) -> Iterator[Any]:
    """Yield the packets, and the exception that ends them, if any."""
    try:
        yield from packets
    except Exception as error:  # noqa: BLE001 - whatever the demuxer raises, after what came before it
        yield error
