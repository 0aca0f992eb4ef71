"""Processes under a limit of memory, page cache included, by a cgroup of version 1 or 2."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SCRIPTS = Path(__file__).parents[1]
JOIN = 'echo $$ > "$0" && exec "$@"'
FILES = {1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), 2: ("memory.max", "memory.peak")}


def own_group() -> Path:
    """Folder of this process's group, of whichever version limits memory."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _visible(ROOT / "memory", path)
    return _visible(ROOT, next((path for _, controllers, path in lines if not controllers), "/"))


def _visible(mount: Path, path: str) -> Path:
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount  # a container may see its group as the root


@contextmanager
def memory_group(parent: Path, limit_bytes: int) -> Iterator[tuple[Path, int]]:
    """Make a group that limits memory; yields its folder and its version, and removes it."""
    folder = parent / f"large-index-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        version = 1 if (folder / FILES[1][0]).exists() else 2
        (folder / FILES[version][0]).write_text(str(limit_bytes))
        yield folder, version
    finally:
        folder.rmdir()


def run_limited(
    arguments: Sequence[str], parent: Path | None, limit_bytes: int, python: str = sys.executable
) -> tuple[str, int | None]:
    """Run Python with some arguments; returns its last line, and the most memory of its group."""
    with start_limited(arguments, parent, limit_bytes, python) as process:
        output, _ = process.communicate()
        _raise_failure(process)
        group_bytes = process.group_bytes()
    return output.splitlines()[-1], group_bytes


class LimitedProcess(subprocess.Popen[str]):
    """Process in a group."""

    peak: Path | None = None

    def group_bytes(self) -> int | None:
        """Most memory of its group; None where it has none, or the kernel does not tell."""
        return int(self.peak.read_text()) if self.peak is not None and self.peak.exists() else None


@contextmanager
def start_limited(
    arguments: Sequence[str], parent: Path | None, limit_bytes: int, python: str = sys.executable
) -> Iterator[LimitedProcess]:
    """Start Python with some arguments; the block must wait for its end, as its group is removed after that."""
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [python, *arguments]
    if parent is None:
        with LimitedProcess(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            yield process
        return
    with memory_group(parent, limit_bytes) as (folder, version):
        joined = ["sh", "-c", JOIN, str(folder / "cgroup.procs"), *command]
        with LimitedProcess(joined, stdout=subprocess.PIPE, text=True, env=environment) as process:
            process.peak = folder / FILES[version][1]
            yield process


def _raise_failure(process: LimitedProcess) -> None:
    if process.returncode:
        killed = ": killed, as by a group whose memory is too small" if process.returncode in (-9, 137) else ""
        raise SystemExit(f"{process.args[-4:]} ended with {process.returncode}{killed}")
