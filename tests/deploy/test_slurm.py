"""The batch script in a real Slurm: two nodes train together, one dies, and the job, queued again, ends in the same adapter.

It needs Slurm and munge on this machine (Debian: `apt-get install --no-install-recommends slurm-wlm munge`). The test starts a
controller and three nodes of its own on 127.0.0.1, and needs neither their services nor their configuration.
"""

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from tests.ports import free_ports

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("node1", "node2", "node3")
LIMIT_S = 1800
STEPS = 60

# A node that does not answer is down after 15 s, and a job that was queued again starts 10 s later at the earliest.
CONFIG = """
ClusterName=grpo
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CryptoType=crypto/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=15
KillWait=5
"""

RUN = f"""
name: tiny
seed: 5
model: {{path: 'embedded:base', lora: {{r: 4, lora_alpha: 8}}}}
data:
  train: [{{path: 'embedded:arithmetic_train.jsonl'}}]
  eval: [{{path: 'embedded:arithmetic_eval.jsonl'}}]
  system_prompt: 'Reply with <reasoning>...</reasoning><answer>...</answer>.'
validation: {{max_prompt_length: 128}}
rollout: {{max_completion_length: 32}}
stages:
  - name: format
    rewards: [incremental_format, format]
    max_steps: {STEPS}
    num_generations: 4
    per_device_train_batch_size: 8
    learning_rate: 1.0e-3
    save_steps: 5
evaluation: {{max_prompts: 8, num_samples: 1}}
"""


class Slurm:
    """A controller and three nodes on this machine, in a folder of their own."""

    def __init__(self, folder):
        self.folder, self.started = folder, {}
        port, ray, *ports = free_ports(2 + len(NODES))
        host = socket.gethostname().split(".")[0]
        config = CONFIG.format(host=host, user=getpass.getuser(), folder=folder, port=port)
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={each} CPUs=1 State=UNKNOWN"
            for name, each in zip(NODES, ports, strict=True)
        ]
        (folder / "slurm.conf").write_text("\n".join([config, *lines, "PartitionName=all Nodes=ALL Default=YES State=UP", ""]))
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "GRPO_RAY_PORT": str(ray), "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own | {"GRPO_PYTHON": str(ROOT / ".venv" / "bin" / "python")}

    def up(self):
        files = {"key-file": "munge.key", "socket": "munge.sock", "log-file": "munged.log", "pid-file": "munged.pid"}
        files["seed-file"] = "munged.seed"
        self._start("munged", "--foreground", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        self.until((self.folder / "munge.sock").exists, 60)
        self._start("slurmctld", "-D", "-c")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name, key=name)
        self.until(lambda: self.ask("sinfo", "--noheader", "--format=%D %T") == f"{len(NODES)} idle", 120)

    def _start(self, program, *arguments, key=""):
        key = key or program
        with (self.folder / f"{key}.txt").open("w") as log:
            self.started[key] = subprocess.Popen([program, *arguments], env=self.environment, stdout=log, stderr=log)

    def until(self, condition, patience_s):
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def ask(self, *call):
        return subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, timeout=120).stdout.strip()

    def submit(self, folder, *options, settings=()):
        """Submit one run in `folder`; the number of its job."""
        folder.mkdir()
        (folder / "config.yaml").write_text(RUN)
        script = ROOT / "deploy" / "slurm" / "grpo.sbatch"
        call = ["sbatch", "--parsable", "--cpus-per-task=1", *options, script, "config.yaml", *settings]
        done = subprocess.run(call, env=self.environment, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip()

    def job(self, number):
        shown = self.ask("scontrol", "--oneliner", "show", "job", number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, number):
        """The job when it has ended for good."""
        ends = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
        self.until(lambda: self.job(number).get("JobState") in ends, LIMIT_S)
        return self.job(number)

    def lose(self, name):
        """Everything on a node ends at once, as when its power fails."""
        self.started[name].kill()
        self.started[name].wait()
        while found := self._processes(name):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=10)

    def _processes(self, name):
        """What jobs have started on a node, and Slurm's own processes above it."""
        marks = {"SLURMD_NODENAME": name, "SLURM_CONF": self.environment["SLURM_CONF"]}
        found = {}
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or not marks.items() <= process.environ().items():
                    continue
                above = [each for each in process.parents() if each.name().startswith("slurmstepd")]
                for each in (process, *above, *process.children(recursive=True)):
                    found[each.pid] = each
            except psutil.Error:
                continue  # it has ended meanwhile
        return list(found.values())

    def down(self):
        self.ask("scancel", "--user", getpass.getuser())
        for name in self.started.keys() & set(NODES):
            self.lose(name)
        for process in reversed(self.started.values()):
            process.terminate()
        for process in self.started.values():
            process.wait(timeout=60)


@pytest.fixture
def slurm(tmp_path):
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"Slurm is not complete here: no {', '.join(missing)}")
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "slurm").mkdir()
    cluster = Slurm(tmp_path / "slurm")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def stage_of(folder):
    return next(iter((folder / "runs" / "tiny" / "train_stage").glob("format-*")), None)


def journal(folder):
    return stage_of(folder) / "metrics.jsonl"


def updates(folder):
    """Updates in the journal of the stage."""
    return journal(folder).read_text().count("\n") if stage_of(folder) and journal(folder).exists() else 0


def adapter(folder):
    return sha256((stage_of(folder) / "final" / "adapter_model.safetensors").read_bytes()).hexdigest()


def test_a_job_whose_node_dies_ends_in_the_same_bytes(slurm, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # The batch script itself runs on the first node: with it, the driver and one half of the stage die.
    number = slurm.submit(killed, "--nodes=2")
    slurm.until(lambda: updates(killed) >= 7, LIMIT_S)
    victim = slurm.job(number)["BatchHost"]
    slurm.lose(victim)
    seen = updates(killed)
    assert 7 <= seen < STEPS
    job = slurm.wait(number)
    log = (killed / f"grpo-{number}.log").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log[-4000:]
    assert "start number 2" in log
    assert "resumed: from the checkpoint of update" in log
    assert [json.loads(line)["step"] for line in journal(killed).read_text().splitlines()] == list(range(1, STEPS + 1))
    assert slurm.ask("sinfo", "--noheader", "--format=%T", "--nodes", victim).startswith("down")

    number = slurm.submit(whole, "--nodes=1", settings=("--set", "resources.num_processes=2"))
    assert slurm.wait(number)["JobState"] == "COMPLETED", (whole / f"grpo-{number}.log").read_text()[-4000:]
    assert updates(whole) == updates(killed) == STEPS
    print(adapter(killed), "after", seen, "updates were seen; never killed:", adapter(whole))
    assert adapter(killed) == adapter(whole)
