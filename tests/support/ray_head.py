"""A Ray cluster of this machine with its dashboard, behind a token: a head, and further nodes."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil

RAY = Path(sys.executable).with_name("ray")
ROOT = Path(__file__).parents[2]
STORE_BYTES = 150_000_000
STARTED_S = 300.0  # a machine that does much else is slow to start Ray


def can_start() -> bool:
    """Whether the packages of Ray's dashboard are here, and nodes can have their own folders."""
    from importlib.util import find_spec

    return (
        os.geteuid() == 0
        and shutil.which("unshare") is not None
        and RAY.is_file()
        and all(map(find_spec, ("aiohttp", "aiohttp_cors", "opencensus", "smart_open", "virtualenv")))
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class RayHead:
    """Cluster with a dashboard; its nodes don't have this project on their path, unless it is installed."""

    def __init__(self, num_cpus: int = 2, num_nodes: int = 2):
        self.token = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="rj"))  # the paths of Ray's sockets must be short
        self.port, self.dashboard_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.dashboard_port}"
        self._started, self._metrics_ports = [], []
        dashboard = (f"--dashboard-port={self.dashboard_port}", "--include-dashboard=true")
        options = ("--head", f"--port={self.port}", *dashboard, f"--temp-dir={self.folder}")
        for is_last in (False, False, True):
            self._start(*options, cpus=num_cpus / num_nodes)
            try:
                self._wait()
                break
            except AssertionError:  # Ray gives up after 30 s, which a busy machine takes
                self.kill()
                if is_last:
                    raise
                self._started.clear()
                self._metrics_ports.clear()
        for _ in range(num_nodes - 1):
            self._start(f"--address=127.0.0.1:{self.port}", cpus=num_cpus / num_nodes)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the cluster's processes, and of its clients."""
        paths = [path for path in sys.path if path and ROOT not in (Path(path), *Path(path).parents)]
        return os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # a run in this process may have set 0, for its own Ray
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
        }

    def _start(self, *options: str, cpus: float) -> None:
        ports = (f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}")
        self._metrics_ports.append(free_port())
        ports += (f"--metrics-export-port={self._metrics_ports[-1]}",)
        command = [str(RAY), "start", "--block", *options, *ports, f"--num-cpus={cpus:g}", "--num-gpus=0"]
        command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        if self._started:
            command = [*self._with_own_folder(), *command]
        log = (self.folder / f"start-{len(self._started)}.log").open("wb")
        self._started.append(subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log))

    def _with_own_folder(self) -> list[str]:
        """Prefix of a command that sees its own folder in the place of the cluster's, as on another machine.

        Each node unpacks a job's files again, into a path that is the same on all nodes.
        """
        own = Path(tempfile.mkdtemp(prefix=f"node{len(self._started)}-", dir=self.folder))
        script = f'mount --bind {own} {self.folder} && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]

    def _wait(self) -> None:
        deadline_s = time.monotonic() + STARTED_S
        headers = {"Authorization": f"Bearer {self.token}"}
        while True:
            with suppress(OSError):
                request = urllib.request.Request(f"{self.url}/api/jobs/", headers=headers)
                with urllib.request.urlopen(request, timeout=5):
                    return
            assert self._started[0].poll() is None, (self.folder / "start-0.log").read_text()
            assert time.monotonic() < deadline_s, (self.folder / "start-0.log").read_text()
            time.sleep(0.5)

    def metrics(self) -> str:
        """What all nodes report to Prometheus."""
        found = []
        for port in self._metrics_ports:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                found.append(answer.read().decode())
        return "\n".join(found)

    def processes(self) -> list[psutil.Process]:
        """All processes of the cluster."""
        found = []
        for started in self._started:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(started.pid)
                found += [root, *root.children(recursive=True)]
        return found

    def drivers(self, job_id: str) -> list[psutil.Process]:
        """Processes of a job's command."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                words, job = process.cmdline(), process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
                if "embedder" in words and "run.toml" in words and "-c" not in words and job_id in job:
                    found.append(process)
        return found

    def kill(self) -> None:
        """End all of it at once, as a power cut would."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self._started:
            started.wait(10)
        psutil.wait_procs(processes, timeout=10)

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
