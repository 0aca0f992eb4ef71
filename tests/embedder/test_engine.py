from pathlib import Path

import pytest

import embedder
from embedder.config import load_config
from embedder.run.engine import choose_engine
from shards.config import load_model_config
from shards.plan import plan_shards

DEMO_MODEL = Path(embedder.__file__).with_name("demo_model")


@pytest.fixture(scope="module")
def plan():
    return plan_shards(load_model_config(DEMO_MODEL), 3)


def chosen(plan, num_items, num_cpus, **options):
    return choose_engine(load_config(overrides=options), plan, num_items, num_cpus).engine


def test_few_cores_are_kept_busy_by_one_process(plan):
    assert {chosen(plan, num_items, 2) for num_items in (1, 1_000, 1_000_000)} == {"local"}


def test_many_cores_would_wait_for_one_decoder(plan):
    assert chosen(plan, 100, 64) == "local", "Ray's start would take longer"
    assert chosen(plan, 100_000, 64) == "ray"


def test_what_asks_for_ray_gets_it(plan):
    assert chosen(plan, 1, 2, engine="ray") == "ray"
    assert chosen(plan, 1, 2, ray_address="10.0.0.1:6379") == "ray"
    assert chosen(plan, 1, 2, num_stages=1, stage=[{"replicas": {"min": 1, "max": 2}}]) == "ray"
    assert chosen(plan, 100_000, 64, engine="local") == "local"
