"""VideoPrism of transformers: clips of several numbers of frames, and captions, against transformers' own features."""

import json
import math
import shutil
import statistics
import time

import pytest
import torch
from library_checkpoints import MAX_TOKENS, SIZE, save_all, save_videoprism
from safetensors.torch import load_file
from tiny_tokenizers import CAPTIONS, ODD_CAPTIONS
from tower_checkpoints import edit_json
from tower_checks import (
    check_every_cut,
    check_every_part_matters,
    check_refused,
    embed_whole,
    run_stages,
    vectors,
)

from embedder.plugins.train.trainer.prune import prune_model
from embedder.plugins.verify.verify import LIMITS
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.convert.checkpoint import import_config
from shards.costs import tower_costs
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import one_tower, specs_between, whole_model
from shards.tokenizer import parse_tokenizer
from shards.towers import capped_attention
from shards.towers.videoprism import VideoPrismTower

NUM_FRAMES = 4
LENGTHS = (4, 0, 1, 4, 2, 4, 7, 1)
"""Frames of each row; the second one has no clip."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_videoprism(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    import_checkpoint(checkpoint, folder)
    return folder


def clips(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (sum(lengths), SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    return TowerState(pixels, torch.tensor(lengths))


def token_ids(model, captions):
    tokenizer = parse_tokenizer((model / "tokenizer.json").read_text(), "")
    ids = [each.ids[:MAX_TOKENS] for each in tokenizer.encode_batch(list(captions))]
    return TowerState(torch.tensor([each for row in ids for each in row]).int(), torch.tensor(list(map(len, ids))))


def batch_of(model, lengths=LENGTHS):
    return Batch(clips(lengths), token_ids(model, (2 * [*CAPTIONS, "fruit fruit"])[: len(lengths)]))


def library(folder):
    from transformers import VideoPrismClipModel

    return VideoPrismClipModel.from_pretrained(folder).eval()


@torch.no_grad()
def clip_features(theirs, state):
    rows = [pixels for pixels in state.values.split(state.lengths.tolist()) if len(pixels)]
    found = [
        theirs.get_video_features(
            (pixels / 255).permute(0, 3, 1, 2)[None], interpolate_pos_encoding=len(pixels) != NUM_FRAMES
        ).pooler_output[0]
        for pixels in rows
    ]
    return torch.cat(found)


def test_clips_of_any_number_of_frames_have_the_librarys_vectors(checkpoint, model):
    state = clips([*LENGTHS, *[NUM_FRAMES] * 20])
    found, expected = embed_whole(model, Batch(state, None))["vision"], clip_features(library(checkpoint), state)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((expected[1:] - expected[0]).abs().max(1).values.min()) > 1e-2, "clips that differ must matter"


def test_the_order_of_frames_matters_and_each_of_them_does(model):
    state = clips([NUM_FRAMES])
    (before,) = embed_whole(model, Batch(state, None))["vision"]
    turned = TowerState(state.values.flip(0), state.lengths)
    assert float((embed_whole(model, Batch(turned, None))["vision"][0] - before).abs().max()) > 1e-3
    for frame in range(NUM_FRAMES):
        pixels = state.values.clone()
        pixels[frame] = 255 - pixels[frame]
        other = TowerState(pixels, state.lengths)
        assert float((embed_whole(model, Batch(other, None))["vision"][0] - before).abs().max()) > 1e-3


def test_a_picture_is_a_clip_of_one_frame_and_no_repeated_one(checkpoint, model):
    theirs, state = library(checkpoint), clips([1])
    (found,) = embed_whole(model, Batch(state, None))["vision"]
    frame = (state.values / 255).permute(0, 3, 1, 2)[None]
    with torch.no_grad():
        one = theirs.get_video_features(frame, interpolate_pos_encoding=True).pooler_output[0, 0]
        repeated = theirs.get_video_features(frame.expand(-1, NUM_FRAMES, -1, -1, -1)).pooler_output[0, 0]
    assert float((found - one).abs().max()) < 1e-5
    assert float((found - repeated).abs().max()) > 1e-3


def test_captions_have_the_librarys_vectors_padded_to_the_longest_or_not(checkpoint, model):
    from transformers import AutoProcessor

    captions = [each for each in ODD_CAPTIONS if each.strip()]
    found = embed_whole(model, Batch(None, token_ids(model, captions)))["text"]
    processor, theirs = AutoProcessor.from_pretrained(checkpoint), library(checkpoint)
    for padding in ({}, {"padding": "longest"}):  # its own: to max_length
        inputs = processor(text=captions, max_length=MAX_TOKENS, return_tensors="pt", **padding)
        with torch.no_grad():
            expected = theirs.get_text_features(**inputs).pooler_output
        assert float((found - expected).abs().max()) < 1e-5


def test_stages_at_the_turns_give_the_bits_of_the_unsplit_towers(model):
    batch = batch_of(model)
    with torch.inference_mode():
        expected = vectors(load_towers(model)(batch))
        for inside in (0, 1):  # at the turns, and inside each kind of layers
            steps = [(0, 0), *((cut + inside, min(cut, 3)) for cut in (2, 3, 5)), (7, 3)]
            found = run_stages(model, specs_between(steps), batch)
            assert all(torch.equal(found[side], rows) for side, rows in expected.items())


@pytest.mark.slow
def test_every_cut_gives_the_bits_of_the_unsplit_towers_with_rows_of_several_numbers_of_frames(model):
    check_every_cut(model, batch_of(model))


@pytest.mark.slow
def test_every_part_of_it_matters(model, tmp_path):
    check_every_part_matters(model, batch_of(model), tmp_path)


def test_a_shard_holds_what_stands_around_the_temporal_layers_once(model):
    config = load_model_config(model)
    tower = config.vision
    around = [each for each in tower.shapes(LayerRange(0, tower.num_layers)) if "layernorm" in each or "tempor" in each]
    for cut in range(1, tower.num_layers):
        halves = [LayerRange(0, cut), LayerRange(cut, tower.num_layers)]
        parts = [name for half in halves for name in load_shard(model, one_tower("vision", half)).state_dict()]
        assert len(parts) == len(set(parts))
        assert {f"vision.{each}" for each in around} <= set(parts)


def test_attention_in_parts_is_the_librarys(checkpoint, model, monkeypatch):
    state = clips(LENGTHS)
    whole = embed_whole(model, Batch(state, None))["vision"]
    monkeypatch.setattr(capped_attention, "MAX_SCORES", {"cpu": 200})  # a query or two at once
    in_parts = embed_whole(model, Batch(state, None))["vision"]
    assert float((in_parts - whole).abs().max()) < 1e-6
    assert float((in_parts - clip_features(library(checkpoint), state)).abs().max()) < 1e-5
    tower = load_model_config(model).vision
    towers = load_towers(model).requires_grad_(False)
    tower.use_plain_attention(towers.vision)
    assert float((vectors(towers(Batch(state, None)))["vision"] - whole).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_other_dtypes_come_close(model, dtype):
    batch = batch_of(model)
    exact, found = (
        embed_whole(model, batch),
        vectors(load_shard(model, whole_model(load_model_config(model)), dtype=dtype)(batch)),
    )
    for side, rows in exact.items():
        assert torch.nn.functional.cosine_similarity(rows, found[side].float()).min() > 0.97


def test_costs_count_what_a_layer_sees(model):
    config = load_model_config(model)
    tower = VideoPrismTower()
    assert tower.num_layers == 18
    assert sum(tower.layer_shares) == pytest.approx(18)
    spatial, temporal, auxiliary = (tower.layer_shares[layer] for layer in (0, 12, 16))
    assert temporal < spatial < auxiliary < 2.5 * temporal
    whole = VideoPrismTower().flops(0)
    products = sum(
        math.prod(shape) for name, shape in tower.shapes(LayerRange(0, 18)).items() if name.endswith("proj.weight")
    )
    assert whole.layer * 18 > 2 * tower.num_tokens * products * 0.9
    assert tower_costs(config, "vision", 16).depth == config.vision.num_layers


def test_a_model_alone_of_its_clips_or_its_captions_is_imported(checkpoint, tmp_path):
    from transformers import AutoProcessor

    theirs, processor = library(checkpoint), AutoProcessor.from_pretrained(checkpoint)
    save_all(tmp_path / "clips", theirs.video_model, processor.video_processor)
    save_all(tmp_path / "captions", theirs.text_model, processor.tokenizer)
    for side, kind in (("vision", "clips"), ("text", "captions")):
        config = import_checkpoint(tmp_path / kind, tmp_path / f"{kind} imported")
        assert list(config.towers) == [side]
    state = clips(LENGTHS)
    found = embed_whole(tmp_path / "clips imported", Batch(state, None))["vision"]
    assert float((found - clip_features(theirs, state)).abs().max()) < 1e-5


def test_one_without_a_pooling_head_is_refused(checkpoint, tmp_path):
    from transformers import AutoProcessor

    theirs, processor = library(checkpoint), AutoProcessor.from_pretrained(checkpoint)
    save_all(tmp_path / "checkpoint", theirs.video_model.vision_model, processor.video_processor)
    check_refused(
        import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", "without its pooling head has features of patch"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"video_processor_type": "Qwen2VLVideoProcessor"},
            "a Qwen2VLVideoProcessor prepares clips in its own way",
        ),
        ({"size": {"height": 64, "width": 64}}, "expected .'height': 32, 'width': 32."),
        ({"video_processor_type": "Missing"}, "a Missing prepares clips in its own way"),
    ],
)
def test_clips_that_cannot_be_prepared_as_the_checkpoints_own_processor_does_are_refused(tmp_path, changes, message):
    folder = save_videoprism(tmp_path / "checkpoint")
    edit_json(folder / "processor_config.json", video_processor=saved_processor(folder) | changes)
    check_refused(import_checkpoint, folder, tmp_path / "model", message)


def saved_processor(folder):
    return json.loads((folder / "processor_config.json").read_text())["video_processor"]


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("vision_config", {"tubelet_size": [2, 8, 8]}, "tubelet_size = .2, 8, 8.; only patches of one frame"),
        ("vision_config", {"tubelet_size": [1, 8, 4]}, "only squares can be imported"),
        ("vision_config", {"num_auxiliary_layers": 3}, "auxiliary_layers.2"),
        ("vision_config", {"num_temporal_layers": 1}, "found the tensor video_model.vision_model.temporal_layers.1"),
        ("vision_config", {"num_frames": 8}, "temporal_embeddings.position_embeddings"),
        ("text_config", {"pad_token_id": 4000}, "pad_token_id 4000 is outside the vocabulary"),
    ],
)
def test_a_configuration_that_is_not_the_weights_is_refused(tmp_path, section, changes, message):
    folder = save_videoprism(tmp_path / "checkpoint")
    tree = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", **{section: tree[section] | changes})
    check_refused(import_checkpoint, folder, tmp_path / "model", message)


def test_a_configuration_alone_is_enough_for_a_plan(checkpoint, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    config = import_config(tmp_path / "checkpoint", tmp_path / "model")
    assert (config.clip_frames, config.embedding_dim) == (NUM_FRAMES, 32)


def test_a_pruned_model_keeps_layers_of_both_first_kinds(model, tmp_path):
    folder = prune_model(model, tmp_path / "small", {"vision": [0, 2, 4, 6], "text": "all"})
    tower = load_model_config(folder).vision
    assert (tower.num_spatial_layers, tower.num_temporal_layers, tower.num_auxiliary_layers) == (2, 1, 1)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    kept = {"spatial_layers.1.": "spatial_layers.2.", "temporal_layers.0.": "temporal_layers.1."}
    kept["auxiliary_layers.0."] = "auxiliary_layers.1."
    for name, tensor in ours.items():
        (origin,) = {name.replace(old, new) for old, new in kept.items() if old in name} or {name}
        assert torch.equal(tensor, theirs[origin]), name
    assert embed_whole(folder, Batch(clips(LENGTHS), None))["vision"].isfinite().all()
    with pytest.raises(ModelError, match="it needs a spatial one .of 0 to 2. and a temporal one .3 to 4."):
        prune_model(model, tmp_path / "smaller", {"vision": [0, 1, 5], "text": "all"})


@pytest.mark.slow
@torch.inference_mode()
def test_figures_of_clips(checkpoint, model, tmp_path, capsys):
    """Print a row of docs/models.md: differences of 64 clips, cuts, int8, throughput against transformers' own forward.

    pytest -m slow -s tests/shards/towers/test_videoprism.py -k figures
    """
    state = clips([NUM_FRAMES] * 64)
    config, exact = load_model_config(model), embed_whole(model, Batch(state, None))["vision"]
    difference = float((exact - clip_features(library(checkpoint), state)).abs().max())
    int8 = vectors(load_shard(model, whole_model(config), dtype="int8")(Batch(state, None)))["vision"]
    cosine = float((exact * int8).sum(-1).min())
    num_cuts = (config.vision.num_layers + 1) * (config.text.num_layers + 1) + 1  # as `check_every_cut` makes them
    big = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "image_size": 112}
    folder = save_videoprism(tmp_path / "big", 16, **big, tubelet_size=(1, 14, 14))
    config = import_checkpoint(folder, tmp_path / "big model")
    ours, theirs = load_shard(tmp_path / "big model", whole_model(config)), library(folder)
    pixels = torch.randint(0, 256, (32, 112, 112, 3), dtype=torch.uint8)
    given = Batch(TowerState(pixels, torch.tensor([16, 16])), None)
    scaled = (pixels / 255).permute(0, 3, 1, 2).contiguous().view(2, 16, 3, 112, 112)

    def cpu_s(call):
        started = time.thread_time()
        call()
        return time.thread_time() - started

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = (lambda: theirs.get_video_features(scaled), lambda: ours(given))
        ratios = [cpu_s(calls[0]) / cpu_s(calls[1]) for _ in range(8)][1:]
    finally:
        torch.set_num_threads(before)
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(f"\n| videoprism, clips | {difference:.0e} | {num_cuts} | {cosine:.4f} | {ratio:.2f} |")
    assert difference < 1e-5
    assert cosine >= LIMITS["int8"].min_cosine
    assert ratio >= 0.95


@pytest.mark.parametrize("stated", [{"num_frames": 2}, {"num_frames": None, "fps": 2}])
def test_the_models_own_number_of_frames_wins_over_its_processors(tmp_path, stated):
    """The processor that is published with the model of 16 frames says 8, which the model can't take."""
    folder = save_videoprism(tmp_path / "checkpoint")
    edit_json(folder / "processor_config.json", video_processor=saved_processor(folder) | stated)
    assert import_checkpoint(folder, tmp_path / "model").clip_frames == NUM_FRAMES
    record = json.loads((tmp_path / "model" / "import.json").read_text())
    (line,) = [each for each in record["decisions"] if each.startswith("frames of a clip")]
    assert line.startswith("frames of a clip: 4 of config.json win over {'") and line.endswith("processor_config.json")


@pytest.mark.medium
def test_its_video_processor_is_read_wherever_it_is_saved_and_an_image_processor_is_not(checkpoint, model, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    names = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
    (folder / names[2]).write_text('{"size": {"height": 7, "width": 7}}')
    for place in range(2):
        assert import_checkpoint(folder, tmp_path / f"{place}").preprocess == load_model_config(model).preprocess
        record = json.loads((tmp_path / f"{place}" / "import.json").read_text())
        uses = {each["file"]: each["use"] for each in record["files"]}
        assert (uses[names[place]], uses[names[2]]) == ("read", "no influence")
        if place == 0:
            (folder / names[1]).write_text(json.dumps(saved_processor(folder)))
            (folder / names[0]).unlink()


def test_sentinels_of_t5_are_words_like_others(checkpoint, model):
    from transformers import AutoTokenizer

    tokenizer, theirs = (
        parse_tokenizer((model / "tokenizer.json").read_text(), ""),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    num_tokens = load_model_config(model).text.vocab_size
    assert max(theirs("a <extra_id_7> car")["input_ids"]) >= num_tokens, "the library has no embedding of it"
    assert max(tokenizer.encode("a <extra_id_7> car").ids) < num_tokens
    for caption in ODD_CAPTIONS:
        assert tokenizer.encode(caption).ids == theirs(caption)["input_ids"]
