"""Installed from a wheel, or run from a checkout that nobody may write to: `grpo` works in an empty folder anywhere.

The wheel goes into a new environment that finds every other package in the environment of the tests, so nothing is downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.flows.place import ask
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "grpo_tasks", "schemas")
FEW_STEPS = {
    "stages.0.max_steps": 2,
    "stages.1.max_steps": 2,
    "stages.0.per_device_train_batch_size": 8,
    "stages.1.per_device_train_batch_size": 8,
    "evaluation.max_prompts": 8,
    "lab.num_prompts": 4,
    "resources.num_threads": 1,
}

pytestmark = [pytest.mark.xdist_group("wheel"), pytest.mark.timeout(900)]


@dataclass
class Installation:
    """A copy of the three packages with a `grpo` command."""

    command: list[str]
    packages: Path
    """Folder that holds flows, grpo_tasks and schemas."""
    folder: Path
    """An empty working directory."""

    def run(self, *arguments, expect=0):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "PYTHONPATH"))}
        own = {"PREFECT_HOME": str(self.folder / "prefect"), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*self.command, *arguments], cwd=self.folder, env=kept | own, capture_output=True, text=True, check=False
        )
        assert done.returncode == expect, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    def files(self):
        """Every file of the installation with its size and time of change."""
        found = [path for package in PACKAGES for path in (self.packages / package).rglob("*")]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found if path.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


def environment(folder, *first):
    """A new virtual environment without pip, whose packages are `first` and those of the present one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # A .pth file found through another .pth file is not read, so the editable installation of the tests stays out.
    present = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "present.pth").write_text("\n".join([*map(str, first), *present]))
    return folder / "bin" / "python", packages


@pytest.fixture(scope="module")
def installations(wheel, tmp_path_factory):
    """The wheel, installed; and a read-only copy of the checkout."""
    top = tmp_path_factory.mktemp("anywhere")
    python, packages = environment(top / "installed")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True, capture_output=True)
    checkout = top / "checkout"
    for name in (*PACKAGES, "deploy"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [checkout, *checkout.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    reader, _ = environment(top / "reader", checkout)
    yield {
        "wheel": ([str(python.parent / "grpo")], packages),
        "read-only checkout": ([str(reader), "-P", "-m", "flows.cli"], checkout),
    }
    for path in [checkout, *checkout.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)


KINDS = ["wheel", "read-only checkout"]


@pytest.fixture
def installation(request, installations, tmp_path):
    folder = tmp_path / "ein Ordner für mich"
    folder.mkdir()
    return Installation(*installations[request.param], folder)


def test_the_wheel_holds_every_file_that_a_command_may_read(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == set(PACKAGES)
    parts = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    read = {str(path.relative_to(ROOT)) for path in parts if "__pycache__" not in path.parts}
    assert "grpo_tasks/demo/base/model.safetensors" in read
    deploy = [ROOT / "deploy" / "prefect.yaml", *(ROOT / "deploy").glob("presets/*"), *(ROOT / "deploy").glob("work_pools/*")]
    assert len(deploy) > 8
    assert read | {f"schemas/{path.relative_to(ROOT)}" for path in deploy} <= files


def test_no_other_distribution_provides_one_of_the_packages():
    others = [other for other in distributions() if other.name != "grpo-pipeline"]
    assert [other.name for other in others for file in other.files or [] if file.parts[0] in PACKAGES] == []


@pytest.mark.parametrize("installation", KINDS, indirect=True)
def test_fields_presets_and_a_dry_run_work_in_an_empty_folder(installation):
    before = installation.files()
    python = installation.command[0].replace("bin/grpo", "bin/python")
    where = "import flows, schemas.paths as paths; print(flows.__file__); print(paths.DEPLOY)"
    found = subprocess.run([python, "-P", "-c", where], check=True, capture_output=True, text=True, cwd=installation.folder)
    assert all(line.startswith(str(installation.packages)) for line in found.stdout.splitlines())
    assert "stages[].learning_rate" in installation.run("fields")
    assert "custom-csv" in installation.run("presets")
    assert installation.run("presets", "demo") == (ROOT / "deploy" / "presets" / "demo.yaml").read_text()
    assert "nothing was run" in installation.run("run", "demo", "--dry-run")
    assert list(installation.folder.iterdir()) == []
    assert installation.files() == before


def test_deployments_are_written_to_a_named_file_where_there_is_no_checkout(installations, tmp_path):
    installation = Installation(*installations["wheel"], tmp_path)
    installation.run("deployments", expect=1)
    installation.run("deployments", "--out", "mine.yaml")
    assert (installation.folder / "mine.yaml").read_text() == (ROOT / "deploy" / "prefect.yaml").read_text()


@pytest.mark.long
@pytest.mark.parametrize("installation", KINDS, indirect=True)
def test_the_demo_runs_in_an_empty_folder(installation):
    before = installation.files()
    settings = [text for name, value in FEW_STEPS.items() for text in ("--set", f"{name}={value}")]
    assert "grpo-demo version 1" in installation.run("run", "demo", *settings)
    assert (installation.folder / "runs" / "grpo-demo").is_dir()
    assert installation.files() == before


@pytest.mark.long
@pytest.mark.parametrize("installation", KINDS, indirect=True)
def test_servers_start_in_an_empty_folder_and_their_worker_runs_a_deployment(installation):
    before = installation.files()
    prefect, mlflow = free_ports(2)
    try:
        started = installation.run("up", "--prefect-port", str(prefect), "--mlflow-port", str(mlflow))
        [api] = re.findall(r"Prefect UI +(\S+)", started)
        [found] = ask(f"{api}/api/deployments/filter", {"deployments": {"name": {"any_": ["validate"]}}})
        run = ask(f"{api}/api/deployments/{found['id']}/create_flow_run", {"parameters": found["parameters"]})
        while (state := ask(f"{api}/api/flow_runs/{run['id']}")["state"])["type"] not in ("COMPLETED", "FAILED", "CRASHED"):
            time.sleep(0.5)
        assert state["type"] == "COMPLETED", json.dumps(state)
        assert (installation.folder / "runs" / "grpo-demo" / "validate_data").is_dir()
    finally:
        stopped = installation.run("down")
    assert "Prefect server" in stopped
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{prefect}/api/health", timeout=5)
    assert installation.files() == before
