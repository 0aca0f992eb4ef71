"""Steps of the user's own on a real Ray: the same rows as in one process, the same rejects."""

import pytest
import samples
from embedding_runs import assert_same, embedded
from own_steps import steps_file
from refresh_runs import items_of

STAGE = """
import embedder
import numpy as np

class Brightness(embedder.Stage):
    columns_in = ("image",)
    columns_out = {"brightness": "float32"}

    def process(self, rows):
        return {"brightness": [np.frombuffer(image["pixels"], np.uint8).mean() for image in rows["image"].to_pylist()]}
"""


@pytest.mark.slow
def test_ray_and_the_local_engine_make_the_same_rows_of_steps(make_run, tmp_path, ray_cluster):
    source, file = samples.folder(tmp_path / "in", num_images=30, num_clips=1), steps_file(tmp_path)
    stage = tmp_path / "stage.py"
    stage.write_text(STAGE)
    steps = [
        {"name": "bright", "callable": f"{stage}:Brightness"},
        {"name": "halves", "callable": f"{file}:quarters", "inputs": ["image"], "one_to_many": True}
        | {"outputs": {"region": "region", "side": "string"}},
        {"name": "lengths", "callable": f"{file}:troubled", "inputs": ["item_id"], "timeout_s": 5.0}
        | {"outputs": {"length": "int64"}},
        {"name": "norm", "callable": f"{file}:norm", "inputs": ["image_embedding"], "where": "before_write"}
        | {"outputs": {"norm": "float64"}},
    ]
    options = {"step": steps, "max_reject_fraction": 1, "rows_per_part": 16, "segment_s": 2.0, "num_stages": 2}
    local = make_run(source, store=str(tmp_path / "local"), **options)
    ray = make_run(source, store=str(tmp_path / "ray"), engine="ray", **options)
    (here, expected), (there, found) = embedded(local), embedded(ray)
    assert (here.num_items, here.num_rejected) == (there.num_items, there.num_rejected) == (31, 4)
    assert len(expected) == 2 * 26 + 2 * 2, "two parts of each image, and of each segment of the clip"
    assert_same(found, expected)
    for name in ("brightness", "region", "side", "length", "norm"):
        assert all(row[name] is not None for row in found.values())
    for name in ("brightness", "region", "side", "length"):
        assert {key: row[name] for key, row in found.items()} == {key: row[name] for key, row in expected.items()}
    columns = ("step", "error_type", "num_vectors", "state")
    rejects = [{key: [item[name] for name in columns] for key, item in items_of(each).items()} for each in (local, ray)]
    assert rejects[0] == rejects[1]
