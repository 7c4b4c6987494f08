"""A stage whose completions come from a vLLM server that it starts and ends itself."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError
from schemas.prompts import GREEDY
from schemas.results.model import StageResult
from tests.forked import train_in_processes
from tests.grpo.conftest import journal
from tests.rollout.servers import PYTHON

pytestmark = [
    pytest.mark.xdist_group("heavy"),
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]

OWN = "GRPO_TEST_STAGE_OF"


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    monkeypatch.setenv(OWN, str(os.getpid()))


@pytest.mark.ci
def test_a_stage_trains_on_a_servers_completions_and_leaves_no_process(stages):
    directory = stages.write(rollout=rollout(sync="adapter"), max_steps=4, learning_rate=1e-2, beta=0.01)
    trained(directory)
    assert journal(directory)[-1]["kl"] > 0
    assert not vllm_processes()


def test_a_server_samples_tokens_that_were_added_from_their_trained_rows(stages):
    """The embeddings of the demo model are tied to its output layer, whose packed copy vLLM on a CPU would not reload."""
    model = {"added_tokens": ["<ask>", {"token": "<search>", "special": True}]}
    directory = stages.write(rollout=rollout() | {"temperature": 2.0}, max_steps=3, learning_rate=3e-2, model=model)
    result = trained(directory)
    assert not (directory.root / "served-base").exists()
    # A server evaluates the same model as the local engine.
    spec, tables = StageSpec.load(directory.spec), []
    for engine in ("local", "vllm"):
        sampled = SampleSpec(
            model=spec.model, ref=result.model, prompts=spec.train, max_prompts=4, num_samples=1, temperature=1.0, greedy=True,
            rollout=spec.rollout.model_copy(update={"engine": engine}), resources=spec.resources, seed=3,
        )  # fmt: skip
        tables.append(sample_table(sampled, directory.root).filter(sample=GREEDY))
    assert tables[0].equals(tables[1])
    assert not vllm_processes()


def test_trained_tied_embeddings_are_refused_for_a_cpu_server(policy, tokenizer, tmp_path):
    plain = policy.unload().requires_grad_(True)
    with pytest.raises(RolloutError, match="tied to the output layer"):
        VllmEngine(plain, tokenizer, VllmConfig(), [], weights=tmp_path, dtype="float32", merged=True)


def test_the_trainer_killed_leaves_no_server_and_no_socket(stages):
    """tests/processes/test_serve.py kills the supervisor too; here all that vLLM starts and leaves is to go."""
    directory = stages.write(rollout=rollout(sync="merged"), max_steps=200, save_steps=1, learning_rate=1e-2, beta=0.01)
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # tmp_path is too long for sockets
        command = [sys.executable, "-m", "grpo_tasks.grpo", directory.root]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": temporary})
        deadline = time.monotonic() + 300
        while not directory.journal.exists() or directory.journal.read_text().count("\n") < 4:
            assert process.poll() is None, (directory.root / "vllm.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert vllm_processes()
        family = psutil.Process(process.pid).children(recursive=True)
        assert any(path.is_socket() for path in Path(temporary).rglob("*"))
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert not vllm_processes()
        time.sleep(0.1)
        assert not any(path.is_socket() for path in Path(temporary).rglob("*"))
    assert_served(journal(directory))
    assert journal(directory)[-1]["kl"] > 0


def rollout(**settings):
    return {"engine": "vllm", "vllm": {"python": str(PYTHON), **settings}}


def trained(directory):
    train_in_processes(directory.root)
    result = StageResult.load(directory.result)
    lines = journal(directory)
    assert len(lines) == result.steps > 0
    assert_served(lines)
    return result


def assert_served(lines):
    """Each update was trained on completions of its own policy."""
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["clip_ratio/region_mean"] == 0


def vllm_processes():
    """The servers of these tests; others may run on this machine."""
    found = []
    for process in psutil.process_iter():
        try:
            if "vllm.entrypoints" in " ".join(process.cmdline()) and process.environ().get(OWN) == str(os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return found
