"""`python -m tests.benchmarks.count_waits`: how often the host would wait for a GPU to build a pass and to score it.

Microbatches are built, scored, differentiated and measured on the pretend card. A line of JSON is printed, {"file:line,
operation": times}. It is a process of its own, because the pretend card changes torch. Widths do not change what waits, so the
model is small.
"""

from tests.grpo.pretend_card import CARD, WAITS, card  # first: it names the device

# isort: split
import json

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_tasks.attention import packed_attention
from grpo_tasks.data.table import PromptRow
from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.groups import Rollout
from grpo_tasks.grpo.losses import LossInputs, policy_loss
from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.microbatches import Microbatch, make_microbatches
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.load import new_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Completion
from schemas.config.model import ModelConfig
from schemas.config.stage import StageConfig
from tests.attention.reference_kernel import REFERENCE

PROMPTS, GROUP = 2, 4
ROW = PromptRow("0" * 16, "rows.jsonl", 1, ({"role": "user", "content": "1+1?"},), "2", 1, {})


def microbatches() -> list[Microbatch]:
    """Two microbatches of two groups, with lengths that differ."""
    lengths = [5 + 3 * index for index in range(PROMPTS * GROUP)]
    completions = [Completion([7 + row, *[9] * (size - 1)], [-1.0] * size, "", "stop") for row, size in enumerate(lengths)]
    rollout = Rollout([ROW] * PROMPTS, [[1] * 12, [2] * 9], completions, GROUP, 0.0)
    values = torch.linspace(-1, 1, len(lengths))[:, None]
    return make_microbatches(
        rollout,
        Advantages(values, torch.ones(PROMPTS), torch.zeros(PROMPTS, dtype=torch.bool)),
        range(len(lengths)),
        StageConfig(name="s", rewards=["format"], num_generations=GROUP, per_device_train_batch_size=GROUP),
        max_completion_length=40,
        device=CARD,
        ranks=Ranks(Accelerator(cpu=True)),
    )


def main() -> None:
    """Print what waits."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    stage = StageConfig(name="s", rewards=["format"])
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda *_: REFERENCE
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").requires_grad_(False)
    with card():
        policy = new_policy(base.to(CARD), ModelConfig()).to(CARD).train()
        figures = UpdateFigures()
        WAITS.clear()
        for microbatch in microbatches():
            scores = completion_logprobs(policy, microbatch.tokens, temperature=1.0, count_hits=True)
            logps, trained = scores.logps, microbatch.trained
            inputs = LossInputs(logps, logps.detach(), None, microbatch.advantages, trained, microbatch.weights)
            out = policy_loss(inputs, stage)
            out.loss.backward()
            figures.add(inputs, out, scores.entropies, microbatch.sampler_policy_logps, None)
            figures.add_supervised(out.loss, trained, scores.entropies, scores.hits)
    print(json.dumps({f"{line}, {name}": times for (line, name), times in WAITS.items()}))


if __name__ == "__main__":
    main()
