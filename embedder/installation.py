"""Installations: the light one and its extras, and the one line that says what a missing package is for.

`pip install embedder` is light: it searches, plans, asks a service, and reads stores. What computes vectors or writes
to a store comes with an extra. Code imports such packages where it needs them; nothing but this module deals with their
absence.
"""

import os
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from embedder.errors import EmbedderError

EXTRAS: dict[str, tuple[str, ...]] = {
    "embed": (
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "ray",
        "safetensors",
        "deltalake",
        "onnx",
        "onnxscript",
        "matplotlib",
        "fontTools",
        "prometheus_client",
    ),
    "serve": ("fastapi", "starlette", "uvicorn", "python_multipart", "prometheus_client"),
    "formats": ("pillow_heif", "pillow_jxl", "rawpy"),
    "s3": ("boto3", "botocore"),
    "ray-serve": ("ray", "grpc", "watchfiles"),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Packages, by the names they are imported under, that each extra of pyproject.toml brings."""

MAX_NAMED = 3
MISSING_EXTRA = "MissingExtra"
"""Error type of an item whose decoder an extra brings that is not installed."""


class InstallationError(EmbedderError):
    """Package that is not installed, and the extra that brings it."""


def command_here() -> str:
    """Command of this installation as the shell finds it: its name, or its path where the environment is not active."""
    own = Path(sys.executable).with_name("embedder")
    found = shutil.which("embedder")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "embedder"
    path = os.path.relpath(own)
    return str(own) if path.startswith(os.pardir) else path


@cache
def missing(extra: str) -> tuple[str, ...]:
    """Packages of an extra that can't be found here; imports none of them."""
    return tuple(package for package in EXTRAS[extra] if not _is_there(package))


def _is_there(package: str) -> bool:
    """Whether a package can be found; of one within another, the outer ones are imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require(extra: str, where: str) -> None:
    """Refuse before anything is begun what this installation can't do.

    Args:
        extra: the extra that is needed.
        where: the command or function that needs it.

    Raises:
        InstallationError: a package of it is missing.
    """
    if lacking := missing(extra):
        raise _refusal(extra, where, lacking)


def explained(error: ModuleNotFoundError, where: str) -> Exception:
    """Name the extra that brings a missing package; the error as it is where none does.

    Args:
        error: of an import.
        where: the command or function that needs it.
    """
    name = error.name or ""
    package = name.partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if {name, package} & {*packages}), None)
    return error if extra is None else _refusal(extra, where, missing(extra) or (package,))


def describe() -> str:
    """This installation in a few words: light or not, and the extras that are whole."""
    extras = [extra for extra in EXTRAS if not missing(extra)]
    if "embed" in extras:
        return f"embedder[{','.join(extras)}]"
    return f"light{', with ' + ', '.join(extras) if extras else ''}: searches, plans and reads stores"


def _refusal(extra: str, where: str, lacking: tuple[str, ...]) -> InstallationError:
    more = f" and {len(lacking) - MAX_NAMED} more" if len(lacking) > MAX_NAMED else ""
    return InstallationError(
        f"{where}: needs {', '.join(lacking[:MAX_NAMED])}{more}, which this installation lacks; "
        f"pip install 'embedder[{extra}]'"
    )
