"""CPU of decoding a picture to a model's pixels, by format, size and step: ours beside other libraries.

    python scripts/bench_decode.py [FOLDER]                  # its pictures, else ones that are made: three minutes
    python scripts/bench_decode.py FOLDER --beside CHECKOUT  # also whether another checkout gives the same pixels
    python scripts/bench_decode.py --only road               # one of: pictures, formats, road, equal

All ways take one thread of one process, and turns: each decodes some pictures, then the next does. `ours` is
`decode_image`, as the sandbox process calls it, for a model with torchvision's processor (the shortest side to 224
pixels, bicubic, the middle cut out) and for one with Pillow's, with the numbers as the file has them. A way whose
pixels are ours to the bit is marked `=`.
simplejpeg, OpenCV, torchvision and torchcodec take part where they are installed.

The road is all that a picture costs from its file to its committed row but for the layers: the difference in CPU
seconds, over all processes, of two runs of `embedder embed` with a model of next to no work, one with more pictures.
The last line is one JSON document: `ours_ms` and `bare_ms`, the fastest decoder and resize of our bits, for
torchvision's processor; `ours_pillow_ms` and `pillow_ms`, Pillow's own decode and resize; and `road_ms`, per picture.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and PyTorch: figures are of one thread

import numpy as np
from PIL import Image

from corpus import encode, make_model, write_config, write_pairs
from embedder.media.images import decode_image, prepare_pillow
from embedder.media.resample import LOAD_S
from embedder.media.resize import ResizeSpec
from embedder.media.sniff import HEAD_BYTES, sniff
from harness import EMBEDDER, environment, run_watched, show

SIDE, MAX_PIXELS = 224, 100_000_000
PROCESSORS = {
    name: ResizeSpec(SIDE, "crop", "bicubic", resampler=name, colour="raw")  # type: ignore[arg-type]
    for name in ("torchvision", "pillow")
}
MADE_SIZES = ((500, 375), (1600, 1200), (4000, 3000))
NUM_MADE, NUM_PICTURES = 24, 120
NO_WORK = {"image_size": SIDE, "patch_size": SIDE // 4, "width": 16, "depth": 1, "num_heads": 1}
NO_TEXT = {"embedding_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
COLUMNS = {
    "pictures": "{pictures}",
    "way": "{way}",
    "ms of CPU": "{ms:.2f}",
    "of ours": "{ratio:.2f}",
    "bits": "{bits}",
}
Way = Callable[[bytes], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="with pictures; by default some are made")
    parser.add_argument("--only", choices=("pictures", "formats", "road", "equal"), help="leave the others out")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--road-items", type=int, nargs=2, default=(1000, 4000), help="pictures of the two runs")
    parser.add_argument("--beside", type=Path, help="another checkout, whose pixels are compared with ours")
    options = parser.parse_args()
    prepare_pillow()
    pictures = read_pictures(options.folder) if options.folder else make_pictures(MADE_SIZES[0], NUM_MADE)
    found: dict = {"num_pictures": len(pictures)}
    if options.only in (None, "pictures"):
        found |= measure_pictures(pictures, options.rounds)
    if options.only in (None, "formats"):
        found["formats"] = measure_formats(pictures[0], max(1, options.rounds // 2))
    if options.only in (None, "road"):
        found["road_ms"] = measure_road(pictures, *options.road_items)
    if options.only in (None, "road") and options.beside is not None:
        found["road_beside_ms"] = measure_road(pictures, *options.road_items, options.beside.resolve())
    if options.only in (None, "equal") and options.beside is not None:
        found["num_equal"], found["num_compared"] = compare(pictures, options.beside)
    print(json.dumps(found))


def read_pictures(folder: Path) -> list[bytes]:
    """The first pictures of a folder, in the order of their names."""
    contents = (path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    contents = (content for content in contents if sniff(content[:HEAD_BYTES]) == "image")
    pictures = list(islice(contents, NUM_PICTURES))
    if not pictures:
        raise SystemExit(f"{folder}: no picture in it; name a folder with JPEG files")
    return pictures


def make_pictures(size: tuple[int, int], number: int) -> list[bytes]:
    """JPEGs with as much detail as a camera's."""
    return [encode(make_picture(size, seed), "JPEG", quality=90) for seed in range(number)]


def make_picture(size: tuple[int, int], seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (size[1] // 25, size[0] // 25, 3), np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    return Image.fromarray((smooth + rng.normal(0, 10, (size[1], size[0], 1))).clip(0, 255).astype(np.uint8))


def measure_pictures(pictures: Sequence[bytes], rounds: int) -> dict:
    """Decode and resize for both processors; gives the figures of the last line."""
    torch_ways, pillow_ways = torchvision_ways(), pillow_processor_ways()
    by_torch = measure(pictures, ours("torchvision"), torch_ways, rounds)
    by_pillow = measure(pictures, ours("pillow"), pillow_ways, rounds)
    decoders = measure(pictures, decode_with_pillow, decoder_ways(), rounds)
    for name, rows in (("torchvision's processor", by_torch), ("Pillow's processor", by_pillow), ("decode", decoders)):
        show([row | {"pictures": name} for row in rows], COLUMNS)
    equal = [row["ms"] for row in by_torch[1:] if row["bits"] == "="]
    return {
        "ours_ms": by_torch[0]["ms"],
        "bare_ms": min(equal, default=None),
        "ours_pillow_ms": by_pillow[0]["ms"],
        "pillow_ms": by_pillow[1]["ms"],
        "pillow_decode_ms": decoders[0]["ms"],
    }


def measure(pictures: Sequence[bytes], first: Way, others: dict[str, Way], rounds: int) -> list[dict]:
    """CPU of each way a picture, in turns; rows whose first is the one that the others are compared with."""
    ways = {"ours" if first is not decode_with_pillow else "Pillow": first} | others
    expected = [first(each) for each in pictures]
    equal, usable = {}, {}
    for name, way in ways.items():
        try:
            equal[name] = all(np.array_equal(way(each), want) for each, want in zip(pictures, expected, strict=True))
            usable[name] = way
        except Exception as error:  # noqa: BLE001 - a library that can't read a format takes no part
            print(f"{name}: takes no part: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, way in usable.items():
            started_s = time.process_time()
            for each in pictures:
                way(each)
            spent[name].append((time.process_time() - started_s) / len(pictures) * 1000)
    mine = median(next(iter(spent.values())))
    return [
        {"way": name, "ms": median(each), "ratio": median(each) / mine, "bits": "=" if equal[name] else ""}
        for name, each in spent.items()
    ]


def ours(processor: str) -> Way:
    """`decode_image`, once it has loaded what it will work with in a long run."""
    rule = PROCESSORS[processor]

    def decode(encoded: bytes) -> np.ndarray:
        return np.frombuffer(decode_image(encoded, rule, MAX_PIXELS).data, np.uint8).reshape(SIDE, SIDE, 3)

    warm, started_s = encode(make_picture(MADE_SIZES[1], 0), "PNG"), time.process_time()
    while processor == "torchvision" and time.process_time() - started_s < 4 * LOAD_S:
        decode(warm)
    return decode


def decode_with_pillow(encoded: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(encoded))
    image.load()
    return np.asarray(image)


def decoder_ways() -> dict[str, Way]:
    """Decoders of JPEG without a resize."""
    ways: dict[str, Way] = {}
    try:
        import simplejpeg

        ways["simplejpeg"] = simplejpeg.decode_jpeg
    except ImportError:
        pass
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        ways["torchvision.io"] = lambda encoded: (
            decode_jpeg(torch.frombuffer(encoded, dtype=torch.uint8), ImageReadMode.RGB).permute(1, 2, 0).numpy()
        )
    except ImportError:
        pass
    try:
        import torch
        from torchcodec.decoders import decode_image as torchcodec_decode

        ways["torchcodec"] = lambda encoded: torchcodec_decode(encoded).permute(1, 2, 0).numpy()
    except (ImportError, RuntimeError):
        pass
    try:
        import cv2

        ways["OpenCV"] = lambda encoded: cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    except ImportError:
        pass
    return ways


def torchvision_ways() -> dict[str, Way]:
    """Each decoder with PyTorch's resize of 8-bit images, and transformers' own processor."""
    try:
        import torch
        from torchvision.transforms.v2 import functional
    except ImportError:
        return {}
    torch.set_num_threads(1)

    def resized(pixels_HWC: np.ndarray) -> np.ndarray:
        image = torch.from_numpy(pixels_HWC).permute(2, 0, 1)  # channels last in memory, which the kernel likes best
        height, width = image.shape[1:]
        size = [SIDE * height // min(height, width), SIDE * width // min(height, width)]
        found = functional.resize(image, size, interpolation=functional.InterpolationMode.BICUBIC, antialias=True)
        top, left = ((edge - SIDE) // 2 for edge in size)
        return found[:, top : top + SIDE, left : left + SIDE].permute(1, 2, 0).contiguous().numpy()

    decoders = {"Pillow": decode_with_pillow} | decoder_ways()
    return {
        f"{name} + torch": lambda encoded, decode=decode: resized(decode(encoded)) for name, decode in decoders.items()
    }


def pillow_processor_ways() -> dict[str, Way]:
    def pillow(encoded: bytes) -> np.ndarray:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        size = tuple(SIDE * edge // min(image.size) for edge in image.size)
        scaled = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (round((edge - SIDE) / 2) for edge in size)
        return np.asarray(scaled.crop((left, top, left + SIDE, top + SIDE)))

    ways: dict[str, Way] = {"Pillow": pillow}
    try:
        import cv2

        def opencv(encoded: bytes) -> np.ndarray:
            image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
            width, height = (SIDE * edge // min(image.shape[:2]) for edge in image.shape[1::-1])
            scaled = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
            left, top = (width - SIDE) // 2, (height - SIDE) // 2
            return scaled[top : top + SIDE, left : left + SIDE]

        ways["OpenCV, area"] = opencv
    except ImportError:
        pass
    return ways


def measure_formats(picture: bytes, rounds: int) -> list[dict]:
    """Ours beside Pillow's decoding, by format and size, for torchvision's processor."""
    rows = []
    for size in MADE_SIZES:
        image = make_picture(size, 0)
        for kind, settings in (("JPEG", {"quality": 90}), ("PNG", {"compress_level": 3}), ("WEBP", {"quality": 80})):
            encoded = [encode(image, kind, **settings)]
            found = measure(encoded, ours("torchvision"), {"Pillow's decode": decode_with_pillow}, rounds)
            rows += [row | {"pictures": f"{kind} {size[0]} x {size[1]}", "bits": ""} for row in found]
    show(rows, COLUMNS)
    return rows


def measure_road(pictures: Sequence[bytes], fewer: int, more: int, checkout: Path | None = None) -> float:
    """CPU ms of a picture from its file to its committed row, layers excepted, on the local engine."""
    with tempfile.TemporaryDirectory(prefix="bench-decode-") as name:
        root = Path(name)
        model = make_model(root / "model", NO_WORK, NO_TEXT | {"intermediate_size": 16})
        use_torchvision(model)
        originals = [(content, ".jpg", "") for content in pictures]
        spent = {}
        for number in (fewer, more):
            source = write_pairs(root / f"pictures-{number}", number, originals)
            for caption in source.glob("*.txt"):
                caption.unlink()
            config = write_config(
                root / f"{number}.toml", model, root / f"store-{number}", source, engine="local", num_stages=1
            )
            command = [*EMBEDDER, "embed", "--config", config, "--set", "index.build=false", "--json"]
            watched = run_watched(command, root, 1800, checkout=checkout)
            spent[number] = watched.cpu_use.between(watched.started_s, watched.started_s + watched.wall_s)
    road_ms = (spent[more] - spent[fewer]) / (more - fewer) * 1000
    print(f"road of a picture{f' by {checkout}' if checkout else ''}: {road_ms:.2f} ms of CPU")
    return road_ms


def use_torchvision(model: Path) -> None:
    """Have a model folder ask for the pixels of torchvision's processor."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["preprocess"] |= {"resize": "crop", "resampler": "torchvision", "reduced_decode": False}
    path.write_text(json.dumps(config))


HASH = """
import hashlib, json, sys
from embedder.media.images import decode_image, prepare_pillow
from embedder.media.resize import ResizeSpec
prepare_pillow()
for line in sys.stdin:
    path, rules = json.loads(line)
    encoded = open(path, "rb").read()
    found = []
    for rule in rules:
        try:
            known = {name: rule[name] for name in rule if name in ResizeSpec.__dataclass_fields__}
            image = decode_image(encoded, ResizeSpec(**known), 100_000_000)
            found.append([list(image.size), hashlib.blake2b(image.data).hexdigest()])
        except Exception as error:
            found.append(type(error).__name__)
    print(json.dumps(found), flush=True)
"""
"""Program that prints the hash of each picture's pixels, by the code of the checkout that it runs in."""


def compare(pictures: Sequence[bytes], checkout: Path) -> tuple[int, int]:
    """Number of pictures whose pixels are the same by another checkout's code, and number compared."""
    rules = [vars(rule) for rule in PROCESSORS.values()]
    with tempfile.TemporaryDirectory(prefix="bench-decode-") as name:
        paths = []
        for number, encoded in enumerate(variants(pictures)):
            paths.append(Path(name, str(number)))
            paths[-1].write_bytes(encoded)
        requests = "".join(json.dumps([str(path), rules]) + "\n" for path in paths)
        found = [hashes(requests, each) for each in (Path(__file__).parents[1], checkout.resolve())]
    pairs = [(mine, theirs) for mine, theirs in zip(*found, strict=True) if "[[" in theirs]  # the others it refuses
    num_equal = sum(mine == theirs for mine, theirs in pairs)
    num_refused = len(paths) - len(pairs)
    print(f"{num_equal} of {len(pairs)} pictures have the same pixels as by {checkout}; it refuses {num_refused} more")
    return num_equal, len(pairs)


def hashes(requests: str, checkout: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", HASH],
        input=requests,
        text=True,
        capture_output=True,
        check=True,
        env=environment(checkout),
        cwd=checkout,
        timeout=1800,
    )
    return done.stdout.splitlines()


def variants(pictures: Sequence[bytes]) -> Iterable[bytes]:
    """Pictures as they are, and of other sizes, formats, subsamplings, orientations and modes."""
    yield from pictures
    jpegs = [
        {"quality": quality, "subsampling": subsampling, "progressive": progressive}
        for quality in (40, 92)
        for subsampling in (0, 1, 2)
        for progressive in (False, True)
    ]
    others = [
        ("PNG", {}),
        ("WEBP", {"quality": 80}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("AVIF", {}),
    ]
    for number, encoded in enumerate(pictures[:70]):
        image = Image.open(io.BytesIO(encoded)).convert("RGB").resize((211 + 5 * number, 390 - 5 * number))
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        for settings in jpegs:
            yield encode(image, "JPEG", **settings, exif=exif)
        for mode, kind in (
            ("L", "JPEG"),
            ("CMYK", "JPEG"),
            ("RGBA", "PNG"),
            ("LA", "PNG"),
            ("1", "PNG"),
            ("P", "PNG"),
            ("I;16", "PNG"),
        ):
            yield encode(image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode), kind)
        for kind, settings in others:
            yield encode(image, kind, **settings)
        yield encode(image, "JPEG", keep_rgb=True)
        yield encode(image, "JPEG")[: -200 - number]


if __name__ == "__main__":
    main()
