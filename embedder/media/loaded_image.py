"""Image as a decoder returns it, before it is turned, flattened and resized."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

    from embedder.media.arrays import Pixels
    from embedder.media.resize import Size


class PictureForm(NamedTuple):
    """Form of a picture as its header describes it: `size` is upright, in pixels, (0, 0) if unknown.

    `mode` is Pillow's, empty if unknown. `orientation`, 1 to 8, is the one that was applied.
    """

    format: str
    size: "Size"
    mode: str = ""
    orientation: int = 1


class LoadedImage(NamedTuple):
    """Decoded image as it is stored, with the EXIF orientation (1 to 8) that puts it upright.

    `image` is Pillow's, of any mode, or an array, uint8 (H, W, 3) RGB or (H, W, 1) grey. `note` says what is missing;
    None means nothing. `late_profile` is the ICC profile of an array's colours, applied after the resize; None means
    sRGB. `opened` is what its metadata is read from, if that is not `image`; `form` is known where the header says more
    than `image`.
    """

    image: "Image.Image | Pixels"
    orientation: int
    note: str | None = None
    late_profile: bytes | None = None
    opened: Any = None
    form: PictureForm | None = None

    @property
    def source(self) -> Any:
        """Return the image, as Pillow or a plug-in opened it, that has the file's metadata."""
        return self.image if self.opened is None else self.opened
