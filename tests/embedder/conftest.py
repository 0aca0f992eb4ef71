"""One tiny seeded twin tower, media made in code, and one Ray for the whole session."""

import io
import json
import os
import secrets
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import samples
from bucket_server import KEY, SECRET, make_bucket, running_server

from embedder.config import RunConfig, load_config
from embedder.training.tokenizer import train_tokenizer
from shards import object_stores
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig
from shards.towers import init_model


def tiny_config(**vision) -> ModelConfig:
    """A twin tower of 4 + 4 layers that embeds a picture in a millisecond."""
    return ModelConfig(
        name="tiny",
        trained=False,
        embedding_dim=24,
        vision=VisionConfig(image_size=32, patch_size=8, width=32, depth=4, num_heads=2, **vision),
        text=TextConfig(
            vocab_size=300,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        ),
        preprocess=PreprocessConfig(image_size=32, max_caption_tokens=32),
    )


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What is measured here is nobody else's, and what others measured is not taken for this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return init_model(tiny_config(), folder, seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))


@pytest.fixture
def make_run(tiny_model, tmp_path):
    """Makes configurations: some source, the tiny model, a fresh store, the local engine; any key can differ."""

    def make(source: Path | list, **changes) -> RunConfig:
        settings = {
            "model": str(tiny_model),
            "store": str(tmp_path / "store"),
            "source": [{"path": str(source)}] if isinstance(source, Path) else source,
            "engine": "local",
            "no_progress_timeout_s": 60,
        }
        return load_config(overrides=settings | changes)

    return make


@pytest.fixture(scope="session")
def ray_cluster():
    """The session's Ray: two CPUs, wherever the tests run."""
    import ray

    from embedder.run.ray_session import start_ray

    start_ray(num_cpus=2)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server with conditional writes, for the session; gives its URL."""
    with running_server() as (url, _):
        yield url


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """A fresh bucket, as a URI; this process and its children find it and its credentials in the environment."""
    yield from bucket_on(s3_server, monkeypatch)


def bucket_on(url, monkeypatch):
    """Make a bucket on a server, and the environment that leads to it."""
    name = f"team-{secrets.token_hex(4)}"
    make_bucket(url, name)
    for variable in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    settings = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    for variable, value in settings.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("EMBEDDER_LEASE_S", "3")
    object_stores.bucket_store.cache_clear()
    yield f"s3://{name}"
    object_stores.bucket_store.cache_clear()


@pytest.fixture
def run_embedder(monkeypatch):
    """Runs the command in this process; gives exit code, the JSON of its last line, and standard error.

    What a process of its own adds to that, `run_embedder_apart` shows once, and costs seconds of imports each time.
    """
    from embedder.cli import main

    def run(*arguments):
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors), monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["embedder", *map(str, arguments)])
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
            except Exception:  # noqa: BLE001  # as the interpreter ends a program
                traceback.print_exc()
                code = 1
        return code, _last_json(arguments, code, out.getvalue()), errors.getvalue()

    return run


@pytest.fixture
def run_embedder_apart():
    """Runs the command in a process of its own; gives the same."""
    import subprocess

    def run(*arguments, timeout_s: float = 120, **options):
        command = [sys.executable, "-m", "embedder", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
        return done.returncode, _last_json(arguments, done.returncode, done.stdout), done.stderr

    return run


def _last_json(arguments, code, stdout):
    return json.loads(stdout.strip().splitlines()[-1]) if "--json" in arguments and code == 0 else None
