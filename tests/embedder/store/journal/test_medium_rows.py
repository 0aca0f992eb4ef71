"""Columns of the medium as part files keep them: what they cost, and what becomes of values that are none."""

import json
import random
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from embedder.batch_schema import medium_schema
from embedder.medium_columns import BY_NAME
from embedder.store.journal.part_writer import VECTOR_COLUMNS, encode_part, with_medium

MODELS = [f"Maker{number % 7} Model {number}" for number in range(40)]


def values_of(rng, number):
    """Values as a photographer's archive has them; each picture has all but the clip's."""
    taken = datetime(2015, 1, 1) + timedelta(seconds=rng.randrange(300_000_000))
    turned = rng.random() < 0.3
    model = rng.choice(MODELS)
    return {
        "width": 3000 if turned else 4000,
        "height": 4000 if turned else 3000,
        "orientation": 6 if turned else 1,
        "format": "JPEG",
        "bits": 8,
        "colour_profile": "sRGB IEC61966-2.1",
        "has_alpha": False,
        "is_animated": False,
        "num_frames": 1,
        "taken_at": taken.isoformat(),
        "taken_offset_min": rng.choice((60, 120)),
        "camera": model,
        "lens": f"{model} 24-70 mm",
        "focal_length_mm": float(rng.randrange(24, 70)),
        "exposure_s": 1 / rng.choice((30, 60, 125, 250, 500)),
        "f_number": rng.choice((2.8, 4.0, 5.6, 8.0)),
        "iso": rng.choice((100, 200, 400, 800)),
        "latitude": round(rng.uniform(-60, 70), 6),
        "longitude": round(rng.uniform(-180, 180), 6),
        "altitude_m": round(rng.uniform(0, 900), 1),
        "creator": f"Person {number % 20}",
        "copyright": f"(c) Person {number % 20}",
        "software": "Editor 7",
        "content_hash": rng.randbytes(16).hex(),
        "perceptual_hash": rng.randbytes(8).hex(),
        "sharpness": round(rng.uniform(0, 3000), 2),
        "brightness": round(rng.random(), 4),
        "one_colour_share": round(rng.random(), 4),
    }


def share_of_columns(num_rows):
    """Bytes that the columns add to a part file of vectors of 768 dimensions, as a share."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    said = pa.array([json.dumps(values_of(rng, number)) for number in range(num_rows)])
    rows = pa.table({"item_id": [f"{number:08d}" for number in range(num_rows)], "medium": said})
    filled = with_medium(rows, medium_schema(BY_NAME)).drop_columns(["medium"])
    assert filled["carried:iso"].null_count == 0
    flat = pa.array(noise.standard_normal(num_rows * 768, np.float32))
    vectors = pa.ListArray.from_arrays(pa.array(np.arange(num_rows + 1, dtype=np.int32) * 768), flat)
    whole = filled.append_column(VECTOR_COLUMNS[0], vectors)
    sizes = [
        len(encode_part("embeddings", "part", each, "")[1])
        for each in (whole, whole.select(["item_id", VECTOR_COLUMNS[0]]))
    ]
    return sizes[0] / sizes[1] - 1


def test_the_columns_add_three_percent_at_most():
    assert share_of_columns(512) < 0.04  # the smallest part files, whose footers weigh most
    assert share_of_columns(4096) <= 0.03


@pytest.mark.slow
def test_the_columns_of_a_hundred_thousand_rows_add_three_percent_at_most():
    assert share_of_columns(100_000) <= 0.03


def test_a_value_that_is_none_of_its_column_is_null_and_costs_no_other_row():
    said = [
        {"width": 7, "iso": 2**40, "taken_at": "2023-07-04T12:00:00"},
        {"width": "wide", "iso": 100, "taken_at": "yesterday"},
        {"width": 9, "iso": "100", "taken_at": 5, "unknown": 1},
    ]
    fractions = [{"width": 3.5, "iso": 100.0}]
    rows = pa.table({"medium": [*map(json.dumps, said), None]})
    filled = with_medium(rows, medium_schema(["width", "iso", "taken_at"]))
    assert filled["carried:width"].to_pylist() == [7, None, 9, None]
    assert filled["carried:iso"].to_pylist() == [None, 100, None, None]
    assert filled["carried:taken_at"].to_pylist() == [datetime(2023, 7, 4, 12), None, None, None]
    cut = with_medium(pa.table({"medium": [*map(json.dumps, fractions)]}), medium_schema(["width", "iso"]))
    assert (cut["carried:width"].to_pylist(), cut["carried:iso"].to_pylist()) == ([None], [100])
    assert "carried:unknown" not in filled.column_names
