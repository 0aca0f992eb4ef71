"""A Ray cluster of nodes with their own addresses, processes and disks, on one machine. Needs Linux and root.

    python scripts/cluster/nodes.py start 3 --cpus 1            # node 0 is the head; prints the cluster's address
    python scripts/cluster/nodes.py run 0 embedder embed --config run.toml --ray-address 10.77.0.10:6379
    python scripts/cluster/nodes.py add 3 --cpus 2 --ray=--num-gpus=2 --ray=--labels=type=T4
    python scripts/cluster/nodes.py pause 1 --seconds 20        # a machine that hangs: all its processes are stopped
    python scripts/cluster/nodes.py who                         # which of Ray's processes run where

docs/cluster.md shows how to kill, cut and drain nodes, and to stop them all. Each node has its own namespaces:
network, processes, mounts and host name. `start --private DIR` gives each its own empty DIR (DIR:50m bounds its
size); `add 3 --cores 0.5` holds a node to half a core; `start 1 --cpus 0 --grow 3` makes a head whose cluster grows up
to three nodes. Several can be up by name (`--name`). A driver must run on a node: `run`. `ray stop` and
`ray.cluster_utils.AutoscalingCluster` end every Ray of the machine.
"""

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
PORT, SUBNET = 6379, "10.77.0"  # clusters don't see each other, and may have the same addresses
START_S = 90.0
OBJECT_STORE_BYTES = 300_000_000  # of a node, unless an option of `ray start` says otherwise
CGROUPS, PERIOD_US = Path("/sys/fs/cgroup"), 100_000
HEAD_TYPE, WORKER_TYPE = "ray.head.default", "worker"
GROWING = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
# The name "fake_multinode" would read an example file that Ray's wheel lacks; as an external module it reads none.
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class NodeError(Exception):
    """A node did not start, or isn't there."""


@dataclass(frozen=True)
class NodeCluster:
    """Nodes of one name; everything else about them is asked of the kernel."""

    name: str = "raynode"  # begins the names of their network namespaces

    @property
    def place(self) -> Path:
        """Folder of token, logs and Ray's files; its path is short, because Ray opens sockets below it."""
        return Path(tempfile.gettempdir(), f"{self.name}-{os.getuid()}")

    @property
    def address(self) -> str:
        return f"{self.ip(0)}:{PORT}"

    def ip(self, number: int) -> str:
        return f"{SUBNET}.{10 + number}"

    def start(
        self, num_nodes: int, cpus: float, *, head_cpus: float | None = None, ray: Sequence[str] = (),
        private: Sequence[str] = (), grow: int = 0,
    ) -> str:  # fmt: skip
        """Start a head and its other nodes, one after the other; gives the address."""
        self.stop()
        (self.place / "ray").mkdir(parents=True)
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_urlsafe(32))
        (self.place / "private.json").write_text(json.dumps(list(private)))
        for words in (
            f"netns add {self.switch}",
            f"-n {self.switch} link set lo up",
            f"-n {self.switch} link add br0 type bridge",
            f"-n {self.switch} link set br0 up",
            f"-n {self.switch} addr add {SUBNET}.1/24 dev br0",
        ):
            _ip(words)
        head = ["--head", f"--port={PORT}", f"--temp-dir={self.place / 'ray'}", "--include-dashboard=false"]
        if grow:
            head.append(f"--autoscaling-config={self._growth(grow)}")
        self._start_node(0, cpus if head_cpus is None else head_cpus, [*head, *ray])
        for number in range(1, num_nodes):
            self.add(number, cpus, ray)
        return self.address

    def add(self, number: int, cpus: float, ray: Sequence[str] = (), cores: float | None = None) -> None:
        self._start_node(number, cpus, [f"--address={self.address}", *ray], cores)

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """Command line that runs another one on a node, in this folder, with the cluster's token."""
        pid = self._first_process(number)
        enter = [*self._bounded(number), "nsenter", "-t", str(pid), "-m", "-u", "-n", "-p", f"--wd={Path.cwd()}"]
        return [*enter, "env", *(f"{name}={value}" for name, value in self._variables().items()), *words]

    def kill(self, number: int) -> None:
        """End everything on a node at once; its address still answers, as that of a machine whose Ray died."""
        self._signal(number, signal.SIGKILL)

    def pause(self, number: int, seconds: float | None = None) -> None:
        """Stop everything on a node, as of a machine that hangs, and let it continue where there is a time for that."""
        self._signal(number, signal.SIGSTOP)
        if seconds is not None:
            time.sleep(seconds)
            self.resume(number)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, kind: signal.Signals) -> None:
        for pid in _pids(self.netns(number)):
            with suppress(ProcessLookupError):
                os.kill(pid, kind)

    def cut(self, number: int, seconds: float | None = None) -> None:
        """Take a node's link down, and up again where there is a time for that."""
        _ip(f"-n {self.netns(number)} link set e0 down")
        if seconds is not None:
            time.sleep(seconds)
            self.heal(number)

    def heal(self, number: int) -> None:
        _ip(f"-n {self.netns(number)} link set e0 up")
        _ip(f"-n {self.netns(number)} route replace default via {SUBNET}.1")

    def drain(self, number: int, seconds: float) -> None:
        """Tell Ray that a node goes away in so many seconds; whoever says so has to end it then."""
        drain = [sys.executable, __file__, "give-notice", self.address, self.ip(number), str(seconds)]
        subprocess.run(self.command(0, drain), check=True)

    def titles(self, number: int) -> Iterator[str]:
        """Titles that Ray gave to the processes of a node: actors, tasks, idle workers."""
        for pid in _pids(self.netns(number)):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if title.startswith("ray::"):
                    yield title

    def numbers(self) -> list[int]:
        """Return the numbers of the nodes that were started; some may be dead."""
        found = (line.split()[0] for line in _ip("netns list").splitlines() if line)
        ends = (name.removeprefix(self.name) for name in found if name.startswith(self.name))
        return sorted(int(end) for end in ends if end.isdigit())

    def stop(self) -> None:
        names = {line.split()[0] for line in _ip("netns list").splitlines() if line}
        mine = [self.netns(number) for number in self.numbers()] + [name for name in names if name == self.switch]
        for name in mine:
            for pid in _pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in mine:
            _wait_for(lambda name=name: not _pids(name), f"processes of {name} don't end")
        for number in self.numbers():
            group = self._cgroup(number)
            if group.is_dir():
                # Processes that have left their namespace may not have left the group yet.
                _wait_for(lambda group=group: not (group / "cgroup.procs").read_text(), f"{group} doesn't become empty")
                group.rmdir()
        for name in mine:
            _ip(f"netns del {name}")
        shutil.rmtree(self.place, ignore_errors=True)

    def netns(self, number: int) -> str:
        return f"{self.name}{number}"

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    @property
    def _token(self) -> Path:
        return self.place / "token"

    def _variables(self) -> dict[str, str]:
        """Variables of Ray's processes and of drivers; 'ray start --head' wants a token."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        busy = {"RAY_raylet_start_wait_time_s": f"{START_S:g}"}  # Ray gives a node 30 s, also on a machine that is busy
        busy["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # a run in this process may have set 0, for its own Ray
        return token | busy | {"RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}

    def _start_node(self, number: int, cpus: float, options: Sequence[str], cores: float | None = None) -> None:
        self._link(number)
        if cores is not None:
            self.hold(number, cores)
        own = self.place / f"node{number}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        setup = [f"hostname {self.netns(number)}", f"mount --bind {own} {self.place / 'ray'}"]
        for each in json.loads((self.place / "private.json").read_text()):
            folder, _, size = each.partition(":")
            setup.append(f"mount -t tmpfs {f'-o size={size} ' if size else ''}none {shlex.quote(folder)}")
        ray = [BIN / "ray", "start", "--block", "--disable-usage-stats", f"--node-ip-address={self.ip(number)}"]
        ray += [f"--num-cpus={cpus:g}", *options]
        if not any(option.startswith("--object-store-memory") for option in options):
            ray.append(f"--object-store-memory={OBJECT_STORE_BYTES}")
        inside = " && ".join([*setup, f"exec {shlex.join(map(str, ray))}"])
        unshare = ["unshare", "-m", "-u", "-p", "--fork", "--mount-proc", "--kill-child", "--propagation", "private"]
        log = self.place / f"node{number}.log"
        command = [*self._bounded(number), "ip", "netns", "exec", self.netns(number), *unshare, "bash", "-c", inside]
        growing = GROWING if any("autoscaling" in option for option in options) else {}
        with log.open("wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            variables = os.environ | self._variables() | growing
            process = subprocess.Popen(command, **streams, start_new_session=True, env=variables)

        def is_up() -> bool:
            if process.poll() is not None:
                raise NodeError(f"node {number} ended at once: {log.read_text()[-2000:]}")
            return "runtime started" in log.read_text()

        _wait_for(is_up, f"node {number} did not start; see {log}")

    def hold(self, number: int, cores: float) -> None:
        """Hold the processes of a node to so many cores together; one started without `cores` can't be held."""
        group, quota_us = self._cgroup(number), round(cores * PERIOD_US)
        group.mkdir(exist_ok=True)
        if group.parent != CGROUPS:  # version 1
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    def _bounded(self, number: int) -> list[str]:
        """Begin of a command line that runs within the bounds of a node."""
        group = self._cgroup(number)
        return ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"] if group.is_dir() else []

    def _cgroup(self, number: int) -> Path:
        return (CGROUPS / "cpu" if (CGROUPS / "cpu").is_dir() else CGROUPS) / self.netns(number)

    def _link(self, number: int) -> None:
        """Make a node's network namespace, and link it with the others."""
        name, port = self.netns(number), f"p{number}"
        if number in self.numbers():
            return
        for words in (
            f"netns add {name}",
            f"-n {name} link set lo up",
            f"link add e0 netns {name} type veth peer name {port} netns {self.switch}",
            f"-n {self.switch} link set {port} master br0 up",
            f"-n {name} addr add {self.ip(number)}/24 dev e0",
            f"-n {name} link set e0 up",
            f"-n {name} route add default via {SUBNET}.1",  # Ray asks the default route for its own address
        ):
            _ip(words)

    def _growth(self, num_nodes: int) -> Path:
        resources = {"CPU": 1, "object_store_memory": OBJECT_STORE_BYTES}
        worker = {"resources": resources, "min_workers": 0, "max_workers": num_nodes, "node_config": {}}
        provider = {
            "type": "external", "module": PROVIDER, "gcs_address": self.address, "use_node_id_as_ip": True,
            "disable_node_updaters": True, "disable_launch_config_check": True,
        }  # fmt: skip
        head = {"resources": {"CPU": 0}, "max_workers": 0, "node_config": {}}
        config = {"cluster_name": self.name, "provider": provider, "max_workers": num_nodes, "idle_timeout_minutes": 5}
        config |= {"head_node_type": HEAD_TYPE, "available_node_types": {HEAD_TYPE: head, WORKER_TYPE: worker}}
        lists = ("cluster_synced_files", "worker_setup_commands", "worker_start_ray_commands")
        config |= {"auth": {}, "file_mounts": {}, **{name: [] for name in lists}}
        path = self.place / "autoscaling.yaml"
        path.write_text(json.dumps(config))
        return path

    def _first_process(self, number: int) -> int:
        for pid in _pids(self.netns(number)):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                if len(numbers) > 1 and numbers[-1] == "1":
                    return pid
        raise NodeError(f"node {number} of {self.name} isn't up")


def _ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, stdout=subprocess.PIPE, text=True).stdout


def _pids(netns: str) -> list[int]:
    return [int(pid) for pid in _ip(f"netns pids {netns}").split()]


def _wait_for(is_so, complaint: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise NodeError(complaint)
        time.sleep(0.2)


def give_notice(address: str, node_ip: str, seconds: str) -> None:
    """Tell a cluster, on one of its nodes, that a node goes away: whoever says so has to end it then."""
    import ray

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == node_ip]
    ray.shutdown()
    if len(found) != 1:
        sys.exit(f"error: {len(found)} living nodes have the address {node_ip}; one is expected")
    command = [BIN / "ray", "drain-node", "--address", address, "--node-id", found[0]]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the machine is taken away"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", str(round(float(seconds)))], check=True)


def main() -> None:
    if sys.argv[1:2] == ["give-notice"]:
        return give_notice(*sys.argv[2:])
    parser = argparse.ArgumentParser(description="Make a Ray cluster of namespaces on one machine.")
    parser.add_argument("--name", default=NodeCluster.name)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start")
    start.add_argument("num_nodes", type=int)
    start.add_argument("--head-cpus", type=float)
    start.add_argument("--private", action="append", default=[], metavar="DIR[:SIZE]")
    start.add_argument("--grow", type=int, default=0, metavar="NODES")
    for name in ("add", "run", "kill", "cut", "heal", "pause", "resume", "drain"):
        commands.add_parser(name).add_argument("number", type=int)
    for name in ("who", "stop"):
        commands.add_parser(name)
    for command in (start, commands.choices["add"]):
        command.add_argument("--cpus", type=float, default=1)
        command.add_argument("--ray", action="append", default=[], metavar="OPTION", help="of 'ray start'")
    commands.choices["add"].add_argument("--cores", type=float, help="of the machine, for all its processes together")
    commands.choices["cut"].add_argument("--seconds", type=float, help="then heal it")
    commands.choices["pause"].add_argument("--seconds", type=float, help="then let it continue")
    commands.choices["drain"].add_argument("seconds", type=float)
    commands.choices["run"].add_argument("words", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args())
    if os.geteuid() != 0:
        parser.error("namespaces need root")
    cluster, command = NodeCluster(options.pop("name")), options.pop("command")
    try:
        _do(cluster, command, options)
    except NodeError as error:
        sys.exit(f"error: {error}")


def _do(cluster: NodeCluster, command: str, options: dict) -> None:
    match command:
        case "start":
            print(cluster.start(**options))
        case "run":
            sys.exit(subprocess.call(cluster.command(options["number"], options["words"])))
        case "who":
            for number in cluster.numbers():
                for title in sorted(cluster.titles(number)):
                    print(f"node {number}  {title}")
        case _:
            getattr(cluster, command)(**options)


if __name__ == "__main__":
    main()
