"""A stage fetches the weights of its own layers, once for all processes of a machine; bytes counted by the server."""

import fnmatch
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import obstore
import pytest
import torch
from bucket_server import bucket_on, running_server

from embedder import demo_model
from embedder.steps.stage import TowerStage, UnsplitStage
from embedder.steps.stage_spec import StageSpec
from embedder.storage import model_download
from embedder.storage.model_download import resolve_model
from embedder.storage.object_ranges import join_ranges
from embedder.storage.object_stores import open_place
from shards.fingerprint import model_fingerprint
from shards.fresh import init_model
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.plan import plan_shards
from shards.shard_specs import whole_model
from shards.tensor_shapes import shard_shapes
from shards.weights import read_entries

WHOLE_FILE = Path(demo_model.__path__[0])
FIRST, SECOND, LAST = (stage.spec for stage in plan_shards(load_model_config(WHOLE_FILE), 3).stages)
PROCESSES = 4
SLACK_BYTES = 64 << 10  # of what is fetched besides the tensors: the header, and gaps between them


@pytest.fixture(scope="module")
def several_files(tmp_path_factory):
    """The same model with other weights, in files of 1 MiB, as those of large models are in files of 5 GB."""
    folder = tmp_path_factory.mktemp("models") / "several"
    return init_model(load_model_config(WHOLE_FILE), folder, seed=0, max_file_bytes=1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 server, and the file of what it answered."""
    log = tmp_path_factory.mktemp("log") / "requests.txt"
    with running_server(f"--log={log}") as (url, _):
        yield url, log


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download, "HEADER_BYTES", SLACK_BYTES // 2)
    monkeypatch.setattr(model_download, "GAP_BYTES", 1 << 10)
    yield from bucket_on(server[0], monkeypatch)


@pytest.fixture
def fetched(server):
    """Counts bytes and requests by file name since it was asked last."""
    seen = 0

    def count():
        nonlocal seen
        lines = [line.split() for line in server[1].read_text().splitlines()]
        sizes, requests = Counter(), Counter()
        for method, path, size in lines[seen:]:
            if method == "GET" and "." in path:
                sizes[path.rpartition("/")[2]] += int(size)
                requests[path.rpartition("/")[2]] += 1
        seen = len(lines)
        return sizes, requests

    return count


def upload(folder, bucket):
    """Copy a model folder into the bucket; give its URI."""
    for path in folder.iterdir():
        if path.is_file():
            obstore.put(open_place(f"{bucket}/model"), path.name, path.read_bytes())
    return f"{bucket}/model"


def make_stage(uri, shard, kind=TowerStage):
    """A stage with these layers."""
    return kind(StageSpec(0, str(uri), shard, "float32", "cpu", 1, (8,))).load()


def needed_bytes(folder, shard, *others):
    """Bytes of a shard's tensors that no other shard has."""
    entries, config = read_entries(folder), load_model_config(folder)
    names = shard_shapes(config, shard).keys() - {name for other in others for name in shard_shapes(config, other)}
    return sum(entries[name].stop - entries[name].start for name in names)


def assert_loaded(stage, folder):
    """The stage holds the weights of the whole model's layers."""
    expected = make_stage(folder, stage.spec.shard).shard.state_dict()
    found = stage.shard.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.medium
def test_of_one_large_file_each_stage_fetches_its_tensors_once(bucket, fetched):
    uri = upload(WHOLE_FILE, bucket)
    fetched()
    with ThreadPoolExecutor(PROCESSES) as starts:
        stages = list(starts.map(lambda _: make_stage(uri, FIRST), range(PROCESSES)))
    sizes, requests = fetched()
    first_bytes = needed_bytes(WHOLE_FILE, FIRST)
    assert first_bytes <= sizes["model.safetensors"] <= first_bytes + SLACK_BYTES
    assert first_bytes < 0.6 * (WHOLE_FILE / "model.safetensors").stat().st_size
    assert sizes.keys() == {"model.safetensors", "config.json"}
    assert requests["config.json"] == 1
    assert requests["model.safetensors"] < 15, "neighbours come together"
    for stage in stages:
        assert_loaded(stage, WHOLE_FILE)
    assert_loaded(make_stage(uri, LAST), WHOLE_FILE)
    sizes, _ = fetched()
    assert sizes.keys() == {"model.safetensors"}
    assert sizes["model.safetensors"] <= needed_bytes(WHOLE_FILE, LAST, FIRST) + SLACK_BYTES
    assert_loaded(make_stage(uri, FIRST), WHOLE_FILE)
    assert not fetched()[0]


@pytest.mark.medium
def test_a_whole_model_never_comes_from_parts_and_serves_all_stages(bucket, fetched):
    uri = upload(WHOLE_FILE, bucket)
    parts = resolve_model(uri, SECOND)
    whole = resolve_model(uri)
    assert parts != whole
    assert model_fingerprint(whole) == model_fingerprint(WHOLE_FILE)
    assert resolve_model(uri, whole_model(load_model_config(whole))) == whole
    fetched()
    assert resolve_model(uri, FIRST) == whole
    assert_loaded(make_stage(uri, FIRST), WHOLE_FILE)
    make_stage(uri, whole_model(load_model_config(whole)), UnsplitStage)
    assert not fetched()[0]


@pytest.mark.medium
def test_of_several_files_only_those_come_that_hold_the_stages_tensors(bucket, fetched, several_files):
    uri = upload(several_files, bucket)
    index = json.loads((several_files / "model.safetensors.index.json").read_text())["weight_map"]
    config = load_model_config(several_files)
    fetched()
    have = set()
    for shard in (FIRST, LAST):
        assert_loaded(make_stage(uri, shard), several_files)
        sizes, requests = fetched()
        weights = {name for name in sizes if name.endswith(".safetensors")}
        assert weights == {index[name] for name in shard_shapes(config, shard)} - have
        assert all(requests[name] == 1 for name in weights)
        have |= weights
    assert have < set(index.values())


def test_a_download_that_broke_off_goes_on_and_zeros_never_count(bucket, fetched, monkeypatch):
    uri = upload(WHOLE_FILE, bucket)
    copy = model_download._copy_range
    calls = []

    def break_off(ranges, file, start, stop):
        calls.append((start, stop))
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        copy(ranges, file, start, stop)

    monkeypatch.setattr(model_download, "_copy_range", break_off)
    with pytest.raises(ModelError, match="No space left on device"):
        resolve_model(uri, FIRST)
    assert len(calls) == 4
    monkeypatch.setattr(model_download, "_copy_range", copy)
    assert_loaded(make_stage(uri, FIRST), WHOLE_FILE)


@pytest.mark.medium
def test_a_model_that_changes_has_parts_of_its_own(bucket, several_files, tmp_path):
    uri = upload(WHOLE_FILE, bucket)
    before = resolve_model(uri, FIRST)
    assert_loaded(make_stage(uri, FIRST), WHOLE_FILE)
    other = init_model(load_model_config(WHOLE_FILE), tmp_path / "other", seed=1)
    upload(other, bucket)
    assert resolve_model(uri, FIRST) != before
    assert_loaded(make_stage(uri, FIRST), other)


@pytest.mark.parametrize("head", [b"", b"short", (10).to_bytes(8, "little") + b"not a json", b"\xff" * 40_000])
def test_a_broken_file_of_weights_is_one_line(head, bucket, tmp_path):
    broken = shutil.copytree(WHOLE_FILE, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(head)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*fetch it again"):
        resolve_model(upload(broken, bucket), FIRST)


@pytest.mark.parametrize("single", [True, False])
def test_of_the_hub_only_files_come_that_a_stage_needs(single, several_files, monkeypatch, tmp_path):
    source, commit = WHOLE_FILE if single else several_files, "c" * 40
    snapshot, asked = tmp_path / commit, []

    def fetch(name, revision, allow_patterns, ignore_patterns):
        """The library's part: files by pattern into the folder of the commit."""
        asked.append((name, revision))
        snapshot.mkdir(exist_ok=True)
        for path in source.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert_loaded(make_stage("hf:org/name@v2", SECOND), source)
    assert asked == [("org/name", "v2"), ("org/name", commit)], "a branch that moves on meanwhile mixes nothing"
    names = {path.name for path in snapshot.iterdir()}
    if single:
        assert names == {"config.json", "model.safetensors"}
    else:
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {index[name] for name in shard_shapes(load_model_config(source), SECOND)}
        assert names == {"config.json", "model.safetensors.index.json", *needed}
        assert needed < set(index.values())


def test_neighbouring_tensors_are_one_range():
    entries = sorted(read_entries(WHOLE_FILE).values(), key=lambda entry: entry.start)
    ranges = [(entry.start, entry.stop) for entry in entries]
    assert join_ranges(ranges, model_download.GAP_BYTES) == [(entries[0].start, entries[-1].stop)]
    far = [ranges[0], ranges[-1]]
    assert join_ranges(far[::-1], model_download.GAP_BYTES) == far
    assert all(one.stop <= other.start for one, other in pairwise(entries))
