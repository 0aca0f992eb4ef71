"""Dtype that `auto` becomes: of the store, of the plan, or by what the devices compute in."""

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError, StoreError
from embedder.executors.find_gpus import find_gpus
from embedder.executors.ray_session import gpu_types_of
from embedder.placement.compute_dtype import (
    DtypeChoice,
    Gpu,
    check_dtype,
    choose_by_gpus,
    choose_dtype,
    describe_dtype,
    gpus_of_nodes,
)
from embedder.placement.placement import Node

H100, T4 = Gpu("NVIDIA H100 80GB HBM3", (9, 0)), Gpu("Tesla T4", (7, 5))
BY_GPUS = {
    (): ("float32", "the stages compute on CPUs"),
    (H100, H100): ("bfloat16", "NVIDIA H100 80GB HBM3 (compute capability 9.0) computes in it natively"),
    (T4,): ("float16", "Tesla T4 (compute capability 7.5) doesn't compute in bfloat16 natively"),
    (H100, T4): ("float16", "Tesla T4 (compute capability 7.5) doesn't compute in bfloat16 natively"),
    (Gpu("V100"), Gpu("P100"), Gpu("L4")): ("float16", "P100 and V100 don't compute in bfloat16 natively"),
    (Gpu("A10G"), Gpu("A100-80G"), Gpu("L4")): ("bfloat16", "A100-80G, A10G and L4 compute in it natively"),
    (Gpu("A10G"), Gpu("B300")): ("bfloat16", "B300 is not in the table, and GPUs from A100 on compute in it"),
    (Gpu("NVIDIA A100", (8, 0)),): ("bfloat16", "NVIDIA A100 (compute capability 8.0) computes in it natively"),
}


@pytest.mark.parametrize("gpus", BY_GPUS)
def test_all_gpus_compute_in_the_dtype_that_is_chosen(gpus):
    found = choose_by_gpus(gpus)
    assert (found.dtype, found.reason) == BY_GPUS[gpus]


def test_of_gpus_that_nobody_can_tell_float32_is_taken():
    found = choose_by_gpus(None)
    assert (found.dtype, "not known" in found.reason) == ("float32", True)


def chosen(gpus=(H100,), recorded=None, planned=None, **options):
    return choose_dtype(load_config(overrides=options).compute, lambda: gpus, recorded=recorded, planned=planned).dtype


def test_what_the_configuration_names_stands_before_the_store_the_plan_and_the_devices():
    store = ("/s", "float32")
    assert chosen(dtype="int8", recorded=store, planned="bfloat16") == "int8"
    assert chosen(recorded=store, planned="bfloat16") == "float32"
    assert chosen(planned="float16") == "float16"
    assert chosen() == "bfloat16"


def test_stages_that_use_no_gpu_compute_in_float32():
    def never():
        raise AssertionError("nobody need ask for GPUs")

    for options in (
        {"device": "cpu"},
        {"engine": "local"},
        {"cluster": {"max_gpus": 0}},
        {"num_stages": 2, "stage": [{"device": "cpu"}, {"num_gpus": 0}]},
    ):
        config = load_config(overrides=options)
        assert choose_dtype(config.compute, never).dtype == "float32"
        assert find_gpus(config.compute) == ()
    assert chosen(num_stages=2, stage=[{"device": "cpu"}, {}]) == "bfloat16"


def test_nodes_tell_the_types_of_their_gpus():
    nodes = [Node("a", 4.0), Node("b", 4.0, num_gpus=2, gpu_type="T4"), Node("c", 4.0, num_gpus=1)]
    assert gpus_of_nodes(nodes) == (Gpu("T4"), Gpu("GPU"))


def test_a_cluster_is_asked_for_its_gpus_without_attaching_to_it(ray_cluster):
    address = ray_cluster.get_runtime_context().gcs_address
    assert gpu_types_of(address) == []
    assert find_gpus(load_config(overrides={"ray_address": address}).compute) == ()
    growing = load_config(overrides={"ray_address": address, "cluster": {"max_gpus": 4}})
    assert choose_by_gpus(find_gpus(growing.compute)).dtype == "bfloat16"
    assert find_gpus(load_config().compute) == (), "of the Ray that runs in this process, not of the driver"


@pytest.mark.parametrize(
    ("dtype", "gpus", "cure"),
    [
        ("float16", (), "--dtype float32"),
        ("bfloat16", (T4,), "--dtype float16"),
        ("bfloat16", (H100, Gpu("V100")), "--dtype float16"),
    ],
)
def test_a_store_is_not_continued_on_devices_that_do_not_compute_in_its_dtype(dtype, gpus, cure):
    choice = choose_dtype(load_config().compute, lambda: gpus, recorded=("/s", dtype))
    with pytest.raises(
        ConfigError, match=f"^dtype: the vectors of store /s are computed in {dtype}, .*{cure}"
    ) as found:
        check_dtype(choice, gpus)
    assert "\n" not in str(found.value)
    asked = load_config(overrides={"dtype": dtype}).compute
    check_dtype(choose_dtype(asked, lambda: gpus), gpus)  # who asks for it gets it


@pytest.mark.parametrize(
    ("dtype", "gpus"),
    [("float32", (H100, T4)), ("float32", ()), ("bfloat16", ()), ("bfloat16", (H100,)), ("float16", (T4, H100)),
     ("int8", ()), ("float16", None)],
)  # fmt: skip
def test_a_store_goes_on_in_its_own_dtype_wherever_that_is_possible(dtype, gpus):
    choice = choose_dtype(load_config().compute, lambda: gpus, recorded=("/s", dtype))
    check_dtype(choice, gpus)
    assert choice.dtype == dtype
    assert describe_dtype(choice, gpus).startswith(f'dtype {dtype} (dtype = "auto"): store /s is computed in it')


def test_a_slow_dtype_is_told_with_the_faster_one():
    choice = choose_dtype(load_config().compute, tuple, recorded=("/s", "float32"))
    assert describe_dtype(choice, (T4,)).endswith("; the GPUs here are faster in float16: --dtype float16")
    assert "faster" not in describe_dtype(choice, ())
    assert "faster" not in describe_dtype(DtypeChoice("bfloat16", "x"), (H100,))


def test_a_dtype_of_a_later_release_is_refused():
    with pytest.raises(StoreError, match="store /s: it says dtype 'float8', and this release computes in float32, "):
        choose_dtype(load_config().compute, tuple, recorded=("store /s", "float8"))
