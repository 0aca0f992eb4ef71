"""Builds ICC profiles from numbers in files: primaries, a gamma, the codes of video; no library needed.

For HDR (PQ and HLG) the curve maps the white of text and paper, 203 nit or 75 %, to the white of sRGB, and rolls off
what is brighter. Each channel is treated separately, so a profile of curves and a matrix is enough.
"""

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

Curve = Callable[[float], float]
"""Maps a channel's value in [0, 1] to linear light, 1 for white."""
Point = tuple[float, float]
"""Chromaticity x, y."""
Primaries = tuple[Point, Point, Point, Point]
"""Chromaticities of red, green, blue and white."""
Matrix = tuple[tuple[float, float, float], ...]
Cicp = tuple[int, int]
"""Codes of the primaries and of the transfer characteristics (Source: ITU-T H.273)."""

D65, WHITE_C, EQUAL_ENERGY = (0.3127, 0.329), (0.31, 0.316), (1 / 3, 1 / 3)
BT709 = ((0.64, 0.33), (0.3, 0.6), (0.15, 0.06), D65)
SMPTE_170M = ((0.63, 0.34), (0.31, 0.595), (0.155, 0.07), D65)
BT2020 = ((0.708, 0.292), (0.17, 0.797), (0.131, 0.046), D65)
P3 = ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06), D65)
ADOBE_GAMMA = 563 / 256

PRIMARIES: dict[int, Primaries] = {
    4: ((0.67, 0.33), (0.21, 0.71), (0.14, 0.08), WHITE_C),
    5: ((0.64, 0.33), (0.29, 0.6), (0.15, 0.06), D65),
    6: SMPTE_170M,
    7: SMPTE_170M,
    8: ((0.681, 0.319), (0.243, 0.692), (0.145, 0.049), WHITE_C),
    9: BT2020,
    10: ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0), EQUAL_ENERGY),
    11: (*P3, (0.314, 0.351)),
    12: (*P3, D65),
    22: ((0.63, 0.34), (0.295, 0.605), (0.155, 0.077), D65),
}
"""Primaries by code, except those of sRGB (1), the default for any other code (Source: ITU-T H.273, table 2)."""
PQ, HLG = 16, 18

WHITE_NITS = 203.0
"""Luminance of the reference white, at which SDR's white is shown (Source: ITU-R BT.2408)."""
PEAK_NITS = 1000.0
"""Luminance of PQ that becomes full white: the peak of nearly all mastered content."""
HLG_WHITE = 0.75
"""Signal of the reference white (Source: ITU-R BT.2408)."""
KNEE = 0.85
"""Linear light above which highlights are rolled off; the reference white itself comes to 246 of 255."""

CURVE_POINTS = 4096
D50_XYZ = (0.9642, 1.0, 0.8249)  # of the ICC's connection space
BRADFORD = ((0.8951, 0.2664, -0.1614), (-0.7502, 1.7135, 0.0367), (0.0389, -0.0685, 1.0296))
SMALLEST_DETERMINANT = 1e-4  # primaries on one line make no colours
NEAR_SRGB_GAMMA, NEAR_SRGB_POINT = 0.1, 0.005
"""Distances from 2.2, and from sRGB's primaries, within which files count as sRGB, which they nearly always mean."""


def cicp_profile(codes: Cicp, *, is_grey: bool = False) -> bytes | None:
    """Return a profile for codes of video; None if they mean sRGB or are unknown.

    The transfer of BT.709 and its relatives counts as that of sRGB, as browsers and players show it. No system gamma is
    applied to HLG: for a display whose 75 % is as bright as an SDR screen's white, of 100 nit, it is 1.03.

    Source: ITU-T H.273; ITU-R BT.2100 (PQ, HLG and its system gamma).
    """
    primaries, curve = PRIMARIES.get(codes[0]), _CURVES.get(codes[1])
    if curve is None and (primaries is None or is_grey):
        return None
    return _profile(f"H.273 {codes}", curve or srgb_curve, primaries or BT709, is_grey)


def gamma_profile(gamma: float, primaries: Primaries = BT709, *, is_grey: bool = False) -> bytes | None:
    """Return a profile of a gamma and primaries; None if these are impossible.

    `gamma` is the exponent from values to linear light; near 2.2, with sRGB's primaries, it counts as sRGB's curve.
    """
    if not 0.1 <= gamma <= 10:
        return None
    is_srgb = abs(gamma - 2.2) <= NEAR_SRGB_GAMMA and all(
        abs(stated - own) <= NEAR_SRGB_POINT
        for points in zip(primaries, BT709, strict=True)
        for stated, own in zip(*points, strict=True)
    )
    curve = srgb_curve if is_srgb else _power(gamma)
    return _profile(f"gamma {gamma} {primaries}", curve, primaries, is_grey)


def primaries_profile(primaries: Primaries) -> bytes | None:
    """Return a profile of primaries with the curve of sRGB; None if they are impossible."""
    return _profile(f"primaries {primaries}", srgb_curve, primaries, is_grey=False)


def adobe_rgb_profile() -> bytes | None:
    """Return the profile of Adobe RGB (1998)."""
    return _profile("Adobe RGB", _power(ADOBE_GAMMA), ADOBE_RGB, is_grey=False)


def _power(gamma: float) -> Curve:
    return lambda value: math.pow(value, gamma)


def srgb_curve(value: float) -> float:
    """Return the linear light of an sRGB value (Source: IEC 61966-2-1)."""
    return value / 12.92 if value <= 0.04045 else math.pow((value + 0.055) / 1.055, 2.4)


def pq_curve(value: float) -> float:
    """Return the linear light of PQ, 1 for the reference white, before roll-off (Source: ITU-R BT.2100)."""
    root = math.pow(value, 1 / 78.84375)
    power = max(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)
    return 10_000 / WHITE_NITS * math.pow(power, 1 / 0.1593017578125)


def hlg_curve(value: float) -> float:
    """Return the linear light of HLG, 1 for the reference white, before roll-off (Source: ITU-R BT.2100)."""
    return _hlg_scene_light(value) / _hlg_scene_light(HLG_WHITE)


def _hlg_scene_light(value: float) -> float:
    if value <= 0.5:
        return value * value / 3
    return (math.exp((value - 0.55991073) / 0.17883277) + 0.28466892) / 12


def rolled_off(light: float, peak: float) -> float:
    """Compress highlights into [0, 1]: unchanged up to the knee, then ever flatter up to the peak, which becomes 1.

    `light` is linear, 1 for the reference white; `peak` is the brightest that differs from white. Source: Reinhard et
    al. 2002, equation 4, above the knee.
    """
    if light <= KNEE:
        return light
    above, most = (light - KNEE) / (1 - KNEE), (peak - KNEE) / (1 - KNEE)
    return min(1.0, KNEE + (1 - KNEE) * above * (1 + above / most**2) / (1 + above))


def _pq_to_sdr(value: float) -> float:
    return rolled_off(pq_curve(value), PEAK_NITS / WHITE_NITS)


def _hlg_to_sdr(value: float) -> float:
    return rolled_off(hlg_curve(value), hlg_curve(1.0))


def _cinema_curve(value: float) -> float:
    return min(1.0, 52.37 / 48 * math.pow(value, 2.6))


_CURVES: dict[int, Curve] = {
    5: _power(2.8),
    8: lambda value: value,
    PQ: _pq_to_sdr,
    17: _cinema_curve,
    HLG: _hlg_to_sdr,
}
"""Curves by transfer code, unless they are shown as that of sRGB (Source: ITU-T H.273, table 3)."""

_made: dict[tuple[str, bool], bytes | None] = {}
MAX_MADE = 64  # files may state any gamma


def _profile(name: str, curve: Curve, primaries: Primaries, is_grey: bool) -> bytes | None:
    key = (name, is_grey)
    if key not in _made:
        if len(_made) >= MAX_MADE:
            _made.clear()
        table = [curve(number / (CURVE_POINTS - 1)) for number in range(CURVE_POINTS)]
        _made[key] = table_profile([table], primaries, is_grey=is_grey)
    return _made[key]


def table_profile(
    curves: Sequence[Sequence[float]], primaries: Primaries = BT709, *, is_grey: bool = False
) -> bytes | None:
    """Write an ICC profile, version 2 (ICC.1:2001-04); None if the primaries span no colours.

    `curves` are evenly spaced values of linear light: one curve for all channels, or three.
    """
    matrix = _matrix(primaries)
    if matrix is None:
        return None
    tags = [(b"desc", _text(b"desc")), (b"cprt", _text(b"text")), (b"wtpt", _xyz(D50_XYZ))]
    if is_grey:
        tags.append((b"kTRC", _curve(curves[0])))
    else:
        packed = [_curve(each) for each in curves] * (3 // len(curves))
        for channel, trc, *column in zip(b"rgb", packed, *matrix, strict=True):
            tags += [(bytes([channel]) + b"XYZ", _xyz(column)), (bytes([channel]) + b"TRC", trc)]
    return _pack(b"GRAY" if is_grey else b"RGB ", tags)


def _pack(space: bytes, tags: Sequence[tuple[bytes, bytes]]) -> bytes:
    table, body, places = struct.pack(">I", len(tags)), b"", dict[bytes, int]()
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags:
        if data not in places:  # one curve serves three channels
            places[data] = start + len(body)
            body += data + bytes(-len(data) % 4)
        table += name + struct.pack(">II", places[data], len(data))
    size = 128 + len(table) + len(body)
    head = struct.pack(">I4xI4s4s4s", size, 0x02400000, b"mntr", space, b"XYZ ")
    head += struct.pack(">6H4s28x3i", 2000, 1, 1, 0, 0, 0, b"acsp", *map(_to_fixed_point, D50_XYZ))
    return head.ljust(128, b"\0") + table + body


def _to_fixed_point(value: float) -> int:
    return round(value * 65536)


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *map(_to_fixed_point, values))


def _curve(values: Sequence[float]) -> bytes:
    levels = [round(65535 * min(max(value, 0.0), 1.0)) for value in values]
    return b"curv\0\0\0\0" + struct.pack(f">I{len(levels)}H", len(levels), *levels)


def _text(kind: bytes) -> bytes:
    return b"text\0\0\0\0\0" if kind == b"text" else b"desc\0\0\0\0" + struct.pack(">I", 1) + bytes(79)


@lru_cache(maxsize=64)
def _matrix(primaries: Primaries) -> Matrix | None:
    *colours, white = ((x, y, 1 - x - y) for x, y in primaries)
    columns = tuple(zip(*colours, strict=True))
    if not all(math.isfinite(value) for row in (*columns, white) for value in row) or white[1] <= 0.01:
        return None
    inverse = _inverse(columns)
    if inverse is None:
        return None
    white_XYZ = [value / white[1] for value in white]
    scales = _times(inverse, white_XYZ)
    unadapted = tuple(tuple(value * scale for value, scale in zip(row, scales, strict=True)) for row in columns)
    from_cones, cones = _inverse(BRADFORD), _times(BRADFORD, white_XYZ)
    if from_cones is None or min(map(abs, cones)) < SMALLEST_DETERMINANT:
        return None
    gains = [target / cone for target, cone in zip(_times(BRADFORD, D50_XYZ), cones, strict=True)]
    adapted = tuple(tuple(gain * value for value in row) for gain, row in zip(gains, BRADFORD, strict=True))
    found = _product(from_cones, _product(adapted, unadapted))
    return found if all(abs(value) < 100 for row in found for value in row) else None


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _product(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> Matrix:
    columns = [_times(left, column) for column in zip(*right, strict=True)]
    return tuple(zip(*columns, strict=True))


def _inverse(matrix: Sequence[Sequence[float]]) -> Matrix | None:
    (a, b, c), (d, e, f), (g, h, i) = matrix
    rows = (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )
    determinant = a * rows[0][0] + b * rows[1][0] + c * rows[2][0]
    if abs(determinant) < SMALLEST_DETERMINANT:
        return None
    return tuple(tuple(value / determinant for value in row) for row in rows)  # type: ignore[misc]  # three of three
