"""The most memory that another process has held, as the kernel tells it."""

from pathlib import Path


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has held so far (resident set size); 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
