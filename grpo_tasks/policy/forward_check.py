"""The model's own forward pass is the truth. Trainer and sampler take the fastest way that says the same on made-up rows:

    who       ways, the fastest first                                      chosen by
    trainer   packed, plain layout (logprobs.py)                           `_fitting_layout` in grpo/policies.py
    sampler   prompts shared and steps fused, shared; repeated; of equal   `_fitting_state` in rollout/local.py
              length only
    both      attention of packed rows: CPU, varlen, masked                `PackedAttention.attend`, by device and precision
              layers: lean where their class gives the same numbers        `use_lean_layers` (lean_layers.py), else peft's
              adapter: folded in float32, apart in 16 bits                 `stays_apart` (folded_adapter.py)

The truth is of one unpadded row at a time, with eager attention, without a cache, by the layers that transformers built, and with
whatever the model does after its head. A new adapter starts at zero and would hide its own faults, so for the check it gets
seeded weights, and its own back afterwards, to the bit.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PretrainedConfig

from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.lean_layers import published_class
from grpo_tasks.policy.sharded import shard_like
from schemas.errors import ModelError

TOLERANCE = 1e-3
"""Largest mean |difference| of a completion from the truth in float32: in nats, or as a share of the log-probabilities where
those are larger, as they are for made-up tokens. Other dtypes get 50 times that, or `ROUNDINGS`."""
LONGEST_WINDOW = 4096
"""The check has a row that is longer than the window of the attention, up to this window."""
LONGEST_COMPLETION = 64
"""A longer window is filled by the prompt: only completions pass through the head, which for long ones would take gigabytes."""
ADAPTER_SHARE = 0.2
"""Output of the check's adapter over that of an ordinary linear layer, which keeps the size of its input."""
SEEN = 4.0
"""The check's adapter moves the policy by so many tolerances at least: a copy without it must not pass for rounding. Where even a
large one does not, the tolerance is this share of what it does."""
ROUNDINGS = 3.0
"""A difference of so many roundings is none, in 16 bits. SmolLM2-135M in bfloat16 differs by 0.01 to 0.05 nats between two kinds
of attention of transformers itself, and by 0.2 under an adapter that moves it further than any training."""
_GROWTH = (1, 4, 16)
"""What the size of the check's adapter is multiplied with until it is seen."""


@dataclass(frozen=True, slots=True)
class CheckRows:
    """Two prompts with two completions each, of unequal lengths: what leaks from one row to the next, or from padding, shows."""

    prompts: list[list[int]]
    completions: list[list[int]]
    prompt_of: list[int]

    @classmethod
    def of(cls, model: CausalLM) -> "CheckRows":
        """Rows of made-up tokens; one is longer than the window of the model's attention."""
        causal = causal_model(model)
        config = causal.config.get_text_config()
        names = ("sliding_window", "attention_chunk_size", "attention_window_size")
        windows = [getattr(config, name, None) or 0 for name in names]
        beyond = max((window for window in windows if window <= LONGEST_WINDOW), default=0)
        in_prompt = 0 if beyond <= LONGEST_COMPLETION else beyond
        special = set(_special_ids(causal.config.to_dict()))
        head = causal.get_output_embeddings()
        words = min(len(causal.get_input_embeddings().weight), config.vocab_size, *(() if head is None else (len(head.weight),)))
        usual = [token for token in range(words) if token not in special]
        numbers = count(7, 31)

        def made_up(length: int) -> list[int]:
            return [usual[next(numbers) % len(usual)] for _ in range(length)]

        return cls(
            prompts=[made_up(length) for length in (7, 12 + in_prompt)],
            completions=[made_up(length) for length in (5, 3 + beyond - in_prompt, 4, 6)],
            prompt_of=[0, 0, 1, 1],
        )

    def by_prompt(self) -> "list[CheckRows]":
        """The rows of each prompt, which need no padding."""
        groups = [[row for row, prompt in enumerate(self.prompt_of) if prompt == number] for number in range(len(self.prompts))]
        return [
            CheckRows([self.prompts[number]], [self.completions[row] for row in rows], [0] * len(rows))
            for number, rows in enumerate(groups)
        ]


def _special_ids(config: Mapping[Any, Any]) -> Iterator[int]:
    # Of tokens with a meaning, such as a place for an image.
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_ids(value)
        elif str(name).endswith("_token_id"):
            yield from [value] if isinstance(value, int) else value or []


@dataclass(frozen=True, slots=True)
class ForwardScores:
    """Log-probabilities and entropies (nats) of the tokens of each completion."""

    logps: list[Float[Tensor, " _"]]
    entropies: list[Float[Tensor, " _"]]

    @classmethod
    def of_logits(cls, logits: Sequence[Float[Tensor, "_ V"]], completions: Sequence[Sequence[int]]) -> "ForwardScores":
        """Of logits for each token of each completion."""
        logps, entropies = [], []
        for each, tokens in zip(logits, completions, strict=True):
            logp = each.float().log_softmax(-1)
            logps.append(logp.gather(-1, torch.tensor(tokens, device=logp.device)[:, None])[:, 0])
            entropies.append(torch.special.entr(logp.exp()).sum(-1))
        return cls(logps, entropies)

    def difference(self, truth: "ForwardScores") -> float:
        """The largest mean |difference| of a completion, in nats or as a share of the truth's size; nan where there are nans."""
        worst = 0.0
        for found, wanted in ((self.logps, truth.logps), (self.entropies, truth.entropies)):
            size = max(1.0, torch.cat(wanted).abs().mean().item())
            for mine, true in zip(found, wanted, strict=True):
                off = (mine - true).abs().mean().item() / size
                worst = off if not off <= worst else worst
        return worst


@dataclass(frozen=True, slots=True)
class Leeway:
    """What the check's adapter does, and what may pass for rounding."""

    shift: float
    """How far the adapter moves the policy; 0 without one, inf in float32, where nothing has to be tried."""
    limit: float
    """Largest difference from the truth that rounding explains."""

    @classmethod
    def of(cls, dtype: str, *, shift: float, rounding: float) -> "Leeway":
        """With what rounding does to the truth."""
        usual = min(_tolerance(dtype), shift / SEEN or math.inf)
        return cls(shift, max(usual, min(ROUNDINGS * rounding, shift / 2 or math.inf)))

    def fault(self, difference: float) -> str | None:
        """What is wrong with numbers that differ so much from the truth; None if rounding explains it."""
        if math.isnan(difference):
            # `no_mask` is nan (attention/shared_prompt.py).
            return "one of its layers does not pass the prompt on"
        if difference <= self.limit:
            return None
        return f"off by {difference:.2g} nats from transformers' own forward pass"


def _tolerance(dtype: str) -> float:
    return TOLERANCE * (1 if dtype == "float32" else 50)


@torch.no_grad()
def true_scores(model: CausalLM, rows: CheckRows, *, temperature: float = 1.0) -> ForwardScores:
    """What transformers' own forward pass says, with the active adapter; ModelError where it fails."""
    report(Progress("comparing with the forward pass of transformers"))
    # The layers that transformers and peft built, in eval mode, with eager attention where the model has some.
    causal, was_training = causal_model(model), model.training
    changed = [(module, module.__class__) for module in model.modules() if published_class(module) is not module.__class__]
    with attention(causal.config, "eager") if causal._can_set_attn_implementation() else nullcontext():
        model.eval()
        for module, _ in changed:
            module.__class__ = published_class(module)
        try:
            pairs = zip(rows.prompt_of, rows.completions, strict=True)
            logits = [_true_logits(model, rows.prompts[prompt], completion) for prompt, completion in pairs]
        finally:
            for module, lean in changed:
                module.__class__ = lean
            model.train(was_training)
    return ForwardScores.of_logits([each / temperature for each in logits], rows.completions)


def _true_logits(model: CausalLM, prompt: list[int], completion: list[int]) -> Float[Tensor, "_ V"]:
    # After the prompt's last token, and after all of the completion's tokens but the last.
    ids = torch.tensor([prompt + completion], device=model.device)
    # For models that cannot, the logits of all tokens are computed; the last ones are the same.
    keeps = "logits_to_keep" in inspect.signature(causal_model(model).forward).parameters
    try:
        out = model(input_ids=ids, use_cache=False, **({"logits_to_keep": len(completion) + 1} if keeps else {}))
    except Exception as error:  # a model that needs more than text, or an adapter that does not fit a layer
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"transformers' own forward pass of {type(causal_model(model)).__name__} fails on {ids.shape[1]} tokens of "
            f"text: {type(error).__name__}: {str(error)[:200]}",
            place="model.path, model.lora.target_modules",
            fix="name the layers of the adapter one by one, or another model",
        ) from error
    logits: Tensor = out.logits[0, -len(completion) - 1 : -1]
    return logits


@contextmanager
def attention(config: PretrainedConfig, name: str | None = None) -> Iterator[None]:
    """Restores the attention of a config and its parts at the end; with a name, another one is used until then."""
    parts = [config, *(part for key in config.sub_configs if (part := getattr(config, key, None)) is not None)]
    before = [part._attn_implementation_internal for part in parts]
    try:
        if name is not None:
            config._attn_implementation = name
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part._attn_implementation_internal = value


@contextmanager
def shaken_adapter(model: CausalLM, rows: CheckRows, dtype: str, *, temperature: float = 1.0) -> Iterator[Leeway]:
    """Gives the active adapter seeded weights for a while, and yields what they do to the policy on these rows.

    In 16 bits they are as large as it takes to tell the adapter from rounding. Random weights hardly prefer any token: they move
    little whatever the size, and under a large adapter rounding becomes noise, on an H100 with 28 layers a third of the shift.
    """
    seconds: list[tuple[Tensor, float]] = []
    """The matrix B of every active adapter, and the standard deviation that gives it the size `ADAPTER_SHARE`."""
    for layer in model.modules() if isinstance(model, PeftModel) else ():
        for name in layer.active_adapters if isinstance(layer, LoraLayer) else ():
            part: Any = layer.lora_B[name] if name in layer.lora_B else layer.lora_embedding_B.get(name)
            if part is not None:
                # Of x with mean square 1, A x has a mean square of about 1/3 as peft draws A, and B A x one of r std^2 / 3.
                std = ADAPTER_SHARE / (layer.scaling[name] * (layer.r[name] / 3) ** 0.5)
                seconds.append((part if isinstance(part, Tensor) else part.weight, std))
    kept = [(weight, weight.detach().clone()) for weight, _ in seconds]
    try:
        if dtype == "float32":
            _shake(seconds, 1)
            yield Leeway.of(dtype, shift=math.inf if kept else 0.0, rounding=0.0)
            return
        with model.disable_adapter() if isinstance(model, PeftModel) else nullcontext():
            base = true_scores(model, rows, temperature=temperature)
            rounding = _rounding(model, rows, dtype, base, temperature)
        chosen, leeway = 1, Leeway.of(dtype, shift=0.0, rounding=rounding)
        for times in _GROWTH if kept else ():
            _shake(seconds, times)
            truth = true_scores(model, rows, temperature=temperature)
            now = max(rounding, _rounding(model, rows, dtype, truth, temperature))
            found = Leeway.of(dtype, shift=truth.difference(base), rounding=now)
            if found.shift / found.limit > leeway.shift / leeway.limit:
                chosen, leeway = times, found
            if found.shift >= max(SEEN * _tolerance(dtype), ROUNDINGS * found.limit):
                break
        _shake(seconds, chosen)
        yield leeway
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


def _rounding(model: CausalLM, rows: CheckRows, dtype: str, truth: ForwardScores, temperature: float) -> float:
    """How far the truth moves when the last bit of the embeddings changes: as far as other orders of its sums move it."""
    half_a_bit, signs = torch.finfo(getattr(torch, dtype)).eps / 2, torch.Generator().manual_seed(0)

    def nudge(_: object, __: object, out: Tensor) -> Tensor:
        up = torch.randint(2, out.shape, generator=signs).to(out.device) * 2 - 1
        return (out.float() * (1 + half_a_bit * up)).to(out.dtype)

    nudged = causal_model(model).get_input_embeddings().register_forward_hook(nudge)
    try:
        return max(true_scores(model, rows, temperature=temperature).difference(truth) for _ in range(2))
    finally:
        nudged.remove()


@torch.no_grad()
def _shake(seconds: Sequence[tuple[Tensor, float]], times: int) -> None:
    # The same random numbers at each call.
    for number, (weight, std) in enumerate(seconds):
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * (times * std)
        weight.copy_(shard_like(values.to(weight.dtype).to(weight.device), weight))
