"""`make test-containers`: builds the image, brings the compose stack up, runs the demo through it, and tears it down.

It needs Docker with the compose plugin, found through PATH and DOCKER_HOST, and images for the base, PostgreSQL and MinIO: from a
registry, or loaded before. GRPO_CONTAINERS_PROJECT names the compose project (grpo-test), so that a real stack is not touched.
"""

import base64
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.ports import free_ports

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = os.environ.get("GRPO_CONTAINERS_PROJECT", "grpo-test")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
RUN_LIMIT_S = 3600


def why_not():
    """Why this machine cannot run containers; empty if it can."""
    for call, what in ((["version"], "Docker does not answer"), (["compose", "version"], "no docker compose")):
        try:
            done = subprocess.run(["docker", *call], capture_output=True, text=True, check=False, timeout=60)
        except OSError as error:
            return f"{what}: {error}"
        if done.returncode:
            return f"{what}: {done.stderr.strip()[-200:]}"
    return ""


def docker(*arguments):
    """What a command of Docker prints."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=600).stdout.strip()


class Stack:
    """The compose stack of the tests, on ports of its own."""

    def __init__(self, folder):
        self.passwords = {name: secrets.token_hex(16) for name in ("POSTGRES_PASSWORD", "STORAGE_PASSWORD", "MLFLOW_PASSWORD")}
        self.passwords |= {"MLFLOW_SECRET_KEY": secrets.token_hex(16), "VLLM_API_KEY": secrets.token_hex(16)}
        self.passwords |= {"PREFECT_AUTH": f"test:{secrets.token_hex(8)}", "STORAGE_USER": "grpo", "MLFLOW_ADMIN": "admin"}
        ports = dict(zip(("prefect", "mlflow"), free_ports(2), strict=True))
        self.prefect, self.mlflow = (f"http://127.0.0.1:{ports[name]}" for name in ("prefect", "mlflow"))
        # The published ports of the file are fixed; a second file replaces them.
        self.override = folder / "ports.yaml"
        inner = {"prefect": 4200, "mlflow": 5000}
        lines = [f"  {name}: {{ports: !override ['127.0.0.1:{port}:{inner[name]}']}}" for name, port in ports.items()]
        self.override.write_text("\n".join(["services:", *lines, ""]))
        self.environment = os.environ | self.passwords | {"VLLM_VERSION": "0.32.0", "VLLM_MODEL": "none"}

    def compose(self, *arguments, check=True, timeout=3600):
        call = ["docker", "compose", "-p", PROJECT, "-f", ROOT / "deploy" / "compose.yaml", "-f", self.override, *arguments]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout)
        assert not check or done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def ask(self, url, body=None, user=None):
        """What a server answers, as (status, text)."""
        headers = {"Content-Type": "application/json"}
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()

    def api(self, path, body=None):
        return json.loads(self.ask(f"{self.prefect}/api{path}", body, self.passwords["PREFECT_AUTH"])[1])

    def deployment(self, name):
        [found] = self.api("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return found

    def run(self, deployment):
        """Run a deployment to its end; the flow run."""
        run = self.api(f"/deployments/{deployment}/create_flow_run", {})
        deadline = time.monotonic() + RUN_LIMIT_S
        while (state := self.api(f"/flow_runs/{run['id']}"))["state_type"] not in FINAL:
            assert time.monotonic() < deadline, state["state_name"]
            time.sleep(5)
        return state

    def registry(self, path):
        return json.loads(self.ask(f"{self.mlflow}/api/2.0/mlflow{path}", user=f"admin:{self.passwords['MLFLOW_PASSWORD']}")[1])


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """The stack, up and healthy. At the end, its containers, networks and volumes are removed."""
    if reason := why_not():
        pytest.skip(reason)
    stack = Stack(tmp_path_factory.mktemp("containers"))
    try:
        stack.compose("build", "prefect")
        stack.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "900", "worker")
        yield stack
    finally:
        print(stack.compose("logs", "--tail", "50", check=False))
        stack.compose("down", "--volumes", "--timeout", "30", check=False)
    assert docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}") == ""


@pytest.fixture(scope="module")
def finished(stack):
    """The demo, started as a user starts it, to its end."""
    return stack.run(stack.deployment("demo")["id"])


def test_the_page_of_prefect_is_there(stack):
    status, text = stack.ask(f"{stack.prefect}/")
    assert status == 200
    assert "<html" in text.lower()


def test_the_image_without_arguments_shows_the_commands(stack):
    shown = stack.compose("run", "--rm", "--no-deps", "--entrypoint", "python -m flows.cli --help", "worker")
    assert "Run the pipeline" in shown


def test_a_login_shell_of_the_image_finds_ray_and_python(stack):
    shown = stack.compose("run", "--rm", "--no-deps", "--entrypoint", "bash -lc", "worker", "command -v ray python")
    assert shown.split() == ["/venv/bin/ray", "/venv/bin/python"]


def test_the_demo_completes_and_registers_a_version(stack, finished):
    assert finished["state_type"] == "COMPLETED", finished["state"]
    versions = stack.registry("/model-versions/search?filter=name%3D%27grpo-demo%27")["model_versions"]
    assert [version["version"] for version in versions] == ["1"]


def test_the_artifacts_of_the_run_are_in_the_storage(stack, finished):
    script = (
        "import boto3, os; s3 = boto3.client('s3', endpoint_url=os.environ['MLFLOW_S3_ENDPOINT_URL'], region_name='us-east-1');"
        "pages = s3.get_paginator('list_objects_v2').paginate(Bucket='mlflow');"
        "print(sum(len(page.get('Contents', [])) for page in pages))"
    )
    assert int(stack.compose("exec", "-T", "mlflow", "python", "-c", script)) > 20


def test_a_killed_worker_is_started_again(stack):
    before = stack.compose("ps", "--quiet", "worker").strip()
    subprocess.run(["docker", "exec", before, "python", "-c", "import os; os.kill(1, 9)"], capture_output=True, check=False)
    subprocess.run(["docker", "exec", before, "python", "-c", "import os; os.kill(1, 15)"], capture_output=True, check=False)
    deadline = time.monotonic() + 300
    while int(docker("inspect", "--format", "{{.RestartCount}}", before)) == 0:
        assert time.monotonic() < deadline
        time.sleep(1)


@pytest.fixture
def docker_worker(stack, tmp_path):
    """The pool grpo-docker of the stack, and a worker for it on this machine."""
    # Its dependencies are those of Prefect and MLflow. Only a worker of such a pool needs it, so that it is in no extra.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site"]
    subprocess.run([*install, "prefect-docker>=0.7,<0.8"], check=True, timeout=600)
    own = {"PYTHONPATH": str(tmp_path / "site"), "PREFECT_HOME": str(tmp_path / "prefect")}
    own |= {"PREFECT_API_URL": f"{stack.prefect}/api", "PREFECT_API_AUTH_STRING": stack.passwords["PREFECT_AUTH"]}
    prefect, template = [sys.executable, "-m", "prefect"], ROOT / "deploy" / "work_pools" / "docker.json"
    create = [*prefect, "--no-prompt", "work-pool", "create", "grpo-docker", "--type", "docker", "--base-job-template", template]
    subprocess.run(create, env=os.environ | own, check=True, cwd=tmp_path, timeout=600)
    call = [*prefect, "worker", "start", "--pool", "grpo-docker", "--type", "docker"]
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(call, env=os.environ | own, stdout=log, stderr=log, cwd=tmp_path)
    yield
    # Asked to end, it has taken longer than a minute. Nothing more is wanted of it.
    worker.kill()
    worker.wait()
    print((tmp_path / "worker.log").read_text()[-3000:])


def test_a_docker_pool_runs_a_flow_in_its_own_container(stack, docker_worker):
    validate = stack.deployment("validate")
    taken = ("flow_id", "entrypoint", "path", "parameters", "parameter_openapi_schema", "pull_steps")
    variables = {"networks": [f"{PROJECT}_default"], "volumes": [f"{PROJECT}_runs:/runs", f"{PROJECT}_models:/models"]}
    body = {name: validate[name] for name in taken} | {"name": "validate-docker", "work_pool_name": "grpo-docker"}
    made = stack.api("/deployments/", body | {"job_variables": variables})
    run = stack.run(made["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    container = run["infrastructure_pid"].rpartition(":")[2]
    deadline = time.monotonic() + 120
    while container in (left := docker("ps", "--all", "--quiet", "--no-trunc")):
        assert time.monotonic() < deadline, left
        time.sleep(1)
