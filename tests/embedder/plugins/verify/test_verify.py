"""`embedder verify`: what it compares, and that it fails when it should."""

import shutil
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
import torch
from command_runs import run_here
from safetensors.torch import load_file, save_file

from embedder.config import load_config
from embedder.errors import ConfigError, SourceError, StoreError
from embedder.executors.job import check_int8
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.plugins.verify.compare_vectors import Limit, compare
from embedder.plugins.verify.verify import verify
from embedder.storage.vector_pages import VectorColumn
from shards.fresh import init_model
from shards.int8_benefit import Int8Benefit, measure_int8_benefit
from shards.model_config import ModelConfig
from shards.plan import LayerRange, ShardSpec, plan_specs
from shards.preprocess import PreprocessConfig
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower
from shards.train_tokenizer import train_tokenizer


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=16, num_clips=1)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """A model whose layers are wide enough for int8 to help: 768 and 1024."""
    config = ModelConfig(
        name="wide",
        trained=False,
        embedding_dim=32,
        vision=VitTower(image_size=64, patch_size=8, width=768, depth=2, num_heads=12),
        text=AlbertTower(
            vocab_size=300, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096
        ),
        preprocess=PreprocessConfig(image_size=64, max_caption_tokens=32),
    )
    folder = tmp_path_factory.mktemp("models") / "wide"
    return init_model(config, folder, seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))


@pytest.mark.medium
def test_three_stages_equal_the_unsplit_towers_to_the_last_bit_and_the_command_says_so(source, tiny_model):
    ended = run_here("verify", source, "--model", tiny_model, "--json")
    assert ended.code == 0, ended.stderr
    found = ended.found
    assert (found["passed"], found["failures"], found["num_rejected"]) == (True, [], 0)
    assert len(found["plan"]) == 3
    images, texts = found["comparisons"]
    # 16 pictures and one segment of 3 seconds; every second picture has a caption.
    names = ("side", "num_vectors", "num_equal", "max_difference")
    assert [images[name] for name in names] == ["image", 17, 17, 0]
    assert [texts[name] for name in names] == ["text", 8, 8, 0]


@pytest.mark.medium
def test_bfloat16_loses_something_but_its_cut_nothing(make_run, source):
    found = verify(make_run(source, dtype="bfloat16"))
    assert found.failures == []
    exact, cut = found.comparisons[:2], found.comparisons[2:]
    assert all(0.999 <= each.least_cosine < 1 and each.num_equal == 0 for each in exact)
    assert all(each.max_difference == 0 and each.reference == "one shard, bfloat16" for each in cut)


@pytest.mark.medium
def test_a_tolerance_below_the_error_of_the_dtype_is_exit_1_in_one_line_with_the_figures(source, tiny_model):
    options = ["--model", tiny_model, "--dtype", "bfloat16", "--tolerance", "1e-6", "--json"]
    ended = run_here("verify", source, *options)
    assert ended.code == 1
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "image against unsplit towers, float32: largest difference" in ended.stderr
    assert "asked for difference <= 1e-06, cosine >= 0.999" in ended.stderr
    assert ended.found["passed"] is False
    assert [each["passed"] for each in ended.found["comparisons"]] == [False, False, True, True]


@pytest.mark.medium
def test_weights_too_large_for_float16_fail_although_no_number_can_be_compared(make_run, source, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "loud")
    tensors = load_file(folder / "model.safetensors")
    tensors["vision.blocks.2.mlp.fc1.weight"] *= 1e6  # float16 ends at 65504
    save_file(tensors, folder / "model.safetensors")
    found = verify(make_run(source, model=str(folder), dtype="float16"))
    image = found.comparisons[0]
    assert (image.side, image.passed, image.max_difference, image.least_cosine) == ("image", False, np.inf, -1.0)
    assert verify(make_run(source, model=str(folder))).failures == []


def test_the_plan_that_is_given_is_the_plan_that_is_verified(make_run, source, tiny_model, tmp_path):
    model = open_model(str(tiny_model))
    specs = [ShardSpec(LayerRange(0, 1), LayerRange(0, 4)), ShardSpec(LayerRange(1, 4), LayerRange(4, 4))]
    plan = tmp_path / "plan.json"
    plan.write_text(plan_specs(model.config, specs, model_fingerprint=model.fingerprint).to_json())
    found = verify(make_run(source, plan=str(plan)), num_items=5)
    assert (found.plan, found.failures, found.num_rows) == (tuple(specs), [], 5)


def test_a_side_that_no_item_has_is_not_said_to_be_verified(make_run, tmp_path):
    source = samples.folder(tmp_path / "mute", num_images=3, captions=False)
    found = verify(make_run(source))
    assert [(each.side, each.num_vectors, each.passed) for each in found.comparisons] == [
        ("image", 3, True),
        ("text", 0, None),
    ]
    assert found.failures == []


@pytest.mark.parametrize("device", ["foo", "cuda", "cuda:7", "cuda:", "meta", ""])
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(make_run, tmp_path, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"^verify: device '{device}', and torch .* can use 0 GPUs here; write cpu"):
        verify(make_run(tmp_path / "nothing", num_stages=2), device=device)


def test_a_source_of_which_nothing_can_be_embedded_is_refused(make_run, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(SourceError, match="0 of 1 item can be embedded"):
        verify(make_run(tmp_path / "in"))


@pytest.mark.medium
def test_vectors_that_a_store_has_published_are_compared_to_the_bit(make_run, source, tmp_path):
    embed(make_run(source, num_stages=1))
    found = verify(load_config(overrides={"source": [{"path": str(source)}]}), store=str(tmp_path / "store"))
    images, texts = found.comparisons[-2:]
    here = f"torch {version('torch')}"
    assert here in images.reference and images.reference.startswith("the store (")
    assert (images.num_vectors, images.num_equal, texts.num_vectors, texts.num_equal) == (17, 17, 8, 8)
    assert found.failures == []


@pytest.mark.medium
def test_vectors_that_another_version_made_otherwise_fail(make_run, source, tmp_path):
    embed(make_run(source))
    part = next((tmp_path / "store" / "embeddings").rglob("*.parquet"))
    rows = pq.read_table(part)
    moved = [None if row is None else [row[0] + 1e-3, *row[1:]] for row in rows["text_embedding"].to_pylist()]
    place = rows.schema.get_field_index("text_embedding")
    field = rows.schema.field(place)
    pq.write_table(rows.set_column(place, field, pa.array(moved, field.type)), part)
    ended = run_here("verify", source, "--store", tmp_path / "store", "--json")
    assert ended.code == 1
    assert "text against the store (" in ended.stderr and "largest difference 0.001" in ended.stderr
    assert [each["passed"] for each in ended.found["comparisons"]] == [True, True, True, False]


@pytest.mark.medium
def test_a_store_of_other_preprocessing_or_of_none_of_the_items_is_refused(make_run, source, tmp_path):
    embed(make_run(source))
    with pytest.raises(StoreError, match="its preprocess fingerprint is not this run's; verify with its model"):
        verify(make_run(source, decode={"colour": "raw"}), store=str(tmp_path / "store"))
    others = samples.folder(tmp_path / "others", num_images=2, num_clips=0)
    for path in list(others.iterdir()):
        path.rename(path.with_name("other-" + path.name))
    with pytest.raises(StoreError, match="it has none of the items as they are now"):
        verify(make_run(others), store=str(tmp_path / "store"))


@pytest.mark.medium
def test_without_a_source_the_shipped_pictures_are_taken_from_all_over_the_listing(tiny_model):
    found = verify(load_config(overrides={"model": str(tiny_model), "num_stages": 2}), num_items=7)
    assert (found.num_rows, found.num_pairs, found.failures) == (7, 7, [])


@pytest.mark.slow
@pytest.mark.timeout(900)  # a CPU without instructions for bfloat16 takes minutes
def test_int8_is_set_beside_the_float_dtypes_with_what_it_gains_and_loses(make_run, tmp_path, wide_model):
    few = samples.folder(tmp_path / "few", num_images=4, num_clips=0)
    found = verify(make_run(few, model=str(wide_model), dtype="int8"))
    assert [each.passed for each in found.comparisons] == [True] * 4
    float32, bfloat16, int8 = found.precisions
    assert [each.dtype for each in found.precisions] == ["float32", "bfloat16", "int8"]
    assert int8.weight_bytes < 0.6 * bfloat16.weight_bytes
    assert bfloat16.weight_bytes < 0.53 * float32.weight_bytes
    assert float32.least_cosine["image"] == pytest.approx(1, abs=1e-6)
    assert 0.99 < int8.least_cosine["text"] < 1
    assert all(each.row_s > 0 for each in found.precisions)
    assert float32.recall_at_10 is None, "two pairs are too few"
    assert found.gain.weight_bytes["int8"] < found.gain.weight_bytes["bfloat16"]


def test_int8_is_refused_before_a_store_is_made(source, tiny_model, tmp_path, run_embedder):
    """Layers of width 32 take longer to quantise than to multiply, on any machine."""
    store = tmp_path / "store"
    code, _, stderr = run_embedder("embed", source, "--model", tiny_model, "--store", store, "--dtype", "int8")
    assert code == 2
    assert "int8 doesn't help this model on cpu" in stderr
    assert " ms and " in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not store.exists()


def test_other_dtypes_and_clusters_are_not_measured(tiny_model):
    model = open_model(str(tiny_model))
    for options in ({"dtype": "bfloat16"}, {"dtype": "int8", "ray_address": "10.0.0.1:6379"}):
        check_int8(load_config(overrides=options).compute, model)
    with pytest.raises(ConfigError, match="use (float32|bfloat16)"):
        check_int8(load_config(overrides={"dtype": "int8"}).compute, model)


@pytest.mark.parametrize(
    ("seconds", "size", "refused"),
    [(0.9, 90, False), (1.0, 90, True), (1.5, 90, True), (0.9, 100, True), (0.9, 150, True)],
)
def test_int8_has_to_be_faster_than_the_fastest_and_smaller_than_the_smallest(seconds, size, refused):
    gain = Int8Benefit(
        "cpu", {"float32": 2.0, "bfloat16": 1.0, "int8": seconds}, {"float32": 200, "bfloat16": 100, "int8": size}
    )
    assert (gain.refusal() is not None) == refused


@pytest.mark.medium
def test_measuring_int8_reads_one_layer_of_each_tower_and_leaves_the_threads_as_they_were(wide_model):
    torch.set_num_threads(2)
    gain = measure_int8_benefit(wide_model)
    assert torch.get_num_threads() == 2
    assert all(seconds > 0 for seconds in gain.seconds.values())
    assert gain.best_float in ("float32", "bfloat16")


def test_rows_that_one_side_lacks_and_numbers_that_are_none_are_failures():
    two = np.eye(2, 4, dtype=np.float32)
    limit = Limit(max_difference=1e-6, min_cosine=0.9)
    both, first = np.array([True, True]), np.array([True, False])
    assert compare("image", VectorColumn(two, both), "x", VectorColumn(two, both), limit).passed
    assert compare("image", VectorColumn(two[:1], first), "x", VectorColumn(two, both), limit).passed is False
    broken = two.copy()
    broken[1, 2] = np.nan
    assert compare("image", VectorColumn(broken, both), "x", VectorColumn(broken, both), limit).passed is False
    turned = compare("image", VectorColumn(-two, both), "x", VectorColumn(two, both), Limit(min_cosine=0.9))
    assert (turned.passed, turned.least_cosine, turned.num_equal) == (False, -1.0, 0)
