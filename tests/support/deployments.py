"""A plan of three device types and its configuration, as `embedder deploy` gets them; writes the golden files, too.

python tests/support/deployments.py    # after an intended change of the manifests
"""

import tempfile
from pathlib import Path

from embedder.plugins.deploy.kuberay import manifests
from embedder.plugins.deploy.pods import Deployment
from embedder.plugins.deploy.shipped_config import read_files
from embedder.plugins.deploy.slurm import slurm_script
from shards.plan import PlannedStage, ShardPlan
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

GOLDEN = Path(__file__).parents[1] / "embedder/plugins/deploy/data/golden"
IMAGE = "registry.example.com/embedder:1.2.3"
GIB = 1 << 30
CONFIG = """\
model = "s3://team/models/products"
store = "s3://team/shop"

[[source]]
path = "/data/catalogue"

[deploy]
name = "shop"
namespace = "search"
labels = { team = "shop" }
service_account = "embedder"
secrets = ["bucket-credentials"]
image_pull_secrets = ["registry"]
env = { AWS_REGION = "eu-west-1" }
ray_version = "2.60.0"

[[deploy.volume]]
claim = "catalogue"
path = "/data"
read_only = true

[[deploy.group]]
device = "L4"
max_replicas = 4
node_selector = { "nvidia.com/gpu.product" = "NVIDIA-L4" }
gres = "l4"
toleration = [{ key = "spot", value = "yes", effect = "NoSchedule" }]

[[deploy.group]]
device = "A100:80GB"
node_selector = { "nvidia.com/gpu.product" = "NVIDIA-A100-SXM4-80GB" }
gres = "a100"
partition = "large"

[[deploy.group]]
device = "CPU"
cpus = 4
"""


def stage(device: str | None = "CPU", replicas: int = 1, num_gpus: float | None = 0.0, threads: int | None = None):
    """A stage of a plan; its layers are of no interest."""
    none = LayerRange(0, 0)
    return PlannedStage(
        ShardSpec(none, none), 1 << 20, 1.0, 1.0, 1, 1, device, replicas, num_gpus, threads, 0.1, memory_bytes=GIB
    )


def plan_of(*stages: PlannedStage) -> ShardPlan:
    """A plan of some stages."""
    return ShardPlan(None, stages or (stage(threads=1),))


THREE_TYPES = plan_of(
    stage("L4", replicas=2, num_gpus=1.0),
    stage("A100:80GB", replicas=3, num_gpus=0.5),
    stage("CPU", replicas=4, threads=2),
)


def shipped(folder: Path, config: str = CONFIG, plan: ShardPlan = THREE_TYPES):
    """Configuration and plan, written to a folder and read as the command reads them."""
    (folder / "run.toml").write_text(config)
    (folder / "plan.json").write_text(plan.to_json())
    return read_files(folder / "run.toml", folder / "plan.json")


def kuberay_texts(folder: Path, config: str = CONFIG, plan: ShardPlan = THREE_TYPES) -> dict[str, str]:
    """Manifests by name."""
    return manifests(Deployment(shipped(folder, config, plan), IMAGE, "2.60.0", "1.2.3"))


def slurm_text(folder: Path, config: str = CONFIG, plan: ShardPlan = THREE_TYPES) -> str:
    """Script for sbatch; the folder's own path is `/shared`."""
    return slurm_script(shipped(folder, config, plan), "embedder.sbatch").replace(str(folder), "/shared")


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**kuberay_texts(Path(folder)), "embedder.sbatch": slurm_text(Path(folder))}.items():
            (GOLDEN / name).write_text(text, encoding="utf-8")
