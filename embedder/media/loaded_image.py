"""Image as a decoder returns it, before it is turned, flattened and resized."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

    from embedder.media.arrays import Pixels


class LoadedImage(NamedTuple):
    """Decoded image as it is stored, with the EXIF orientation (1 to 8) that puts it upright.

    `image` is Pillow's, of any mode, or an array, uint8 (H, W, 3) RGB or (H, W, 1) grey. `note` says what is missing;
    None means nothing. `late_profile` is the ICC profile of an array's colours, applied after the resize; None means
    sRGB.
    """

    image: "Image.Image | Pixels"
    orientation: int
    note: str | None = None
    late_profile: bytes | None = None
