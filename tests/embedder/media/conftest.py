"""Images and videos made in code, and a sandboxed decoder that the tests of one file share."""

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import clips
import pytest
from hidden_packages import hide
from PIL import Image
from sandbox_checks import png_bomb

from embedder.media.limits import DecodeLimits
from embedder.media.sandbox import SandboxedDecoder

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.fixture(scope="module")
def decoder() -> Iterator[SandboxedDecoder]:
    with SandboxedDecoder(DecodeLimits(timeout_s=30, memory_bytes=1 << 30)) as opened:
        yield opened


@pytest.fixture
def encode_image() -> Callable[..., bytes]:
    """`encode_image(image, "PNG", **options)` -> the file's bytes."""

    def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return encode


@pytest.fixture
def png(encode_image: Callable[..., bytes]) -> bytes:
    """A good neighbour: an orange square."""
    return encode_image(Image.new("RGB", (24, 24), (250, 120, 10)), "PNG")


@pytest.fixture
def make_video(tmp_path: Path) -> Callable[..., Path]:
    """`make_video([colour, ...], codec="mpeg4", kind="mp4")` -> a clip with one plain frame for each colour."""

    def make(
        colours: Sequence[clips.Colour], *, codec: str = "mpeg4", kind: str = "mp4", name: str | None = None, **how: Any
    ) -> Path:
        path = tmp_path / (name or f"clip-{codec}.{kind}")
        if codec == "libsvtav1":
            clips.write_apart(path, colours, codec=codec, kind=kind, **how)
        else:
            clips.write(path, colours, codec=codec, kind=kind, **how)
        return path

    return make


@pytest.fixture(scope="module")
def slow_png() -> bytes:
    """An image that takes a good part of a second."""
    return png_bomb(9000, 9000)


@pytest.fixture
def hide_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`hide_packages("rawpy")`: a sandbox that starts from now on can't import it."""

    def hidden(*packages: str) -> None:
        hide(tmp_path / "hidden", monkeypatch, *packages)

    return hidden
