"""A folder as people have it: a phone's export, with all that phones, Macs, Windows and services put into it."""

import json
import unicodedata
from pathlib import Path

import samples
from PIL import Image

CAPTIONS = {
    "IMG_0001.JPG": "Größere Äpfel auf dem Öltisch",
    "IMG_0002.JPG": "красная машина под дождём",
    "IMG_0003.JPG": "قطة على السجادة",
    "IMG_0004.JPG": "雨中的红色汽车",
    "IMG_0005.JPG": "बारिश में लाल कार",
    "IMG_0006.JPG": "🎉 party 👩‍👩‍👧",
}
NAMES = ("Été à Åland.jpg", "снимок 1.png", "照片.webp", "صورة.jpg", "फोटो.jpg", "🎉 a b.jpg")
JUNK = (
    ".DS_Store",
    "DCIM/.DS_Store",
    "DCIM/._IMG_0001.JPG",
    "Thumbs.db",
    "DCIM/desktop.ini",
    ".picasa.ini",
    "@eaDir/IMG_0001.JPG/SYNOPHOTO_THUMB_XL.jpg",
    "__MACOSX/DCIM/._IMG_0002.JPG",
    ".Trash-1000/files/gone.jpg",
    ".git/objects/00/ab",
    "$RECYCLE.BIN/$I1.jpg",
)
NUM_JUNK = 6 + 5  # a folder of them counts as one
SIDECARS = ("DCIM/IMG_0001.AAE", "DCIM/IMG_0002.xmp", "DCIM/IMG_0100.AAE")
OTHERS = ("notes.md", "invoice.pdf", "DCIM/manual.PDF", "trip.gpx", "voice.m4a")
JP2 = b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0" * 4000
DNG = b"II*\0\x08\0\0\0\0\0" + b"\0" * 4000
PANORAMA = (20_000, 7_500)

NUM_IMAGES = len(CAPTIONS) + len(NAMES) + 3  # and a panorama, an image without a suffix, a PNG called .jpg
NUM_CLIPS = 2
NUM_ITEMS = NUM_IMAGES + NUM_CLIPS + 1  # and one that is broken
UNREADABLE = {"JP2": 4, "DNG": 1, "SVG": 1}
OTHER_FILES = {".pdf": 2, ".gpx": 1, ".m4a": 1, ".md": 1, "no suffix": 1}


def people_folder(root: Path, *, panorama: bool = True) -> Path:
    """Make the folder; `panorama` of 150 million pixels, or a small one."""
    camera = root / "DCIM"
    camera.mkdir(parents=True)
    _write_images(root, camera)
    samples.clip(camera / "clip 1.mp4", seconds=1.0)
    samples.clip(camera / "IMG_0100.MOV", seconds=1.0)
    for name in (*JUNK, *SIDECARS, *OTHERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"\0\x05\x16\x07 what some program leaves behind")
    takeout = json.dumps({"title": "IMG_0001.JPG", "photoTakenTime": {"timestamp": "1"}})
    for name in ("IMG_0001.JPG.json", "IMG_0002.JPG.supplemental-metadata.json", "IMG_0003.JPG.suppl.json"):
        (camera / name).write_text(takeout)
    (root / "metadata.json").write_text(json.dumps({"title": "Holiday"}))
    (root / "README").write_text("a text without a suffix is no caption")
    size = PANORAMA if panorama else (200, 75)
    Image.new("RGB", size, (20, 90, 160)).save(camera / "PANO_0007.jpg", quality=30)
    return root


def _write_images(root: Path, camera: Path) -> None:
    for number, (name, caption) in enumerate(CAPTIONS.items()):
        exif = Image.Exif()
        exif[0x0112], exif[0x010F] = 1 + number, "A phone"
        samples.make_image(number, 400, 300).save(camera / name, "JPEG", exif=exif)
        (camera / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
    for number, name in enumerate(NAMES):
        path = root / unicodedata.normalize("NFD", name)  # as a Mac writes names
        samples.make_image(100 + number).save(path)
    (root / "a screenshot").write_bytes(samples.image_bytes(200))
    (root / "really a PNG.jpg").write_bytes(samples.image_bytes(201))
    (root / "cut off.jpg").write_bytes(samples.image_bytes(202, "JPEG")[:300])
    for name in ("IMG_0100.JP2", "IMG_0101.JP2", "IMG_0102.jp2", "named wrongly.jpg"):
        (camera / name).write_bytes(JP2)
    (camera / "IMG_0200.DNG").write_bytes(DNG)
    (root / "logo.svg").write_text('<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>\n')
