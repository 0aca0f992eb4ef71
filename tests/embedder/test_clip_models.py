"""A model of clips from its checkpoint to a search: imported, embedded by two stages; transformers' own vectors."""

import dataclasses
import shutil

import av
import clips
import numpy as np
import pytest
import torch
from command_runs import run_here
from embedding_runs import embedded
from library_checkpoints import save_videoprism
from PIL import Image
from tiny_tokenizers import CAPTIONS

import embedder
from embedder.errors import ConfigError
from embedder.executors.job import decode_spec, handed_on_bytes, store_info
from embedder.models.further_models import open_models
from embedder.models.model_folder import open_model, rows_of_clips
from embedder.placement.device_settings import GPU_SETTINGS, settings_of
from shards.fingerprint import preprocess_fingerprint
from shards.plan import plan_shards
from shards.towers.videoprism import VideoPrismTower

NUM_FRAMES, NUM_CLIPS = 4, 6
RATE = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_videoprism(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    ended = run_here("model", "import", checkpoint, "--out", folder)
    assert ended.code == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Lossless clips of 9 to 23 frames that move, one of three frames, and a picture; a caption next to some."""
    root, generator = tmp_path_factory.mktemp("source"), np.random.default_rng(3)
    for number in range(NUM_CLIPS):
        length = 3 if number == NUM_CLIPS - 1 else 9 + number * 7 // 2
        coarse = [generator.integers(0, 256, (3, 4, 3), dtype=np.uint8) for _ in range(length)]
        frames = [np.array(Image.fromarray(each).resize((64, 48), Image.Resampling.BICUBIC)) for each in coarse]
        clips.write(root / f"{number}.mkv", (), codec="ffv1", kind="mkv", rate=RATE, pix_fmt="bgr0", frames=frames)
        if number < len(CAPTIONS):
            (root / f"{number}.txt").write_text(CAPTIONS[number], encoding="utf-8")
    Image.fromarray(frames[0]).save(root / "still.png")
    return root


def library_vectors(checkpoint, source):
    """transformers' own vectors of all items, from all frames of each clip, which its processor samples."""
    from transformers import AutoProcessor, VideoPrismClipModel

    theirs, processor = (
        VideoPrismClipModel.from_pretrained(checkpoint).eval(),
        AutoProcessor.from_pretrained(checkpoint),
    )
    found = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".txt":
            continue
        if path.suffix == ".png":
            frames = np.array(Image.open(path).convert("RGB"))[None]
        else:
            with av.open(str(path)) as container:
                frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        inputs = processor(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            do_sample_frames=len(frames) >= NUM_FRAMES,  # it refuses fewer frames than that
            return_tensors="pt",
        )
        pixels = inputs["pixel_values_videos"]
        with torch.no_grad():
            features = theirs.get_video_features(pixels, interpolate_pos_encoding=pixels.shape[1] != NUM_FRAMES)
        found[path.name] = features.pooler_output[0, 0].numpy()

    @torch.no_grad()
    def encode(text):
        inputs = processor(text=[text], max_length=24, return_tensors="pt")
        return theirs.get_text_features(**inputs).pooler_output[0].numpy()

    return found, encode


@pytest.mark.medium
def test_clips_and_pictures_have_the_librarys_vectors_and_a_search_its_neighbours(
    make_run, checkpoint, model, source, tmp_path
):
    expected, encode = library_vectors(checkpoint, source)
    run = make_run(source, model=str(model), num_stages=2, batch_size=3, segment_s=60)
    _, rows = embedded(run)
    found = {item: row["image_embedding"] for (item, _), row in rows.items()}
    assert found.keys() == expected.keys()
    differences = {item: float(np.abs(np.array(found[item]) - expected[item]).max()) for item in expected}
    assert max(differences.values()) < 1e-5, differences
    for number, caption in enumerate(CAPTIONS):
        assert np.abs(np.array(rows[f"{number}.mkv", 0]["text_embedding"]) - encode(caption)).max() < 1e-5
    store = embedder.open_store(run.store)
    names, matrix = list(expected), np.stack(list(expected.values()))
    for query in ("a red car", "two cats sleep", "fruit"):
        nearest = [names[place] for place in np.argsort(-(matrix @ encode(query)))]
        hits = store.search(query, k=len(names))
        assert [hit.item_id for hit in hits] == nearest
    hits = store.search(source / "still.png", k=1)
    assert hits[0].item_id == "still.png"
    assert hits[0].score == pytest.approx(1, abs=1e-5)


@pytest.mark.medium
def test_long_clips_have_one_vector_for_each_segment_from_its_first_frame_on(make_run, model, source, tmp_path):
    run = make_run(source, model=str(model), num_stages=2, segment_s=1.0)
    _, rows = embedded(run)
    assert {key[1] for key in rows if key[0] == "4.mkv"} == {0, 1, 2}
    spec = decode_spec(run.rows, open_model(str(model)))
    assert (spec.frames_per_segment, spec.frames_from_start) == (NUM_FRAMES, True)


def test_the_fingerprint_of_the_preprocessing_counts_the_models_frames(make_run, model, source):
    opened = open_model(str(model))
    infos = [
        store_info(make_run(source, model=str(model), **keys).rows, opened, "float32")
        for keys in ({}, {"frames_per_segment": 9})
    ]
    assert infos[0] == infos[1]
    tokenizer = opened.tokenizer_json.encode()
    expected = preprocess_fingerprint(opened.config.preprocess, tokenizer, 5.0, NUM_FRAMES, infos[0].colour)
    assert (infos[0].frames_per_segment, infos[0].preprocess_fingerprint) == (NUM_FRAMES, expected)
    ended = run_here("model", "info", model, "--json")
    assert expected in ended.stdout


@pytest.mark.parametrize("sides", [["image"], ["image", "text"]])
def test_beside_a_model_of_other_frames_it_is_refused_and_its_texts_alone_are_not(make_run, model, tmp_path, sides):
    section = {"name": "clips", "kind": "towers", "uri": str(model), "sides": sides}
    run = make_run(tmp_path).rows
    for frames in (3, NUM_FRAMES):  # of as many frames, but spread otherwise
        rows = dataclasses.replace(run, frames_per_segment=frames)
        with pytest.raises(ConfigError, match=f"takes clips of {NUM_FRAMES} frames, .* make it the main one"):
            open_models([section], rows)
    open_models([section | {"sides": ["text"]}], run)
    (beside,) = open_models([section], rows_of_clips(run, open_model(str(model))))
    assert beside.info.frames_per_segment == NUM_FRAMES


@pytest.mark.medium
def test_frames_that_were_asked_for_in_vain_are_named(make_run, model, source, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copy(source / "still.png", folder)
    for number, (keys, is_said) in enumerate([((), False), (("--set", "frames_per_segment=9"), True)]):
        given = (folder, "--model", model, "--store", tmp_path / f"store-{number}", "--engine", "local", *keys)
        ended = run_here("embed", *given)
        assert ended.code == 0, ended.stderr
        line = f"frames_per_segment = 9 has no effect: model {open_model(str(model)).config.name} takes {NUM_FRAMES}"
        assert (line in ended.stderr) is is_said


def test_blocks_and_batches_count_all_frames_of_a_clip(model):
    opened = open_model(str(model))
    plan = plan_shards(opened.config, 3)
    frame = opened.config.vision.input_bytes(0)
    assert handed_on_bytes(opened, plan)[0] == NUM_FRAMES * frame
    assert handed_on_bytes(opened, plan)[1] == NUM_FRAMES * plan.stages[0].cut_bytes_per_image + (
        plan.stages[0].cut_bytes_per_caption
    )
    base = VideoPrismTower()  # 16 frames, of 3 x 288 x 288 bytes before and 324 x 768 halves behind the first layer
    config = opened.config.model_copy(update={"vision": base})
    (rows, *_) = settings_of(["cuda"], config).batch_sizes
    assert rows * 16 * 324 * 768 * 2 <= GPU_SETTINGS.max_batch_bytes < 2 * rows * 16 * 324 * 768 * 2


@pytest.mark.medium
def test_a_plan_and_a_check_of_its_stages_take_clips(make_run, model, source, tmp_path, run_embedder):
    code, plan, _ = run_embedder(
        "plan", "--model", model, "--stages", "3", "--estimate", "--json", "--out", tmp_path / "plan.json"
    )
    assert (code, len(plan["stages"])) == (0, 3)
    ended = run_here("verify", "--model", model, "--plan", tmp_path / "plan.json", source, "--json")
    assert ended.code == 0, ended.stdout + ended.stderr
