"""A stage whose completions come from a vLLM server that it starts and ends itself."""

import subprocess
import sys
import time

import psutil
import pytest

from grpo_tasks.rollout.vllm_engine import VllmEngine
from schemas.config import VllmConfig
from schemas.errors import RolloutError
from schemas.results import StageResult
from tests.grpo.conftest import journal
from tests.rollout.test_vllm import PYTHON

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]


@pytest.mark.parametrize("settings", [{"sync": "adapter"}, {"sync": "merged"}], ids=lambda settings: settings["sync"])
def test_a_stage_trains_on_a_servers_completions_and_leaves_no_process(stages, settings):
    directory = stages.write(rollout=rollout(**settings), max_steps=4, learning_rate=1e-2, beta=0.01)
    trained(directory)
    assert journal(directory)[-1]["kl"] > 0
    assert not vllm_processes()


def test_tied_embeddings_that_are_trained_are_refused_for_a_server_on_a_cpu(policy, tokenizer, tmp_path):
    plain = policy.unload().requires_grad_(True)
    with pytest.raises(RolloutError, match="also the output layer"):
        VllmEngine(plain, tokenizer, VllmConfig(), [], weights=tmp_path, dtype="float32", merged=True)


def test_the_trainer_killed_leaves_no_server(stages):
    directory = stages.write(rollout=rollout(), max_steps=200, save_steps=1)
    process = subprocess.Popen([sys.executable, "-m", "grpo_tasks.grpo", directory.root], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not directory.journal.exists() or directory.journal.read_text().count("\n") < 2:
        assert process.poll() is None, (directory.root / "vllm.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    servers = vllm_processes()
    assert servers
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert not alive


def rollout(**settings):
    return {"engine": "vllm", "vllm": {"python": str(PYTHON), **settings}}


def trained(directory):
    command = [sys.executable, "-m", "grpo_tasks.grpo", directory.root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + (directory.root / "vllm.log").read_text()[-3000:]
    result = StageResult.load(directory.result)
    lines = journal(directory)
    assert len(lines) == result.steps > 0
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["clip_ratio/region_mean"] == 0


def vllm_processes():
    return [
        process for process in psutil.process_iter(["cmdline"]) if "vllm.entrypoints" in " ".join(process.info["cmdline"] or [])
    ]
