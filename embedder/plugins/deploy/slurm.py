"""Script for Slurm's `sbatch`: Ray on all nodes of the allocation, the command on the first, and the shutdown."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from embedder.errors import ConfigError
from embedder.plugins.deploy import commands
from embedder.plugins.deploy.shipped_config import ShippedConfig
from embedder.plugins.deploy.worker_groups import DeployGroup, check_types_are_told_apart, worker_groups
from embedder.quantities import DAY_S, HOUR_S, MIB, MINUTE_S

HEAD_ADDRESS = '"$head:$port"'
KILL_MARGIN_S = 30  # between the command's end and that of the allocation

HEAD = """\
#!/usr/bin/env bash
# Made by `embedder deploy slurm`; change [deploy] of the configuration, and make it again.
#
#     sbatch {file}
#
# Exit codes are those of the command: 0 done, 2 a mistake of the configuration, 1 anything else. What its time limit or
# a signal stops is put back into the queue, and continues where it was; so is what loses a node, by Slurm itself.
"""

BODY = """\
{setup}
set -uo pipefail # after the setup, whose scripts may read variables that nobody has set
# All of Ray belongs only to this job: port, token, folder. A socket's path may have 107 characters.
head=$(hostname -I | cut -d' ' -f1)
port=$((20000 + SLURM_JOB_ID % 20000))
folder={scratch}/ray-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export head port folder RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # the run is over by then; Ray would wait until Slurm kills it
unset RAY_ADDRESS

# One node: the first of the first group is the head. It ends with the allocation, and leaves no file.
node='
ray=
trap "kill \\$ray 2>/dev/null; wait; rm -rf \\"$folder\\"" EXIT
trap exit TERM INT
first=$1; shift
if [[ $first == first && $SLURM_PROCID == 0 ]]; then
    where=(--head --node-ip-address="$head" --port="$port" --temp-dir="$folder" --include-dashboard=false)
else
    until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do sleep 1; done
    where=(--address="$head:$port")
fi
ray start --block --disable-usage-stats "${{where[@]}}" "$@" &
ray=$!
wait "$ray"
'
{nodes}

stopped= run= code=143
stop() {{
    stopped=1
    [[ -z $run ]] || kill -TERM "$run" 2>/dev/null
}}
trap stop TERM
for ((second = 0; second < {start_timeout_s}; second++)); do
    [[ -n $stopped || -S $folder/session_latest/sockets/raylet ]] && break # this node is one of the cluster
    sleep 1
done

sleep 3 # until the head knows its own node; the command waits for the others itself
if [[ -z $stopped ]]; then
    {command} &
    run=$!
    [[ -z $stopped ]] || stop # the signal came before its number was known
    while kill -0 "$run" 2>/dev/null; do # a signal interrupts the wait
        wait "$run"
    done
    wait "$run" # its code once more: that of an interrupted wait would be the signal's
    code=$?
fi

if [[ -n $stopped && $code != 0 ]] && ((${{SLURM_RESTART_COUNT:-0}} < {max_requeues})); then
    echo "$(date -u +%FT%TZ) stopped with $code; put back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep {kill_margin_s} # Slurm ends the script before
fi
exit "$code"
"""


def slurm_script(shipped: ShippedConfig, file_name: str) -> str:
    """Write the script; all nodes see the shipped files under the same paths. `file_name` appears in its first lines.

    Raises `ConfigError` if the plan doesn't fit an allocation.
    """
    config, deploy = shipped.config, shipped.config.deploy
    groups = worker_groups(shipped.plan, deploy)
    check_types_are_told_apart(groups, "gres", '"l4"')
    if not deploy.slurm.scratch.isascii() or shlex.quote(deploy.slurm.scratch) != deploy.slurm.scratch:
        raise ConfigError(
            f"[deploy.slurm] scratch = {deploy.slurm.scratch!r}: write a path of plain letters, digits, / . _ and -"
        )
    words = commands.embed_command(
        config, groups, config_path=_absolute(shipped.file.path), plan_path=_absolute(shipped.plan_path)
    )
    is_mixed = len(groups) > 1
    body = BODY.format(
        setup="".join(f"{line}\n" for line in deploy.slurm.setup),
        scratch=deploy.slurm.scratch,
        nodes="\n".join(_start(number, group, shipped, is_mixed=is_mixed) for number, group in enumerate(groups)),
        start_timeout_s=deploy.start_timeout_s,
        command=" ".join(HEAD_ADDRESS if word == "auto" else shlex.quote(word) for word in words),
        max_requeues=deploy.slurm.max_requeues,
        kill_margin_s=KILL_MARGIN_S,
    )
    return HEAD.format(file=shlex.quote(file_name)) + _options(shipped, groups) + body


def _absolute(path: Path) -> str:
    return str(path.absolute())


def _options(shipped: ShippedConfig, groups: Sequence[DeployGroup]) -> str:
    """Lines that `sbatch` reads: those of the job, then those of each group."""
    deploy, slurm = shipped.config.deploy, shipped.config.deploy.slurm
    stop_s = commands.stop_seconds(shipped.config) + KILL_MARGIN_S
    if slurm.time_limit_s <= stop_s:
        raise ConfigError(
            f"[deploy.slurm] time_limit_s = {slurm.time_limit_s}: the run's end may take {stop_s} s, of which "
            "stop_timeout_s is a part; raise the one or lower the other"
        )
    job = [
        f"--job-name={deploy.name}",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{stop_s}",
    ]
    shared = [f"--time={time_text(slurm.time_limit_s)}"]
    shared += [f"--{name}={value}" for name in ("account", "qos") if (value := getattr(slurm, name))]
    parts = [[*shared, *_of_nodes(group, slurm.partition)] for group in groups]
    parts[0] = job + parts[0]
    lines = ["".join(f"#SBATCH {shlex.quote(option)}\n" for option in part) for part in parts]
    return "#SBATCH hetjob\n".join(lines) + "\n"


def _of_nodes(group: DeployGroup, partition: str | None) -> list[str]:
    options = [
        f"--nodes={group.num_pods}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={group.num_cpus}",
        f"--mem={group.memory_bytes // MIB}M",
    ]
    if group.num_gpus:
        options.append(f"--gres=gpu:{group.settings.gres + ':' if group.settings.gres else ''}{group.num_gpus}")
    if where := group.settings.partition or partition:
        options.append(f"--partition={where}")
    return options


def _start(number: int, group: DeployGroup, shipped: ShippedConfig, *, is_mixed: bool) -> str:
    options = [f"--num-cpus={group.num_cpus}", f"--num-gpus={group.num_gpus}"]
    options.append(f"--object-store-memory={group.object_store_bytes}")
    if group.label:
        options.append(f"--labels={shipped.config.cluster.type_label}={group.label}")
    step = ["srun", *([f"--het-group={number}"] if is_mixed else []), "--ntasks-per-node=1"]
    step += [f"--nodes={group.num_pods}", f"--cpus-per-task={group.num_cpus}", "--kill-on-bad-exit=0"]
    first = "first" if number == 0 else "further"
    return f'{shlex.join(step)} bash -c "$node" node {shlex.join([first, *options])} &'


def time_text(seconds: int) -> str:
    """Write a time limit as Slurm reads it: days-hours:minutes:seconds."""
    days, rest = divmod(seconds, DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    return f"{days}-{hours:02}:{rest // MINUTE_S:02}:{rest % MINUTE_S:02}"
