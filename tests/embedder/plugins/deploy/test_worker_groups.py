"""A plan becomes worker groups, one for each device type, that hold what the plan has and no more."""

import pytest
from deployments import GIB, THREE_TYPES, plan_of, stage

from embedder.config_toml.deploy_section import DeployConfig, GroupConfig
from embedder.errors import ConfigError
from embedder.plugins.deploy.worker_groups import check_types_are_told_apart, ray_label, worker_groups


def groups_of(plan, *sections, **settings):
    return worker_groups(plan, DeployConfig(group=[GroupConfig(**each) for each in sections], **settings))


def test_three_device_types_make_three_groups_whose_sums_are_the_plans():
    groups = groups_of(THREE_TYPES)
    assert [(group.name, group.label) for group in groups] == [("l4", "L4"), ("a100-80gb", "A100-80G"), ("cpu", "")]
    assert [group.num_pods * group.num_gpus for group in groups] == [2, 2, 0]
    assert groups[2].num_pods * groups[2].num_cpus == 8


def test_stages_that_share_a_device_are_counted_as_ray_places_them():
    plan = plan_of(stage("L4", 3, 0.5), stage("L4", 2, 0.25), stage("L4", 1, 2.0))
    (group,) = groups_of(plan)
    assert (group.num_pods * group.num_gpus, group.num_gpus) == (4, 2)  # two shared ones, and two of one replica


def test_pods_of_several_gpus_divide_the_plans():
    plan = plan_of(stage("L4", 8, 1.0))
    (group,) = groups_of(plan, {"device": "L4", "gpus_per_pod": 4})
    assert (group.num_pods, group.num_gpus, group.num_cpus) == (2, 4, 32)
    with pytest.raises(ConfigError, match="gpus_per_pod = 3, and the plan has 8 GPUs.* write one of 1, 2, 4, 8"):
        groups_of(plan, {"device": "L4", "gpus_per_pod": 3})


def test_cores_are_divided_among_pods_that_hold_a_replica():
    (group,) = groups_of(plan_of(stage(replicas=12, threads=4)))
    assert (group.num_pods, group.num_cpus) == (3, 16)
    with pytest.raises(ConfigError, match="cpus = 3, and the plan has 8 cores.* write one of 2, 4, 8"):
        groups_of(plan_of(stage(replicas=4, threads=2)), {"device": "CPU", "cpus": 3})


def test_replicas_may_share_the_cores_of_fewer_pods():
    plan = plan_of(stage(replicas=3, threads=2), stage(replicas=1, threads=1))
    (group,) = groups_of(plan, {"device": "CPU", "replicas": 2})
    assert (group.num_pods, group.num_cpus) == (2, 4)
    with pytest.raises(ConfigError, match="cpus = 1, and one replica needs 2"):
        groups_of(plan, {"device": "CPU", "replicas": 2, "cpus": 1})
    with pytest.raises(ConfigError, match="replicas = 2, and the plan says how many GPUs"):
        groups_of(plan_of(stage("L4", 2, 1.0)), {"device": "L4", "replicas": 2})


def test_memory_holds_the_replicas_twice_and_shared_memory_beside():
    (group,) = groups_of(plan_of(stage(replicas=40, threads=1)), {"device": "CPU", "cpus": 20})
    assert group.memory_bytes == max(20 * 4 * GIB, 42 * GIB)
    (small,) = groups_of(plan_of(stage(replicas=40, threads=1)), {"device": "CPU", "cpus": 1, "shm_bytes": 3 * GIB})
    assert small.memory_bytes == 6 * GIB
    with pytest.raises(ConfigError, match="more than half"):
        groups_of(plan_of(), {"device": "CPU", "memory_bytes": GIB, "shm_bytes": GIB})


@pytest.mark.parametrize(
    ("device", "label"),
    [
        ("L4", "L4"),
        ("A100:80GB", "A100-80G"),
        ("A100:40GB", "A100-40G"),
        ("T4:16GB", "T4"),
        ("A10:24GB", "A10G"),
        ("cores a", "cores-a"),
    ],
)
def test_the_label_is_rays_name_of_the_type(device, label):
    assert ray_label(device) == label


def test_pods_stay_between_the_bounds_of_the_section():
    section = {"device": "CPU", "min_replicas": 1, "max_replicas": 6}
    (group,) = groups_of(plan_of(stage(replicas=2, threads=16)), section)
    assert (group.min_pods, group.num_pods, group.max_pods) == (1, 2, 6)
    (fixed,) = groups_of(plan_of(stage(replicas=2, threads=16)), section, autoscaling=False)
    assert (fixed.min_pods, fixed.num_pods, fixed.max_pods) == (2, 2, 2)
    with pytest.raises(ConfigError, match="the plan has 2 pods; it has to lie between them"):
        groups_of(plan_of(stage(replicas=2, threads=16)), section | {"max_replicas": 1})


def test_what_the_plan_lacks_is_named():
    with pytest.raises(ConfigError, match="stage 0 is placed on no device.*embedder plan --devices"):
        groups_of(plan_of(stage(None, num_gpus=None)))
    with pytest.raises(ConfigError, match="'T4': the plan has no such device; it has L4, A100:80GB, CPU"):
        groups_of(THREE_TYPES, {"device": "T4"})
    with pytest.raises(ConfigError, match="no name of its own"):
        groups_of(plan_of(stage("a b", threads=1), stage("a-b", threads=1)))


def test_two_types_of_gpus_need_nodes_that_are_told_apart():
    with pytest.raises(ConfigError, match=r"L4: the plan has 2 types of GPUs, and without node_selector"):
        check_types_are_told_apart(groups_of(THREE_TYPES), "node_selector", "{}")
    check_types_are_told_apart(groups_of(plan_of(stage("L4", 1, 1.0), stage(threads=1))), "gres", "x")
