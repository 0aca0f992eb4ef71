"""One tiny seeded twin tower, media made in code, and one Ray for the whole session."""

import json
import sys
from pathlib import Path

import pytest
import samples

from embedder.config import RunConfig, load_config
from embedder.training.tokenizer import train_tokenizer
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


@pytest.fixture
def run_embedder():
    """Runs the command in a process of its own; gives exit code, the JSON of its last line, and standard error."""
    import subprocess

    def run(*arguments, timeout_s: float = 120, **options):
        command = [sys.executable, "-m", "embedder", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
        lines = done.stdout.strip().splitlines()
        found = json.loads(lines[-1]) if "--json" in arguments and done.returncode == 0 else None
        return done.returncode, found, done.stderr

    return run
