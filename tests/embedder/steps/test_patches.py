"""Images of their own proportions: sizes as libraries choose them, vectors of a whole run as libraries compute them."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import samples
import timm
import torch
from embedding_runs import embedded
from library_checkpoints import save_timm
from library_versions import is_older, skip_where_torch_rounds_otherwise
from PIL import Image
from siglip_checkpoints import save_naflex_siglip2
from timm.data import create_transform, resolve_data_config
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import get_image_size_for_seq
from tower_checks import randomise
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.siglip2 import image_processing_siglip2

from embedder.batch_schema import Measurement
from embedder.encoders.query_encoder import QueryEncoder
from embedder.executors.job import decode_spec
from embedder.media.patches import pixel_columns
from embedder.media.resize import ResizeSpec, scaled_size, whole_squares_size
from embedder.models.model_folder import open_model
from embedder.planning.sample import sample_items
from embedder.sources.listing import list_sources
from embedder.steps.decode import ItemReader, count_inputs, grids_of
from embedder.steps.item_decoder import DecodeSpec
from embedder.store.tables.arrow_tensors import pack
from shards.clip_sequence import ClipForm
from shards.convert import import_checkpoint
from shards.costs import cut_bytes
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import DataMix, estimate_costs

SIZES = ((40, 40), (300, 90), (50, 200), (1, 1), (9, 120), (64, 48), (17, 23))
BUDGET = 36


def test_sizes_are_those_of_transformers_and_timm():
    generator = np.random.default_rng(0)
    for width, height in [*generator.integers(1, 3000, (500, 2)).tolist(), [1, 1], [1, 50_000], [5000, 5000]]:
        for patch_size, budget in ((16, 256), (14, 1024), (8, 36), (16, 1)):
            rule = ResizeSpec(0, "patches", patch_size=patch_size, max_patches=budget)
            expected = image_processing_siglip2.get_image_size_for_max_num_patches(height, width, patch_size, budget)
            assert scaled_size((width, height), rule)[::-1] == expected
            assert get_image_size_for_seq((height, width), patch_size, budget)[1] == expected


def save_siglip(folder):
    return save_naflex_siglip2(folder, BUDGET)


def save_naflex(folder):
    settings = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "pos_embed_grid_size": (5, 5)}
    size = {"input_size": (3, 48, 48)}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=5, pretrained_cfg_overlay=size, **settings)
    save_timm(randomise(model), folder, **settings)
    return model


def siglip_features(model, images):
    processor = image_processing_siglip2.Siglip2ImageProcessor(patch_size=8, max_num_patches=BUDGET)
    return model.get_image_features(**processor(images, return_tensors="pt")).pooler_output


def timm_features(model, images):
    data = resolve_data_config(model=model, pretrained_cfg=model.pretrained_cfg)
    names = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    transform = create_transform(
        **{name: data[name] for name in names}, naflex=True, patch_size=8, max_seq_len=BUDGET, patchify=True
    )
    batch, _ = NaFlexCollator(max_seq_len=BUDGET)([(transform(image), 0) for image in images])
    features = model.forward_features(batch["patches"], batch["patch_coord"], batch["patch_valid"])
    return model.forward_head(**features, pre_logits=True)


@pytest.fixture(scope="module", params=[(save_siglip, siglip_features), (save_naflex, timm_features)])
def model(request, tmp_path_factory):
    """A model folder, and the library's own vectors of images."""
    if request.param[0] is save_naflex and is_older("timm", "1.0.31"):
        pytest.skip("this timm doesn't say how a NaFlexVit resizes its positions")
    folder = tmp_path_factory.mktemp("naflex")
    save, features = request.param
    theirs = save(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")

    def expected(images):
        with torch.no_grad():
            vectors = torch.cat([features(theirs, [image]) for image in images])
        return torch.nn.functional.normalize(vectors, dim=-1).numpy()

    return folder / "model", expected


@pytest.fixture
def source(tmp_path):
    generator = np.random.default_rng(1)
    (tmp_path / "in").mkdir()
    for number, (width, height) in enumerate(SIZES):
        coarse = Image.fromarray(generator.integers(0, 255, (5, 5, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / "in" / f"{number}.png")
    return tmp_path / "in"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("engine", "num_stages"), [("local", 1), ("local", 3), pytest.param("ray", 2, marks=pytest.mark.slow)]
)
def test_a_run_gives_the_vectors_of_the_library(make_run, model, source, engine, num_stages):
    skip_where_torch_rounds_otherwise()
    folder, expected = model
    _, rows = embedded(make_run(source, model=str(folder), engine=engine, num_stages=num_stages))
    found = np.stack([rows[f"{number}.png", 0]["image_embedding"] for number in range(len(SIZES))])
    images = [Image.open(source / f"{number}.png").convert("RGB") for number in range(len(SIZES))]
    assert np.abs(found - expected(images)).max() < 1e-5


def test_queries_have_the_same_vectors(model, source):
    skip_where_torch_rounds_otherwise()
    folder, expected = model
    paths = [source / f"{number}.png" for number in range(len(SIZES))]
    found = QueryEncoder(open_model(str(folder))).encode_image([*paths, paths[0].read_bytes()])
    images = [Image.open(path).convert("RGB") for path in [*paths, io.BytesIO(paths[0].read_bytes())]]
    assert np.abs(found - expected(images)).max() < 1e-5


@pytest.mark.medium
def test_frames_of_a_video_have_one_grid(make_run, model, tmp_path):
    folder, _ = model
    source = samples.folder(tmp_path / "clips", num_images=1, num_clips=2)
    run = make_run(source, model=str(folder), num_stages=2, frames_per_segment=3, segment_s=1)
    _, rows = embedded(run)
    assert [row["image_embedding"] is None for row in rows.values()] == [False] * len(rows)
    reader = ItemReader(decode_spec(run.rows, open_model(str(folder))))
    (listing,) = list_sources(run.source)
    grids = np.concatenate([grids_of(table) for table in reader.decode(listing, lambda: False)])
    assert len(grids) == len(rows)
    assert set(grids[:, 0]) == {1, 3}
    assert (grids[:, 1] * grids[:, 2]).max() <= BUDGET


def test_a_plan_counts_the_budget(model, run_embedder):
    code, plan, _ = run_embedder("plan", "--model", model[0], "--stages", "2", "--estimate", "--json")
    config = load_model_config(model[0])
    assert (code, len(plan["stages"])) == (0, 2)
    num_tokens = BUDGET + config.vision.num_prefix_tokens
    assert cut_bytes(config, "vision", 1, "float32", 16) == 4 * num_tokens * config.vision.width
    assert cut_bytes(config, "vision", 0, "float32", 16) == BUDGET * 3 * 8 * 8


def test_a_plan_for_fewer_patches_expects_less_of_each_image(model, run_embedder):
    plans = [
        run_embedder("plan", "--model", model[0], "--stages", "2", "--estimate", "--json", *options)[1]
        for options in ([], ["--image-patches", str(BUDGET)], ["--image-patches", "9"])
    ]
    flops = [sum(stage["flops_per_image"] for stage in plan["stages"]) for plan in plans]
    seconds = [sum(stage["seconds_per_item"] for stage in plan["stages"]) for plan in plans]
    assert flops[0] == flops[1] > 3 * flops[2]
    assert seconds[0] == seconds[1] > seconds[2]
    config = load_model_config(model[0])
    costs = estimate_costs(config, DEVICES["CPU"], "float32")
    few = costs.at_mix(DataMix(image_patches=9), config)
    expected = estimate_costs(config.at_patches(9), DEVICES["CPU"], "float32")
    assert few.vision.layer_s == pytest.approx(expected.vision.layer_s)
    back = few.at_mix(DataMix(image_patches=BUDGET), config)
    assert back.vision.layer_s == pytest.approx(costs.vision.layer_s)
    with pytest.raises(ModelError, match="at least one patch"):
        DataMix(image_patches=0)


@pytest.mark.medium
def test_sampled_items_give_the_patches_of_an_image(make_run, model, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(6):  # one row of patches each: two of them would leave too few columns
        Image.new("RGB", (400, 16 + number)).save(tmp_path / "in" / f"{number}.png")
    run = make_run(tmp_path / "in", model=str(model[0]))
    (listing,) = list_sources(run.source)
    sample = sample_items(run.rows, open_model(str(model[0])), listing)
    grids = grids_of(sample.rows)
    assert sample.mix.image_patches == round(float(np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0]).mean()))
    assert sample.mix.image_patches < BUDGET


def test_whole_squares_of_patches_are_transformers_own_sizes():
    rule = ResizeSpec(768, "patches", patch_size=16, max_patches=7200, merge_size=2, min_patches=16)
    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 200), (200, 1), (31, 33), (47, 48), (1600, 300), (4000, 3000), (9000, 50)]
    sizes += [(int(width), int(height)) for width, height in np.exp(random.uniform(0, 8.5, (3000, 2)))]
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue
        found = whole_squares_size((width, height), rule)
        assert found == smart_resize(height, width, 32, 16 * 16**2, 7200 * 16**2)[::-1], (width, height)
        assert found[0] * found[1] <= rule.most_patches * 16**2
    tight = replace(rule, patch_size=4, max_patches=4096, min_patches=4096)
    for width, height in sizes:
        found = whole_squares_size((width, height), tight)
        assert found[0] * found[1] <= tight.most_patches * 4**2, (width, height)
    assert whole_squares_size((100_000, 3), rule) == whole_squares_size((600, 3), rule), "squeezed to 200 to 1"


def test_patches_of_a_square_follow_each_other():
    rule = ResizeSpec(768, "patches", patch_size=1, max_patches=99, merge_size=2, min_patches=4)
    pixels = np.arange(4 * 6, dtype=np.uint8).reshape(1, 4, 6, 1).repeat(3, -1)
    found = pixel_columns(pixels, rule)
    assert found["image_grid"].tolist() == [1, 4, 6]
    squares = found["pixels"][:, 0].reshape(-1, 4).tolist()
    assert squares[:4] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]


@pytest.mark.parametrize(("together", "num_images"), [(None, 14), (1, 14), (2, 8)])
def test_frames_of_a_clip_that_are_computed_together_count_as_one_image(together, num_images):
    grids = [(1, 4, 6), None, (8, 4, 4), (5, 2, 2)]  # a picture, only a caption, two clips
    pixels = [np.zeros((int(np.prod(grid)), 12), np.uint8) if grid else None for grid in grids]
    columns = {"pixels": pack(pixels), "token_ids": pack([None] * 4)}
    table = pa.table(columns | {"image_grid": pack([np.array(grid, np.int32) if grid else None for grid in grids])})
    form = together and ClipForm(
        place="<p>", frames_together=together, min_pixels=1, max_pixels=9, max_frame_pixels=9, max_frames=8
    )
    measurement = Measurement("decode")
    count_inputs(measurement, table, DecodeSpec(None, None, None, 32, 1.0, 8, 32, clips=form))
    assert measurement.num_images == num_images
