"""`embedder embed --dry-run` says what a run would do, and changes nothing."""

import json

import pytest
import samples
from command_runs import run_here

from embedder.config import load_config
from embedder.ingest.embed import embed


@pytest.mark.medium
def test_a_dry_run_of_embed_changes_nothing_and_keeps_what_is_gone(tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=5, captions=False)
    (source / "contract.pdf").write_bytes(b"%PDF-1.4")
    store = tmp_path / "store"
    asked = ("embed", str(source), "--model", str(tiny_model), "--store", str(store), "--dry-run")
    before = run_here(*asked, "--json")
    assert before.code == 0, before.stderr
    found = json.loads(before.stdout.splitlines()[-1])
    assert (found["num_to_embed"], found["num_retired"]) == (5, 0)
    assert found["left_out"] == ["1 other file left out: 1 .pdf"]
    assert not store.exists()
    embed(load_config(overrides={"model": str(tiny_model), "store": str(store), "source": [{"path": str(source)}]}))
    files = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    (source / "pictures" / "0001.png").unlink()
    (source / "late.png").write_bytes(samples.image_bytes(9))
    after = run_here(*asked)
    assert "1 item now, 0 left for later" in after.stdout
    assert "retire" not in after.stdout
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == files
