"""Servables run in this process, on images and captions made in code."""

import io

import numpy as np
import pyarrow as pa
from PIL import Image

from embedder.media.limits import DecodeLimits
from embedder.servables import make_servable
from embedder.servables.order import order_servables
from embedder.servables.predict import decode_rows, show_rows
from embedder.servables.running_servable import RunningServable


def png(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """A smooth random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, "PNG")
    return buffer.getvalue()


def run_servables(table: pa.Table, *servables, image: str = "image", caption: str = "caption") -> pa.Table:
    """Run servables on a table's rows, in their order, as an actor does; sections of a configuration are taken, too."""
    return run_on_each([table], *servables, image=image, caption=caption)[0]


def run_on_each(tables: list[pa.Table], *servables, image: str = "image", caption: str = "caption") -> list[pa.Table]:
    """Run servables, each loaded once, on each table by itself."""
    ordered = order_servables([make_servable(each) for each in servables])
    names = {"image": image, "caption": caption}
    found = [
        pa.concat_tables(list(decode_rows(each, servables=ordered, limits=DecodeLimits(), **names))) for each in tables
    ]
    for servable in (part for each in ordered for part in each.parts()):
        running = RunningServable(servable)
        try:
            found = [running(each) for each in found]
        finally:
            running.close()
    return [show_rows(each) for each in found]


def vectors(table: pa.Table, name: str) -> np.ndarray:
    """Vectors of a column without nulls, float32 (rows, E)."""
    assert table[name].null_count == 0, table[name.partition(".")[0] + ".error"].to_pylist()
    return np.array(table[name].to_pylist(), np.float32)


def own_maker(file, class_name, inputs, outputs):
    """Makes servables of a user's file, where nothing else is said by a class of it with these inputs and outputs."""

    def make(class_name=class_name, name="own", inputs=inputs, outputs=outputs, **keys):
        return make_servable(
            {"name": name, "kind": "python", "uri": f"{file}:{class_name}", "inputs": inputs, "outputs": outputs} | keys
        )

    return make
