"""The shipped demo, end to end: its recalls are measured, and a second run finds everything done."""

import signal
import subprocess
import sys
import urllib.request

import pytest
from PIL import Image

import embedder
from embedder.plugins.evaluate.evaluate import EvaluationOptions, evaluate


@pytest.mark.slow
def test_the_demo_finds_emoji_by_words_and_is_quick_the_second_time(tmp_path, run_embedder):
    arguments = ("demo", "--out", tmp_path / "demo", "--set", "engine=local", "--json")
    code, first, stderr = run_embedder(*arguments)
    assert code == 0, stderr
    assert (first["report"]["num_items"], first["report"]["num_rejected"]) == (1911, 0)
    recalls = {each["queries"]: each for each in first["recalls"]}
    assert recalls["caption"]["num_queries"] == 1911
    assert recalls["caption"]["recall"]["10"] > 0.6  # chance is 0.005
    assert recalls["tags unseen in training"]["num_queries"] == 785
    assert recalls["tags unseen in training"]["recall"]["10"] > 0.19
    with Image.open(tmp_path / "demo" / "sheet.png") as sheet:
        assert sheet.size[0] > 800

    code, second, stderr = run_embedder(*arguments)
    assert code == 0, stderr
    assert second["report"]["num_unchanged"] == 1911
    assert second["recalls"] == first["recalls"]

    command = [sys.executable, "-m", "embedder", *map(str, arguments), "--serve", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as served:
        line = next(line for line in served.stderr if line.startswith("search page of"))
        page = urllib.request.urlopen(line.split()[4], timeout=60).read().decode()
        served.send_signal(signal.SIGTERM)
        served.communicate(timeout=60)
    assert "<title>Search</title>" in page
    assert served.returncode == 0

    found = evaluate(embedder.open_store(tmp_path / "demo" / "store"), EvaluationOptions(group="group"))
    for k, exact in found.model.r_at.items():
        assert exact.value == pytest.approx(recalls["caption"]["recall"][str(k)], abs=0.005)
        assert found.index.r_at[k].value == pytest.approx(exact.value, abs=0.005)
    flags = next(group for group in found.groups if group.name == "flags")
    assert flags.num_queries == recalls["caption, flags only"]["num_queries"]
    assert flags.r_at[10].value == pytest.approx(recalls["caption, flags only"]["recall"]["10"], abs=0.005)
    assert found.encoding.num_queries > 0
