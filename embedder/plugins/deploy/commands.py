"""Command lines that run in pods and on nodes, as words, with what a run must know of its cluster."""

from collections.abc import Sequence

from embedder.config import RunConfig
from embedder.plugins.deploy.worker_groups import DeployGroup

CONFIG_FOLDER = "/etc/embedder"
CONFIG_FILE, PLAN_FILE = "run.toml", "plan.json"
TOKEN_FOLDER, TOKEN_FILE = "/etc/embedder-tokens", "tokens"
STOP_MARGIN_S = 30  # for the journal, after `stop_timeout_s`


def embed_command(config: RunConfig, groups: Sequence[DeployGroup], *, config_path: str, plan_path: str) -> list[str]:
    """Words of the command that embeds once; the paths are those where the command runs."""
    words = ["embedder", "embed", "--config", config_path, "--plan", plan_path, "--engine", "ray"]
    return [*words, "--ray-address", "auto", *_bounds(config, groups)]


def refresh_command(config: RunConfig, groups: Sequence[DeployGroup], *, config_path: str, plan_path: str) -> list[str]:
    """Words of the command that brings the store up to date with the sources; the paths are those where it runs."""
    words = ["embedder", "refresh", config_path, "--max-hours", f"{config.deploy.max_hours:g}"]
    settings = [f"plan={plan_path}", "engine=ray", "ray_address=auto"]
    return [*words, *(word for each in settings for word in ("--set", each)), *_bounds(config, groups)]


def drain_command(config: RunConfig) -> list[str]:
    """Words of the command that runs before a pod is stopped."""
    return ["embedder", "deploy", "drain", "--within-s", str(drain_seconds(config))]


def drain_seconds(config: RunConfig) -> int:
    """Seconds that the end of a pod may take: what is in flight is finished, and kept."""
    return max(config.deploy.drain_s, stop_seconds(config))


def stop_seconds(config: RunConfig) -> int:
    """Seconds that a command may take to end after SIGTERM."""
    return int(config.stop_timeout_s) + STOP_MARGIN_S


def _bounds(config: RunConfig, groups: Sequence[DeployGroup]) -> list[str]:
    """Settings by which the run waits for nodes that are still to come; the configuration's own take precedence."""
    found = {
        "max_cpus": sum(group.max_pods * group.num_cpus for group in groups),
        "max_gpus": sum(group.max_pods * group.num_gpus for group in groups),
        "wait_s": config.deploy.start_timeout_s,
    }
    left_out = {key: value for key, value in found.items() if key not in config.cluster.model_fields_set}
    return [word for key, value in left_out.items() for word in ("--set", f"cluster.{key}={value}")]
