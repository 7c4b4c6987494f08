"""One small update with what a learner does on the device: microbatches are built, scored, differentiated and measured."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.losses import LossInputs, policy_loss
from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.microbatches import Microbatches, make_microbatches
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Rollout
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import new_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Completion
from schemas.config.model import ModelConfig
from schemas.config.stage import StageConfig
from schemas.prompts import PromptRow

PROMPTS, GROUP = 2, 4
STAGE = StageConfig(name="s", rewards=["format"], num_generations=GROUP, per_device_train_batch_size=GROUP)
ROW = PromptRow("0" * 16, "rows.jsonl", 1, ({"role": "user", "content": "1+1?"},), "2", 1, {})


def microbatches(device: torch.device) -> Microbatches:
    """Two microbatches of two groups, with lengths that differ."""
    lengths = [5 + 3 * index for index in range(PROMPTS * GROUP)]
    completions = [Completion([7 + row, *[9] * (size - 1)], [-1.0] * size, "", "stop") for row, size in enumerate(lengths)]
    rollout = Rollout([ROW] * PROMPTS, [[1] * 12, [2] * 9], completions, GROUP, 0.0)
    values = torch.linspace(-1, 1, len(lengths))[:, None]
    return make_microbatches(
        rollout,
        Advantages(values, torch.ones(PROMPTS), torch.zeros(PROMPTS, dtype=torch.bool)),
        range(len(lengths)),
        STAGE,
        max_completion_length=40,
        device=device,
        ranks=Ranks(Accelerator(cpu=True)),
    )


def small_policy(device: torch.device, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A random Qwen2 of two layers with a new adapter."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False)
    return new_policy(base.to(device), ModelConfig(dtype=str(dtype).removeprefix("torch."))).to(device).train()


def score_all(policy: CausalLM) -> UpdateFigures:
    """Everything up to the gradients; the figures stay on the device."""
    figures = UpdateFigures()
    for microbatch in microbatches(policy.device):
        scores = completion_logprobs(policy, microbatch.tokens, temperature=1.0, count_hits=True)
        logps, trained = scores.logps, microbatch.trained
        inputs = LossInputs(logps, logps.detach(), None, microbatch.advantages, trained, microbatch.weights)
        out = policy_loss(inputs, STAGE)
        out.loss.backward()
        figures.add(inputs, out, scores.entropies, microbatch.sampler_policy_logps, None)
        assert scores.hits is not None
        figures.add_supervised(out.loss, trained, scores.entropies, scores.hits)
    return figures
