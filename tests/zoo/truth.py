"""What transformers and peft compute, without anything of this project: the truth of the zoo.

Every row passes through `model(input_ids=...)` alone: unpadded, without a cache, in float32, with eager attention where the model
has it. Whatever the model does behind its last hidden state is thereby done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Row = tuple[list[int], list[int]]
"""A prompt and a completion."""

ADAPTER_SPREAD = 0.1
"""Standard deviation of the adapter's B, which peft starts at zero: large enough to move every token by tenths of a nat."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probability and entropy (nats) of each token of a completion [T]."""

    logps: Tensor
    entropies: Tensor


def load(folder: Path, attention: str = "eager") -> PreTrainedModel:
    """The model of a folder in eval mode, without gradients; with its own attention where it has no other."""
    options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, **options)
    except ValueError:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    return model.eval().requires_grad_(False)


def adapted(model: PreTrainedModel, targets: Any, without: Any = None) -> PeftModel:
    """The model with an adapter on these layers, but some, that is not zero."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, exclude_modules=without)
    policy = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, ADAPTER_SPREAD)
    return policy.eval()


def score(model: Any, rows: Sequence[Row], temperature: float) -> list[Scores]:
    """Score the completion of every row, each in a pass of its own; with gradients where the model has some."""
    return [_score_one(model, prompt, completion, temperature) for prompt, completion in rows]


def _score_one(model: Any, prompt: list[int], completion: list[int], temperature: float) -> Scores:
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logps = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)  # [T, V]
    chosen = logps.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
    return Scores(chosen, -(logps.exp() * logps).sum(-1))


def short_of_greedy(model: Any, rows: Sequence[Row]) -> float:
    """The most nats by which a token of a completion is less likely than the likeliest one at its place."""
    worst = 0.0
    for prompt, completion in rows:
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
        worst = max(worst, (logits.max(-1).values - chosen).max().item())
    return worst


def gradient(model: PeftModel, rows: Sequence[Row], temperature: float, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradient of the weighted sum of all log-probabilities with respect to the adapter, by the names of its parameters."""
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    scores = score(model, rows, temperature)
    loss = torch.stack([(one.logps * weight).sum() for one, weight in zip(scores, weights, strict=True)]).sum()
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for parameter in trained.values():
        parameter.requires_grad_(False)
    # A layer that no token of text reaches, such as one of a vision tower, has none.
    return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}
