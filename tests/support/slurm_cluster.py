"""A Slurm of this machine: slurmctld, and slurmd for each of some nodes of one core, in their own folder."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "squeue", "scontrol")
MISSING = next((name for name in PROGRAMS if shutil.which(name) is None), None)
START_S = 60
CONFIG = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={spool}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


class Slurm:
    """Commands of a Slurm that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        """Standard output of a command; one that fails shows what it said."""
        done = subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path) -> str:
        """Submit a script, and return the job's id."""
        return self.run("sbatch", "--parsable", str(script))

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, states: set[str], within_s: float) -> dict[str, str]:
        """Wait until a job is in one of some states."""
        deadline = time.monotonic() + within_s
        while (found := self.show(job))["JobState"] not in states:
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        return found


@contextmanager
def slurm(folder: Path, num_nodes: int = 2) -> Iterator[Slurm]:
    """Run Slurm while the block lasts; all of its processes and those of its jobs end with it."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as spool:  # short: sockets' paths have 107 bytes
        yield from _running(folder, Path(spool), num_nodes)


def _running(folder: Path, spool: Path, num_nodes: int) -> Iterator[Slurm]:
    host, names = socket.gethostname(), [f"n{number}" for number in range(num_nodes)]
    ports = _free_ports(num_nodes + 1)
    node = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs=1 RealMemory=16000 State=UNKNOWN"
    nodes = "\n".join(node.format(name, host, port) for name, port in zip(names, ports[1:], strict=True))
    (folder / "state").mkdir(parents=True)
    for name in names:
        (spool / name).mkdir()
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=host, port=ports[0], folder=folder, spool=spool, nodes=nodes, first_job=1_000 + os.getpid())
    )
    found = Slurm(folder)
    commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in names)]
    with (folder / "daemons.log").open("wb") as log:
        daemons = [subprocess.Popen(each, env=found.env, stdout=log, stderr=log) for each in commands]
    try:
        deadline = time.monotonic() + START_S
        while _idle_nodes(found) < num_nodes:
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
            time.sleep(0.5)
        yield found
    finally:
        subprocess.run(["scancel", "--user=root"], env=found.env, check=False)
        deadline = time.monotonic() + 20
        while _squeue(found) and time.monotonic() < deadline:
            time.sleep(0.5)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def _squeue(found: Slurm) -> str:
    return subprocess.run(
        ["squeue", "--noheader"], env=found.env, capture_output=True, text=True, check=False
    ).stdout.strip()


def _idle_nodes(found: Slurm) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=found.env, capture_output=True, text=True, check=False)
    return done.stdout.split().count("idle")


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
