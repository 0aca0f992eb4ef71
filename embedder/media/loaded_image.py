"""Image as a decoder hands it on, before it is turned, flattened and resized."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

    from embedder.media.arrays import Pixels


class LoadedImage(NamedTuple):
    """Decoded image as it is stored, the EXIF orientation that puts it upright, and what is missing of it.

    Attributes:
        image: Pillow's, of any mode; or an array, uint8 (H, W, 3) RGB or (H, W, 1) grey.
        orientation: 1 to 8.
        note: what is missing; None: nothing.
        late_profile: ICC profile of an array's colours, which are brought to sRGB once it is resized; None: sRGB.
    """

    image: "Image.Image | Pixels"
    orientation: int
    note: str | None = None
    late_profile: bytes | None = None
