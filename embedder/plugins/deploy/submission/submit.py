"""Submission of a run as a job of a Ray cluster: what is sent, how it begins there, and control over it afterwards.

`describe_job` decides what a job consists of, and is pure except for the files that it reads; `submit` sends it.
"""

import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from math import ceil
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from embedder.config import RunConfig
from embedder.config_paths import replace_paths
from embedder.config_toml.values import toml, toml_key
from embedder.errors import ConfigError, check_argument
from embedder.plugins.deploy.submission.follow import follow_log
from embedder.plugins.deploy.submission.job_server import JobInfo, JobServer
from embedder.plugins.deploy.submission.packages import JobPackage, code_package, package_of, read_to_send
from embedder.redaction import mask
from embedder.store.layout import utc_now
from embedder.version import __version__
from shards.model_settings import split_address

SUPPORTED_RAY = SpecifierSet(">=2.52.1")  # as pyproject.toml has it
CONFIG_FILE, PLAN_FILE, OWN_FILES = "run.toml", "plan.json", "own"
SENT = frozenset(("metric.callable", "model.extra_files", "step.callable", "step.extra_files"))
EXTRA = "embed"
END_S = 60.0  # in addition to `stop_timeout_s`: a write task ends, and the journal is written; else Ray kills after 3 s
OUR_KEY = "embedder"  # of a job's metadata; its value is the version

JobKind = Literal["refresh", "embed"]
"""Command that a job runs."""


@dataclass(frozen=True)
class SubmittedJob:
    """Job of a cluster.

    Attributes:
        server: client of its cluster.
        job_id: its id there.
    """

    server: JobServer
    job_id: str

    def info(self) -> JobInfo:
        """Describe its current state."""
        return self.server.job(self.job_id)

    def log(self) -> str:
        """All that it has printed so far."""
        return self.server.log(self.job_id)

    def follow(self) -> Iterator[str]:
        """Yield the pieces of its log as they come, until it has ended; leaving the loop doesn't affect the job.

        Raises:
            RunFailedError: it failed or was stopped, or the head is gone.
        """
        return follow_log(self.server, self.job_id)

    def stop(self) -> bool:
        """Ask it to stop as Ctrl-C would, keeping what is finished; return whether it was running."""
        return self.server.stop(self.job_id)


@dataclass(frozen=True)
class JobDescription:
    """Job as it is sent: `request`, the JSON of `POST /api/jobs/`, and the packages that it needs."""

    request: Mapping[str, Any]
    packages: tuple[JobPackage, ...]


def submit(
    config: RunConfig,
    address: str,
    *,
    kind: JobKind = "refresh",
    arguments: Sequence[str] = (),
    install: bool = False,
    python: str = "python",
    token: str | None = None,
) -> SubmittedJob:
    """Submit a run to a Ray cluster as a job; needs neither Ray nor torch here, and returns once the cluster has it.

    The package and the files that the configuration names are sent along. A job that is stopped, killed, or loses its
    cluster continues where it was when the same is submitted again.

    Args:
        config: the run; paths in it are those of the cluster's nodes.
        address: of the cluster's dashboard, such as http://10.0.0.1:8265.
        kind: `refresh` or `embed`.
        arguments: further options of that command, such as `--limit 1000`.
        install: first let pip install what the extra `embed` names on each node; else versions are only checked.
        python: interpreter of the head that starts the job.
        token: of the cluster; None for that of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.

    Raises:
        ConfigError: nothing answers at the address, its Ray is of another version, the token is wrong, or the
            configuration lacks something that the command needs.
        RunFailedError: the cluster refuses the job.
    """
    check_argument("embedder.submit: config", config, RunConfig, "one of embedder.load_config")
    job = describe_job(config, kind=kind, arguments=arguments, install=install, python=python)
    server = JobServer(address, token)
    check_version(server.url, server.ray_version())
    for package in job.packages:
        if not server.has_package(package.name):
            server.upload(package.name, package.content)
    return SubmittedJob(server, server.submit(job.request))


def describe_job(
    config: RunConfig,
    *,
    kind: JobKind = "refresh",
    arguments: Sequence[str] = (),
    install: bool = False,
    python: str = "python",
) -> JobDescription:
    """Describe a job; see `submit` for the arguments.

    Raises `ConfigError` if the configuration names no model, store or source, or a file of it can't be sent.
    """
    store = config.required_store
    if not config.source or not config.required_model:
        raise ConfigError("submit: no source; write a [[source]] into the configuration file")
    if config.engine == "local":
        raise ConfigError('submit: engine = "local" would leave the cluster idle; write "ray", or leave it out')
    code, own = code_package(), package_of(files_of(config))
    named = ("--config", CONFIG_FILE) if kind == "embed" else (CONFIG_FILE,)
    # `exec`, so that the signal of a stop reaches Python itself.
    command = shlex.join([python, "-m", "embedder", kind, *named, *arguments])
    runtime_env: dict[str, Any] = {
        "py_modules": [code.uri],
        "working_dir": own.uri,
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(ceil(config.stop_timeout_s + END_S))},
    }
    if install:
        runtime_env["pip"] = {"packages": wanted_libraries(), "pip_check": False}
    metadata = {OUR_KEY: __version__, "kind": kind, "store": mask(store)}
    request = {
        "entrypoint": f"exec {command}",
        "submission_id": new_job_id(kind),
        "runtime_env": runtime_env,
        "metadata": metadata,
    }
    return JobDescription(request, (code, own))


def files_of(config: RunConfig) -> dict[str, bytes]:
    """Read what a job's package holds: the configuration, without the address of a cluster, its plan and own functions.

    A file of own functions or classes is packed next to the others of its folder, which it may import by name if
    `extra_files` names them. All other paths are those of the nodes. Raises `ConfigError` if one of them can't be read
    here.
    """
    files: dict[str, bytes] = {}
    folders: dict[Path, str] = {}
    plans: dict[str, str] = {}

    def pack(key: str, path: str) -> str:
        if key in ("plan", "model.plan"):
            name = plans.setdefault(path, f"plan-{len(plans)}.json" if plans else PLAN_FILE)
        elif key in SENT or (key == "model" and path.endswith(".py")):
            file = Path(path).expanduser()
            name = f"{folders.setdefault(file.parent, f'{OWN_FILES}/{len(folders)}')}/{file.name}"
        else:
            return path
        files[name] = read_to_send(path, key)
        return name

    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"ray_address"})
    tree = replace_paths(tree, pack)
    text = "".join(f"{toml_key(key)} = {toml(value)}\n" for key, value in tree.items())
    return {CONFIG_FILE: text.encode(), **files}


def local_paths(config: RunConfig) -> list[str]:
    """Paths of a configuration that every node must see as this machine does; addresses are left out."""
    main = split_address(config.main_model)[0] if config.main_model is not None else None
    models = (main, *(model.uri for model in config.further_models if ".py:" not in model.uri))
    tables = (join.path for join in config.join)
    named = (config.store, *models, *(source.path for source in config.source), *tables)
    return [path for path in named if path is not None and path.startswith(("/", "~"))]


def new_job_id(kind: str) -> str:
    """Make an id from kind and time, such as `refresh-20260102-030405-1a2b`."""
    return f"{kind}-{utc_now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_version(url: str, version: str) -> None:
    """Refuse a cluster whose Ray this package doesn't run on, with a `ConfigError`."""
    try:
        fits = SUPPORTED_RAY.contains(Version(version), prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        raise ConfigError(f"{url}: its Ray is {version}, and embedder {__version__} runs on {SUPPORTED_RAY}")


def wanted_libraries(requirements: Callable[[str], list[str] | None] = requires) -> list[str]:
    """Requirements of a run for pip: the package's own and those of its extra, without Ray, which nodes have.

    `requirements` gives those of a distribution, by its name. Raises `ConfigError` if this package is not installed
    here, so its requirements are unknown.
    """
    try:
        lines = requirements("embedder")
    except PackageNotFoundError:
        raise ConfigError("--install: nothing names the libraries of an embedder that is not installed") from None
    found = (Requirement(line) for line in lines or ())
    wanted = (each for each in found if each.marker is None or each.marker.evaluate({"extra": EXTRA}))
    return sorted(f"{each.name}{each.specifier}" for each in wanted if each.name not in ("ray", "embedder"))
