"""How long a large model takes to plan: `python scripts/bench_planner.py`.

A 48-layer ViT and a 24-layer text tower, four stages, three types of devices; the search alone, then with the plans
of one stage fewer and one more. CPU time of one core, the median of seven after a first pass that is dropped. The
search is bound by memory bandwidth: it goes a few dozen times over the arrays of all 400,000 stages that the model
allows.
"""

import json
import statistics
import time
from collections.abc import Callable

from embedder.compat.malloc import keep_freed_memory
from shards.config import ModelConfig
from shards.plan import DataMix, plan_placement
from shards.planning.costs import estimate_costs, estimate_host
from shards.planning.devices import parse_devices
from shards.planning.problem import PlacementProblem, make_problem
from shards.planning.solver.search import best_placement
from shards.preprocess import PreprocessConfig
from shards.towers.vit import VitTower

FLEETS = {
    "2xA100:80GB, 4xT4:16GB, 3xL4": "float16",
    "2xA100:80GB, 4xL4, 64xCPU": "bfloat16",
    "600xA100, 400xL4, 10000xCPU": "bfloat16",
}
NUM_STAGES = 4
NUM_RUNS = 7


def large_model() -> ModelConfig:
    return ModelConfig(
        name="large",
        trained=False,
        embedding_dim=512,
        vision=VitTower(width=1280, depth=48, num_heads=16, patch_size=14),
        text={"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 8192},
        preprocess=PreprocessConfig(),
    )


def problem_on(devices: str, dtype: str) -> PlacementProblem:
    model, fleet = large_model(), parse_devices(devices)
    costs = {device.name: estimate_costs(model, device, dtype) for _, device in fleet}
    return make_problem(model, fleet, costs, estimate_host(model), mix=DataMix(), dtype=dtype)


def median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS + 1):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


def main() -> None:
    keep_freed_memory()  # as `embedder plan` does
    figures = {}
    for devices, dtype in FLEETS.items():
        problem = problem_on(devices, dtype)
        search_s = median_s(lambda problem=problem: best_placement(problem, NUM_STAGES))
        plan_s = median_s(lambda problem=problem: plan_placement(problem, NUM_STAGES))
        print(f"{devices:32} search {search_s:.3f} s, with both neighbours {plan_s:.3f} s")
        figures[devices] = {"search_s": search_s, "plan_s": plan_s}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
