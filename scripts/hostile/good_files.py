"""Good files of every accepted format, small, made of the shipped images: what the mutator starts from."""

import csv
import io
import json
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pillow_heif
import pillow_jxl  # noqa: F401 - makes Pillow write JPEG XL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageCms

from corpus import encode, read_shipped, write_clip
from hostile.camera_raws import dng

NUM_IMAGES = 3
SIZE = (128, 96)
CLIPS = {"mp4": "mpeg4", "h264.mp4": "libx264", "mkv": "libx264", "webm": "libvpx", "vp9.webm": "libvpx-vp9"} | {
    "avi": "mpeg4",
    "mjpeg.avi": "mjpeg",
    "mov": "mpeg4",
    "ts": "libx264",
    "mpg": "mpeg2video",
    "flv": "flv",
    "wmv": "wmv2",
}
FORMAT_OF = {"mkv": "matroska", "ts": "mpegts", "mpg": "mpeg", "wmv": "asf"}


def good_files() -> dict[str, bytes]:
    """File content by name; the suffix tells what it is."""
    images, captions = (each[:NUM_IMAGES] for each in read_shipped())
    files = encoded_images([Image.open(io.BytesIO(image)).convert("RGBA").resize(SIZE) for image in images])
    files |= {f"clip.{name}": clip(codec, name.rpartition(".")[2]) for name, codec in CLIPS.items()}
    files["caption.txt"] = captions[0].encode()
    files["caption.json"] = json.dumps({"caption": captions[1], "tags": ["a", "b"]}).encode()
    members = [("clip.mp4", files["clip.mp4"], {})]
    for key, caption in enumerate(captions):
        members.append((f"{key}.jpg", files["plain.jpg"], {}))
        members.append((f"{key}.json", json.dumps({"caption": caption}).encode(), {}))
    files["shard.tar"] = tar_of(*members)
    return files | tables(files, captions)


def encoded_images(images: list[Image.Image]) -> dict[str, bytes]:
    """The images in every format that is embedded, and in some of its variants."""
    rgba = images[0]
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    animation = {"save_all": True, "append_images": [each.convert("RGB") for each in images[1:]], "duration": 80}
    return {
        "plain.jpg": encode(rgb, "JPEG"),
        "progressive.jpg": encode(rgb, "JPEG", progressive=True, exif=exif, icc_profile=profile),
        "cmyk.jpg": encode(rgb.convert("CMYK"), "JPEG"),
        "several.mpo": encode(rgb, "MPO", **{key: animation[key] for key in ("save_all", "append_images")}),
        "rgba.png": encode(rgba, "PNG", exif=exif, icc_profile=profile),
        "palette.png": encode(rgb.quantize(16), "PNG", transparency=3),
        "sixteen.png": encode(Image.fromarray(np.asarray(grey, np.uint16) * 257), "PNG"),
        "animated.gif": encode(rgb, "GIF", **animation),
        "lossy.webp": encode(rgb, "WEBP", exif=exif),
        "lossless.webp": encode(rgba, "WEBP", lossless=True),
        "animated.webp": encode(rgb, "WEBP", **animation),
        "raw.tiff": encode(rgb, "TIFF", exif=exif),
        "lzw.tiff": encode(rgb, "TIFF", compression="tiff_lzw"),
        "deflate.tiff": encode(grey, "TIFF", compression="tiff_adobe_deflate"),
        "plain.bmp": encode(rgb, "BMP"),
        "palette.bmp": encode(rgb.quantize(8), "BMP"),
        "plain.avif": encode(rgb, "AVIF"),
        "animated.avif": encode(rgb, "AVIF", **animation),
        "animated.png": encode(rgb, "PNG", **animation),
    } | extra_images(images)


def extra_images(images: list[Image.Image]) -> dict[str, bytes]:
    """Images of the formats that the extra `formats` decodes, and some of their variants."""
    pillow_heif.register_heif_opener()
    rgba, rgb = images[0], images[0].convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = pillow_heif.from_bytes("RGB;16", rgb.size, (np.asarray(rgb, np.uint16) * 257).tobytes())
    deep_file = io.BytesIO()
    deep.save(deep_file)
    jpeg = encode(rgb, "JPEG")
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        Path(file.name).write_bytes(jpeg)
        from_jpeg = encode(Image.open(file.name), "JXL", lossless_jpeg=True)
    return {
        "plain.heic": encode(rgb, "HEIF", exif=exif.tobytes()),
        "alpha.heic": encode(rgba, "HEIF"),
        "tiles.heic": encode(rgb, "HEIF", tile_size=64),
        "several.heic": encode(rgb, "HEIF", save_all=True, append_images=[rgba], thumbnails=[32]),
        "deep.heic": deep_file.getvalue(),
        "lossy.jxl": encode(rgb, "JXL"),
        "lossless.jxl": encode(rgba, "JXL", lossless=True, use_container=True, exif=exif.tobytes()),
        "jpeg.jxl": from_jpeg,
        "plain.dng": dng(np.asarray(rgb)),
        "preview.dng": dng(np.asarray(rgb), orientation=6, preview=jpeg),
    }


def clip(codec: str, kind: str) -> bytes:
    """A short clip that changes with time."""
    frames = [np.full((48, 64, 3), 10 * number, np.uint8) for number in range(24)]
    for pixels in frames:
        pixels[:24, :32] = (200, 30, 90)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{kind}"
        write_clip(path, frames, codec, FORMAT_OF.get(kind, kind))
        return path.read_bytes()


def tar_of(*members: tuple[str, bytes, dict[str, object]]) -> bytes:
    """A tar of members: name, content, and changes of the header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content, changes in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tables(files: dict[str, bytes], captions: list[str]) -> dict[str, bytes]:
    """Rows with images or captions, in each format of tables."""
    rows = [{"id": f"r{number}", "caption": caption} for number, caption in enumerate(captions)]
    images = pa.array([files["plain.jpg"], files["rgba.png"], None], pa.binary())
    parquet, text = io.BytesIO(), io.StringIO()
    pq.write_table(pa.Table.from_pylist(rows).append_column("image", images), parquet)
    writer = csv.DictWriter(text, ["id", "caption"])
    writer.writeheader()
    writer.writerows(rows)
    lines = "\n".join(json.dumps(row) for row in rows)
    return {"table.parquet": parquet.getvalue(), "table.csv": text.getvalue().encode(), "table.jsonl": lines.encode()}
