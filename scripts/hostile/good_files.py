"""Good files of every accepted format, small, made of the shipped pictures: what the mutator starts from."""

import csv
import io
import json
import tarfile
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageCms

DEMO = Path(__file__).parents[2] / "embedder" / "demo_data" / "noto.tar"
NUM_PICTURES = 3
SIZE = (128, 96)
CLIPS = {"mp4": "mpeg4", "h264.mp4": "libx264", "mkv": "libx264", "webm": "libvpx", "vp9.webm": "libvpx-vp9"} | {
    "avi": "mpeg4",
    "mjpeg.avi": "mjpeg",
    "mov": "mpeg4",
}
FORMAT_OF = {"mkv": "matroska"}


def good_files() -> dict[str, bytes]:
    """File content by name; the suffix tells what it is."""
    pictures, captions = shipped()
    files = encoded_pictures(pictures)
    files |= {f"clip.{name}": clip(codec, name.rpartition(".")[2]) for name, codec in CLIPS.items()}
    files["caption.txt"] = captions[0].encode()
    files["caption.json"] = json.dumps({"caption": captions[1], "tags": ["a", "b"]}).encode()
    files["shard.tar"] = tar_of(files, captions)
    return files | tables(files, captions)


def shipped() -> tuple[list[Image.Image], list[str]]:
    """Some pictures and captions of the demo."""
    pictures, captions = [], []
    with tarfile.open(DEMO) as tar:
        for member in tar:
            content = tar.extractfile(member).read()
            if member.name.endswith(".png") and len(pictures) < NUM_PICTURES:
                pictures.append(Image.open(io.BytesIO(content)).convert("RGBA").resize(SIZE))
            elif member.name.endswith(".json") and len(captions) < NUM_PICTURES:
                captions.append(json.loads(content)["caption"])
            if len(pictures) == len(captions) == NUM_PICTURES:
                break
    return pictures, captions


def encoded_pictures(pictures: list[Image.Image]) -> dict[str, bytes]:
    """The pictures in every format that is embedded, and in some of its variants."""
    rgba = pictures[0]
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    animation = {"save_all": True, "append_images": [each.convert("RGB") for each in pictures[1:]], "duration": 80}
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
    }


def encode(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def clip(codec: str, kind: str, num_frames: int = 24, rate: int = 8) -> bytes:
    """A short clip that changes with time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{kind}"
        with av.open(str(path), "w", format=FORMAT_OF.get(kind, kind)) as container:
            stream = container.add_stream(codec, rate=Fraction(rate))
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.thread_count = 1
            for number in range(num_frames):
                pixels = np.full((48, 64, 3), 10 * number, np.uint8)
                pixels[:24, :32] = (200, 30, 90)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        return path.read_bytes()


def tar_of(files: dict[str, bytes], captions: list[str]) -> bytes:
    """A WebDataset tar: pictures with captions, and a clip."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for key, caption in enumerate(captions):
            add(tar, f"{key}.jpg", files["plain.jpg"])
            add(tar, f"{key}.json", json.dumps({"caption": caption}).encode())
        add(tar, "clip.mp4", files["clip.mp4"])
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes, **changes: object) -> None:
    """Add a member; `changes` are set on its header."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def tables(files: dict[str, bytes], captions: list[str]) -> dict[str, bytes]:
    """Rows with pictures or captions, in each format of tables."""
    rows = [{"id": f"r{number}", "caption": caption} for number, caption in enumerate(captions)]
    pictures = pa.array([files["plain.jpg"], files["rgba.png"], None], pa.binary())
    parquet, text = io.BytesIO(), io.StringIO()
    pq.write_table(pa.Table.from_pylist(rows).append_column("image", pictures), parquet)
    writer = csv.DictWriter(text, ["id", "caption"])
    writer.writeheader()
    writer.writerows(rows)
    lines = "\n".join(json.dumps(row) for row in rows)
    return {"table.parquet": parquet.getvalue(), "table.csv": text.getvalue().encode(), "table.jsonl": lines.encode()}
