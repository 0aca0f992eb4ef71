"""Stages of the local engine."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pyarrow as pa

from embedder.executors import local
from embedder.steps.further_inputs import MAIN_INPUTS
from embedder.steps.stage_spec import StageSpec


class Stage:
    def __init__(self, spec):
        assert spec.num_threads == 1

    def load(self):
        return lambda table: table


def test_garbage_is_frozen_with_the_first_table_alone(monkeypatch):
    """What is garbage by then stays in memory for ever."""
    blocks = []

    @contextmanager
    def sparing_imports(*, with_text):
        blocks.append(with_text)
        yield

    monkeypatch.setattr(local, "is_command", lambda: True)
    monkeypatch.setattr(local, "sparing_imports", sparing_imports)
    monkeypatch.setitem(sys.modules, "embedder.steps.stage", SimpleNamespace(TowerStage=Stage))
    spec = StageSpec(0, "model", SimpleNamespace(text=(0,)), "float32", "cpu", 2, (32,))
    stages = local._Stages(SimpleNamespace(groups=(), stages=(spec,)), SimpleNamespace(asked=False, is_overdue=False))
    table = pa.table({name: [b"pixels"] for name in MAIN_INPUTS})
    for _ in range(3):
        assert stages.encode(table) is table
    assert blocks == [True]
