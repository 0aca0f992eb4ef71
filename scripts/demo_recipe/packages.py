"""Pinned packages of npm that the recipe learns from."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 300


@dataclass(frozen=True)
class Package:
    """A package, and what must be told of it."""

    name: str  # on npm, with its version
    sha256: str  # of its tarball
    licence: str  # of what is taken from it
    authors: str  # whom the licence asks to name

    @property
    def file(self) -> str:
        """Name of the tarball, as npm calls it."""
        return f"{re.sub('[^a-z0-9.]+', '-', self.name).strip('-')}.tgz"


def fetch(package: Package, folder: Path) -> Path:
    """Find the package's tarball in the folder, or get it with npm; either way its bytes are those that were pinned."""
    tarball = folder / package.file
    if not tarball.exists():
        _download(package, tarball)
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise SystemExit(f"{tarball}: SHA-256 {digest}, not the pinned {package.sha256}; delete it to fetch it again")
    return tarball


def _download(package: Package, tarball: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(f"{package.name}: npm is not installed; install it, or put the tarball at {tarball}")
    with tempfile.TemporaryDirectory(dir=tarball.parent) as empty:
        command = [npm, "pack", package.name, "--silent", "--pack-destination", empty]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        found = list(Path(empty).glob("*.tgz"))
        if done.returncode or len(found) != 1:
            said = done.stderr.strip().splitlines()[-1:] or ["npm said nothing"]
            raise SystemExit(f"{package.name}: npm can't fetch it ({said[0]}); or put the tarball at {tarball}")
        found[0].replace(tarball)
