"""Parts of an update against the plain way of doing them.

python -m tests.benchmarks.parts PART [SIDE]      prints one line of JSON
"""

import json
import resource
import statistics
import sys
import time

import torch
from torch import nn

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.policy.logprobs import score_tokens
from grpo_tasks.rollout.engine import Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef

PROMPTS, GROUP, LENGTH, ROUNDS = 8, 8, 64, 7
TOKENS, HIDDEN, VOCABULARY = 1024, 256, 151_936


def decode(adapter: bool) -> dict[str, float]:
    """Tokens per second: 64 completions of 64 tokens, ours against transformers' generate, turn by turn in one process.

    With `adapter` both start from the policy as it is trained; ours folds the adapter in, which is part of its time. Without,
    both decode the bare base model, so that the loop alone is compared.
    """
    device = pick_device(ResourcesConfig(device="cpu", num_threads=2))
    ref = ModelRef(path="embedded:base")
    policy = trainable_policy(ref, ModelConfig(), device=device, seed=1).eval()
    model, tokenizer = policy if adapter else policy.unload().eval(), load_tokenizer(ref)
    system = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}
    chats = [[system, {"role": "user", "content": f"What is {11 + index} + 27?"}] for index in range(PROMPTS)]
    prompts = [prompt_ids(tokenizer, chat) for chat in chats for _ in range(GROUP)]
    engine = LocalEngine(model, tokenizer)
    engine._end_ids = frozenset()
    sampling = Sampling.of(RolloutConfig(max_completion_length=LENGTH))
    requests = [Request(prompt, completion_seed("bench", index)) for index, prompt in enumerate(prompts)]
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")

    def ours() -> int:
        engine.sync()
        return sum(len(completion.token_ids) for completion in engine.generate(requests, sampling))

    def theirs() -> int:
        with torch.no_grad():
            out = model.generate(
                **batch, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        return out[:, batch["input_ids"].shape[1] :].numel()

    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(ROUNDS + 1):
        for name, side in (("ours", ours), ("theirs", theirs)):
            began = time.perf_counter()
            tokens = side()
            if turn:
                found[name].append(tokens / (time.perf_counter() - began))
    return {name: statistics.median(rates) for name, rates in found.items()}


def memory(side: str) -> dict[str, float]:
    """Peak memory in bytes that log-probs and entropies of sampled tokens take above the head's own, backward included."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    hidden, targets = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randint(0, VOCABULARY, (TOKENS,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "ours":
        logps, _ = score_tokens(head, hidden, targets, temperature=1.0)
    else:
        every = torch.log_softmax(head(hidden), dim=-1)
        logps = every.gather(-1, targets[:, None]).squeeze(-1)
        with torch.no_grad():
            -(every.exp() * every).sum(-1)
    logps.sum().backward()
    return {"bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, "check": hidden.grad.norm().item()}


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        print("\n" + json.dumps(memory(sys.argv[2])))
    else:
        print("\n" + json.dumps(decode(adapter=sys.argv[1] == "decode")))
