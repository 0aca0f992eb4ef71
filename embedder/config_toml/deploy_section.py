"""Section `[deploy]` of a configuration: what a cluster of Kubernetes or Slurm needs beyond the plan."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal
from zoneinfo import available_timezones

from pydantic import AfterValidator, Field, field_validator, model_validator

from embedder.config_toml.sections import ConfigSection
from embedder.redaction import PLACE_NAME, SECRET_NAME

GIB = 1 << 30
LEAST_SHM_BYTES = 96 << 20  # Ray starts with no object store of less than 75 MiB
MAX_NAME = 36  # characters; KubeRay adds its suffixes to the 63 that Kubernetes allows
MAX_LABEL = 63
_TAKEN = (
    "bin dev dev/shm etc etc/embedder etc/embedder-tokens home home/embedder lib notebooks opt proc spill sys tmp "
    "tmp/ray usr var"
)
TAKEN_FOLDERS = frozenset(f"/{name}" for name in ("", *_TAKEN.split()))

_DNS_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(_DNS_LABEL)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_CRON = (
    ("minute", 0, 59, ""),
    ("hour", 0, 23, ""),
    ("day of the month", 1, 31, ""),
    ("month", 1, 12, "jan feb mar apr may jun jul aug sep oct nov dec"),
    ("day of the week", 0, 6, "sun mon tue wed thu fri sat"),
)
"""Fields of a schedule, their bounds, and names for the numbers from the lower one on."""
_CRON_PART = re.compile(r"(?:[*?]|(\w+)(?:-(\w+))?)(?:/[1-9]\d*)?", re.ASCII)


def _checked_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(
                f"{key} = {value}: no label of Kubernetes; write letters, digits, . _ and -, at most 63, before the "
                "name a domain and / if wanted"
            )
    return labels


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > MAX_LABEL:
        raise ValueError(
            f"{name!r}: no name of an object; write small letters, digits and -, at most {MAX_LABEL}, a letter or "
            "digit at both ends"
        )
    return name


def _checked_line(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError(f"{text!r}: write one line of text, without control characters")
    return text


Labels = Annotated[dict[str, str], AfterValidator(_checked_labels)]
ObjectName = Annotated[str, AfterValidator(_checked_name)]
OneLine = Annotated[str, AfterValidator(_checked_line)]
Bytes = Annotated[int, Field(ge=64 << 20)]


class Toleration(ConfigSection):
    """Taint of nodes that pods may be placed on all the same."""

    key: OneLine = Field(description="key of the taint")
    value: str | None = Field(None, description="value of the taint; left out: any")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="effect of the taint; left out: any"
    )


class NodeResources(ConfigSection):
    """Resources of one pod; requests and limits are equal, so that none is thrown out for what others take."""

    cpus: int | None = Field(None, ge=1, description="cores of a pod; left out: 8 for each of its GPUs")
    memory_bytes: Bytes | None = Field(
        None, description="memory of a pod, shared memory included; left out: 4 GiB a core, or what the plan needs"
    )
    shm_bytes: int = Field(
        2 * GIB, ge=LEAST_SHM_BYTES, description="shared memory, of which Ray's object store takes all but a tenth"
    )
    spill_bytes: Bytes = Field(32 * GIB, description="disk that Ray spills blocks to")
    node_selector: Labels = Field({}, description="labels that nodes must have")
    toleration: tuple[Toleration, ...] = ()


class HeadResources(NodeResources):
    """Resources of the head's pod, where the command runs: it lists, compares, publishes, and builds the index."""

    cpus: int | None = Field(2, ge=1, description="cores of the head; it computes nothing of the stages")
    memory_bytes: Bytes | None = Field(8 * GIB, description="memory of the head, shared memory included")


class GroupConfig(NodeResources):
    """Worker group of one device type of the plan."""

    device: str = Field(description="device type, as the plan has it: L4, A100:80GB, CPU")
    gpus_per_pod: int | None = Field(
        None, ge=1, description="GPUs of a pod, a divisor of the plan's; left out: 1, or what one replica needs"
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="pods of a type of cores, which replicas share; left out: a core for each of their threads",
    )
    min_replicas: int = Field(0, ge=0, description="pods that stay where there is nothing to do; needs autoscaling")
    max_replicas: int | None = Field(None, ge=1, description="most pods; left out: as many as the plan has")
    gpu_resource: OneLine = Field("nvidia.com/gpu", description="resource that the device plugin of the GPUs offers")
    gres: OneLine | None = Field(None, description="Slurm's name of the GPU's type, as in --gres=gpu:TYPE:1")
    partition: OneLine | None = Field(None, description="Slurm's partition of such nodes; left out: that of `slurm`")


class VolumeConfig(ConfigSection):
    """Volume that holds sources or the store, mounted into every pod."""

    claim: ObjectName = Field(description="name of the PersistentVolumeClaim, readable from many nodes")
    path: str = Field(
        pattern=r"^/[^\x00-\x1f\x7f]+$",
        description="folder that it is mounted at",
        json_schema_extra={"rule": "a path that begins with /"},
    )
    read_only: bool = Field(False, description="mount it without the right to write")


class NotebookConfig(ConfigSection):
    """JupyterLab next to the head of the RayCluster."""

    token_secret: ObjectName = Field("embedder-notebook", description="Secret whose key `token` is JupyterLab's token")
    cpus: int = Field(2, ge=1, description="cores of JupyterLab and its kernels")
    memory_bytes: Bytes = Field(8 * GIB, description="memory of JupyterLab and its kernels")
    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim of the notebooks; left out: they go with the pod"
    )


class ServiceConfig(ConfigSection):
    """Query service of the RayService."""

    replicas: int = Field(1, ge=1, description="replicas that always run")
    max_replicas: int = Field(4, ge=1, description="replicas that run under load")
    cpus: int = Field(2, ge=1, description="cores of each replica, which has its own pod")
    memory_bytes: Bytes = Field(8 * GIB, description="memory of each replica: the index has to fit")
    token_secret: ObjectName = Field(
        "embedder-tokens", description="Secret whose key `tokens` lists the clients' tokens, one a line"
    )
    no_auth: bool = Field(False, description="let everybody who reaches it search, without a token")

    @model_validator(mode="after")
    def _consistent(self) -> "ServiceConfig":
        if self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas}); raise it")
        return self


class SlurmConfig(ConfigSection):
    """Allocation of a Slurm cluster."""

    partition: OneLine | None = Field(None, description="partition; left out: the cluster's default")
    account: OneLine | None = Field(None, description="account that is charged")
    qos: OneLine | None = Field(None, description="quality of service")
    time_limit_s: int = Field(86_400, ge=60, description="seconds that the job may take before it is requeued")
    max_requeues: int = Field(10, ge=0, description="times that it is requeued before it ends")
    setup: tuple[OneLine, ...] = Field((), description="lines of shell before Ray starts: modules, an environment")
    scratch: str = Field(
        "/tmp",
        pattern=r"^/[^\x00-\x1f\x7f]{0,29}$",
        description="folder on each node's own disk for Ray's sockets, logs and spilled blocks",
        json_schema_extra={"rule": "a path that begins with /, at most 30 characters: a socket's has at most 107"},
    )


class DeployConfig(ConfigSection):
    """Cluster that `embedder deploy kuberay` and `slurm` describe for a plan."""

    name: ObjectName = Field("embedder", max_length=MAX_NAME, description="begins the names of all objects")
    namespace: ObjectName = Field("default", description="namespace of Kubernetes")
    labels: Labels = Field({}, description="labels of all objects and pods, in addition to embedder's own")
    service_account: ObjectName | None = Field(None, description="service account of the pods, for a role of the cloud")
    secrets: tuple[ObjectName, ...] = Field(
        (), description="Secrets whose keys become environment variables: credentials of buckets"
    )
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="Secrets to fetch the image with")
    env: dict[str, str] = Field({}, description="further environment variables, none of them secret")
    volume: tuple[VolumeConfig, ...] = ()
    user_id: int = Field(10001, ge=1, description="user and group that all processes run as; the image's is 10001")
    ray_version: str | None = Field(
        None,
        pattern=r"^\d+\.\d+\.\d+$",
        description="Ray of the image; left out: the one that is installed here",
        json_schema_extra={"rule": "a version, as 2.60.0"},
    )
    autoscaling: bool = Field(True, description="let KubeRay's autoscaler add and remove pods")
    idle_timeout_s: int = Field(300, ge=10, description="seconds after which an idle pod is removed")
    start_timeout_s: int = Field(
        1800, ge=60, description="seconds that a run waits for its nodes; cluster.wait_s goes first"
    )
    drain_s: int = Field(120, ge=1, description="seconds of a pod's end in which blocks leave it, or the run is saved")
    deadline_s: int = Field(86_400, ge=60, description="seconds after which a job is ended, its retries included")
    retries: int = Field(3, ge=0, description="clusters that are made again for a job that failed; each continues it")
    keep_s: int = Field(3600, ge=0, description="seconds that a finished job's cluster and logs are kept")
    home_bytes: Bytes = Field(16 * GIB, description="disk for the model's files and caches")
    schedule: str = Field(
        "30 1 * * *",
        pattern=r"^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|\S+( \S+){4})$",
        description="when the refresh runs, as cron writes it",
        json_schema_extra={"rule": "five fields of cron, or @daily"},
    )
    time_zone: str = Field(
        "Etc/UTC",
        pattern=r"^[A-Za-z]+(/[A-Za-z0-9_+-]+)*$",
        description="time zone of the schedule",
        json_schema_extra={"rule": "a name of the time zone database, as Europe/Berlin"},
    )
    max_hours: float = Field(6.0, gt=0, description="hours after which the refresh begins no further item")
    head: HeadResources = HeadResources()
    group: tuple[GroupConfig, ...] = ()
    notebook: NotebookConfig = NotebookConfig()
    service: ServiceConfig = ServiceConfig()
    slurm: SlurmConfig = SlurmConfig()

    @field_validator("schedule")
    @classmethod
    def _in_bounds(cls, schedule: str) -> str:
        """Refuse what no night would follow: the cluster's scheduler reports it in its own log at most."""
        if schedule.startswith("@"):
            return schedule
        for text, (field, lowest, highest, names) in zip(schedule.split(" "), _CRON, strict=True):
            numbers = {name: lowest + place for place, name in enumerate(names.split())}
            for part in text.split(","):
                found = _CRON_PART.fullmatch(part)
                ends = [numbers.get(end.lower(), end) for end in found.groups() if end] if found else ["none"]
                known = [int(end) for end in ends if str(end).isdecimal()]
                if len(known) < len(ends) or known != sorted(known) or not all(lowest <= n <= highest for n in known):
                    raise ValueError(f"{part!r} is no {field}: write {lowest} to {highest}, as 2, 1-5, 1,3 or */6")
        return schedule

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, time_zone: str) -> str:
        if (known := available_timezones()) and time_zone not in known:  # a small image may have no database
            raise ValueError(f"{time_zone}: no name of the time zone database; write one, as Europe/Berlin")
        return time_zone

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name}: no name of a variable; write letters, digits and _")
            if SECRET_NAME.search(name) and not PLACE_NAME.search(name):
                raise ValueError(
                    f"{name}: a secret doesn't belong in a manifest; put it into a Secret, and name that in `secrets`"
                )
        return env

    @field_validator("volume")
    @classmethod
    def _own_folders(cls, volumes: tuple[VolumeConfig, ...]) -> tuple[VolumeConfig, ...]:
        paths = [str(PurePosixPath("/" + volume.path.strip("/"))) for volume in volumes]
        for path in paths:
            if path in TAKEN_FOLDERS or paths.count(path) > 1 or ".." in path.split("/"):
                raise ValueError(
                    f"[[deploy.volume]] path = {path}: pods have something else there, or another volume; "
                    "write a folder of its own, as /data"
                )
        return volumes

    @model_validator(mode="after")
    def _each_device_once(self) -> "DeployConfig":
        devices = [group.device for group in self.group]
        if twice := sorted({each for each in devices if devices.count(each) > 1}):
            raise ValueError(
                f"[[deploy.group]]: {', '.join(twice)} is named twice; write one entry for each device type"
            )
        return self
