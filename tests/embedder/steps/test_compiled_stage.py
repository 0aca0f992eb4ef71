"""Stages with compiled layers: the vectors of eager ones, few compilations, and what happens where compiling fails."""

import gc
import logging
import os
import weakref
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache
from tower_families import FAMILIES, NUM_TOKENS, SIDE_PX, beside_default, save_random_model, tiny

from embedder.batch_schema import IMAGE_GRID
from embedder.steps.stage import TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.step_metrics import TRACE
from embedder.store.tables.arrow_tensors import pack
from shards.compat import num_graphs
from shards.compiled import CACHE_VARIABLE, THREADS_VARIABLE
from shards.model_config import load_model_config
from shards.shard_specs import text_only, vision_only
from shards.towers.tower_kinds import VisionTower
from shards.towers.vit import VitTower

TOLERANCE = 1e-6
# Its scores of attention are not divided by the root of a head's width: they are larger, and so are their roundings.
LARGER_TOLERANCES = {"embedding_gemma2_text": 2e-6}
BY_NAME = {family.model_fields["family"].default: family for family in FAMILIES}
# Kinds of layers times forms: with and without a mask; of ModernBERT the first, the global and the local layers,
# of EmbeddingGemma 2 the last two.
MOST_GRAPHS = dict.fromkeys(BY_NAME, 2) | dict.fromkeys(("vit", "eva", "siglip_text", "clip_text"), 1)
MOST_GRAPHS |= {"metaclip_2_text": 1, "modernbert": 6, "embedding_gemma2_text": 4}
SIZES = (5, 3, 8, 1, 2, 16, 7)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    """A cache of the test's own, and no graph of another test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (CACHE_VARIABLE, THREADS_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    torch.compiler.reset()


def model_of(family, folder):
    """A folder with a tiny tower of a family, and its side."""
    side = "vision" if issubclass(family, VisionTower) else "text"
    return save_random_model(beside_default(family), folder), side


def spec_of(model, side, **fields):
    """The settings of a stage with one tower, whole."""
    shard = (vision_only if side == "vision" else text_only)(load_model_config(model))
    return replace(StageSpec(0, str(model), shard, "float32", "cpu", 1, (64,)), **fields)


def rows_of(tower, num_rows, seed=0):
    """Decoded rows of one side: images, or captions, all of one length where there are two of them."""
    generator = np.random.default_rng(seed)
    columns = {"pixels": pa.nulls(num_rows, pa.large_binary()), "token_ids": pa.nulls(num_rows, pa.large_binary())}
    if not isinstance(tower, VisionTower):
        lengths = [
            tower.max_tokens if tower.has_fixed_length else 9 if num_rows == 2 else 8 + row % 3
            for row in range(num_rows)
        ]
        columns["token_ids"] = pack([generator.integers(1, NUM_TOKENS - 1, n, np.int32) for n in lengths])
    elif tower.patch_px is None:
        columns["pixels"] = pack([generator.integers(0, 256, (1, SIDE_PX, SIDE_PX, 3), np.uint8)] * num_rows)
    else:
        grids = [
            np.array([1, (2 + row % 3) * tower.merge_size, 2 * max(2, tower.merge_size)], np.int32)
            for row in range(num_rows)
        ]
        columns["pixels"] = pack(
            [generator.integers(0, 256, (g[1] * g[2], 3 * tower.patch_px**2), np.uint8) for g in grids]
        )
        columns[IMAGE_GRID.name] = pack(grids)
    return pa.table(columns | {"trace": pa.nulls(num_rows, TRACE)})


def vectors_of(table, side):
    """Embeddings, as one array."""
    return np.array(table["image_embedding" if side == "vision" else "text_embedding"].to_pylist(), np.float32)


def compared(family, folder):
    """The largest difference of vectors over several sizes of batches, the graphs, and whether it still compiles."""
    model, side = model_of(family, folder)
    tower = load_model_config(model).towers[side]
    eager, stage = TowerStage(spec_of(model, side)).load(), TowerStage(spec_of(model, side, compile=True)).load()
    before, worst = num_graphs(), 0.0
    for seed, size in enumerate(SIZES):
        table = rows_of(tower, size, seed)
        worst = max(worst, float(np.abs(vectors_of(stage(table), side) - vectors_of(eager(table), side)).max()))
    return worst, num_graphs() - before, stage._compiled.is_compiled


ONE_TOWERS = {
    name for name, family in BY_NAME.items() if getattr(beside_default(family).vision, "shared_decoder", None)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ONE_TOWERS))
def test_decoders_with_eyes_are_not_compiled(name, tmp_path):
    model, side = model_of(BY_NAME[name], tmp_path / "model")
    stage, table = (
        TowerStage(spec_of(model, side, compile=True)).load(),
        rows_of(load_model_config(model).towers[side], 3),
    )
    before = num_graphs()
    assert vectors_of(stage(table), side).shape[0] == 3
    assert num_graphs() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - ONE_TOWERS))
def test_compiled_towers_of_each_family_equal_eager_ones_and_few_graphs_serve_all_sizes(name, tmp_path):
    CppCodeCache.cache_clear()  # of kernels that another family has made in this process
    CppPythonBindingsCodeCache.cache_clear()
    worst, graphs, is_compiled = compared(BY_NAME[name], tmp_path / "model")
    print(f"{name}: largest difference {worst:.2e}, {graphs} graphs")
    assert is_compiled
    assert worst <= LARGER_TOLERANCES.get(name, TOLERANCE)
    assert 1 <= graphs <= MOST_GRAPHS[name]
    folders = list((tmp_path / "cache/embedder/compiled").iterdir())
    assert [folder.name.startswith(f"torch-{torch.__version__}-cpu-") for folder in folders] == [True]
    assert any(folders[0].rglob("*.so"))


@pytest.fixture
def vit(tmp_path):
    """A model folder, and rows of images."""
    model, side = model_of(VitTower, tmp_path / "model")
    return spec_of(model, side, compile=True), rows_of(tiny(VitTower), 5)


def failing(error):
    """A `torch.compile` whose function raises an error at each call, as if it had come to the compiler."""
    calls = []

    def compiled(*arguments, **named):
        calls.append(1)
        raise error

    return lambda function, **options: compiled, calls


def test_where_the_first_compiled_call_fails_the_batch_is_computed_eagerly_and_the_log_names_the_cause(
    vit, monkeypatch, caplog
):
    spec, table = vit
    expected = TowerStage(replace(spec, compile=False)).load()(table)
    fake, calls = failing(RuntimeError("no C++ compiler\nwas found\n\nSet TORCH_LOGS"))
    monkeypatch.setattr(torch, "compile", fake)
    stage = TowerStage(spec).load()
    with caplog.at_level(logging.WARNING):
        found = [stage(table) for _ in range(2)]
    assert all(each["image_embedding"].equals(expected["image_embedding"]) for each in found)
    assert len(calls) == 1
    (line,) = caplog.messages
    assert line.startswith("stage 0 on node ")
    assert "(RuntimeError: no C++ compiler was found)" in line
    assert "compile = false" in line
    calls = [call for each in found for calls in each["trace"].drop_null().to_pylist() for call in calls]
    assert [call["note"] for call in calls if call["step"] == "stage 0"] == [line, ""], "once, for the run's report"


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["of the layer", "of the compiler"])
def test_a_compiled_layer_that_is_out_of_memory_gets_smaller_batches_and_stays_compiled(
    is_wrapped, vit, monkeypatch, caplog
):
    spec, table = vit
    sizes, tensors = [], []

    def compile_(function, **options):
        def compiled(x, *others, **named):
            assert len(x) > 3 or tensors[0]() is None, "a batch that failed has left its tensors behind"
            sizes.append(len(x))
            tensors.append(weakref.ref(x))
            if len(x) > 3:
                if is_wrapped:
                    raise RuntimeError("of the compiler") from torch.OutOfMemoryError("CUDA out of memory")
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(x, *others, **named)

        return compiled

    expected = TowerStage(replace(spec, compile=False)).load()(table)
    monkeypatch.setattr(torch, "compile", compile_)
    stage = TowerStage(spec).load()
    gc.disable()
    try:
        found = stage(table)
    finally:
        gc.enable()
    assert np.allclose(vectors_of(found, "vision"), vectors_of(expected, "vision"), atol=TOLERANCE)
    assert stage._compiled.is_compiled
    assert max(sizes[1:]) == 3
    assert not caplog.messages


def test_an_eager_stage_leaves_its_layers_and_torchs_settings_alone(vit, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    spec, table = vit
    TowerStage(replace(spec, compile=False)).load()(table)
    assert not {CACHE_VARIABLE, THREADS_VARIABLE} & os.environ.keys()


def test_the_batch_that_compiles_counts_for_no_batch_size(vit, monkeypatch):
    spec, table = vit
    graphs = iter((0, 1, 1, 1))
    monkeypatch.setattr("embedder.steps.stage.num_graphs", lambda: next(graphs))
    stage = TowerStage(replace(spec, compile=False, batch_sizes=(5, 2))).load()
    for expected in (5, 2):
        stage(table)
        assert stage._batch_size.next_rows(5) == expected


@pytest.mark.slow
def test_a_first_batch_with_as_many_rows_as_tokens_shares_its_graph_with_the_others(tmp_path):
    model, side = model_of(VitTower, tmp_path / "model")
    stage = TowerStage(spec_of(model, side, compile=True)).load()
    tower, before = stage.config.towers[side], num_graphs()
    for num_rows in (tower.num_tokens, 8, 3):
        stage(rows_of(tower, num_rows))
    assert num_graphs() - before == 1


@pytest.mark.slow
def test_what_one_run_has_compiled_the_next_one_reads_from_disk(vit):
    spec, table = vit
    found = []
    for _ in range(2):
        CppCodeCache.cache_clear()  # of kernels that this process has loaded
        CppPythonBindingsCodeCache.cache_clear()
        torch.compiler.reset()
        counters.clear()
        found.append(vectors_of(TowerStage(spec).load()(table), "vision"))
        names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
        assert [counters["inductor"][name] for name in names] == ([0, 1] if len(found) == 1 else [1, 0])
    assert np.array_equal(*found)


@pytest.mark.slow
def test_without_a_cpp_compiler_a_stage_goes_on_eagerly_and_says_so(vit, monkeypatch, caplog):
    import torch._inductor.config as inductor

    spec, table = vit
    expected = TowerStage(replace(spec, compile=False)).load()(table)
    with inductor.patch({"cpp.cxx": ("/nonexistent/g++",)}), caplog.at_level(logging.WARNING, "embedder"):
        found = TowerStage(spec).load()(table)
    assert found["image_embedding"].equals(expected["image_embedding"])
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("embedder")]
    assert "InvalidCxxCompiler" in line
    assert "TORCH_LOGS" not in line
