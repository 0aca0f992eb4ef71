"""Pods of a cluster: containers without rights on a read-only root, their volumes, and their hooks before they stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from embedder.config import RunConfig
from embedder.config_toml.deploy_section import GIB, NodeResources, VolumeConfig
from embedder.plugins.deploy import commands
from embedder.plugins.deploy.manifest_text import quantity
from embedder.plugins.deploy.shipped_config import ShippedConfig

Tree = dict[str, Any]

HOME = "/home/embedder"
SPILL = "/spill"
NO_KUBERNETES: Tree = {"automountServiceAccountToken": False}  # nothing in the pod talks to Kubernetes
TMP_BYTES = 8 * GIB  # Ray's logs, and files of the decoding children
STOP_MARGIN_S = 30  # between the end of the hook and SIGKILL


@dataclass(frozen=True)
class Deployment:
    """Everything that manifests are made from: configuration and plan, the image of all containers, and versions.

    `ray_version` is that of the image, `version` that of this package, for the labels.
    """

    shipped: ShippedConfig
    image: str
    ray_version: str
    version: str

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap with configuration and plan."""
        return f"{self.shipped.config.deploy.name}-config"

    @property
    def digest(self) -> str:
        """Digest of configuration and plan, so that a change to them changes the pods, too."""
        return sha256((self.shipped.file.text + "\0" + self.shipped.plan_text).encode()).hexdigest()[:16]

    def labels(self, component: str) -> dict[str, str]:
        """Labels of an object or of its pods."""
        return {
            "app.kubernetes.io/name": "embedder",
            "app.kubernetes.io/instance": self.shipped.config.deploy.name,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/version": self.version,
            **self.shipped.config.deploy.labels,
        }

    def metadata(self, suffix: str, component: str) -> Tree:
        """Name, namespace and labels of an object."""
        deploy = self.shipped.config.deploy
        return {"name": f"{deploy.name}-{suffix}", "namespace": deploy.namespace, "labels": self.labels(component)}


def resources(num_cpus: int, memory_bytes: int, spill_bytes: int = 0, gpus: Mapping[str, int] | None = None) -> Tree:
    """Requests and limits of a container, which are equal.

    Memory includes the shared memory that it fills. `spill_bytes` is disk of its volumes; 0 requests none. `gpus` are
    by the name of the resource.
    """
    amounts = {"cpu": str(num_cpus), "memory": quantity(memory_bytes)}
    amounts |= {"ephemeral-storage": quantity(spill_bytes)} if spill_bytes else {}
    amounts |= {name: str(number) for name, number in (gpus or {}).items()}
    return {"requests": amounts, "limits": dict(amounts)}


def security() -> Tree:
    """Security context of a container, without any rights."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def environment(deployment: Deployment) -> list[Tree]:
    """Variables of every container; none of them is a secret."""
    config = deployment.shipped.config
    own = {
        "HOME": HOME,
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": str(commands.stop_seconds(config)),  # Ray's own 3 s would lose what is in flight
    }
    return [{"name": name, "value": value} for name, value in (own | config.deploy.env).items()]


def container(
    deployment: Deployment,
    name: str,
    needs: Tree,
    *,
    command: Sequence[str] = (),
    secret_env: Mapping[str, tuple[str, str]] | None = None,
    drains: bool = False,
    computes: bool = True,
    mounts: Sequence[tuple[str, str]] = (),
) -> Tree:
    """One container.

    `command` is empty if KubeRay fills in `ray start`. `secret_env` has the Secret and its key by variable. With
    `drains` the pod's end waits for what is in flight. Without `computes` it reads neither sources nor stores, and gets
    no credentials and no data. `mounts` are further volumes and their folders.
    """
    deploy = deployment.shipped.config.deploy
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for variable, (secret, key) in (secret_env or {}).items()
    ]
    hook = {"preStop": {"exec": {"command": commands.drain_command(deployment.shipped.config)}}}
    secrets_of_data = deploy.secrets if computes else ()
    return {
        "name": name,
        "image": deployment.image,
        **({"command": list(command)} if command else {}),
        "env": [*environment(deployment), *secrets],
        **({"envFrom": [{"secretRef": {"name": each}} for each in secrets_of_data]} if secrets_of_data else {}),
        "resources": needs,
        "securityContext": security(),
        **({"lifecycle": hook} if drains else {}),
        "volumeMounts": _mounts(deploy.volume if computes else (), mounts, computes=computes),
    }


def _mounts(data: Sequence[VolumeConfig], further: Sequence[tuple[str, str]], *, computes: bool) -> list[Tree]:
    """Mounts of a container: those of every one, those of one that `computes`, further ones, and volumes of data."""
    shared = [("home", HOME), ("tmp", "/tmp")]
    shared += [("config", commands.CONFIG_FOLDER), ("shm", "/dev/shm"), ("spill", SPILL)] if computes else []
    return [
        *({"name": name, "mountPath": folder} for name, folder in (*shared, *further)),
        *(
            {"name": f"volume-{number}", "mountPath": volume.path, "readOnly": volume.read_only}
            for number, volume in enumerate(data)
        ),
    ]


def template(
    deployment: Deployment,
    component: str,
    containers: Sequence[Tree],
    node: NodeResources,
    *,
    volumes: Sequence[Tree] = (),
    **more: Any,
) -> Tree:
    """Template of pods; a volume that no container mounts is left out.

    The main container comes first. `node` is where the pods go, and the sizes of their volumes; `more` are further
    fields of the pod.
    """
    config = deployment.shipped.config
    deploy = config.deploy
    pull_secrets = [{"name": each} for each in deploy.image_pull_secrets]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    spec: Tree = {
        **({"serviceAccountName": deploy.service_account} if deploy.service_account else {}),
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        **({"nodeSelector": dict(node.node_selector)} if node.node_selector else {}),
        **({"tolerations": tolerations} if (tolerations := _tolerations(node, containers)) else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": deploy.user_id,
            "runAsGroup": deploy.user_id,
            "fsGroup": deploy.user_id,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
        **(_time_to_drain(config) if any("lifecycle" in each for each in containers) else {}),
        "containers": list(containers),
        "volumes": [each for each in _volumes(deployment, node, volumes) if each["name"] in mounted],
    }
    annotations = {"embedder/config": deployment.digest}
    return {"metadata": {"labels": deployment.labels(component), "annotations": annotations}, "spec": spec}


def _volumes(deployment: Deployment, node: NodeResources, further: Sequence[Tree]) -> list[Tree]:
    """Volumes that pods may mount: those that `_mounts` names, and further ones."""
    deploy = deployment.shipped.config.deploy
    return [
        {"name": "config", "configMap": {"name": deployment.config_map}},
        {"name": "home", "emptyDir": {"sizeLimit": quantity(deploy.home_bytes)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": quantity(TMP_BYTES)}},
        {
            "# the object store of Ray, and pixels from the decoding children; counts as memory of the pod": None,
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": quantity(node.shm_bytes)},
        },
        {"name": "spill", "emptyDir": {"sizeLimit": quantity(node.spill_bytes)}},
        *further,
        *(
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": each.claim}}
            for number, each in enumerate(deploy.volume)
        ),
    ]


def _time_to_drain(config: RunConfig) -> Tree:
    seconds = commands.drain_seconds(config) + STOP_MARGIN_S
    return {"# the hook before the stop ends within that": None, "terminationGracePeriodSeconds": seconds}


def _tolerations(node: NodeResources, containers: Sequence[Tree]) -> list[Tree]:
    """Tolerations of taints; clouds taint nodes with GPUs by the name of the resource."""
    given = [
        {
            "key": each.key,
            "operator": "Exists" if each.value is None else "Equal",
            **({} if each.value is None else {"value": each.value}),
            **({} if each.effect is None else {"effect": each.effect}),
        }
        for each in node.toleration
    ]
    gpus = [name for name in containers[0]["resources"]["limits"] if "gpu" in name]
    return given or [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in gpus]
