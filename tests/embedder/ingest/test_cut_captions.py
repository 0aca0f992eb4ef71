"""What a model's limit cuts of captions is counted and said: in folders, tables, clips, by further models."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from command_runs import run_here
from model_runs import other_towers
from refresh_runs import refreshed

from embedder.cli.render_report import report_parts
from embedder.models.model_folder import open_model
from embedder.steps.caption_encoder import CaptionEncoder

LONG = "a red car " * 100


@pytest.fixture
def encoder(tiny_model):
    model = open_model(str(tiny_model))
    preprocess = model.config.preprocess
    return CaptionEncoder(model.tokenizer_json, preprocess.max_caption_tokens, model.config.required_text.end_id)


@pytest.mark.parametrize(
    ("caption", "is_cut"),
    [
        ("a red car", False),
        ("a red car" + " " * 100_000, False),
        ("\n\ta red car \u3000\u00a0", False),
        (LONG, True),
        ("w" * 200_000, True),
        ("\u4e2d" * 500, False),  # one unknown token
        ("\u4e2d " * 500, True),
        ("\U0001f469\u200d\U0001f692 " * 200, True),
        ("\u00e1 " * 400, True),
        ("<pad>" * 400, True),
        ("a red car\x00" * 50, True),
        ("\u200b" * 10, False),
        ("a.b,c;d!" * 60, True),
    ],
)
def test_what_is_read_of_a_caption_is_known_to_the_character(encoder, caption, is_cut):
    ids, num_read = encoder.read(caption)
    assert (num_read < len(caption)) is is_cut
    if is_cut:
        assert encoder.read(caption[:num_read]).ids.tolist() == ids.tolist(), "the rest moves no token"
        assert encoder.read(caption[:num_read]).num_read == num_read


def said(report):
    return [line for line in report_parts(report) if "longer than" in str(line)]


@pytest.mark.medium
def test_a_folder_with_a_clip_counts_each_caption_once(make_run, tmp_path, encoder):
    source = samples.folder(tmp_path / "in", num_images=3, num_clips=1, captions=False)
    (source / "pictures" / "0000.txt").write_text(LONG)
    (source / "pictures" / "0001.json").write_text(json.dumps({"caption": LONG}))
    (source / "pictures" / "0002.txt").write_text("a red car")
    (source / "clips" / "0.txt").write_text(LONG)
    config = make_run(source, segment_s=0.5)
    report, rows = refreshed(config)
    row = rows["pictures/0000.png", 0]
    assert row["caption"] == LONG.strip(), "the table has all of it"
    assert np.linalg.norm(row["text_embedding"]) == pytest.approx(1, abs=1e-5)
    num_unread = len(LONG.strip()) - encoder.read(LONG.strip()).num_read
    assert (report.num_cut_captions, report.num_cut_characters) == (3, 3 * num_unread)
    limit = report.max_caption_tokens
    assert said(report) == [
        f"3 captions longer than {limit} tokens: {3 * num_unread:,} characters at the end cut, which no vector knows of"
    ]
    info = run_here("model", "info", config.model)
    assert f"captions up to {limit} tokens, longer ones are cut" in " ".join(info.stdout.split())


@pytest.mark.medium
def test_a_table_and_a_further_model_count_and_whole_captions_are_no_line(make_run, tmp_path, tiny_model):
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"title": [LONG, "a red car", LONG, ""]}), table)
    source = [{"path": str(table), "kind": "table", "columns": {"id": "file+row", "caption": "title"}}]
    models = [{"uri": str(tiny_model)}, {"uri": other_towers(tmp_path), "name": "other", "kind": "towers"}]
    report, _ = refreshed(make_run(source, model=models, max_reject_fraction=1, engine="local"))
    assert report.num_cut_captions == 2, "of two models each caption counts once"
    report, _ = refreshed(make_run(samples.folder(tmp_path / "in"), store=str(tmp_path / "whole")))
    assert (report.num_cut_captions, said(report)) == (0, [])
