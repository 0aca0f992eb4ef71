"""Configuration and plan as a cluster gets them: every node has what they name, and they hold no secret."""

import re
from dataclasses import dataclass
from pathlib import Path

from embedder.config import RunConfig, load_config
from embedder.config_paths import replace_paths
from embedder.config_toml.read import ConfigFile, read_file
from embedder.config_toml.values import without_secrets
from embedder.errors import ConfigError
from embedder.redaction import mask
from shards.model_settings import split_address
from shards.plan import ShardPlan

MAX_BYTES = 900_000  # of both files; a ConfigMap takes 1 MiB
_ADDRESS = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:")  # s3://, gs://, hf:


@dataclass(frozen=True)
class ShippedConfig:
    """Files that a cluster gets: the configuration and the plan."""

    config: RunConfig
    file: ConfigFile
    plan: ShardPlan
    plan_path: Path
    plan_text: str


def read_files(config_path: Path, plan_path: Path | None) -> ShippedConfig:
    """Read a configuration and its plan; a `plan_path` of None means the plan that the configuration names.

    Raises `ConfigError` if a file is missing or wrong, there is no plan, or no source; `ModelError` if the plan can't
    be read.
    """
    config = load_config(config_path)
    chosen = plan_path or (Path(config.plan) if config.plan else None)
    if chosen is None:
        raise ConfigError(
            "no plan, so nothing says which devices a cluster needs; give --plan PLAN.json, made by `embedder plan "
            "--devices 2xL4,16xCPU --out PLAN.json`"
        )
    if not (config.required_store and config.required_model and config.source):
        raise ConfigError(f"{config_path}: no [[source]], so a run would have nothing to embed; add one")
    try:
        plan_text = chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {chosen}: it can't be read ({error}); make it with `embedder plan --out`") from None
    return ShippedConfig(config, read_file(config_path), ShardPlan.from_json(plan_text), chosen, plan_text)


def check_shippable(shipped: ShippedConfig) -> None:
    """Refuse (ConfigError) files too large for a manifest, with a secret, or with a path of this machine."""
    path, text = shipped.file.path, shipped.file.text
    tree = {key: value for key, value in shipped.file.tree.items() if key != "on_failure"}  # a webhook may be there
    if mask(text) != text or without_secrets((), tree) != tree:
        raise ConfigError(
            f"{path}: it holds a secret (`embedder config {path}` masks it), which manifests would show; put it into a "
            "Secret that `secrets` of [deploy] names, and take it out of the file"
        )
    if len((text + shipped.plan_text).encode()) > MAX_BYTES:
        raise ConfigError(f"{path} and {shipped.plan_path}: more than {MAX_BYTES:,} bytes, which no ConfigMap holds")
    config = shipped.config
    mounted = [volume.path.rstrip("/") + "/" for volume in config.deploy.volume]
    # A path that is relative in the file is absolute in the configuration.
    kept = {
        split_address(config.required_model)[0],
        config.serve.reranker,
        *(each.uri for each in config.further_models),
    }

    def check(key: str, value: str) -> str:
        is_hub_id = key in ("model", "serve.reranker") and value in kept and not value.startswith(("/", "~"))
        if key == "plan" or not value:  # is shipped, too; a path of no letters switches a file off
            return value
        if not (_ADDRESS.match(value) or is_hub_id or any(f"{value}/".startswith(folder) for folder in mounted)):
            raise ConfigError(
                f"{path}: {key} = {value!r} is a path of this machine, whose disk pods don't see; write an address of "
                "a bucket, or an absolute path below the `path` of a [[deploy.volume]]"
            )
        return value

    replace_paths(shipped.file.tree, check)
