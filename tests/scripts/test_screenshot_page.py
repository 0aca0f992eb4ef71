"""The script that makes the README's picture, over a small store."""

import shutil

import pytest
import samples
from page_store import make_page_store
from PIL import Image
from script_runs import run_script
from tiny_models import tiny_config

from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: install Debian's package to test the page")
@pytest.mark.slow
def test_the_screenshot_shows_the_page_with_its_images(tmp_path):
    tokenizer = train_tokenizer(samples.SENTENCES, 300)
    model = init_model(tiny_config(), tmp_path / "model", seed=0, tokenizer_json=tokenizer)
    config = make_page_store(tmp_path, model)
    out = tmp_path / "page.png"
    done = run_script("screenshot_page.py", config.store, "--query", "car", "--out", out, "--width", 900, timeout_s=180)
    assert done.returncode == 0, done.stderr
    with Image.open(out) as shown:
        assert shown.size == (900, 800)
        assert len(shown.convert("RGB").resize((90, 80)).getcolors(7200)) > 200  # images, and not the page alone
