"""`python -m tests.benchmarks.engines`: tokens per second of the rollout engines on this machine's CPU, swap included.

64 completions of at most 64 tokens for 8 prompts of the demo; the vLLM servers come from .venv-vllm (make vllm).
"""

import statistics
import tempfile
import time
from pathlib import Path

from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.rollout.engine import Request, RolloutEngine, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import Served, serving
from schemas.config import ModelConfig, ResourcesConfig, RolloutConfig, VllmConfig
from schemas.paths import resolve
from schemas.results import ModelRef

ROUNDS, PROMPTS, GROUP, LENGTH = 5, 8, 8, 64


def main() -> None:
    """Measure in turns and print."""
    device, ref, config = pick_device(ResourcesConfig(device="cpu", num_threads=2)), ModelRef(path="embedded:base"), VllmConfig()
    policy, tokenizer = trainable_policy(ref, ModelConfig(), device=device, seed=1).eval(), load_tokenizer(ref)
    folder, model = Path(tempfile.mkdtemp()), Path(resolve(ref.path))
    with (
        serving(config, Served(model, "float32", 16, cuda=False), folder) as with_adapters,
        serving(config, Served(model, "float32", None, cuda=False), folder) as plain,
    ):
        engines: dict[str, RolloutEngine] = {"local": LocalEngine(policy, tokenizer)}
        for name, servers in (("vllm, adapter", with_adapters), ("vllm, merged", plain)):
            merged = servers is plain
            weights = folder / name.replace(", ", "-")
            engines[name] = VllmEngine(policy, tokenizer, config, servers, weights=weights, dtype="float32", merged=merged)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(ROUNDS + 1):
            for name, engine in engines.items():
                rate = _tokens_per_s(engine, tokenizer, turn)
                if turn:
                    rates[name].append(rate)
    for name, found in rates.items():
        print(f"{name:15} {statistics.median(found):8.0f} tokens/s")


def _tokens_per_s(engine, tokenizer, turn) -> float:
    system = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}
    chats = [[system, {"role": "user", "content": f"What is {11 + index} + 27?"}] for index in range(PROMPTS)]
    prompts = [prompt_ids(tokenizer, chat) for chat in chats for _ in range(GROUP)]
    requests = [Request(prompt, completion_seed("bench", turn, index)) for index, prompt in enumerate(prompts)]
    began = time.perf_counter()
    engine.sync()
    drawn = engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=LENGTH)))
    return sum(len(completion.token_ids) for completion in drawn) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
