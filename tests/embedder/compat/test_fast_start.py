"""`fast_start` switches the patches that only save time; those that are needed stay."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import samples
from embedding_runs import assert_same, embedded

import embedder
from embedder.compat import (
    FAST_START_VARIABLE,
    draining,
    execution_callbacks,
    fast_start,
    light_imports,
    ray_start,
    worker_options,
)
from shards.compat import DEFERRED_COMPILER, is_fast_start

patched = pytest.mark.skipif(
    not (DEFERRED_COMPILER.is_there() and light_imports.QUESTIONS.is_there()),
    reason="of versions that are not patched",
)
DEMO_MODEL = Path(embedder.__file__).parent / "demo_model"
IMPORTED = """
import json, sys
from embedder.compat.light_imports import sparing_imports
from shards.compat import deferred_compiler
with sparing_imports(with_text=True), deferred_compiler():
    import timm.layers
    from transformers.utils import import_utils
print(json.dumps([type(sys.modules["torch._dynamo"]).__name__ if "torch._dynamo" in sys.modules else None,
    import_utils.is_torch_flex_attn_available.__module__]))
"""


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    """Without the switch."""
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)


def test_without_fast_start_only_what_is_needed_for_correctness_is_patched():
    assert patched_names() == {"set_sigterm_handler", "RayParams", "start_api_server"}
    with fast_start(False):
        names = [callback.__name__ for callback in execution_callbacks.select_callbacks()]
        assert patched_names() == {"set_sigterm_handler"}
    there = draining.EARLY_END.is_there()
    assert names == (["DrainOnStop", "EndStagesOnFailure", "OperatorReadings"] if there else [])
    assert patched_names(inside=False) == set()


def patched_names(*, inside=True):
    """What of Ray is replaced while it starts, or after that."""
    from ray._private import utils
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    def now():
        return {
            "set_sigterm_handler": utils.set_sigterm_handler,
            "RayParams": vars(RayParams)["__init__"],
            "start_api_server": Node.start_api_server,
        }

    before = now()
    with ray_start.light_start():
        during = now()
    return {name for name, value in (during if inside else now()).items() if value is not before[name]}


def test_what_ray_tells_of_its_cluster_is_logged_as_a_line_and_not_printed(ray_cluster, caplog, capfd):
    from ray._private import utils, worker

    with caplog.at_level(logging.INFO):
        utils.publish_error_to_driver("lost", "a node is lost:\n\t(2) of a network", worker.global_worker.gcs_client)
        stop_s = time.monotonic() + 30
        while "Ray: a node is lost: (2) of a network" not in caplog.messages and time.monotonic() < stop_s:
            time.sleep(0.05)
    assert "Ray: a node is lost: (2) of a network" in caplog.messages
    assert capfd.readouterr() == ("", "")


def test_the_switch_goes_to_processes_and_ends_with_its_block(monkeypatch):
    with fast_start(True):
        assert is_fast_start() and worker_options() == {}
    with fast_start(False):
        assert not is_fast_start() and os.environ[FAST_START_VARIABLE] == "0"
        assert worker_options() == {"runtime_env": {"env_vars": {FAST_START_VARIABLE: "0"}}}
    assert is_fast_start()
    monkeypatch.setenv(FAST_START_VARIABLE, "0")
    with fast_start(True):
        assert not is_fast_start(), "what the environment switches off, no configuration switches on"
    with fast_start(False):
        pass
    assert not is_fast_start()


@pytest.mark.medium
@patched
@pytest.mark.parametrize("value", ["0", "1"])
def test_libraries_are_imported_as_they_are_where_the_environment_says_so(tmp_path, value):
    environment = os.environ | {FAST_START_VARIABLE: value}
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    compiler, asked = json.loads(done.stdout)
    if value == "0":
        assert (compiler, asked) == ("module", "transformers.utils.import_utils")
    else:
        assert (compiler, asked) == (None, "embedder.compat.light_imports")


@pytest.mark.medium
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_vectors_are_the_same_without_fast_start(make_run, tmp_path, monkeypatch, ray_cluster, engine):
    from embedder import pipeline
    from embedder.steps import stage
    from embedder.steps.stage_actor import StageActor

    class Unpatched(StageActor):
        def __init__(self, spec, run=None):
            assert os.environ["EMBEDDER_FAST_START"] == "0"
            super().__init__(spec, run)

    source = samples.folder(tmp_path / "in", num_images=12)
    # On Ray, a stage is a process that imports all of torch, timm and transformers.
    num_stages = 3 if engine == "local" else 1
    options = {"model": str(DEMO_MODEL), "engine": engine, "num_stages": num_stages, "no_progress_timeout_s": 240}
    _, expected = embedded(make_run(source, store=str(tmp_path / "fast"), **options))
    seen, keep = [], stage.keep_freed_memory
    monkeypatch.setattr(stage, "keep_freed_memory", lambda: (seen.append(is_fast_start()), keep()))
    monkeypatch.setattr(pipeline, "StageActor", Unpatched)
    _, rows = embedded(make_run(source, fast_start=False, **options))
    assert seen == ([False] * 3 if engine == "local" else [])
    assert_same(rows, expected)
    for key, row in rows.items():
        for name in ("image_embedding", "text_embedding"):
            np.testing.assert_array_equal(row[name], expected[key][name])
