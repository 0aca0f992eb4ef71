"""Nodes of a run, the devices that it held, and what they cost."""

import pytest

from embedder.batch_schema import Measurement
from embedder.compat.operator_stats import OperatorState, Replica, Sample
from embedder.placement.placement import Node
from embedder.report.node_sums import all_devices, cost_per_million, held_devices, node_reports

HEAD = Node("head 10.0.0.1", num_cpus=4, node_id="a")
WORKER = Node("worker 10.0.0.2", num_cpus=8, num_gpus=2, device_type="L4", node_id="b")


def call(step, node, pid, peak_rss_bytes):
    return Measurement(step, node, pid, peak_rss_bytes=peak_rss_bytes)


def test_memory_of_a_node_is_the_sum_of_the_peaks_of_its_processes():
    trace = [
        call("load 0", "worker", 7, 900),
        call("stage 0", "worker", 7, 400),
        call("stage 0", "worker", 8, 50),
        call("decode", "head", 7, 30),
        call("decode", "head", 7, 20),
    ]
    head, worker = node_reports([WORKER, HEAD], trace)
    assert (head.name, head.num_cpus, head.steps, head.peak_memory_bytes) == ("head 10.0.0.1", 4, ("decode",), 30)
    assert (worker.steps, worker.peak_memory_bytes) == (("stage 0",), 950)
    assert (worker.num_gpus, worker.gpu_type) == (2, "L4")


def test_a_node_without_work_is_told_too_and_nodes_of_one_host_as_one():
    twin = Node("worker 10.0.0.3", num_cpus=1, node_id="c")
    head, worker = node_reports([HEAD, WORKER, twin], [call("write", "worker", 1, 5)])
    assert (head.steps, head.peak_memory_bytes) == ((), 0)
    assert (worker.name, worker.num_cpus, worker.peak_memory_bytes) == ("worker (2 nodes)", 9, 5)


def sample(stage_gpus, replicas, decode_cpus):
    stage = OperatorState("stage 0", replicas=replicas, num_cpus=0.5, num_gpus=stage_gpus)
    return Sample(0.0, (OperatorState("decode", num_cpus=decode_cpus), stage))


def test_devices_held_are_the_most_at_once_by_type():
    on_worker, elsewhere = (Replica("x", "b"), Replica("y", "b")), (Replica("z", "gone"),)
    samples = [sample(1.0, on_worker, 3.0), sample(0.5, on_worker[:1], 6.0), sample(0.5, elsewhere, 1.0)]
    assert held_devices(samples, {"a": HEAD, "b": WORKER}) == {"CPU": 6.5, "L4": 1.0, "GPU": 0.5}
    assert all_devices([HEAD, WORKER]) == {"CPU": 12, "L4": 2}


def test_cost_of_a_million_items():
    devices = {"CPU": 10.0, "L4": 2.0, "GPU": 0.0}
    cost, lacking = cost_per_million({"CPU": 0.05, "L4": 0.75, "A100": 4.0}, devices, 100.0)
    assert (cost, lacking) == (pytest.approx((10 * 0.05 + 2 * 0.75) / 360_000 * 1e6), ())
    assert cost_per_million({"CPU": 0.05}, devices, 100.0) == (None, ("L4",))
    assert cost_per_million({}, devices, 100.0) == (None, ()), "nobody asked"
    assert cost_per_million({"CPU": 1, "L4": 1}, devices, 0.0) == (None, ())
