"""An image of four colours, and where they are found again."""

import numpy as np
from PIL import Image

RED, GREEN, BLUE, YELLOW, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255)

SHOWN = {  # EXIF orientation -> which stored corner is shown top left, top right, bottom left, bottom right
    1: (0, 1, 2, 3),
    2: (1, 0, 3, 2),
    3: (3, 2, 1, 0),
    4: (2, 3, 0, 1),
    5: (0, 2, 1, 3),
    6: (2, 0, 3, 1),
    7: (3, 1, 2, 0),
    8: (1, 3, 0, 2),
}


def quarters(width=64, height=48):
    """Red, green / blue, yellow."""
    image = Image.new("RGB", (width, height))
    boxes = [(0, 0), (width // 2, 0), (0, height // 2), (width // 2, height // 2)]
    for (left, top), colour in zip(boxes, (RED, GREEN, BLUE, YELLOW), strict=True):
        image.paste(colour, (left, top, left + width // 2, top + height // 2))
    return image


def corners(pixels):
    """Colours well inside the four quarters: top left, top right, bottom left, bottom right."""
    near, far = len(pixels) // 4, len(pixels) * 3 // 4
    return [tuple(pixels[y, x].tolist()) for y in (near, far) for x in (near, far)]


def close(found, expected, tolerance):
    return np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() <= tolerance
