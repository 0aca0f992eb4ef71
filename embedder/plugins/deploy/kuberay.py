"""Manifests of KubeRay: a job with its own cluster, one every night, a cluster for notebooks, and the query service."""

import shlex
from collections.abc import Sequence

from embedder.config_toml.deploy_section import GIB, LEAST_SHM_BYTES, NodeResources
from embedder.errors import ConfigError
from embedder.plugins.deploy import commands
from embedder.plugins.deploy.manifest_text import manifest_text, quantity, yaml_text
from embedder.plugins.deploy.pods import (
    HOME,
    NO_KUBERNETES,
    SPILL,
    TMP_BYTES,
    Deployment,
    Tree,
    container,
    resources,
    security,
    template,
)
from embedder.plugins.deploy.shipped_config import check_shippable
from embedder.plugins.deploy.worker_groups import (
    MIN_SHARE_OF_MEMORY,
    RAY_SHARE_OF_SHM,
    DeployGroup,
    check_shared_memory,
    check_types_are_told_apart,
    worker_groups,
)

API = "ray.io/v1"
CONFIG_PATH = f"{commands.CONFIG_FOLDER}/{commands.CONFIG_FILE}"
PLAN_PATH = f"{commands.CONFIG_FOLDER}/{commands.PLAN_FILE}"
SERVICE_PORT, NOTEBOOK_PORT = 8000, 8888
NOTEBOOK_FOLDER = "/notebooks"
RAY_TOKEN_KEY = "auth_token"  # of the Secret that KubeRay makes for a cluster
SMALL = NodeResources(cpus=1, memory_bytes=GIB)  # submits, computes nothing
RAY_LOGS = ("ray-logs", "/tmp/ray")  # KubeRay's name: sockets and logs that all containers of a head share
RUNS = ("run", "refresh")  # components whose head runs a command
UPGRADE_S = 600  # seconds until a service that does not come up is recreated


def manifests(deployment: Deployment) -> dict[str, str]:
    """Write the texts of all files, by name; ConfigError if plan or configuration don't fit a cluster of Kubernetes."""
    check_shippable(deployment.shipped)
    config = deployment.shipped.config
    if not (name := config.deploy.name)[0].isalpha():
        raise ConfigError(f"[deploy] name = {name!r}: KubeRay makes services of it, whose names begin with a letter")
    groups = worker_groups(deployment.shipped.plan, config.deploy)
    check_types_are_told_apart(groups, "node_selector", '{ "nvidia.com/gpu.product" = "NVIDIA-L4" }')
    made: dict[str, tuple[str, Tree]] = {
        "config.yaml": ("Configuration and plan, as all pods see them. Apply it first.", _config_map(deployment)),
        "rayjob.yaml": ("A cluster for one run of `embedder embed`, which goes with it.", _job(deployment, groups)),
        "raycronjob.yaml": ("The nightly refresh, on its own cluster each time.", _cron_job(deployment, groups)),
        "raycluster.yaml": ("A cluster for notebooks: JupyterLab next to the head.", _cluster(deployment, groups)),
        "rayservice.yaml": ("The query service, which follows what is published.", _service(deployment)),
    }
    made_by = "Made by `embedder deploy kuberay`; change [deploy] of the configuration, and make it again."
    return {
        name: manifest_text([title, made_by, f"kubectl diff -f {name}; kubectl apply -f {name}"], document)
        for name, (title, document) in made.items()
    }


def _config_map(deployment: Deployment) -> Tree:
    shipped = deployment.shipped
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": deployment.metadata("config", "config"),
        "data": {commands.CONFIG_FILE: shipped.file.text, commands.PLAN_FILE: shipped.plan_text},
    }


def _job(deployment: Deployment, groups: Sequence[DeployGroup]) -> Tree:
    words = commands.embed_command(deployment.shipped.config, groups, config_path=CONFIG_PATH, plan_path=PLAN_PATH)
    return _ray_object(deployment, "RayJob", "embed", "run", _job_spec(deployment, "run", words, groups))


def _cron_job(deployment: Deployment, groups: Sequence[DeployGroup]) -> Tree:
    deploy = deployment.shipped.config.deploy
    words = commands.refresh_command(deployment.shipped.config, groups, config_path=CONFIG_PATH, plan_path=PLAN_PATH)
    spec = {
        "# KubeRay 1.7 begins it only with the feature gate RayCronJob of its operator": None,
        "# where one night is not done by the next, the lock of the store refuses the second, with a line": None,
        "schedule": deploy.schedule,
        "timeZone": deploy.time_zone,
        "jobTemplate": _job_spec(deployment, "refresh", words, groups),
    }
    return _ray_object(deployment, "RayCronJob", "refresh", "refresh", spec)


def _ray_object(deployment: Deployment, kind: str, suffix: str, component: str, spec: Tree) -> Tree:
    return {"apiVersion": API, "kind": kind, "metadata": deployment.metadata(suffix, component), "spec": spec}


def _job_spec(deployment: Deployment, component: str, words: Sequence[str], groups: Sequence[DeployGroup]) -> Tree:
    deploy = deployment.shipped.config.deploy
    submitter = container(deployment, "ray-job-submitter", resources(1, GIB), computes=False)
    return {
        "entrypoint": shlex.join(words),
        "# runs on the head; its log: kubectl logs -f job/NAME": None,
        "submissionMode": "K8sJobMode",
        "# each further attempt gets a new cluster and continues the run: nothing finished is computed again": None,
        "backoffLimit": deploy.retries,
        "# KubeRay begins the command when all pods run; one for which there is no room ends the job": None,
        "preRunningDeadlineSeconds": deploy.start_timeout_s,
        "activeDeadlineSeconds": deploy.deadline_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": deploy.keep_s,
        "submitterPodTemplate": template(
            deployment, component, [submitter], SMALL, restartPolicy="Never", **NO_KUBERNETES
        ),
        "rayClusterSpec": _cluster_spec(deployment, component, [_group(deployment, component, g) for g in groups]),
    }


def _cluster(deployment: Deployment, groups: Sequence[DeployGroup]) -> Tree:
    spec = _cluster_spec(deployment, "notebook", [_group(deployment, "notebook", group) for group in groups])
    return _ray_object(deployment, "RayCluster", "notebook", "notebook", spec)


def _cluster_spec(deployment: Deployment, component: str, worker_groups: Sequence[Tree]) -> Tree:
    deploy = deployment.shipped.config.deploy
    return {
        "rayVersion": deployment.ray_version,
        "# KubeRay makes the token, and gives it to all pods of the cluster": None,
        "authOptions": {"mode": "token"},
        **(_autoscaler(deploy.idle_timeout_s) if deploy.autoscaling else {}),
        "headGroupSpec": _head(deployment, component),
        "workerGroupSpecs": [*worker_groups],
    }


def _autoscaler(idle_timeout_s: int) -> Tree:
    return {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": idle_timeout_s,
            "resources": resources(1, GIB),
            "securityContext": security(),
            "env": [{"name": "HOME", "value": "/tmp"}],
            "volumeMounts": [{"name": name, "mountPath": folder} for name, folder in (("tmp", "/tmp"), RAY_LOGS)],
        },
    }


def _start_parameters(shm_bytes: int, **more: str) -> dict[str, str]:
    """Options of `ray start`, whose values are texts."""
    store = int(shm_bytes * RAY_SHARE_OF_SHM)
    return {
        **more,
        "object-store-memory": str(store),
        "object-spilling-directory": SPILL,
        "metrics-export-port": "8080",
    }


def _head(deployment: Deployment, component: str) -> Tree:
    deploy = deployment.shipped.config.deploy
    head, is_run = deploy.head, component in RUNS
    disk = head.spill_bytes + deploy.home_bytes + 2 * TMP_BYTES
    memory_bytes = head.memory_bytes or 8 * GIB
    check_shared_memory("[deploy.head]", memory_bytes, head.shm_bytes)
    needs = resources(head.cpus or 2, memory_bytes, disk)
    main = container(deployment, "ray-head", needs, drains=True, mounts=[RAY_LOGS])
    main["ports"] = [{"name": name, "containerPort": port} for name, port in _ports(deployment, component)]
    logs: Tree = {"name": RAY_LOGS[0], "emptyDir": {"sizeLimit": quantity(TMP_BYTES)}}
    containers, volumes, more = [main], [logs], {}
    if component == "notebook":
        containers.append(_notebook(deployment))
        claim = deploy.notebook.claim
        source: Tree = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes.append({"name": "notebooks", **source})
        more["shareProcessNamespace"] = True  # the raylet watches the processes of its drivers
    return {
        f"# no task runs {'next to the command, which lists, compares and publishes' if is_run else 'here'}": None,
        "rayStartParams": _start_parameters(head.shm_bytes, **{"num-cpus": "0", "dashboard-host": "0.0.0.0"}),
        "template": template(deployment, component, containers, head, volumes=volumes, **more),
    }


def _ports(deployment: Deployment, component: str) -> list[tuple[str, int]]:
    """Ports of a head by name; for a run also that of its own metrics, if configured."""
    ports = [("gcs-server", 6379), ("dashboard", 8265), ("client", 10001), ("metrics", 8080)]
    address = deployment.shipped.config.metrics_address
    if component in RUNS and address is not None:
        ports.append(("run-metrics", int(address.rpartition(":")[2])))
    return ports


def _group(deployment: Deployment, component: str, group: DeployGroup) -> Tree:
    deploy, settings = deployment.shipped.config.deploy, group.settings
    gpus = {settings.gpu_resource: group.num_gpus} if group.num_gpus else {}
    disk = settings.spill_bytes + deploy.home_bytes + TMP_BYTES
    worker = container(deployment, "ray-worker", resources(group.num_cpus, group.memory_bytes, disk, gpus), drains=True)
    each = f"{group.num_gpus} x {group.device}" if group.num_gpus else f"{group.num_cpus} cores"
    type_label = deployment.shipped.config.cluster.type_label
    return {
        f"# the plan: {group.num_pods} pods of {each}": None,
        "groupName": group.name,
        "replicas": group.num_pods,
        "minReplicas": group.min_pods,
        "maxReplicas": group.max_pods,
        **({"# stages that were planned for this type are placed by that label": None} if group.label else {}),
        **({"labels": {type_label: group.label}} if group.label else {}),
        "rayStartParams": _start_parameters(settings.shm_bytes),
        "template": template(deployment, component, [worker], settings, **NO_KUBERNETES),
    }


def _notebook(deployment: Deployment) -> Tree:
    deploy = deployment.shipped.config.deploy
    notebook = deploy.notebook
    found = container(
        deployment,
        "jupyterlab",
        resources(notebook.cpus, notebook.memory_bytes),
        command=[
            *("jupyter", "lab", "--no-browser", "--ip=0.0.0.0", f"--port={NOTEBOOK_PORT}"),
            f"--ServerApp.root_dir={NOTEBOOK_FOLDER}",
        ],
        secret_env={
            "JUPYTER_TOKEN": (notebook.token_secret, "token"),
            "RAY_AUTH_TOKEN": (f"{deploy.name}-notebook", RAY_TOKEN_KEY),  # KubeRay names it after the cluster
        },
        mounts=[("notebooks", NOTEBOOK_FOLDER), RAY_LOGS],
    )
    values = {"RAY_ADDRESS": "127.0.0.1:6379", "RAY_AUTH_MODE": "token"}
    found["env"] += [{"name": name, "value": value} for name, value in values.items()]
    found["ports"] = [{"name": "notebook", "containerPort": NOTEBOOK_PORT}]
    return found


def _service(deployment: Deployment) -> Tree:
    config = deployment.shipped.config
    service = config.deploy.service
    arguments = config.serve.given | {
        "store": config.required_store,
        "replicas": service.replicas,
        "max_replicas": service.max_replicas,
        "num_cpus": service.cpus,
        "cache_dir": f"{HOME}/.cache/embedder/thumbnails",
    }
    if not service.no_auth:
        arguments["token_file"] = f"{commands.TOKEN_FOLDER}/{commands.TOKEN_FILE}"
    serve_config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": SERVICE_PORT},
        "applications": [
            {
                "name": "embedder",
                "route_prefix": "/",
                "import_path": "embedder.plugins.serve.ray_serve:application_of_manifest",
                "args": arguments,
            }
        ],
    }
    spec = {
        "# a change makes a second cluster; requests go there once it answers, then the first one ends": None,
        "upgradeStrategy": {"type": "NewCluster"},
        "deploymentUnhealthySecondThreshold": UPGRADE_S,
        "serviceUnhealthySecondThreshold": UPGRADE_S,
        "# no replica runs there": None,
        "excludeHeadPodFromServeSvc": True,
        "# like `embedder serve --ray`; replicas are added and removed by load": None,
        "serveConfigV2": yaml_text(serve_config),
        "rayClusterConfig": _service_cluster(deployment),
    }
    return _ray_object(deployment, "RayService", "service", "service", spec)


def _service_cluster(deployment: Deployment) -> Tree:
    deploy = deployment.shipped.config.deploy
    service = deploy.service
    usual_bytes, most_bytes = NodeResources().shm_bytes, service.memory_bytes // MIN_SHARE_OF_MEMORY
    shm_bytes = max(LEAST_SHM_BYTES, min(usual_bytes, most_bytes))
    node = NodeResources(cpus=service.cpus, memory_bytes=service.memory_bytes, shm_bytes=shm_bytes, spill_bytes=GIB)
    mounts, volumes = _token_volume(None if service.no_auth else service.token_secret)
    worker = container(
        deployment,
        "ray-worker",
        resources(service.cpus, service.memory_bytes, GIB + deploy.home_bytes + TMP_BYTES),
        drains=True,
        mounts=mounts,
    )
    worker["ports"] = [{"name": "serve", "containerPort": SERVICE_PORT}]
    replicas = {
        "groupName": "replicas",
        "replicas": service.replicas,
        "minReplicas": service.replicas,
        "maxReplicas": service.max_replicas if deploy.autoscaling else service.replicas,
        "rayStartParams": _start_parameters(node.shm_bytes),
        "template": template(deployment, "service", [worker], node, volumes=volumes, **NO_KUBERNETES),
    }
    return _cluster_spec(deployment, "service", [replicas])


def _token_volume(secret: str | None) -> tuple[list[tuple[str, str]], list[Tree]]:
    """Mount and volume of the clients' tokens; none if everybody may search."""
    if secret is None:
        return [], []
    return [("tokens", commands.TOKEN_FOLDER)], [
        {"name": "tokens", "secret": {"secretName": secret, "defaultMode": 0o440}}
    ]
