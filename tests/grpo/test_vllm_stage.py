"""A stage whose completions come from a vLLM server that it starts and ends itself."""

import subprocess
import sys

import psutil
import pytest

from schemas.results import StageResult
from tests.grpo.conftest import journal
from tests.rollout.test_vllm import PYTHON

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]


def test_a_stage_trains_on_a_servers_completions_and_leaves_no_process(stages):
    rollout = {"engine": "vllm", "vllm": {"python": str(PYTHON)}}
    directory = stages.write(rollout=rollout, max_steps=4, learning_rate=1e-2, beta=0.01)
    command = [sys.executable, "-m", "grpo_tasks.grpo", directory.root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + (directory.root / "vllm.log").read_text()[-3000:]
    assert StageResult.load(directory.result).steps == 4
    for line in journal(directory):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["clip_ratio/region_mean"] == 0
    assert journal(directory)[-1]["kl"] > 0
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if "vllm.entrypoints" in " ".join(process.info["cmdline"] or [])
    ]
