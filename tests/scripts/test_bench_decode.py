"""The benchmark of decoding, on tiny input: what it prints; no clock is judged."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def bench_decode(monkeypatch):
    def run(*words):
        import bench_decode

        monkeypatch.setattr(sys, "argv", ["bench_decode.py", *map(str, words)])
        bench_decode.main()

    return run


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate([(90, 70), (300, 260), (71, 300)]):
        Image.effect_noise(size, 60).convert("RGB").save(tmp_path / f"{number}.jpg")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_each_way_takes_its_turns(bench_decode, folder, capsys):
    pytest.importorskip("torch")
    bench_decode(folder, "--only", "pictures", "--rounds", 1)
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["num_pictures"] == 3
    assert all(found[name] > 0 for name in ("ours_ms", "bare_ms", "ours_pillow_ms", "pillow_ms", "pillow_decode_ms"))
    equal = [line for line in lines if line.endswith("=")]
    assert any("simplejpeg + torch" in line for line in equal) and any(
        "Pillow's processor  Pillow" in line for line in equal
    )


def test_a_checkout_gives_the_pixels_that_it_gives(bench_decode, folder, capsys):
    bench_decode(folder, "--only", "equal", "--beside", Path(__file__).parents[2])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["num_equal"] == found["num_compared"] > 80


@pytest.mark.slow
def test_the_road_is_the_difference_of_two_runs(bench_decode, folder, capsys):
    bench_decode(folder, "--only", "road", "--road-items", 30, 330)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["road_ms"] > 0


def test_a_folder_without_pictures_is_refused(bench_decode, tmp_path):
    with pytest.raises(SystemExit, match="no picture in it"):
        bench_decode(tmp_path)
