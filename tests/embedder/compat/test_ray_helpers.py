"""A run on a Ray of its own has no helper actors of Ray Data, and what answers in their place answers the same."""

import json
import subprocess
import sys

import pytest
import samples

from embedder.compat.ray_helpers import HELPERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("starts_ray"),
    pytest.mark.skipif(not HELPERS.is_there(), reason="of versions that are not patched"),
]
HELPER_ACTORS = ["ActorLocationTracker", "_AutoscalingCoordinatorActor", "_StatsActor"]
RUN = """
import json, sys
from embedder import embed, load_config
from embedder.compat import ray_helpers
from embedder.ray_executor import RayExecutor

found = {}
run = RayExecutor.run

def noting(self, *arguments):
    run(self, *arguments)
    import ray
    from ray._private.state import actors
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
    from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import STANDARD_RESOURCE_TYPES
    from ray.data._internal.execution.interfaces import ExecutionResources

    found["actors"] = [each["ActorClassName"] for each in actors().values()]
    real = _AutoscalingCoordinatorActor()
    real.request_resources("x", [], 60, request_remaining=STANDARD_RESOURCE_TYPES)
    of_each = [real.get_reserved_resources("x"), ray_helpers._all_resources("x")]
    found["resources"] = [
        {node: str(ExecutionResources.from_resource_dict(each)) for node, each in nodes.items()} for nodes in of_each
    ]

RayExecutor.run = noting
embed(load_config(sys.argv[1], {"store": sys.argv[2], "engine": "ray", "num_stages": 1}))
print(json.dumps(found))
"""


@pytest.mark.parametrize("fast_start", [True, False])
def test_only_the_stages_are_actors_of_a_run_on_its_own_ray(fast_start, tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=4)
    (tmp_path / "run.toml").write_text(
        f'model = "{tiny_model}"\nfast_start = {str(fast_start).lower()}\n[[source]]\npath = "{source}"\n'
    )
    command = [sys.executable, "-c", RUN, str(tmp_path / "run.toml"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    helpers = [name for name in found["actors"] if "StageActor" not in name]
    assert len(found["actors"]) - len(helpers) == 1
    assert sorted(helpers) == (
        [] if fast_start else ["ActorLocationTracker", "_AutoscalingCoordinatorActor", "_StatsActor"]
    )
    real, here = found["resources"]
    assert here == real != {}
