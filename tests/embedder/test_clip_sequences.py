"""A clip as a model with eyes takes it, from its file to its vector: against transformers with its own processor."""

import json
import shutil
from dataclasses import replace
from functools import cache

import av
import numpy as np
import pytest
import torch
from embedding_runs import embedded
from picture_decoders import INSTRUCTION, as_state, pictures, save_checkpoint
from PIL import Image
from tower_checks import run_stages, vectors
from transformers import AutoModel, AutoProcessor
from transformers.video_utils import VideoMetadata

from embedder.errors import ConfigError
from embedder.executors.job import decode_spec
from embedder.ingest.embed import refresh
from embedder.models.model_folder import open_model
from embedder.plugins.verify.verify import verify
from embedder.steps.item_decoder import CLIP_TEXT, ItemContent, ItemDecoder
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.fingerprint import preprocess_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_summary import read_import_record
from shards.shard import load_shard
from shards.shard_specs import specs_between, whole_model

FAMILIES = ["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "embedding_gemma2"]
FPS, NUM_FRAMES, SEGMENT_S = 10, 50, 2.0  # three segments: two of 20 frames, one of 10
FULL = [(2, 7, 12, 17), (22, 27, 32, 37), (41, 43, 46, 48)]
"""Frames of each segment where it has four."""
PICKED = {4: FULL, 3: [(3, 10, 16), (23, 30, 36), (41, 45, 48)], 1: [(10,), (30,), (45,)]}
SIZES = [(48, 40), (64, 36), (200, 150), (9, 120), (5, 7)]  # of frames; the last ones are enlarged


class Clips:
    """A family's checkpoint, model folder and library."""

    def __init__(self, family, root):
        self.family, self.folder = family, root / "model"
        self.checkpoint = save_checkpoint(root / "checkpoint", family)
        import_checkpoint(self.checkpoint, self.folder)
        self.theirs = AutoModel.from_pretrained(self.checkpoint).eval()
        self.processor = AutoProcessor.from_pretrained(self.checkpoint)
        self.config = load_model_config(self.folder)

    @torch.no_grad()
    def library(self, frames, seconds, length_s):
        """transformers' vector of a segment's frames, shown at these seconds from its start, and its inputs."""
        indices = [round(each * FPS) for each in seconds]
        if len(frames) == 1 and self.family == "qwen3_vl":  # its processor refuses one frame
            frames, indices = frames.repeat(2, 0), indices * 2
        metadata = VideoMetadata(
            total_num_frames=round(length_s * FPS), fps=float(FPS), frames_indices=indices, duration=length_s
        )
        given = {"video_metadata": [metadata], "do_sample_frames": False}
        if self.family == "embedding_gemma2":
            inputs = self.processor(videos=[frames], videos_kwargs=given, return_tensors="pt")
            return torch.nn.functional.normalize(self.theirs(**inputs).last_hidden_state[0].mean(0), dim=-1), inputs
        vector, inputs = self.last({"type": "video", "video": ""}, videos=[frames], videos_kwargs=given)
        return torch.nn.functional.normalize(vector, dim=-1), inputs

    @torch.no_grad()
    def last(self, item, **given):
        """The last token's vector of a conversation with an item, and its inputs."""
        system = {"role": "system", "content": [{"type": "text", "text": INSTRUCTION}]}
        messages = [system, {"role": "user", "content": [item]}]
        form = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(text=[form], return_tensors="pt", **given)
        return self.theirs(**inputs).last_hidden_state[0, -1], inputs


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return cache(lambda name: Clips(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=FAMILIES)
def clips(request, families):
    return families(request.param)


def write_video(path, frames):
    """Write a lossless clip."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=FPS)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def make_frames(size=SIZES[0], num=NUM_FRAMES):
    return [np.asarray(each) for each in pictures([size] * num)]


def decoded(spec, path):
    """Rows of a clip, as a run decodes them."""
    decoder = ItemDecoder(spec)
    try:
        return list(decoder.rows(ItemContent(kind="video", media=path)))
    finally:
        decoder.sandbox.close()


def as_rows(rows):
    """Pack rows with pixels, as a stage gets them."""
    grids = torch.tensor(np.stack([row["image_grid"] for row in rows]))
    values = torch.from_numpy(np.concatenate([row["pixels"] for row in rows]))
    text = as_state([row.get(CLIP_TEXT, np.zeros(0, np.int32)) for row in rows])
    return TowerState(values, grids.long().prod(1), grids, text)


def spec_of(make_run, clips, tmp_path, num_frames=4, segment_s=SEGMENT_S):
    run = make_run(tmp_path, model=str(clips.folder), segment_s=segment_s, frames_per_segment=num_frames)
    return decode_spec(run.rows, open_model(str(clips.folder)))


def expand(ids, grid, config):
    """Token ids of a conversation, with one for each token of a clip."""
    squares = int(grid[1] * grid[2]) // config.vision.merge_size**2
    return [each for one in ids.tolist() for each in ([one] if one >= 0 else [-1] * squares)]


@pytest.mark.medium
@pytest.mark.parametrize(
    "num_frames", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
@torch.inference_mode()
def test_a_segment_has_transformers_own_tokens_grids_and_vector(make_run, clips, tmp_path, num_frames):
    shard = load_shard(clips.folder, whole_model(clips.config))
    for size in SIZES[2:4] if num_frames == 3 else SIZES:
        frames = make_frames(size)
        rows = decoded(spec_of(make_run, clips, tmp_path, num_frames), write_video(tmp_path / "clip.mkv", frames))
        assert [row["segment"] for row in rows] == [0, 1, 2]
        found = vectors(shard(Batch(as_rows(rows), None)))["vision"]
        for row, vector, picked in zip(rows, found, PICKED[num_frames], strict=True):
            seconds = [(number - row["segment"] * SEGMENT_S * FPS) / FPS for number in picked]
            shown = np.stack([frames[number] for number in picked])
            expected, inputs = clips.library(shown, seconds, row["end_s"] - row["start_s"])
            own = np.array(expand(row[CLIP_TEXT], row["image_grid"], clips.config))
            ids = inputs["input_ids"][0].numpy()
            assert (own == np.where(ids == clips.processor.video_token_id, -1, ids)).all()
            if "video_grid_thw" in inputs:
                times, *sides = inputs["video_grid_thw"][0].tolist()
                assert [times, *sides] == [-(-num_frames // 2), *row["image_grid"][1:].tolist()]
            assert float((vector - expected).abs().max()) < 1e-5


@pytest.mark.medium
@torch.inference_mode()
def test_every_cut_of_clips_among_pictures_gives_the_bits_of_the_whole(make_run, clips, tmp_path):
    spec, frames = spec_of(make_run, clips, tmp_path, 3), make_frames((40, 24))
    rows = decoded(spec, write_video(tmp_path / "clip.mkv", frames))
    pictures_alone = [{key: row[key] for key in ("pixels", "image_grid")} for row in rows[:1]]
    state = as_rows([rows[0], *pictures_alone, *rows[1:]])
    whole = load_shard(clips.folder, whole_model(clips.config))
    found = vectors(whole(Batch(state, None)))["vision"]
    assert float((found[0] - found[1]).abs().max()) > 1e-3  # the same frames, each by itself
    depth, decoder = (clips.config.num_layers[side] for side in ("vision", "text"))
    for cut in range(1, depth):
        specs = specs_between([(0, 0), (cut, 0), (depth, decoder)])
        assert torch.equal(run_stages(clips.folder, specs, Batch(state, None))["vision"], found), cut
    alone = vectors(whole(Batch(state.take(torch.tensor([3])), None)))["vision"]
    assert float((alone - found[3:]).abs().max()) < 1e-5


@pytest.mark.slow
def test_the_time_between_frames_matters_where_the_model_reads_it(make_run, families, tmp_path):
    """Of Qwen3-VL as text, of Qwen2.5-VL as positions; Qwen2-VL numbers its frames."""
    frames = [make_frames(num=4)[number // 10] for number in range(40)]
    path = write_video(tmp_path / "clip.mkv", frames)
    slow = write_video(tmp_path / "slow.mkv", [each for frame in frames for each in (frame, frame)])
    moved = {}
    for name in ("qwen3_vl", "qwen2_5_vl", "qwen2_vl"):
        clips, found = families(name), []
        for file, segment_s in ((path, 4.0), (slow, 8.0)):
            (row,) = decoded(spec_of(make_run, clips, tmp_path, 4, segment_s), file)
            shard = load_shard(clips.folder, whole_model(clips.config))
            found.append(vectors(shard(Batch(as_rows([row]), None)))["vision"])
        moved[name] = float((found[0] - found[1]).abs().max())
    assert moved["qwen3_vl"] > 1e-4
    assert moved["qwen2_5_vl"] > 1e-4
    assert moved["qwen2_vl"] == 0


@pytest.mark.medium
def test_a_run_embeds_segments_as_sequences_and_a_folder_without_the_form_as_before(make_run, families, tmp_path):
    clips, source = families("qwen3_vl"), tmp_path / "in"
    source.mkdir()
    frames = make_frames()
    write_video(source / "clip.mkv", frames)
    (source / "clip.txt").write_text("two cats")
    pictures([(40, 30)])[0].save(source / "picture.png")
    run = make_run(source, model=str(clips.folder), num_stages=3, segment_s=SEGMENT_S, frames_per_segment=4)
    report, rows = embedded(run)
    assert report.num_rejected == 0
    segments = {segment: row for (item, segment), row in rows.items() if item.endswith("clip.mkv")}
    assert len(segments) == 3
    for segment, picked in enumerate(FULL):
        length_s = segments[segment]["end_s"] - segments[segment]["start_s"]
        seconds = [(number - segment * SEGMENT_S * FPS) / FPS for number in picked]
        expected, _ = clips.library(np.stack([frames[number] for number in picked]), seconds, length_s)
        assert np.abs(np.array(segments[segment]["image_embedding"]) - expected.numpy()).max() < 1e-5
    assert {each.side: each.passed for each in verify(run).comparisons} == {"image": True, "text": True}
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in clips.folder.iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    preprocess = clips.config.preprocess.model_copy(update={"clips": None})
    text = clips.config.model_copy(update={"preprocess": preprocess}).to_json()
    assert "clips" not in text  # as folders of before have it
    (plain / "config.json").write_text(text)
    refresh(run.model_copy(update={"model": str(plain)}))
    _, rows = embedded(run.model_copy(update={"model": str(plain)}))
    row = next(row for (item, segment), row in rows.items() if item.endswith("clip.mkv") and segment == 0)
    frames = [Image.fromarray(frames[number]) for number in FULL[0]]
    mean = torch.stack([clips.last({"type": "image", "image": ""}, images=[each])[0] for each in frames]).mean(0)
    expected = torch.nn.functional.normalize(mean, dim=-1).numpy()
    assert np.abs(np.array(row["image_embedding"]) - expected).max() < 1e-5


def test_the_fingerprint_of_preprocessing_counts_the_form(families):
    preprocess = families("qwen3_vl").config.preprocess
    plain = preprocess.model_copy(update={"clips": None})
    other = preprocess.model_copy(update={"clips": preprocess.clips.model_copy(update={"max_frame_pixels": 10000})})
    assert len({preprocess_fingerprint(each, b"", 5.0, 4) for each in (preprocess, plain, other)}) == 3


def test_more_frames_than_the_model_takes_are_refused(make_run, families, tmp_path):
    with pytest.raises(ConfigError, match="frames_per_segment: 65.*64 at most"):
        spec_of(make_run, families("qwen3_vl"), tmp_path, 65)


@pytest.mark.medium
def test_places_of_other_frames_are_refused(make_run, families, tmp_path):
    clips = families("qwen3_vl")
    rows = decoded(spec_of(make_run, clips, tmp_path), write_video(tmp_path / "clip.mkv", make_frames()))
    state = as_rows(rows)
    wrong = replace(state, grids=state.grids * torch.tensor([2, 1, 1]), lengths=state.lengths * 2)
    with pytest.raises(ModelError, match=r"clips of \[8, 8, 8\] frames have \[2, 2, 2\] places"):
        load_shard(clips.folder, whole_model(clips.config)).arrange(Batch(wrong, None))


VIDEO_FILE, IMAGE_FILE, BOTH_FILE = (
    "video_preprocessor_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def split_processors(checkpoint, folder):
    """Copy a checkpoint; return its video processor's settings, which are then in no file of it."""
    shutil.copytree(checkpoint, folder)
    both = json.loads((folder / BOTH_FILE).read_text())
    (folder / IMAGE_FILE).write_text(json.dumps(both.pop("image_processor")))
    video = both.pop("video_processor")
    (folder / BOTH_FILE).write_text(json.dumps(both))
    return video


@pytest.mark.medium
@pytest.mark.parametrize(
    "odd", [{"image_mean": 0.5}, {"image_std": "x"}, {"size": 224}, {"size": [1, 2]}, {"max_frames": True}]
)
def test_settings_that_fit_no_form_of_a_clip_leave_the_mean_of_frames(families, tmp_path, odd):
    video = split_processors(families("qwen3_vl").checkpoint, tmp_path / "checkpoint")
    for number, (settings, has_form) in enumerate([(video, True), (video | odd, False)]):
        (tmp_path / "checkpoint" / VIDEO_FILE).write_text(json.dumps(settings))
        found = import_checkpoint(tmp_path / "checkpoint", tmp_path / f"{number}")
        assert (found.preprocess.clips is not None) is has_form


@pytest.mark.medium
def test_the_record_of_an_import_names_the_files_that_the_form_of_a_clip_is_of(families, tmp_path):
    video, folder = split_processors(families("qwen3_vl").checkpoint, tmp_path / "checkpoint"), tmp_path / "checkpoint"

    def uses(name):
        import_checkpoint(folder, tmp_path / name)
        files = read_import_record(tmp_path / name)["files"]
        return {each["file"]: each["use"] for each in files if each["file"] in (VIDEO_FILE, IMAGE_FILE, BOTH_FILE)}

    (folder / VIDEO_FILE).write_text(json.dumps(video))
    assert uses("apart") == {VIDEO_FILE: "read", IMAGE_FILE: "read", BOTH_FILE: "no influence"}
    (folder / BOTH_FILE).write_text(json.dumps({"video_processor": video}))
    assert uses("both") == {VIDEO_FILE: "no influence", IMAGE_FILE: "read", BOTH_FILE: "read"}
    (folder / VIDEO_FILE).write_text(json.dumps(video | {"image_mean": 0.5}))  # which is not read
    assert load_model_config(tmp_path / "both") == import_checkpoint(folder, tmp_path / "again")
