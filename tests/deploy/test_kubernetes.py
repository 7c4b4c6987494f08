"""The Kubernetes manifests: valid by the published schemas, and nothing in them points at something that nobody creates."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values

from schemas.config.rollout import VllmConfig

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
VERSIONS = ("1.29", "1.33", "1.37")
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())


def documents(path):
    return [tree for tree in yaml.safe_load_all(path.read_text()) if tree]


def kustomized(folder):
    """The manifests and the generated secrets (name -> keys) of a kustomization and of those that it includes."""
    [tree] = documents(folder / "kustomization.yaml")
    manifests, secrets = [], {}
    for generated in tree.get("secretGenerator", []):
        files = [(folder / f"{name}.example").read_text() for name in generated["envs"]]
        secrets[generated["name"]] = {line.split("=")[0] for text in files for line in text.splitlines() if "=" in line}
    for resource in tree["resources"]:
        if (folder / resource).is_dir():
            inner, inner_secrets = kustomized((folder / resource).resolve())
            manifests, secrets = manifests + inner, secrets | inner_secrets
        else:
            manifests += documents(folder / resource)
    return manifests, secrets


def job_of_the_pool():
    """The job that the Kubernetes work pool creates for a run, from the defaults of its template."""
    template = json.loads((ROOT / "deploy" / "work_pools" / "kubernetes.json").read_text())
    defaults = {name: field["default"] for name, field in template["variables"]["properties"].items() if "default" in field}
    given = {"name": "run", "labels": {}, "command": ["prefect", "flow-run", "execute"]}
    job = apply_values(copy.deepcopy(template["job_configuration"]["job_manifest"]), defaults | given)
    [container] = job["spec"]["template"]["spec"]["containers"]
    # Prefect's Kubernetes worker turns the variables into this form.
    container["env"] = [{"name": name, "value": value} for name, value in defaults["env"].items()]
    return job


BASE, SECRETS = kustomized(K8S / "base")
GPU, _ = kustomized(K8S / "gpu")
EXAMPLES = [*documents(K8S / "job.yaml"), job_of_the_pool()]
RAY = [tree for path in sorted((K8S / "ray").glob("*.yaml")) for tree in documents(path)]
EVERYTHING = [*GPU, *EXAMPLES, *RAY]


def named(kind, manifests=GPU):
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pods(manifests=EVERYTHING):
    """(name, template) of every pod that a manifest describes."""
    found = []
    for each in manifests:
        name, spec = each["metadata"].get("name") or each["metadata"]["generateName"], each.get("spec", {})
        cluster = spec.get("rayClusterSpec", spec)
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]] if "headGroupSpec" in cluster else []
        found += [(name, owner["template"]) for owner in [spec, *groups] if "template" in owner]
    return found


def containers(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_published_schemas(version):
    of_kubernetes = [manifest for manifest in EVERYTHING if not manifest["apiVersion"].startswith("ray.io/")]
    # Ray's own kinds have no schema there (the next test has one), but the pods that they describe have.
    pods_of_ray = [{"apiVersion": "v1", "kind": "Pod"} | template for _, template in pods(RAY)]
    assert len(pods_of_ray) == 4
    for manifest in [*of_kubernetes, *pods_of_ray]:
        kubernetes_validate.validate(manifest, version, strict=True)


KUBERAY = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text())


def test_the_kinds_of_ray_have_the_fields_of_their_definition():
    of_ray = [tree for tree in RAY if tree["apiVersion"].startswith("ray.io/")]
    assert [tree["kind"] for tree in of_ray] == ["RayCluster", "RayJob"]
    for tree in of_ray:
        jsonschema.validate(tree, KUBERAY)


def test_a_misspelt_field_is_found_by_the_schemas():
    broken = copy.deepcopy(named("Deployment")["prefect"])
    broken["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "wrong", "says"),
    [
        ("RayCluster", [], {"workerGroupSpec": []}, "'workerGroupSpec' was unexpected"),
        ("RayCluster", ["headGroupSpec"], {"rayStartParameters": {}}, "'rayStartParameters' was unexpected"),
        ("RayCluster", ["headGroupSpec", "rayStartParams"], {"num-cpus": 0}, "0 is not of type 'string'"),
        ("RayCluster", ["workerGroupSpecs", 0], {"maxReplica": 1}, "'maxReplica' was unexpected"),
        ("RayJob", [], {"submitMode": "HTTPMode"}, "'submitMode' was unexpected"),
        ("RayJob", ["rayClusterSpec"], {"version": "2"}, "'version' was unexpected"),
    ],
)
def test_a_wrong_field_of_ray_is_found_by_its_definition(kind, path, wrong, says):
    [broken] = [copy.deepcopy(tree) for tree in RAY if tree["kind"] == kind]
    place = broken["spec"]
    for part in path:
        place = place[part]
    place |= wrong
    with pytest.raises(jsonschema.ValidationError, match=says):
        jsonschema.validate(broken, KUBERAY)


def test_a_pod_with_a_volume_finds_vllm_where_runs_look(tmp_path):
    """The volume hides the link that the image has there. The head of Ray samples nothing, and its nodes have no such volume."""
    checked = 0
    for name, pod in pods():
        [main] = pod["spec"]["containers"]
        mounts = [mount["mountPath"] for mount in main.get("volumeMounts", [])]
        if main["image"] != "grpo-pipeline-gpu:0.3.0" or "/runs" not in mounts or main["name"] == "ray-head":
            continue
        checked += 1
        [link] = pod["spec"]["initContainers"]
        assert link["image"] == main["image"], name
        there = tmp_path / str(checked)
        (there / "runs").mkdir(parents=True)
        (there / "venv-vllm" / "bin").mkdir(parents=True)
        (there / "venv-vllm" / "bin" / "python").touch()
        call = [part.replace("/runs", f"{there}/runs").replace("/venv-vllm", f"{there}/venv-vllm") for part in link["command"]]
        # A pod that starts again finds the link.
        for _ in range(2):
            subprocess.run(call, check=True)
        assert (there / "runs" / VllmConfig().python).exists(), name
    assert checked == 3, "the worker, the job, and the job of the pool"


def test_a_login_shell_of_the_image_finds_ray_and_python():
    """KubeRay before 1.4 starts Ray in one, and /etc/profile sets PATH before it reads the files of this folder."""
    [(line, name)] = re.findall(r"RUN echo '(.*)' > /etc/profile.d/(\S+)", (ROOT / "deploy" / "Dockerfile").read_text())
    assert name.endswith(".sh"), "others are not read"
    shown = subprocess.run(
        ["bash", "-c", f"{line}; echo $PATH"],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("/venv/bin:/usr/local/bin:")


def test_a_kustomization_lists_its_folder_and_has_only_known_fields():
    for folder in ("base", "gpu"):
        [tree] = documents(K8S / folder / "kustomization.yaml")
        files = {path.name for path in (K8S / folder).glob("*.yaml")} - {"kustomization.yaml"}
        assert {name for name in tree["resources"] if name.endswith(".yaml")} == files
        # `kubectl kustomize` finds a misspelt field too, and the test with it skips where kubectl is missing.
        assert tree.keys() <= {"apiVersion", "kind", "namespace", "resources", "generatorOptions", "secretGenerator"}
        assert (tree["apiVersion"], tree["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
        assert tree["namespace"] == "grpo"
        assert all(generated.keys() == {"name", "envs"} for generated in tree.get("secretGenerator", []))
    [base] = documents(K8S / "base" / "kustomization.yaml")
    # Without it the names of the secrets end in a hash, and job.yaml would not find them.
    assert base["generatorOptions"] == {"disableNameSuffixHash": True}


def test_the_base_has_every_part_of_the_stack():
    assert named("Namespace").keys() == {"grpo"}
    assert named("StatefulSet").keys() == {"postgres", "storage"}
    assert named("Deployment", BASE).keys() == {"prefect", "mlflow", "worker"}
    assert named("Job").keys() == {"bucket", "deployments"}
    assert named("Deployment").keys() - named("Deployment", BASE).keys() == {"worker-gpu"}


def test_every_secret_and_key_that_a_container_reads_is_generated():
    read = set()
    for name, pod in pods():
        for container in containers(pod):
            for variable in container.get("env", []):
                source = variable.get("valueFrom", {})
                assert "configMapKeyRef" not in source
                if key := source.get("secretKeyRef"):
                    assert key["key"] in SECRETS[key["name"]], f"{name}: {key}"
                    read.add(key["key"])
            for source in container.get("envFrom", []):
                read |= SECRETS[source["secretRef"]["name"]]
    assert read == set().union(*SECRETS.values()), "a secret that nobody reads"
    clients = COMPOSE["x-clients"].keys() - {"PREFECT_API_URL", "MLFLOW_TRACKING_URI"}
    assert SECRETS["grpo"] == clients
    for path in K8S.rglob("*.example"):
        for line in path.read_text().splitlines():
            assert line.endswith("="), f"{path.name}: {line}"


def test_every_volume_claim_configmap_and_account_is_created():
    accounts, claims, maps = (named(kind).keys() for kind in ("ServiceAccount", "PersistentVolumeClaim", "ConfigMap"))
    used = set()
    for name, pod in pods():
        assert pod["spec"]["serviceAccountName"] in accounts, name
        for volume in pod["spec"].get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims, name
                used.add(claim["claimName"])
            if content := volume.get("configMap"):
                assert content["name"] in maps, name
            assert "secret" not in volume
    assert used == claims


def test_every_mount_has_its_volume_and_every_volume_is_mounted():
    for name, template in pods():
        owner = named("StatefulSet").get(name, {"spec": {}})
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for container in containers(template) for mount in container.get("volumeMounts", [])}
        assert mounted == volumes, name


def test_every_address_names_a_service_and_its_port():
    services = named("Service")
    addresses = 0
    for name, pod in pods():
        for container in containers(pod):
            text = json.dumps([container.get("env", []), container.get("command", [])])
            for host, port in re.findall(r"(?:http://|@)([a-z][\w.-]*):(\d+)", text):
                assert host in services, f"{name}: {host}"
                assert int(port) in [each["port"] for each in services[host]["spec"]["ports"]], f"{name}: {host}:{port}"
                addresses += 1
    assert addresses >= 10


def test_every_service_finds_a_pod_with_its_port():
    for name, service in named("Service").items():
        found = [pod for _, pod in pods(GPU) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, name
        ports = {port["name"] for container in containers(found[0]) for port in container.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name, owner in named("StatefulSet").items():
        assert owner["spec"]["serviceName"] in named("Service"), name
    for owner in [*named("StatefulSet").values(), *named("Deployment").values()]:
        assert owner["spec"]["selector"]["matchLabels"].items() <= owner["spec"]["template"]["metadata"]["labels"].items()


def test_a_variable_is_defined_before_another_one_or_an_argument_uses_it():
    for name, pod in pods():
        for container in containers(pod):
            defined = set()
            for variable in container.get("env", []):
                assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, f"{name}: {variable['name']}"
                defined.add(variable["name"])
            assert set(re.findall(r"\$\((\w+)\)", json.dumps(container.get("args", [])))) <= defined, name


def test_every_image_is_built_here_or_is_one_of_the_compose_file():
    known = {service["image"] for service in COMPOSE["services"].values()}
    for name, pod in pods():
        for container in containers(pod):
            assert container["image"] in known, f"{name}: {container['image']}"


def test_every_policy_selects_pods_and_every_client_reaches_the_servers():
    labels = [pod["metadata"]["labels"] for _, pod in pods()]
    for policy in named("NetworkPolicy", EVERYTHING).values():
        selectors = [policy["spec"]["podSelector"]]
        peers = [peer for rule in policy["spec"].get("ingress", []) for peer in rule["from"]]
        selectors += [peer["podSelector"] for peer in peers if "namespaceSelector" not in peer]
        for selector in selectors:
            wanted = [{each["key"]: value} for each in selector.get("matchExpressions", []) for value in each["values"]]
            for labelled in [selector["matchLabels"]] if "matchLabels" in selector else wanted:
                assert any(labelled.items() <= each.items() for each in labels), policy["metadata"]["name"]
    for name, pod in pods():
        calls = any("http://prefect:" in json.dumps(container) for container in containers(pod))
        assert calls == (pod["metadata"]["labels"].get("grpo-client") == "true"), name


def test_the_commands_are_those_of_compose():
    def of_compose(service):
        return [re.sub(r"compose(-gpu)?-1", "$(POD_NAME)", part) for part in COMPOSE["services"][service]["command"]]

    for name in ("prefect", "mlflow", "worker", "worker-gpu"):
        [container] = named("Deployment")[name]["spec"]["template"]["spec"]["containers"]
        assert container["args"] == of_compose(name)
    job = named("Job")["deployments"]["spec"]["template"]["spec"]
    in_order = [*job["initContainers"], *job["containers"]]
    assert [each["args"] for each in in_order] == [of_compose(name) for name in ("deployments", "automations")]
    databases = named("ConfigMap")["postgres-databases"]["data"]["databases.sql"]
    assert databases == (ROOT / "deploy" / "postgres" / "databases.sql").read_text()


def test_a_probe_names_a_host_that_the_server_accepts():
    for name in ("prefect", "mlflow"):
        [container] = named("Deployment")[name]["spec"]["template"]["spec"]["containers"]
        [allowed] = [variable["value"] for variable in container["env"] if variable["name"] == "GRPO_ALLOWED_HOSTS"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            [header] = container[probe]["httpGet"]["httpHeaders"]
            assert header["name"] == "Host"
            assert header["value"] in allowed.split(",")


def test_every_pod_fits_the_restricted_profile_of_its_namespace():
    assert named("Namespace")["grpo"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        # A service called mlflow would set MLFLOW_PORT.
        assert pod["spec"]["enableServiceLinks"] is False, name
        for container in containers(pod):
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, name
            assert container["resources"].keys() == {"requests", "limits"}, name


def test_whatever_asks_for_a_gpu_tolerates_its_taint():
    asking = [pod for _, pod in pods() if any("nvidia.com/gpu" in each["resources"]["limits"] for each in containers(pod))]
    assert len(asking) == 5
    for pod in asking:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    assert "nodeSelector" in named("Deployment")["worker-gpu"]["spec"]["template"]["spec"]


def test_kustomize_builds_both_from_the_examples(tmp_path):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed on this machine")
    shutil.copytree(K8S, tmp_path / "k8s")
    for example in (tmp_path / "k8s").rglob("*.example"):
        example.with_suffix("").write_text(re.sub(r"=$", "=something", example.read_text(), flags=re.MULTILINE))
    for folder, manifests in (("base", BASE), ("gpu", GPU)):
        done = subprocess.run([kubectl, "kustomize", tmp_path / "k8s" / folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = [(tree["kind"], tree["metadata"]["name"]) for tree in yaml.safe_load_all(done.stdout)]
        assert sorted(built) == sorted(
            [(each["kind"], each["metadata"]["name"]) for each in manifests] + [("Secret", name) for name in SECRETS]
        )
