"""Images, clips and captions made in code."""

import tarfile
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from PIL import Image

SENTENCES = [
    "a red car on the road",
    "two cats sleep in the sun",
    "a blue bird over the sea",
    "green apples and a loaf of bread",
    "the old man reads a book",
    "seven white horses",
] * 4


def make_image(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Make coloured rectangles on noise; the same seed gives the same image."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 60, (height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] += rng.integers(0, 190, 3, np.uint8)
    return Image.fromarray(pixels)


def image_bytes(seed: int, form: str = "PNG") -> bytes:
    """Encode an image file."""
    file = BytesIO()
    make_image(seed).save(file, form)
    return file.getvalue()


def clip(path: Path, seconds: float = 3.0, fps: int = 10, size: int = 48, **tags: str) -> Path:
    """Write a clip whose brightness grows with time; return its path."""
    with av.open(str(path), "w") as container:
        container.metadata.update(tags)
        stream = container.add_stream("mpeg4", rate=Fraction(fps))
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        num_frames = int(seconds * fps)
        for number in range(num_frames):
            level = int(255 * number / num_frames)
            frame = av.VideoFrame.from_ndarray(np.full((size, size, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar of members by name, in this order; return its path."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, BytesIO(content))
    return path


def folder(root: Path, num_images: int = 6, *, captions: bool = True, num_clips: int = 0) -> Path:
    """Write images `pictures/N.png`, every second one with a caption, and clips `clips/N.mp4`."""
    (root / "pictures").mkdir(parents=True)
    for number in range(num_images):
        (root / "pictures" / f"{number:04d}.png").write_bytes(image_bytes(number))
        if captions and number % 2 == 0:
            (root / "pictures" / f"{number:04d}.txt").write_text(SENTENCES[number % len(SENTENCES)])
    if num_clips:
        (root / "clips").mkdir()
    for number in range(num_clips):
        clip(root / "clips" / f"{number}.mp4")
        with (root / "clips" / f"{number}.mp4").open("ab") as file:
            file.write(b"\0\0\0\x0cfree" + number.to_bytes(4, "big"))  # equal ones would be computed once
    return root
