"""A folder in which the examples of README and docs run: with the archive, models, and stores that they name."""

import json
import re
import shutil
import tarfile
import warnings
from io import BytesIO
from pathlib import Path

import hf_checkpoints
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import samples
from command_runs import run_here
from PIL import Image

import embedder
from hostile.files import dng

DEMO_MODEL = Path(embedder.__file__).parent / "demo_model"
CAPTIONS = ("a red car in the rain", "two dogs", "a red heart", "a slice of pizza", "snow", "a cat on the beach")
NUM_TARS = 128
ORIENTATION = 0x0112
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><r:Description '
    'xmlns:photoshop="http://ns.adobe.com/photoshop/1.0/" photoshop:Headline="%s" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:subject><r:Bag><r:li>wedding</r:li></r:Bag></dc:subject>'
    "</r:Description></r:RDF></x:xmpmeta>"
)
LABELS = """
import numpy as np
import pyarrow as pa


class Labels:
    def load(self, device):
        pass

    def __call__(self, batch):
        bright = batch.column("image").to_numpy_ndarray().mean((1, 2, 3)) > 60
        return {"top": pa.array(np.where(bright, "cat", "dog").tolist()), "score": np.ones(len(bright), np.float32)}
"""
SHOP = """
store = "runs/shop"
engine = "local"

[[source]]
path = "catalogue.parquet"
columns = { id = "sku", image = "photo", caption = "title" }
carryover = ["category", "price"]

[[model]]
uri = "models/mine"

[[model]]
name = "clip"
uri = "models/clip"

[[model]]
name = "labels"
kind = "python"
uri = "labels.py:Labels"
inputs = { image = { make = "pixels", preprocess = { image_size = 32, resize = "squash" } } }
outputs = { top = { type = "string" }, score = { type = "float32" } }
"""
DEMO = f"""
model = "{DEMO_MODEL}"
store = "runs/demo/store"
engine = "local"

[[source]]
path = "{DEMO_MODEL.parent / "demo_data/noto.tar"}"
kind = "webdataset"
carryover = ["openmoji_tags", "group"]
"""
NIGHTLY = """
model = "models/mine"
store = "runs/mine"
engine = "local"

[[source]]
path = "path/to/archive"
"""


def build(folder: Path, pages: dict[str, str]) -> None:
    """Make all of it in a folder, which is the working directory."""
    for name in ("mine", "clip", "tower"):
        shutil.copytree(DEMO_MODEL, folder / "models" / name)
    with warnings.catch_warnings(action="ignore"):
        hf_checkpoints.image_classifier(folder / "models/classifier")
    config = folder / "models/classifier/config.json"
    labels = {"id2label": {"0": "bicycle", "1": "bicycle", "2": "bicycle"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | labels))
    for place in ("path/to/archive", "path/to/DCIM", "archive", "photos"):
        make_archive(folder / place)
    make_photographs(folder / "photographs")
    make_museum(folder / "museum")
    make_export(folder / "Takeout/Google Photos")
    for number in range(NUM_TARS):
        make_tar(folder / f"shards/{number:04d}.tar", number)
    (folder / "labels.py").write_text(LABELS)
    # The classes that other examples name.
    for block in re.findall(r"```python\n(# \w+\.py\n.*?)```", pages["docs/python.md"], re.DOTALL):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    write_configurations(folder, pages)
    for name in ("photo.jpg", "street.jpg", "striped.jpg"):
        samples.make_image(1, 400, 300).save(folder / name)
    (folder / "ids.txt").write_text("dog.jpg\n")
    (folder / "queries.csv").write_text("query,item_id\na red car in the rain,sku-0\ntwo dogs,sku-1\n")
    (folder / "judged.csv").write_text("query,item_id\na red car in the rain,sku-0\ntwo dogs,sku-1\n")
    made("refresh", "demo.toml", "--limit", "500")  # of the emoji that `embedder demo` embeds
    for _ in range(2):  # publications of before and of now
        made("refresh", "nightly.toml")
        samples.make_image(77).save(folder / "path/to/archive/late.jpg")
    shutil.copytree(folder / "runs/mine", folder / "runs/nightly")
    for price in (0.0, 1.0):
        make_tables(folder, price)
        made("refresh", "shop.toml")
    for store in ("runs/old", "runs/new"):
        shutil.copytree(folder / "runs/shop", folder / store)
    made("index", "build", "--store", "runs/shop")  # of the rows of now, so that there is one to go back to
    rows = embedder.open_store("runs/shop").to_arrow(["image_embedding"])["image_embedding"]
    np.save(folder / "query.npy", np.array(rows[0].as_py(), np.float32))
    made("embed", "--config", "archive.toml")


def made(*arguments: str) -> None:
    """Run a command that has to succeed."""
    ended = run_here(*arguments)
    assert ended.code == 0, f"{arguments}: {ended.stdout[-3000:]} {ended.stderr[-3000:]}"


def make_archive(root: Path) -> None:
    """Write pictures and captions, in folders and next to each other, a clip, and a file that is broken."""
    for place in ("cats", "2024", "private"):
        (root / place).mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS * 2):
        samples.make_image(number).save(root / "2024" / f"{number:02d}.jpg")
        (root / "2024" / f"{number:02d}.txt").write_text(caption)
    for number, name in enumerate(("cat.jpg", "dog.jpg", "private/a.jpg", "cats/a.jpg")):
        samples.make_image(100 + number).save(root / name)
    samples.clip(root / "clip.mp4", seconds=1.0)
    (root / "cats/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 broken")


def make_photographs(root: Path) -> None:
    """Write a photographer's archive: dated folders, raws next to their JPEGs, and what programs leave there."""
    for number in range(8):
        day = root / "2025" / f"2025-06-{10 + number // 2} Wedding Müller"
        day.mkdir(parents=True, exist_ok=True)
        image = samples.make_image(number, 96, 64)
        exif = Image.Exif()
        exif[ORIENTATION] = 6 if number % 2 else 1
        image.save(day / f"_DSC{number}.JPG", exif=exif)
        (day / f"_DSC{number}.DNG").write_bytes(dng(np.asarray(image), preview=jpeg(image)))
        (day / f"_DSC{number}.xmp").write_text(XMP % CAPTIONS[number % len(CAPTIONS)])
    (day / "cut-off.JPG").write_bytes((day / "_DSC7.JPG").read_bytes()[:700])
    (day / "notes.txt").write_text("call the bride's mother")
    (root / "Lightroom Catalog.lrcat").write_bytes(b"SQLite format 3\0")


def make_museum(root: Path) -> None:
    """Write a museum's scans, each another kind of TIFF, and its catalogue as Excel writes it; one scan is missing."""
    (root / "scans").mkdir(parents=True)
    kinds = (("RGB", "raw"), ("CMYK", "tiff_lzw"), ("L", "tiff_deflate"), ("1", "group4"), ("RGB", "jpeg"))
    rows = ["\ufeffAccession No.;Title;Artist;Date;Image"]
    for number, (mode, compression) in enumerate(kinds):
        image = samples.make_image(number, 80, 60).convert(mode)
        image.save(root / f"scans/1987.{number}.tif", compression=compression)
        rows.append(f'1987.{number};"{CAPTIONS[number]}; étude";Unknown;ca. 1710;scans/1987.{number}.tif')
    rows.append("1988.1;Self-portrait, lost;Dürer, Albrecht;1502;scans/1988.1.tif")
    (root / "objects.csv").write_text("\r\n".join(rows), encoding="utf-8")


def make_export(root: Path) -> None:
    """Write an album as Takeout exports it: each photo with a description next to it."""
    album = root / "Photos from 2025"
    album.mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS):
        samples.make_image(300 + number).save(album / f"IMG_{number}.jpg")
        said = {"title": f"IMG_{number}.jpg", "description": caption, "photoTakenTime": {"timestamp": "1750000000"}}
        (album / f"IMG_{number}.jpg.supplemental-metadata.json").write_text(json.dumps(said))


def jpeg(image: Image.Image) -> bytes:
    """Content of a JPEG of it."""
    file = BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


def make_shop(folder: Path) -> None:
    """Make what the examples with Ray name, in a fraction of the time of all: a model and the catalogue."""
    shutil.copytree(DEMO_MODEL, folder / "models/mine")
    (folder / "path/to").mkdir(parents=True)
    make_tables(folder, 0.0)


def make_tables(folder: Path, price: float) -> None:
    """Write the catalogue as Parquet and as CSV, and a dataset as Hugging Face's library does."""
    numbers = range(24)
    contents = [samples.image_bytes(number) for number in numbers]
    captions = [CAPTIONS[number % len(CAPTIONS)] for number in numbers]
    columns = {
        "sku": [f"sku-{number}" for number in numbers],
        "title": captions,
        "title_en": captions,
        "keywords": captions,
        "product": [f"product-{number % 12}" for number in numbers],
        "category": ["toys" if number % 2 else "food" for number in numbers],
        "price": [price + number for number in numbers],
    }
    pq.write_table(pa.table(columns | {"photo": contents, "photo_uri": contents}), folder / "catalogue.parquet")
    (folder / "photos-of-the-shop").mkdir(exist_ok=True)
    paths = [folder / f"photos-of-the-shop/{number}.png" for number in numbers]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    pyarrow.csv.write_csv(pa.table(columns | {"photo": [str(path) for path in paths]}), folder / "catalogue.csv")
    (folder / "path/to/dataset").mkdir(exist_ok=True)
    images = [{"bytes": content, "path": None} for content in contents]
    pq.write_table(pa.table({"image": images, "caption": captions}), folder / "path/to/dataset/train.parquet")


def make_tar(path: Path, number: int) -> None:
    """Write a tar of one picture with its caption."""
    path.parent.mkdir(exist_ok=True)
    picture = jpeg(Image.new("RGB", (24, 24), (number, 255 - number, 90)))
    with tarfile.open(path, "w") as tar:
        for suffix, content in (("jpg", picture), ("txt", CAPTIONS[number % len(CAPTIONS)].encode())):
            info = tarfile.TarInfo(f"{number:04d}.{suffix}")
            info.size = len(content)
            tar.addfile(info, BytesIO(content))


def write_configurations(folder: Path, pages: dict[str, str]) -> None:
    """Write the configurations that commands name: a page's own where it has one that runs here."""
    (folder / "nightly.toml").write_text(NIGHTLY)
    (folder / "demo.toml").write_text(DEMO)
    (folder / "shop.toml").write_text(SHOP)
    (several,) = [block for block in tomls(pages["docs/several-models.md"]) if 'store = "runs/archive"' in block]
    assert "image_size = 224" in several  # the classifier here is a tiny one
    (folder / "archive.toml").write_text(f'engine = "local"\n{several.replace("image_size = 224", "image_size = 32")}')
    (train,) = [block for block in tomls(pages["docs/training.md"]) if block.startswith("# train.toml")]
    for old, new in (("s3://team/", ""), ("20000", "2"), ("batch_size = 256", 'batch_size = 4\nengine = "local"')):
        assert old in train
        train = train.replace(old, new)
    (folder / "train.toml").write_text(train)


def settle(folder: Path, page: str, text: str) -> None:
    """Write the `run.toml` that a page speaks of: its own, where it deploys one, else that of `runs/mine`."""
    own = next((block for block in tomls(text) if "[deploy]" in block and "model = " in block), NIGHTLY)
    (folder / "run.toml").write_text(own if page == "docs/kubernetes.md" else NIGHTLY)


def tomls(page: str) -> list[str]:
    """Configurations of a page."""
    return re.findall(r"```toml\n(.*?)```", page, re.DOTALL)


def first_run(store: str) -> str:
    """Id of the first publication of a store that can be read, for the place of one that a page names."""
    found = json.loads(run_here("history", "--store", store, "--json").stdout.strip().splitlines()[-1])
    return next(each["run_id"] for each in found["publications"] if each["can_be_read"] and not each["current"])
