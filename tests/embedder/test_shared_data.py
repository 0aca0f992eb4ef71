"""Real photographs and clips, where they are at hand: none is rejected, each stands once."""

from pathlib import Path

import pytest
from embedding_runs import embedded

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the shared photographs and clips are not next to the checkout"
)


def test_all_photographs_and_clips_embed_without_a_reject(make_run):
    sources = [{"path": str(DATA / name), "name": name} for name in ("photos", "video")]
    report, rows = embedded(make_run(sources, segment_s=2.0))
    assert (report.num_items, report.num_rejected) == (403, 0)
    assert len({item_id for item_id, _ in rows}) == 403
    assert sum(item_id.startswith("photos:") for item_id, _ in rows) == 400
    clips = {item_id: [] for item_id, _ in rows if item_id.startswith("video:")}
    for item_id, segment in rows:
        if item_id in clips:
            clips[item_id].append(segment)
    assert all(sorted(segments) == list(range(len(segments))) for segments in clips.values())
    assert len(clips["video:flipping_a_pancake.mkv"]) == 6, "ten seconds in segments of two"
