"""Each private name of a library has a probe that looks for it, a fallback, and a line of what the fallback costs."""

import logging
import re
from importlib.metadata import version

import numpy as np
import pytest
from packaging.version import Version

from embedder.compat import (
    describe_fallbacks,
    draining,
    execution_callbacks,
    private_names,
    ray_attempts,
    ray_claim,
    ray_data,
    ray_fleet,
    ray_gcs,
    ray_start,
)
from shards import compat
from shards.compat import has_name

PATCHES = dict(private_names())


def is_seen(patch):
    """Whether the installed version is one that the names were seen in."""
    package, first, last = re.fullmatch(r"(\w+) (\S+?)(?: to (\S+))?", patch.seen_in).groups()
    return Version(first) <= Version(version(package)) <= Version(last or first)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_the_installed_versions_have_the_names_that_were_seen_there(patch):
    if not is_seen(patch):
        pytest.skip(f"seen in {patch.seen_in}")
    assert [name for name in patch.names if not has_name(name)] == []


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_missing_name_is_told_once_with_what_it_costs(patch, renamed, caplog):
    for name in patch.names:
        renamed(name)
        break
    with caplog.at_level(logging.INFO):
        assert [patch.is_there() for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert "\n" not in record.message and record.message.startswith(f"{patch.purpose}: off, as ")
    assert f" has no {patch.names[0]}; " in record.message
    assert record.levelname == ("WARNING" if patch.loss else "INFO")
    assert record.message.endswith(patch.loss or "it only saves time")


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("a_package_that_nobody_has:name", False),
        ("json:dumps(obj, indent)", True),
        ("json:dumps(obj, no_such_parameter)", False),
        ("json.decoder:JSONDecoder.decode", True),
        ("threading:Thread._target", True),  # that its constructor sets
        ("threading:Thread._no_such_attribute", False),
        ("json/decoder.py:class JSONDecoder", True),
        ("json/decoder.py:class NoSuchDecoder", False),
        ("json/no_such_file.py:class JSONDecoder", False),
    ],
)
def test_a_name_is_looked_for_where_it_is_used(name, is_there):
    assert has_name(name) == is_there


def test_fallbacks_are_listed_with_what_they_cost(renamed):
    before = describe_fallbacks()
    renamed("ray._private.state:available_resources_per_node", "torch:_int_mm")
    added = [each for each in describe_fallbacks() if each not in before]
    assert len(added) == 2
    assert all(": off, as " in each and " has no " in each for each in added)


def test_without_the_names_of_ray_data_no_callback_is_made(renamed):
    renamed("ray.data._internal")
    assert execution_callbacks.select_callbacks() == []


def test_without_the_autoscaler_of_ray_2_60_the_other_callbacks_are_made(renamed):
    renamed("ray.data._internal.actor_autoscaler")
    if not is_seen(draining.PACE):
        pytest.skip("of versions with few callbacks")
    names = [callback.__name__ for callback in execution_callbacks.select_callbacks()]
    assert names == ["LoopPace", "DrainOnStop", "EndStagesOnFailure", "OperatorReadings"]


def test_without_names_of_ray_s_start_it_starts_as_it_is(renamed):
    from ray._private import ray_constants, utils, worker
    from ray._private.node import Node

    before = (ray_constants.ENABLE_RAY_CLUSTER, worker.print_to_stdstream)
    renamed("ray._private")
    ray_start.bind_to_loopback()
    ray_start.messages_to_log()
    handler, server = utils.set_sigterm_handler, Node.start_api_server
    with ray_start.light_start():
        assert (utils.set_sigterm_handler, Node.start_api_server) == (handler, server)
    assert (ray_constants.ENABLE_RAY_CLUSTER, worker.print_to_stdstream) == before


def test_without_names_of_ray_s_head_nothing_is_asked(renamed):
    renamed("ray._private", "ray._raylet", "ray.experimental")
    assert ray_gcs.refusal_of("127.0.0.1:1") is None and ray_gcs.gpu_types("127.0.0.1:1") is None
    assert ray_claim.claim() and ray_claim.release() is None
    assert not ray_attempts.is_in_worker() and ray_attempts.attempt_number() == 0
    ray_attempts.delete_notes()
    assert ray_fleet.free_resources() is None and not ray_fleet.can_read()


def test_without_what_is_free_nodes_have_all_that_they_are_made_of(renamed, ray_cluster):
    from embedder.executors.ray_session import ray_nodes

    renamed("ray._private.state:available_resources_per_node")
    assert ray_nodes(free_now=True) == ray_nodes()


def test_without_ray_s_method_blocks_go_to_gpus_by_the_public_one(renamed, ray_cluster, caplog):
    import ray

    whole = ray_data.map_blocks(ray.data.range(4), Actor, ("a",), rows_per_batch=64, num_gpus=1, compute=pool())
    assert operator_of(whole)._batch_size is None
    renamed("ray.data.dataset")
    cut = ray_data.map_blocks(ray.data.range(4), Actor, ("a",), rows_per_batch=64, num_gpus=1, compute=pool())
    assert operator_of(cut)._batch_size == 64
    on_cpus = ray_data.map_blocks(ray.data.range(4), Actor, ("a",), rows_per_batch=64, num_gpus=0, compute=pool())
    assert operator_of(on_cpus)._batch_size is None
    warned = [each.message.rpartition("; ")[2] for each in caplog.records if each.levelname == "WARNING"]
    assert warned == [ray_data.WHOLE_BLOCKS.loss]


class Actor:
    def __init__(self, name):
        self.name = name

    def __call__(self, table):
        return table


def pool():
    return ray_data.actor_pool(1, 2)


def operator_of(dataset):
    """The last operator of a dataset's logical plan, whose fields have other names in other versions."""
    operator = dataset._logical_plan.dag
    if not hasattr(operator, "_batch_size"):
        operator = type("Operator", (), {"_batch_size": operator.batch_size})
    return operator


def test_settings_and_pools_of_an_older_ray_are_left_out_with_a_line(monkeypatch, caplog):
    class Older:
        def __init__(self, *, min_size=None, max_size=None):
            self.sizes = min_size, max_size

    monkeypatch.setattr(ray_data, "ActorPoolStrategy", Older)
    monkeypatch.setattr(ray_data, "fields", lambda context: [])
    ray_data._log_once.cache_clear()
    assert ray_data.actor_pool(1, 2, 3).sizes == (1, 2)
    assert ray_data.known_settings({"execution_no_progress_timeout_s": 1}) == {}
    said = " ".join(record.message for record in caplog.records)
    assert "copies to a GPU do not overlap" in said and "no_progress_timeout_s has no effect" in said


def test_int8_products_are_the_same_without_torch_s_own(renamed):
    import torch

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-127, 128, (rows, 4096), dtype=torch.int8, generator=generator) for rows in (40, 24))
    expected = compat.int8_product(x, weight)
    renamed("torch:_int_mm")
    assert torch.equal(compat.int8_product(x, weight), expected) and expected.dtype == torch.int32


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_positions_are_the_same_without_timm_s_own_sum(model):
    import timm
    import torch

    tower = timm.create_model(model, depth=1).eval()
    with torch.no_grad():
        patches = tower.patch_embed(torch.randn(2, 3, 224, 224))
        np.testing.assert_array_equal(compat._sum_positions(tower, patches), compat.with_positions(tower, patches))
