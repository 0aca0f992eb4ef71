#!/usr/bin/env python3
"""The nightly refresh for a scheduler: tries again what may pass, and leaves everything else to a person.

    python scripts/nightly_refresh.py nightly.toml [--attempts 3] [--wait-s 600] [-- --max-hours 6]

What stands after `--` goes to `embedder refresh`. Exit codes are those of the command: 0 done, or nothing to do; 2 a
mistake in the configuration, or another run holds the store; 1 anything else. Only 1 is tried again, and not where a
guard refused: that is a decision for a person. What a failed attempt embedded is kept, so the next one continues. Of
SIGTERM, the refresh hears too: it finishes what is in flight and keeps it.

scripts/nightly/ holds a systemd timer and a cron line that call it; for Kubernetes there is `embedder deploy kuberay`.
"""

import argparse
import signal
import subprocess
import sys
import threading
from types import FrameType

REFUSED = "embedder: guard "  # how the command's last line begins where a guard refused


class Nightly:
    """Runs the command until it is done, a person is needed, or the attempts are used up."""

    def __init__(self, command: list[str], num_attempts: int, wait_s: float) -> None:
        self.command, self.num_attempts, self.wait_s = command, num_attempts, wait_s
        self.asked_to_stop = threading.Event()
        self.process: subprocess.Popen[str] | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on to the refresh, and begin no further attempt."""
        self.asked_to_stop.set()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def run(self) -> int:
        code = 1
        for attempt in range(1, self.num_attempts + 1):
            code, last_line = self._attempt()
            if code != 1 or last_line.startswith(REFUSED) or self.asked_to_stop.is_set():
                break
            if attempt < self.num_attempts:
                left = f"attempt {attempt} of {self.num_attempts} failed; again in {self.wait_s:g} s"
                print(f"nightly: {left}", flush=True)
                if self.asked_to_stop.wait(self.wait_s):
                    break
        return code

    def _attempt(self) -> tuple[int, str]:
        """One refresh; what it says is passed on line by line, and the last line is looked at."""
        last_line = ""
        # The refresh hears of signals only through this process, so that it is asked once.
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        if self.process.stderr is not None:
            for line in self.process.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                last_line = line
        return self.process.wait(), last_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file that describes the run")
    parser.add_argument("--attempts", type=int, default=3, help="how often a passing failure is tried")
    parser.add_argument("--wait-s", type=float, default=600.0, help="seconds between two attempts")
    stop = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = parser.parse_args(sys.argv[1:stop])
    command = [sys.executable, "-m", "embedder", "refresh", given.config, *sys.argv[stop + 1 :]]
    nightly = Nightly(command, given.attempts, given.wait_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, nightly.stop)
    return nightly.run()


if __name__ == "__main__":
    sys.exit(main())
