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
    """Make a group that limits memory; yields its folder and its version, and removes it.

    Args:
        parent: folder of the group to make it in.
        limit_bytes: of all its processes together, page cache included.
    """
    folder = parent / f"large-index-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        version = 1 if (folder / FILES[1][0]).exists() else 2
        (folder / FILES[version][0]).write_text(str(limit_bytes))
        yield folder, version
    finally:
        folder.rmdir()


def run_limited(arguments: Sequence[str], parent: Path | None, limit_bytes: int) -> tuple[str, int | None]:
    """Run Python with some arguments; returns its last line, and the most memory of its group.

    Args:
        arguments: of the interpreter.
        parent: folder of the group to make one in; None for no limit.
        limit_bytes: of the process, page cache included.

    Raises:
        SystemExit: it failed; the message says whether its memory was too small.
    """
    command = [sys.executable, *arguments]
    if parent is None:
        return _last_line(command), None
    with memory_group(parent, limit_bytes) as (folder, version):
        line = _last_line(["sh", "-c", JOIN, str(folder / "cgroup.procs"), *command])
        peak = folder / FILES[version][1]
        return line, int(peak.read_text()) if peak.exists() else None


def _last_line(command: Sequence[str]) -> str:
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        killed = ": killed, as by a group whose memory is too small" if done.returncode in (-9, 137) else ""
        raise SystemExit(f"{command[-4:]} ended with {done.returncode}{killed}")
    return done.stdout.splitlines()[-1]
