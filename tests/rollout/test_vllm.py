"""The vLLM engine on a real server (CPU build): the contract of the local engine, swaps, the probe, and who ends what."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import Served, serving
from schemas.config import RolloutConfig, VllmConfig
from schemas.errors import RolloutError
from schemas.paths import resolve

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = Path(os.environ.get("GRPO_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]
CONFIG = VllmConfig(python=str(PYTHON))


def served(rank=16):
    return Served(Path(resolve("embedded:base")), "float32", rank, cuda=False)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with serving(CONFIG, served(), tmp_path_factory.mktemp("vllm") / "log.txt") as found:
        yield found


def moved(policy, by):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return policy


@pytest.fixture
def engines(policy, tokenizer, address, tmp_path):
    remote = VllmEngine(policy, tokenizer, CONFIG, [address], adapters=tmp_path / "adapters", dtype="float32")
    remote.sync()
    yield {"local": LocalEngine(policy, tokenizer), "vllm": remote}
    remote.close()
    assert not list((tmp_path / "adapters").iterdir())


def sampling(temperature=None, **settings):
    return Sampling.of(RolloutConfig(**{"max_completion_length": 40, **settings}), temperature=temperature)


def test_log_probs_of_sampled_tokens_are_the_trainers(engines, policy, prompts):
    requests = [Request(prompt, completion_seed(1, index, k)) for index, prompt in enumerate(prompts) for k in range(4)]
    drawn = engines["vllm"].generate(requests, sampling(temperature=0.9))
    batch = token_batch(prompts, [c.token_ids for c in drawn], [i // 4 for i in range(16)], device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=0.9)
    given = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    torch.testing.assert_close(scores.logps[batch.completion_mask].detach(), given, rtol=0, atol=1e-4)
    assert len({tuple(completion.token_ids) for completion in drawn}) > 4
    assert [c.token_ids for c in engines["vllm"].generate(requests, sampling(temperature=0.9))] == [c.token_ids for c in drawn]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop": ["</reasoning>"]},
        {"stop": ["</reasoning>"], "include_stop_str_in_output": False},
        {"stop": ["+ 27"], "max_completion_length": 60},
        {"stop_token_ids": [30, 31, 32, 33, 34]},
        {"max_completion_length": 3},
    ],
    ids=str,
)
def test_both_engines_give_the_same_greedy_completions(engines, prompts, settings):
    requests = [Request(prompt, index) for index, prompt in enumerate(prompts)]
    ours, theirs = (engines[name].generate(requests, sampling(temperature=0.0, **settings)) for name in ("local", "vllm"))
    for one, other in zip(ours, theirs, strict=True):
        assert (other.token_ids, other.text, other.finish_reason) == (one.token_ids, one.text, one.finish_reason)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_fifty_swaps_leave_the_server_healthy_and_one_folder(engines, policy, address, tmp_path):
    engine, before = engines["vllm"], None
    for swap in range(50):
        moved(policy, 0.001)
        engine.sync()
        if swap == 9:
            before = server_memory(address)
    assert httpx.get(f"{address}/health").status_code == 200
    assert len(list((tmp_path / "adapters").iterdir())) == 1
    assert server_memory(address) < 1.1 * before
    models = {model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]}
    assert len([name for name in models if name.startswith("policy-")]) == 1


def server_memory(address):
    port = int(address.rpartition(":")[2])
    [server] = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
    process = psutil.Process(server)
    return sum(part.memory_info().rss for part in [process, *process.children(recursive=True)])


def test_a_server_with_another_policy_is_found_out(engines, policy, monkeypatch):
    engine = engines["vllm"]
    monkeypatch.setattr(engine, "_swap_adapter", lambda: None)
    moved(policy, 0.5)
    with pytest.raises(RolloutError, match="serves another policy than the trainer's"):
        engine.sync()


def test_without_an_environment_the_mend_is_named(tmp_path):
    with pytest.raises(RolloutError, match="make vllm"), serving(VllmConfig(python="nowhere"), served(), tmp_path / "log"):
        pass


STARTER = """
import sys, time
from pathlib import Path
from grpo_tasks.rollout.vllm_server import Served, serving
from schemas.config import VllmConfig
from schemas.paths import resolve
served = Served(Path(resolve("embedded:base")), "float32", None, False)
with serving(VllmConfig(python=sys.argv[1]), served, Path(sys.argv[2])) as address:
    print(address, flush=True)
    time.sleep(600)
"""


def test_a_server_whose_starter_is_killed_ends_with_everything_it_started(tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, PYTHON, tmp_path / "log.txt"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    address = starter.stdout.readline().strip()
    assert address, (tmp_path / "log.txt").read_text()[-2000:]
    family = psutil.Process(starter.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    time.sleep(0.1)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{address}/health", timeout=2)
