"""Security checklist, one test per line. Where a line has many cases, its own test file is named next to it.

media         formats, pixels, playlists, memory, time      tests/embedder/media: test_images, test_videos, test_sandbox
sources       tars, links, paths                            tests/embedder/sources: test_{webdataset,local}_listing
credentials   in addresses and answers of buckets           tests/embedder/store/test_bucket_errors.py
hostile bytes 1,000 mutated inputs                          tests/scripts/test_hostile_inputs.py
index         sha256 before FAISS reads                     tests/index/test_index_open.py
"""

import ast
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from safetensors.numpy import load_file
from typer.testing import CliRunner

import embedder
from embedder.cli import app
from embedder.cli.terminal import TerminalLog
from embedder.compat import FAST_START_VARIABLE
from embedder.config_toml.run_sections import DecodeConfig
from embedder.ingest.embed import embed
from embedder.media import images, videos
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.observability.log import messages_to
from embedder.storage.model_download import resolve_model
from shards.model_errors import ModelError
from shards.shard import load_shard

ROOT = Path(__file__).parents[2]
FIT = ResizeSpec(image_size=32, mode="crop", interpolation="bilinear", reduced_decode=True)
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCY"
SIGNATURE = "5ignatureOfOneAddress0"


@cache
def nodes():
    """Calls and imports of the packages, each with its file and, of a call, the name of what is called."""
    found = []
    for package in ("embedder", "shards", "index"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    found.append((path, node, ast.unparse(node.func)))
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    found.append((path, node, ""))
    return found


def calls(*names):
    """Every call of a function or method of these names in the packages: where, and the call."""
    for path, node, name in nodes():
        if any(name == each or name.endswith(f".{each.lstrip('.')}") for each in names):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", name, node


def imports():
    for path, node, _ in nodes():
        if isinstance(node, ast.Import):
            yield from ((path, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield path, node.module


def keywords(call):
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


# Images and videos


@pytest.mark.medium
def test_images_are_opened_with_a_list_of_formats_that_has_no_interpreter_in_it():
    opened = [(where, keywords(call)) for where, name, call in calls("Image.open")]
    assert opened
    assert all("formats" in options for _, options in opened), opened
    assert set(images.FORMATS) <= {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"}


def test_videos_are_opened_with_lists_of_formats_and_protocols(tmp_path, monkeypatch):
    clip, calls_of_open, av_open = samples.clip(tmp_path / "clip.mp4"), [], av.open

    def recorded(*arguments, **options):
        calls_of_open.append(options)
        return av_open(*arguments, **options)

    monkeypatch.setattr(av, "open", recorded)
    with clip.open("rb") as file:
        assert list(videos.read_segments(file, FIT, segment_s=Fraction(5), frames_per_segment=1, max_pixels=1 << 20))
    (options,) = calls_of_open
    formats = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
    formats += ",mpegts,mpeg,mpegvideo,flv,asf"
    assert options["options"] == {"format_whitelist": formats, "protocol_whitelist": "file"}
    with pytest.raises(DecodeError, match="refers to another one"):
        options["io_open"]("other.mp4", 0, {})


@pytest.mark.medium
def test_videos_are_opened_in_one_place():
    assert [where.split(":")[0] for where, _, _ in calls("av.open")] == ["embedder/media/videos.py"]


def test_pixels_of_an_image_are_limited():
    assert DecodeConfig().max_pixels <= 100_000_000


# Code in data


def test_nothing_on_any_path_unpickles_evaluates_or_asks_a_shell():
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
    assert not [(path, name) for path, name in imports() if name.partition(".")[0] in forbidden]
    for where, name, call in calls("eval", "exec", "os.system", "os.popen", "yaml.load"):
        assert name.endswith(".eval"), f"{where}: {name}"  # modules have an `eval()` mode
        assert not call.args, f"{where}: {name}"
    for where, _, call in calls("Popen", "subprocess.run", "check_output", "np.load", "numpy.load"):
        options = keywords(call)
        assert options.get("shell", "False") == "False", where
        assert options.get("allow_pickle", "False") == "False", where
    for where, _, call in calls("torch.load"):
        if keywords(call).get("weights_only") != "True":
            assert where.startswith("embedder/plugins/runners/programs/torch_graph.py"), (
                where
            )  # behind allow_pickle = true


def test_no_code_comes_with_a_model():
    for where, _, call in calls("from_pretrained"):
        assert keywords(call).get("trust_remote_code") == "False", where


class Payload:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_a_model_folder_is_never_executed(tiny_model, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    result = CliRunner().invoke(app, ["model", "info", str(folder)])
    assert result.exception is not None
    with pytest.raises(ModelError):
        from shards.model_config import load_model_config
        from shards.shard_specs import whole_model

        load_shard(resolve_model(str(folder)), whole_model(load_model_config(folder)))
    assert not (tmp_path / "executed").exists()


def test_weights_are_safetensors(tiny_model):
    assert load_file(tiny_model / "model.safetensors")
    assert {path.suffix for path in tiny_model.iterdir()} <= {".safetensors", ".json"}


def test_an_index_is_read_by_faiss_where_the_sha256_of_its_manifest_is_compared():
    reading = [where for where, name, _ in calls("faiss.read_index", "deserialize_index")]
    # Parts of one build go from its own tasks into a folder of its own, and are read before anybody else could.
    assert {where.split(":")[0] for where in reading} == {"index/faiss_build.py", "index/faiss_merge.py"}
    callers = [where for where, _, _ in calls("faiss_build.read", "faiss_build.map_file")]
    in_its_own_folder = "embedder/store_index/sharded_build.py"  # what the build has just merged
    assert {where.split(":")[0] for where in callers} == {
        "index/version_files.py",
        "index/disk_files.py",
        in_its_own_folder,
    }


# Sources


def test_members_of_a_tar_are_never_unpacked():
    assert not list(calls("extractall", ".extract", "unpack_archive"))


def test_a_member_of_a_tar_may_have_so_many_bytes_and_no_more(make_run, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("large.png")
        info.size = 1 << 20
        tar.addfile(info, io.BytesIO(b"\0" * info.size))
    config = make_run(tmp_path / "a.tar", decode={"max_file_bytes": 1 << 16}, max_reject_fraction=1)
    embed(config)
    (row,) = embedder.open_store(config.store).rejects().to_pylist()
    assert row["error_type"] == "TooLarge"
    assert "decode.max_file_bytes" in row["error"]


# Ray

LISTENING = """
import json, psutil, ray
from embedder.executors.ray_session import start_ray
start_ray(num_cpus=1)
ray.get(ray.remote(num_cpus=0.1)(lambda: 1).remote())
me = psutil.Process()
found = [
    connection.laddr.ip
    for process in [me, *me.children(recursive=True)]
    for connection in process.net_connections(kind="inet")
    if connection.status == psutil.CONN_LISTEN
]
from ray._raylet import AuthenticationMode, get_authentication_mode
asks = get_authentication_mode() == AuthenticationMode.TOKEN
programs = [argument.rpartition("/")[2] for child in me.children(recursive=True) for argument in child.cmdline()]
print(json.dumps({"ips": sorted(set(found)), "num": len(found), "asks_for_a_token": asks, "programs": programs}))
"""


@pytest.mark.medium
@pytest.mark.usefixtures("starts_ray")
@pytest.mark.parametrize("first", ["", "import ray.data\n"])
def test_ray_listens_on_this_machine_alone_and_asks_for_a_token(first):
    """Also where a notebook has imported Ray before us."""
    command = [sys.executable, "-c", first + LISTENING]
    environment = os.environ | {FAST_START_VARIABLE: "1"}  # else Ray starts its watchers
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num"] >= 3
    assert set(found["ips"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
    assert found["asks_for_a_token"]
    assert "raylet" in found["programs"]
    watchers = {"monitor.py", "log_monitor.py", "dashboard.py"}
    assert not watchers & set(found["programs"]), "of what nobody looks at"


# Secrets


def test_no_secret_of_an_address_or_of_the_environment_reaches_a_store(make_run, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    addresses = [
        f"https://user:{SECRET}@host/a.jpg",
        f"https://host/a.jpg?X-Amz-Signature={SIGNATURE}",
        f"s3://AKIA:{SECRET}@bucket/a.jpg",
        f"http://host/?token={SIGNATURE}",
    ]
    table = {"id": list("abcd"), "photo": addresses, "title": ["a red car"] * 4}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    columns = {"id": "id", "image": "photo", "caption": "title"}
    source = {"path": str(tmp_path / "t.parquet"), "columns": columns}
    settings = {"max_reject_fraction": 1, "metrics_file": str(tmp_path / "m.prom"), "log_file": str(tmp_path / "log")}
    config = make_run([source], **settings)
    with messages_to(TerminalLog()):
        embed(config)
    paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "t.parquet"]
    assert len(paths) > 8
    assert not [path for path in paths if SECRET.encode() in path.read_bytes()]
    signed = {path for path in paths if SIGNATURE.encode() in path.read_bytes()}
    assert signed <= set(tmp_path.glob("*/items/*.parquet")) | set(tmp_path.glob("*/embeddings/*.parquet"))
    store = embedder.open_store(config.store)
    tables = [store.items(), store.to_arrow()]
    assert SECRET not in str([rows.to_pylist() for rows in tables])
    assert SIGNATURE in str(tables[0]["uri"].to_pylist())  # without it nobody could fetch the image again
    assert SIGNATURE not in str([rows.drop_columns("uri").to_pylist() for rows in tables])
    shown = "".join(capfd.readouterr())
    assert SECRET not in shown and SIGNATURE not in shown
