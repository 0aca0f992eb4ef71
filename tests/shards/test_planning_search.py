"""The solver against brute force: every cut, every placement, each throughput at which a use changes."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from work import count_calls

from shards.costs import cut_bytes, weight_bytes
from shards.planning.devices import DeviceType, parse_devices
from shards.planning.planning_costs import DataMix, ModelCosts, TowerSeconds, estimate_costs, estimate_host
from shards.planning.problem import PlacementProblem, Pool, predict
from shards.planning.solver.throughput_search import best_placement
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

SHARES = (1, 2, 4, 8)
COUNTS = [(1, 8), (1, 4), (1, 2), *((count, 1) for count in range(1, 20))]


def random_problem(random, make_config):
    """A small model on up to three kinds of devices, with every cost at random and every limit sometimes tight."""
    vision_depth, text_depth = random.randint(1, 4), random.randint(1, 4)
    groups = random.randint(1, text_depth)
    config = make_config({"depth": vision_depth}, {"num_hidden_layers": text_depth, "num_hidden_groups": groups})
    whole = weight_bytes(config, ShardSpec(LayerRange(0, vision_depth), LayerRange(0, text_depth)), "float32")
    pools = []
    has_cores = random.random() < 0.5
    for number in range(random.randint(1, 3)):
        shared = number == 0 and has_cores
        memory = int(whole * random.choice((0.5, 0.8, 1.5, 4.0, 100.0)))
        device = DeviceType(f"d{number}", "cpu" if shared else "gpu", {"float32": 1e9}, memory, 1e9)
        pools.append(
            Pool(random.randint(1, 4), device, random_costs(random), random.choice((1, 2)) if shared else 1,
                 random.choice(SHARES), shared)
        )  # fmt: skip
    num_cores = pools[0].num if has_cores else random.choice((None, 2.0))
    mix = DataMix(random.choice((0.0, 0.3, 1.0, 4.0)), random.choice((0.5, 1.0, 5.0)), 8)
    return PlacementProblem(
        config,
        "float32",
        mix,
        tuple(pools),
        host_seconds=random.choice((0.0, 0.01, 1.0)),
        num_cores=num_cores,
        memory_cap_bytes=random.choice((None, None, int(whole * random.uniform(0.3, 1.2)))),
        weights_cap_bytes=random.choice((None, None, int(whole * random.uniform(0.3, 1.2)))),
        rows_per_batch=random.choice((1, 4)),
    )


def random_cluster(random, make_config):
    """The same on nodes of two or three types, of which two at least have cores of their own speed."""
    problem = random_problem(random, make_config)
    pools = []
    for number in range(random.randint(2, 3)):
        shared = number < 2 or random.random() < 0.5
        memory = int(sum(problem.part_bytes.values()) * random.choice((0.5, 1.5, 4.0, 100.0)))
        device = DeviceType(f"d{number}", "cpu" if shared else "gpu", {"float32": 1e9}, memory, 1e9)
        pools.append(
            Pool(random.choice((0.5, 1, 3)) if shared else random.randint(1, 3), device, random_costs(random),
                 random.choice((1, 2)) if shared else 1, random.choice(SHARES), shared,
                 core_speed=random.choice((0.4, 1.0, 1.7)),
                 node_memory_bytes=random.choice((None, memory // 2)) if shared else None)
        )  # fmt: skip
    num_cores = sum(pool.num * pool.core_speed for pool in pools if pool.shared) + random.choice((0.0, 0.0, 2.0))
    return replace(problem, pools=tuple(pools), num_cores=num_cores)


def random_costs(random):
    def tower():
        return TowerSeconds(*(random.choice((0.0, 0.2, 1.0)) * random.uniform(0.5, 2) for _ in range(3)))

    vision, text = tower(), tower()
    return ModelCosts(
        None, "d", "float32", "estimated", 8,
        TowerSeconds(vision.front_s, random.uniform(0.2, 2), vision.head_s),
        TowerSeconds(text.front_s, random.uniform(0.2, 2), text.head_s),
        send_s_per_byte=random.choice((0.0, 1e-6, 1e-5)),
        call_s=random.choice((0.0, 0.1)),
        workspace_bytes_per_image=random.choice((0, 5_000)),
        workspace_bytes_per_caption=random.choice((0, 2_000)),
    )  # fmt: skip


def cuts_of(problem, num_stages):
    depths = problem.config.vision.depth, problem.config.text.num_hidden_layers
    points = list(itertools.product(range(depths[0] + 1), range(depths[1] + 1)))
    for inner in itertools.combinations(points, num_stages - 1):
        cuts = [(0, 0), *inner, depths]
        if all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in itertools.pairwise(cuts)):
            yield [ShardSpec(LayerRange(a[0], b[0]), LayerRange(a[1], b[1])) for a, b in itertools.pairwise(cuts)]


class Stage:
    """Load of one stage on one pool, from the definitions."""

    def __init__(self, problem, spec, pool):
        config, mix, costs = problem.config, problem.mix, pool.costs
        depths = config.vision.depth, config.text.num_hidden_layers
        layers_s = mix.images_per_item * costs.vision.of(spec.vision, depths[0])
        layers_s += mix.captions_per_item * costs.text.of(spec.text, depths[1])
        passing = 0.0
        for vision, text in ((spec.vision.start, spec.text.start), (spec.vision.stop, spec.text.stop)):
            passing += mix.images_per_item * cut_bytes(config, "vision", vision, "float32", mix.caption_tokens)
            passing += mix.captions_per_item * cut_bytes(config, "text", text, "float32", mix.caption_tokens)
        overhead_s = passing / 2 * costs.send_s_per_byte + costs.call_s / problem.rows_per_batch
        workspace = max(
            mix.images_per_item * costs.workspace_bytes_per_image if len(spec.vision) else 0,
            mix.captions_per_item * costs.workspace_bytes_per_caption if len(spec.text) else 0,
        )
        weights = weight_bytes(config, spec, "float32")
        self.pool = pool
        self.seconds = max(layers_s, overhead_s / 3) if pool.hides_copies else layers_s + overhead_s
        self.own_cpu_s = self.seconds * pool.num_threads if pool.shared else overhead_s
        self.cpu_s = self.own_cpu_s * (pool.core_speed or 1.0)
        self.memory = weights + problem.rows_per_batch * (passing + workspace)
        room = pool.device.memory_bytes * (pool.num if pool.shared else 1)
        room = pool.node_memory_bytes or room
        self.fits = self.memory <= min(room, problem.memory_cap_bytes or room)
        self.fits &= weights <= (problem.weights_cap_bytes or weights)

    def devices_at(self, rate):
        """The fewest devices that do `rate` items per second: by trying one size after the other."""
        sizes = [1 / share for share in reversed(SHARES) if share <= self.pool.max_shares]
        sizes = [size for size in sizes if size == 1 or self.memory <= self.pool.device.memory_bytes * size]
        load = rate * self.seconds * (1 - 1e-9)
        return next((size for size in sizes if size >= load), math.ceil(load))


def is_possible(problem, stages, rate):
    for pool in problem.pools:
        mine = [stage for stage in stages if stage.pool is pool]
        if pool.shared:
            memory = sum(math.ceil(rate * stage.seconds * (1 - 1e-9)) * stage.memory for stage in mine)
            if memory > pool.num * pool.device.memory_bytes * (1 + 1e-9):
                return False
            if pool.core_speed and rate * sum(stage.own_cpu_s for stage in mine) > pool.num * (1 + 1e-9):
                return False
        elif sum(stage.devices_at(rate) for stage in mine) > pool.num:
            return False
    cpu_s = problem.host_seconds + sum(stage.cpu_s for stage in stages)
    return problem.num_cores is None or rate * cpu_s <= problem.num_cores * (1 + 1e-9)


def best_rate(problem, stages, above=0.0):
    """Uses change where a stage fills its devices; between those, only the shared cores bind."""
    rates = {count / share / stage.seconds for stage in stages for count, share in COUNTS if stage.seconds}
    if problem.num_cores is not None:
        cpu_s = problem.host_seconds + sum(stage.cpu_s for stage in stages)
        rates.add(problem.num_cores / cpu_s if cpu_s else 1.0)
    for pool in problem.pools:
        own_s = sum(stage.own_cpu_s for stage in stages if stage.pool is pool)
        if pool.shared and own_s:
            rates.add(pool.num / own_s)
    hopeful = sorted((rate for rate in rates if rate > above), reverse=True)
    return next((rate for rate in hopeful if is_possible(problem, stages, rate)), 0.0)


def by_brute_force(problem, num_stages, min_layers=0):
    best = 0.0
    for specs in cuts_of(problem, num_stages):
        if any(min(len(spec.vision), len(spec.text)) < min_layers for spec in specs):
            continue
        options = [[stage for pool in problem.pools if (stage := Stage(problem, spec, pool)).fits] for spec in specs]
        for stages in itertools.product(*options):
            best = max(best, best_rate(problem, stages, best))
    return best


def seeds(quick, slow):
    """Seeds of quick and of slow tests."""
    return [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)]


@pytest.mark.medium
@pytest.mark.parametrize("seed", seeds((*range(8), 40, 41), (*range(8, 24), *range(42, 50))))
def test_the_search_is_as_good_as_trying_everything(make_config, seed):
    """Ten problems per seed: 240, and 100 of clusters."""
    make_problem = random_problem if seed < 40 else random_cluster
    chance = random.Random(seed)
    for _ in range(10):
        problem = make_problem(chance, make_config)
        num_layers = sum(problem.depths)
        num_stages = chance.randint(1, min(3, num_layers))
        expected = by_brute_force(problem, num_stages)
        found = best_placement(problem, num_stages)
        if expected == 0:
            assert found is None or found.items_per_s < 1e-6
        else:
            assert found is not None
            assert found.items_per_s == pytest.approx(expected, rel=1e-8)
            check_placement(problem, found, num_stages)


def check_placement(problem, placement, num_stages):
    """The placement is valid, and has the throughput that it claims."""
    assert len(placement.stages) == num_stages
    first, last = placement.stages[0].spec, placement.stages[-1].spec
    assert (first.vision.start, first.text.start) == (0, 0)
    assert (last.vision.stop, last.text.stop) == problem.depths
    for before, after in itertools.pairwise(stage.spec for stage in placement.stages):
        assert (before.vision.stop, before.text.stop) == (after.vision.start, after.text.start)
    stages = [Stage(problem, stage.spec, stage.pool) for stage in placement.stages]
    assert all(stage.fits for stage in stages)
    assert best_rate(problem, stages) == pytest.approx(placement.items_per_s, rel=1e-8)
    assert predict(problem, placement.stages).items_per_s >= placement.items_per_s * (1 - 1e-8)


def preference(problem, stages, specs, rate):
    """Stages that lack a tower, bytes between stages, then squares of a stage's seconds over its devices."""
    lacks = sum(not (len(spec.vision) and len(spec.text)) for spec in specs)
    sent = sum(
        round(problem.image_bytes(spec.vision.stop) + problem.caption_bytes(spec.text.stop)) for spec in specs[:-1]
    )
    devices = [1 if stage.pool.shared else stage.devices_at(rate) for stage in stages]
    return lacks, sent, sum((stage.seconds / num) ** 2 for stage, num in zip(stages, devices, strict=True))


@pytest.mark.parametrize("seed", seeds((*range(10), 20, 21), (*range(10, 15), *range(22, 25))))
def test_of_equally_fast_placements_the_preferred_one_is_taken(make_config, seed):
    make_problem = random_problem if seed < 20 else random_cluster
    chance = random.Random(1000 + seed)
    for _ in range(5):
        problem = make_problem(chance, make_config)
        num_stages = chance.randint(2, min(3, sum(problem.depths)))
        found = best_placement(problem, num_stages)
        if found is None:
            continue
        rate = found.items_per_s * (1 - 1e-9)
        best = min(
            preference(problem, stages, specs, rate)
            for specs in cuts_of(problem, num_stages)
            for stages in itertools.product(*([Stage(problem, s, pool) for pool in problem.pools] for s in specs))
            if all(stage.fits for stage in stages) and is_possible(problem, stages, rate)
        )
        specs = [stage.spec for stage in found.stages]
        stages = [Stage(problem, stage.spec, stage.pool) for stage in found.stages]
        got = preference(problem, stages, specs, rate)
        assert got[:2] == best[:2]
        assert got[2] == pytest.approx(best[2], rel=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("devices", ["2xA100:80GB, 4xT4:16GB, 3xL4", "2xA100:80GB, 4xL4, 64xCPU"])
def test_a_large_model_on_three_kinds_of_devices_is_planned_at_once(make_config, devices):
    """0.2 s on an idle core are promised; counted in calls, of which a core makes millions a second."""
    config = make_config(
        {"width": 1280, "depth": 48, "num_heads": 16, "image_size": 224, "patch_size": 14},
        {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
    )
    fleet = parse_devices(devices)
    dtype = "float16" if "T4" in devices else "bfloat16"
    pools = tuple(
        Pool(num, device, estimate_costs(config, device, dtype), shared=device.kind == "cpu") for num, device in fleet
    )
    cores = next((num for num, device in fleet if device.kind == "cpu"), None)
    problem = PlacementProblem(
        config, dtype, DataMix(), pools, host_seconds=estimate_host(config).item_s(DataMix()), num_cores=cores
    )
    found, num_calls = count_calls(lambda: best_placement(problem, 4))
    assert num_calls < 250_000
    assert found.items_per_s > 500
