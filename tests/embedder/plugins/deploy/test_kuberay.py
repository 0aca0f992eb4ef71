"""Manifests: valid for KubeRay and Kubernetes, the same each time, with commands that exist and without a secret."""

import gzip
import re
import shlex
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from deployments import CONFIG, GOLDEN, IMAGE, kuberay_texts, plan_of, stage
from jsonschema import Draft202012Validator

from embedder.cli import app
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.plugins.deploy.manifest_text import manifest_text, quantity, without_comments, yaml_text

CRDS = Path(__file__).parent / "data"
KINDS = {
    "rayjob.yaml": "rayjobs",
    "raycluster.yaml": "rayclusters",
    "raycronjob.yaml": "raycronjobs",
    "rayservice.yaml": "rayservices",
}
KUBERNETES = "1.35"


@cache
def schema_of(kind):
    """The definition's schema, closed: Kubernetes drops fields that it doesn't have, and so nothing may be one."""
    text = gzip.decompress((CRDS / f"ray.io_{kind}.yaml.gz").read_bytes())
    versions = yaml.load(text, yaml.CSafeLoader)["spec"]["versions"]
    (found,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
    found["properties"]["metadata"] = {"type": "object"}
    return closed(found)


def closed(schema):
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    if (
        isinstance(schema.get("properties"), dict)
        and "type" in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        schema.setdefault("additionalProperties", False)
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
    return schema


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return kuberay_texts(tmp_path_factory.mktemp("deploy"))


@pytest.fixture(scope="module")
def documents(texts):
    return {name: yaml.safe_load(text) for name, text in texts.items()}


def templates(tree):
    """All pod templates in a document."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("template", "submitterPodTemplate"):
                yield value
            yield from templates(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from templates(each)


@pytest.mark.parametrize("name", KINDS)
def test_each_manifest_is_valid_for_its_definition(documents, name):
    errors = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema_of(KINDS[name])).iter_errors(documents[name])
    ]
    assert errors == []


def test_the_definitions_find_what_is_wrong(documents):
    wrong = yaml.safe_load(yaml.safe_dump(documents["rayjob.yaml"]))
    wrong["spec"]["backofLimit"] = wrong["spec"].pop("backoffLimit")
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] = "two"
    found = [error.message for error in Draft202012Validator(schema_of("rayjobs")).iter_errors(wrong)]
    assert len(found) == 2
    assert any("backofLimit" in each for each in found)


@pytest.mark.parametrize("name", KINDS)
def test_each_pod_and_the_config_map_are_valid_for_kubernetes(documents, name):
    found = list(templates(documents[name]))
    assert len(found) == {"rayjobs": 5, "raycronjobs": 5, "rayclusters": 4, "rayservices": 2}[KINDS[name]]
    for number, template in enumerate(found):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"pod-{number}", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    kubernetes_validate.validate(documents["config.yaml"], KUBERNETES, strict=True)


def test_the_files_are_the_golden_ones(texts):
    assert texts == {path.name: path.read_text() for path in sorted(GOLDEN.glob("*.yaml"))}


def test_worker_groups_have_the_devices_of_the_plan(documents):
    groups = documents["rayjob.yaml"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    found = {}
    for group in groups:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        found[group["groupName"]] = (
            group["replicas"] * int(limits.get("nvidia.com/gpu", 0)),
            group["replicas"] * int(limits["cpu"]),
        )
    assert found == {"l4": (2, 16), "a100-80gb": (2, 16), "cpu": (0, 8)}
    assert [(each["minReplicas"], each["maxReplicas"]) for each in groups] == [(0, 4), (0, 2), (0, 2)]
    assert [each.get("labels") for each in groups] == [
        {"ray.io/accelerator-type": "L4"},
        {"ray.io/accelerator-type": "A100-80G"},
        None,
    ]
    tolerations = [each["template"]["spec"].get("tolerations") for each in groups]
    assert tolerations == [
        [{"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        None,
    ]


def test_no_container_has_a_right_and_each_ends_in_time(documents):
    seen = 0
    for name in KINDS:
        for template in templates(documents[name]):
            spec = template["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] == 10001
            writable = {each["name"] for each in spec["volumes"] if "emptyDir" in each}
            for container in spec["containers"]:
                seen += 1
                assert container["image"] == IMAGE
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert container["resources"]["requests"] == container["resources"]["limits"]
                mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
                folders = (
                    "/tmp",
                    "/home/embedder",
                    *(("/dev/shm", "/spill") if "submitter" not in container["name"] else ()),
                )
                assert {mounts[folder] for folder in folders} <= writable
                if hook := container.get("lifecycle"):
                    within = float(hook["preStop"]["exec"]["command"][-1])
                    assert within < spec["terminationGracePeriodSeconds"]
    assert seen == 17


def test_what_submits_gets_no_data_no_credentials_and_no_token_of_kubernetes(documents):
    spec = documents["rayjob.yaml"]["spec"]["submitterPodTemplate"]["spec"]
    (container,) = spec["containers"]
    assert "envFrom" not in container
    assert {each["name"] for each in spec["volumes"]} == {each["name"] for each in container["volumeMounts"]}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/tmp", "/home/embedder"}
    for name in KINDS:
        for template in templates(documents[name]):
            is_head = template["spec"]["containers"][0]["name"] == "ray-head"  # the autoscaler next to it makes pods
            assert template["spec"].get("automountServiceAccountToken", True) is is_head


def test_all_containers_of_a_head_see_rays_sockets_and_logs(documents):
    """KubeRay mounts /tmp/ray only into its own two containers, unless the manifest does so into all."""
    spec = documents["raycluster.yaml"]["spec"]
    containers = [*spec["headGroupSpec"]["template"]["spec"]["containers"], spec["autoscalerOptions"]]
    assert [each.get("name") for each in containers] == ["ray-head", "jupyterlab", None]
    for folder in ("/tmp", "/tmp/ray"):
        found = [{each["mountPath"]: each["name"] for each in one["volumeMounts"]}[folder] for one in containers]
        assert len(set(found)) == 1


def test_the_port_of_a_runs_metrics_has_a_name_where_one_runs(tmp_path):
    texts = kuberay_texts(tmp_path, 'metrics_address = "0.0.0.0:9477"\n' + CONFIG)
    named = [name for name, text in texts.items() if re.search(r"name: run-metrics\n +containerPort: 9477\n", text)]
    assert named == ["rayjob.yaml", "raycronjob.yaml"]


def leaf(words):
    command = typer.main.get_command(app)
    assert words[0] == "embedder"
    words = words[1:]
    while getattr(command, "commands", None):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def command_lines(tree):
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "entrypoint":
                yield shlex.split(value)
            elif key == "command" and value[0] == "embedder":
                yield value
            else:
                yield from command_lines(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from command_lines(each)


def test_every_command_line_parses_with_the_real_commands(documents, tmp_path):
    lines = {tuple(line) for document in documents.values() for line in command_lines(document)}
    assert {line[1] for line in lines} == {"embed", "refresh", "deploy"}
    (tmp_path / "run.toml").write_text(documents["config.yaml"]["data"]["run.toml"])
    for line in lines:
        command, words = leaf(line)
        context = command.make_context(line[1], [*words])
        settings = context.params.get("settings") or []
        if settings:
            config = load_config(tmp_path / "run.toml", settings=settings)
            assert (config.cluster.max_gpus, config.cluster.max_cpus, config.cluster.wait_s) == (6, 56, 1800)
            paths = {context.params.get("plan"), config.plan, str(context.params["config"])}
            assert {"/etc/embedder/plan.json", "/etc/embedder/run.toml"} <= paths
            assert "ray" in (config.engine, context.params.get("engine"))
            assert "auto" in (config.ray_address, context.params.get("ray_address"))


def test_bounds_of_the_configuration_go_before_those_of_the_plan(tmp_path):
    text = kuberay_texts(tmp_path, CONFIG + "[cluster]\nmax_gpus = 1\nwait_s = 5\n")["rayjob.yaml"]
    entrypoint = yaml.safe_load(text)["spec"]["entrypoint"]
    assert "--set cluster.max_cpus=56" in entrypoint
    assert "max_gpus" not in entrypoint
    assert "wait_s" not in entrypoint


def test_files_are_the_same_each_time_and_change_with_the_configuration(tmp_path, texts):
    assert kuberay_texts(tmp_path) == texts
    other = kuberay_texts(tmp_path, CONFIG.replace("s3://team/shop", "s3://team/store"))
    digests = [set(re.findall(r"embedder/config: (\w+)", each["rayjob.yaml"])) for each in (texts, other)]
    assert digests[0] != digests[1]
    assert [len(each) for each in digests] == [1, 1]


def test_comments_stand_in_the_text_and_nowhere_else(texts, documents):
    assert "# the plan: 2 pods of 1 x L4\n" in texts["rayjob.yaml"]
    assert all(without_comments(document) == document for document in documents.values())
    assert not any(re.search(r"['\"]# |\? #|[&*]id\d", text) for text in texts.values())


def test_texts_of_the_user_stay_texts():
    odd = {"a": "no", "b": "1e3", "c": "# x", "d": "two\nlines\n", "e": "x: y", "f": "'# z': null", "g": "é\u202e"}
    odd |= {"h": "a\x85b", "i": "two\nli\x85nes\n", "j": "a\u2028b"}
    text = manifest_text(["head"], {"# why": None, **odd})
    assert yaml.safe_load(text) == odd
    assert text.startswith("# head\n---\n# why\na: ")


@pytest.mark.parametrize("text", ["1e3", "1234567890123e45", "+1_0E-2", "1.5e3", "0189", "-0o17", "y", "N"])
def test_a_text_that_kubernetes_would_read_as_a_number_or_yes_or_no_is_quoted(text):
    assert yaml_text({"a": text}) == f"a: '{text}'\n"  # such as a digest, or the hash of a commit as a label
    assert yaml_text({"a": f"{text}x"}) == f"a: {text}x\n"


def test_secrets_are_referred_to_and_never_written(tmp_path, texts):
    container = yaml.safe_load(texts["rayjob.yaml"])["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["envFrom"] == [{"secretRef": {"name": "bucket-credentials"}}]
    jupyter = yaml.safe_load(texts["raycluster.yaml"])["spec"]["headGroupSpec"]["template"]["spec"]["containers"][1]
    assert {
        "name": "JUPYTER_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "embedder-notebook", "key": "token"}},
    } in jupyter["env"]
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY: a secret doesn't belong in a manifest"):
        kuberay_texts(tmp_path, CONFIG.replace("AWS_REGION", "AWS_SECRET_ACCESS_KEY"))
    with pytest.raises(ConfigError, match="it holds a secret") as error:
        kuberay_texts(tmp_path, CONFIG + '[on_failure]\nwebhook = "https://hooks.example.com/x?token=abcdef123456"\n')
    assert "abcdef123456" not in str(error.value)
    with pytest.raises(ConfigError, match="it holds a secret"):
        step = 'name = "own"\ncallable = "our.steps:own"\ninputs = ["uri"]\nsettings = { api_key = "abcdef123456" }\n'
        kuberay_texts(tmp_path, f"{CONFIG}[[step]]\n{step}")
    assert kuberay_texts(tmp_path, f'{CONFIG}[on_failure]\nwebhook = "https://hooks.example.com/x"\n')


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"/data/catalogue"', '"catalogue"', r"source.path = 'catalogue' is a path of this machine"),
        ('"/data/catalogue"', '"/database/catalogue"', "'/database/catalogue' is a path of this machine"),
        ('"s3://team/shop"', '"runs/shop"', "store = 'runs/shop'"),
        ('"s3://team/shop"', '"file:///runs/shop"', "store = 'file:///runs/shop'"),
        ("[deploy]\n", '[deploy]\nschedule = "at night"\n', "schedule"),
        ("[deploy]\n", '[deploy]\nschedule = "0 25 * * *"\n', "'25' is no hour: write 0 to 23"),
        ("[deploy]\n", '[deploy]\nschedule = "5-61 * * * *"\n', "'5-61' is no minute"),
        ("[deploy]\n", '[deploy]\nschedule = "0 1 0 * *"\n', "'0' is no day of the month: write 1 to 31"),
        ("[deploy]\n", '[deploy]\nschedule = "0 1 * * mon-sun"\n', "'mon-sun' is no day of the week"),
        ("[deploy]\n", '[deploy]\nschedule = "*/0 1 * * 1,"\n', "'[*]/0' is no minute"),
        ("[deploy]\n", '[deploy]\ntime_zone = "Europe/Berlim"\n', "Europe/Berlim: no name of the time zone database"),
        ("[deploy]\n", "[deploy.service]\nno_auth = false\n\n[deploy]\nautoscaling = 3\n", "autoscaling"),
        ('name = "shop"', 'name = "Shop"', "small letters"),
        ('name = "shop"', 'name = "2026-shop"', "'2026-shop'.*begin with a letter"),
        ('team = "shop"', 'team = "a shop"', "no label of Kubernetes"),
        ('path = "/data"\n', 'path = "/tmp/"\n', "/tmp: pods have something else there"),
        ('path = "/data"\n', 'path = "/notebooks"\n', "/notebooks: pods have something else there"),
        ('path = "/data"\n', 'path = "/etc//embedder-tokens"\n', "/etc/embedder-tokens: pods have something else"),
        ('path = "/data"\n', 'path = "/tmp/./ray"\n', "/tmp/ray: pods have something else there"),
        ('device = "A100:80GB"', 'device = "L4"', "L4 is named twice"),
        ("[deploy]\n", "[deploy.head]\nmemory_bytes = 2147483648\n\n[deploy]\n", "deploy.head.*more than half of it"),
        ('device = "CPU"\n', 'device = "CPU"\nshm_bytes = 67108864\n', "shm_bytes.*100[_,]?663[_,]?296"),
    ],
)
def test_what_no_pod_could_use_is_refused(tmp_path, before, after, message):
    assert before in CONFIG
    with pytest.raises(ConfigError, match=message):
        kuberay_texts(tmp_path, CONFIG.replace(before, after, 1))


@pytest.mark.parametrize("schedule", ["*/15 0-6,22 ? JAN-mar Mon-Fri", "5/20 1 1,15 * 0", "@weekly"])
def test_what_cron_knows_is_a_schedule(tmp_path, schedule):
    text = kuberay_texts(tmp_path, CONFIG.replace("[deploy]\n", f'[deploy]\nschedule = "{schedule}"\n', 1))
    assert yaml.safe_load(text["raycronjob.yaml"])["spec"]["schedule"] == schedule


def test_files_that_are_switched_off_are_no_paths(tmp_path):
    texts = kuberay_texts(tmp_path, 'metrics_file = ""\nlog_file = ""\n' + CONFIG)
    assert any('metrics_file = ""' in text for text in texts.values())


def test_a_service_without_tokens_has_to_be_meant(tmp_path, texts):
    config = CONFIG.replace("[[deploy.volume]]", "[deploy.service]\nno_auth = true\n\n[[deploy.volume]]", 1)
    assert "token" not in yaml.safe_load(kuberay_texts(tmp_path, config)["rayservice.yaml"])["spec"]["serveConfigV2"]
    assert "token_file: /etc/embedder-tokens/tokens" in texts["rayservice.yaml"]
    assert "secretName: embedder-tokens" in texts["rayservice.yaml"]


def test_without_autoscaling_there_is_no_autoscaler_and_all_pods_stay(tmp_path):
    text = kuberay_texts(tmp_path, CONFIG.replace("[deploy]\n", "[deploy]\nautoscaling = false\n"))["rayjob.yaml"]
    spec = yaml.safe_load(text)["spec"]["rayClusterSpec"]
    assert "enableInTreeAutoscaling" not in spec
    assert all(each["minReplicas"] == each["replicas"] == each["maxReplicas"] for each in spec["workerGroupSpecs"])


def test_a_hub_model_and_one_gpu_type_need_no_selector(tmp_path):
    config = 'model = "org/name"\nstore = "gs://b/s"\n[[source]]\npath = "gs://b/t"\n[deploy]\nray_version = "2.60.0"\n'
    text = kuberay_texts(tmp_path, config, plan_of(stage("T4", 4, 0.25)))["raycluster.yaml"]
    (group,) = yaml.safe_load(text)["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["groupName"]) == (1, "t4")


def test_further_models_may_be_of_the_hub_or_of_a_package_as_the_first_is(tmp_path):
    models = '[[model]]\nuri = "org/name"\n[[model]]\nname = "tags"\nkind = "hf"\nuri = "org/other"\n'
    models += '[[model]]\nname = "ocr"\nkind = "ocr"\nuri = "rapidocr"\n'
    assert kuberay_texts(tmp_path, CONFIG.partition("\n")[2] + models)
    with pytest.raises(ConfigError, match=r"model = 'here/there/model' is a path of this machine"):
        kuberay_texts(tmp_path, CONFIG.partition("\n")[2] + models.replace("org/other", "here/there/model"))


def test_sizes_are_written_as_kubernetes_writes_them_back():
    assert [quantity(each) for each in (8 << 30, 512 << 20, 3 << 10, 1000)] == ["8Gi", "512Mi", "3Ki", "1000"]


def test_a_small_replica_of_the_service_gets_no_more_shared_memory_than_half_of_its_own(tmp_path):
    config = CONFIG.replace("[deploy]\n", "[deploy.service]\nmemory_bytes = 1073741824\n\n[deploy]\n", 1)
    document = yaml.safe_load(kuberay_texts(tmp_path, config)["rayservice.yaml"])
    (group,) = document["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (shm,) = (each for each in group["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}
    assert int(group["rayStartParams"]["object-store-memory"]) < 512 << 20
