"""Targets of `embedder deploy`: manifests of KubeRay, a script for Slurm."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from embedder.cli.options import AsJson
from embedder.cli.refresh_command import CONFIG_HELP
from embedder.cli.results import Result, print_result
from embedder.errors import ConfigError
from embedder.version import __version__

IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")  # as `docker pull` takes it

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP)]
Plan = Annotated[
    Path | None, typer.Option("--plan", help="Plan made by `embedder plan --out`; else `plan` of the file.")
]


def kuberay(
    config: Config,
    image: Annotated[str, typer.Option("--image", help="Image of all pods, with a tag or digest.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the manifests; made where it is missing.")],
    plan: Plan = None,
    as_json: AsJson = False,
) -> None:
    """Write a ConfigMap, a RayJob, a RayCronJob, a RayCluster for notebooks and a RayService."""
    from embedder.plugins.deploy.kuberay import manifests
    from embedder.plugins.deploy.pods import Deployment
    from embedder.plugins.deploy.shipped_config import read_files

    if not IMAGE.fullmatch(image):
        raise ConfigError(f"--image {image!r}: this is no name of an image; write REGISTRY/NAME:TAG")
    shipped = read_files(config, plan)
    texts = manifests(Deployment(shipped, image, shipped.config.deploy.ray_version or _ray_version(), __version__))
    _write_all(out, texts)
    print_result(as_json, Result({"files": [str(out / name) for name in texts]}, [str(out / name) for name in texts]))


def slurm(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="The script, for `sbatch`.")],
    plan: Plan = None,
    as_json: AsJson = False,
) -> None:
    """Write a script for sbatch that starts Ray on the allocation and runs the job."""
    from embedder.plugins.deploy.shipped_config import read_files
    from embedder.plugins.deploy.slurm import slurm_script

    text = slurm_script(read_files(config, plan), out.name)
    _write_all(out.parent, {out.name: text})
    print_result(as_json, Result({"files": [str(out)]}, [str(out)]))


def _ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            "Ray is not installed here, so its version in the image isn't known; write ray_version into [deploy]"
        ) from None


def _write_all(folder: Path, texts: dict[str, str]) -> None:
    """Write files; an unchanged one keeps its modification time. ConfigError if the folder can't be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != text.encode():
                path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: it can't be written ({error.strerror}); name another") from None
