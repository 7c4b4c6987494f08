"""The files for Slurm and for Ray over ssh: what they run and set exists, and a job near its time limit is queued again.

Slurm itself is not here: scripts take the place of `scontrol` and `srun`, and the batch script runs as Slurm would start it.
"""

import json
import os
import re
import signal
import subprocess
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from schemas.config.run import RunConfig
from tests.processes.waiting import until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SBATCH = DEPLOY / "slurm" / "grpo.sbatch"


def script(path, *lines):
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path):
    """Start the batch script as Slurm would, with `lines` for Python; ended by its pid."""
    started = []

    def run(*lines, restarts="0", nodes="1"):
        script(tmp_path / "scontrol", f'echo "$@" >> {tmp_path}/scontrol.txt')
        script(tmp_path / "srun", f'echo "${{SRUN_CPUS_PER_TASK:-none}}: $*" >> {tmp_path}/srun.txt')
        python = script(tmp_path / "python", f'echo "$@" > {tmp_path}/arguments.txt', *lines)
        slurm = {"SLURM_JOB_ID": "17", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "2"}
        slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": restarts, "GRPO_PYTHON": str(python)}
        environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        process = subprocess.Popen(
            ["bash", SBATCH, "config.yaml", "--set", "seed=3"], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_job_passes_arguments_and_exit_code_of_grpo_through(start, tmp_path):
    process = start("exit 3", restarts="1")
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "start number 2" in shown
    assert (tmp_path / "arguments.txt").read_text().split() == ["-m", "flows.cli", "run", "config.yaml", "--set", "seed=3"]
    assert not (tmp_path / "scontrol.txt").exists()


def test_ray_gets_the_cores_of_a_node_and_not_one(start, tmp_path):
    # A run waits for the nodes of its cluster, too.
    both = f"until [ $(grep -c start {tmp_path}/srun.txt) -ge 2 ]; do sleep 0.05; done"
    process = start(f'case "$*" in *flows.cli*) {both};; esac', nodes="2")
    process.communicate(timeout=60)
    assert process.returncode == 0
    steps = (tmp_path / "srun.txt").read_text().splitlines()
    assert sum("start" in step for step in steps) == 2
    assert all(step.startswith("2: ") for step in steps), steps
    assert "resources.cluster.num_nodes=2" in (tmp_path / "arguments.txt").read_text()


def test_a_job_near_its_limit_ends_and_is_queued_again(start, tmp_path):
    process = start(
        f"trap 'echo ended > {tmp_path}/ended.txt; exit 143' TERM", f"touch {tmp_path}/runs", "while :; do sleep 0.1; done"
    )
    until((tmp_path / "runs").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "ended.txt").exists()
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 17\n"
    for directive in ("--requeue", "--open-mode=append", "--signal=B:USR1@"):
        assert f"#SBATCH {directive}" in SBATCH.read_text(), directive


def test_every_setting_that_the_files_name_exists():
    named = set()
    for path in [SBATCH, *(DEPLOY / "ray").glob("*.yaml"), *(DEPLOY / "k8s").rglob("*.yaml")]:
        named |= set(re.findall(r"\b(resources\.cluster\.\w+|rollout\.vllm\.\w+)=", path.read_text()))
    assert named
    for name in named:
        model = RunConfig
        for part in name.split("."):
            assert part in model.model_fields, name
            model = model.model_fields[part].annotation


def test_ray_accepts_the_cluster_file():
    pytest.importorskip("ray", reason="ray is not installed")
    schema = json.loads(files("ray").joinpath("autoscaler/ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text()), schema)
