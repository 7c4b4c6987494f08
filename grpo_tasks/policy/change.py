"""How much of what training changed is left in another form of the policy: merged, rounded, loaded again, exported.

    kept = 1 - distance(form) / distance(base)      distance = sqrt(mean KL(policy || other)) over the positions of its texts

A fixed tolerance cannot tell: a careful training moves a log-probability by less than rounding a large model does. The KL
divergence sees both ways to lose, a change that rounding removed and noise that it added. For small differences it is the square
of a length (the Fisher metric; Amari 1998, doi:10.1162/089976698300017746), hence the root. `weight_shares` asks the same of each
weight, also of those that the texts did not reach.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_tasks.kit.progress import Count, Progress, report
from grpo_tasks.policy.batch import pad
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.load import generation_of
from schemas.results.model import Sampling

KEPT = 0.95
"""Smallest share of what training changed that a published form must keep."""
UNMEASURABLE = 1e-12
"""KL divergence (nats) up to which base and policy count as equal: float32 arithmetic alone makes a tenth of it."""
TOP = 256
"""Likeliest tokens at a position whose probabilities are compared one by one; all others are compared as one."""
SEED = 0
"""Of the sampled completions: the same proof has the same figures each time."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and a completion of the policy."""

    prompt: list[int]
    completion: list[int]
    greedy: bool


@dataclass(frozen=True, slots=True)
class Position:
    """What a model says at every position of a completion, in float64."""

    logps: Float[Tensor, "T K"]
    """Log-probabilities of the policy's likeliest tokens, the last column of all others together."""
    token_logps: Float[Tensor, " T"]
    best: Int[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The policy at every position of its texts; other models are compared with it."""

    texts: list[Text]
    top: list[Tensor]
    """Its likeliest tokens [T, K]."""
    said: list[Position]
    largest: float
    """Largest absolute value that a layer took or gave."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of a model from the policy, over all positions."""

    kl: float
    """Mean KL(policy || model), nats."""
    mean: float
    """Mean absolute difference (nats) of the log-probability of a token of the completions."""
    max: float
    agreement: float
    """Share of the tokens of greedy completions before the first one that is not the model's likeliest."""


def kept(form: Distance, base: Distance) -> float:
    """Share of the distance between base and policy that a form has gone; 1 where training changed nothing measurable."""
    if base.kl <= UNMEASURABLE:
        return 1.0
    return 1.0 - (max(0.0, form.kl) / base.kl) ** 0.5


@torch.no_grad()
def complete(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    greedy: bool,
    sampling: Sampling | None = None,
) -> list[Text]:
    """One completion of each prompt by transformers' generate, as `sampling` or else the model's own config says."""
    # [N, S], padded on the left: generate() continues every row at the last column.
    ids, mask = pad(list(prompts), left=True)
    config = model.generation_config if sampling is None else generation_of(model, tokenizer, sampling)
    ends = frozenset(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id])
    # Given to generate() instead, what the config leaves open would come from the model's own.
    causal = causal_model(model)
    own, causal.generation_config = causal.generation_config, config
    report(Progress("generating completions", total=len(prompts), unit="completions"))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.long().to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=not greedy,
                pad_token_id=tokenizer.pad_token_id,
            )
    finally:
        causal.generation_config = own
    texts, ends = [], ends | {tokenizer.pad_token_id}
    for prompt, row in zip(prompts, out[:, ids.shape[1] :].tolist(), strict=True):  # [N, S + T] -> [N, T]
        # Rows that end early are filled with padding.
        length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        texts.append(Text(prompt, row[:length], greedy))
    return texts


def record_completions(
    policy: CausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int
) -> PolicyRecord:
    """The policy's completions of the prompts, greedy and sampled, and what it says at every position of them."""
    texts = [
        text
        for greedy in (True, False)
        for text in complete(policy, tokenizer, prompts, max_new_tokens, greedy=greedy, sampling=Sampling())
    ]
    top, said, count = [], [], Count("reading the policy", len(texts), "completions")
    with _largest_value(policy) as largest:
        for text in texts:
            logps = _logps(policy, text)
            # One token less than there are, so that "all others" is never empty.
            top.append(logps.topk(min(TOP, logps.shape[1] - 1)).indices)
            said.append(_position(logps, text, top[-1]))
            count.add(tokens=len(text.completion))
    return PolicyRecord(texts, top, said, largest[0])


def distance(model: CausalLM, of: PolicyRecord) -> Distance:
    """From a model to the policy of the record."""
    found, count = list[Position](), Count("comparing the models", len(of.texts), "completions")
    for text, top in zip(of.texts, of.top, strict=True):
        found.append(_position(_logps(model, text), text, top))
        count.add()
    pairs = list(zip(of.said, found, strict=True))
    kl = torch.cat([(ours.logps.exp() * (ours.logps - theirs.logps)).sum(1) for ours, theirs in pairs])
    moved = torch.cat([(ours.token_logps - theirs.token_logps).abs() for ours, theirs in pairs])
    same = total = 0
    for text, (ours, theirs) in zip(of.texts, pairs, strict=True):
        if text.greedy:
            # After the first other token a model continues another text.
            same += int((ours.best == theirs.best).long().cumprod(0).sum())
            total += len(text.completion)
    return Distance(kl.mean().item(), moved.mean().item(), moved.max().item(), same / max(1, total))


@torch.no_grad()
def _logps(model: CausalLM, text: Text) -> Float[Tensor, "T V"]:
    """Log-probabilities at every position of the completion, by the model's own forward pass."""
    ids = torch.tensor([text.prompt + text.completion], device=model.device)
    length = len(text.completion)
    # Of a long prompt the logits would be the largest tensor of the merge.
    fits = "logits_to_keep" in inspect.signature(causal_model(model).forward).parameters
    logits: Tensor = model(input_ids=ids, **({"logits_to_keep": length + 1} if fits else {})).logits
    # float64: differences of a careful training are as small as the rounding of a softmax in float32.
    return logits[0, -length - 1 : -1].double().log_softmax(-1)


def _position(logps: Float[Tensor, "T V"], text: Text, top: Int[Tensor, "T K"]) -> Position:
    tokens = torch.tensor(text.completion, device=logps.device)
    others = logps.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return Position(torch.cat([logps.gather(1, top), others], dim=1), logps.gather(1, tokens[:, None])[:, 0], logps.argmax(1))


@contextmanager
def _largest_value(model: nn.Module) -> Iterator[list[float]]:
    """A list of one number: the largest absolute value that goes into or comes out of a layer inside the block."""
    largest = [0.0]

    def look(_: nn.Module, given: object, out: object) -> None:
        for values in (given, out):
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    largest[0] = max(largest[0], value.abs().max().item())

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class Shares:
    """Share of the change of the weights that a precision keeps: of all together, and of each by its name."""

    total: float
    each: dict[str, float]


@torch.no_grad()
def weight_shares(policy: CausalLM, base: nn.Module | None, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, Shares]:
    """Share of the change of the weights that is left after rounding.

    A weight W was to become W + D, and becomes W + E. Its share is <E, D> / <D, D>, the part of E in the direction of D: rounding
    noise has no direction and does not count. A share of 1.1 is as wrong as one of 0.9, and counts as that. `base` is what a
    model trained in full started from, None for base + adapter; both are in float32.
    """
    sums = {dtype: dict[str, tuple[float, float]]() for dtype in dtypes}
    for name, weight, change in changes(policy, base):
        wanted = _dot(change, change)
        for dtype in dtypes if wanted else ():
            became = (weight + change).to(dtype).float() - weight
            sums[dtype][name] = (_dot(became, change), wanted)
    return {
        dtype: Shares(_share(list(found.values())), {name: _share([pair]) for name, pair in found.items()})
        for dtype, found in sums.items()
    }


def _dot(one: Tensor, other: Tensor) -> float:
    return (one * other).sum(dtype=torch.float64).item()


def _share(pairs: Sequence[tuple[float, float]]) -> float:
    wanted = sum(pair[1] for pair in pairs)
    return 1.0 - abs(1.0 - sum(pair[0] for pair in pairs) / wanted) if wanted else 1.0


@torch.no_grad()
def changes(policy: CausalLM, base: nn.Module | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, weight of the base and change of each trained weight, one at a time: together they are as large as the model."""
    if base is not None:
        started = dict(base.named_parameters())
        for name, weight in policy.named_parameters():
            if name in started and started[name].shape == weight.shape:
                yield name, started[name], weight - started[name]
    elif isinstance(policy, PeftModel):
        for name, module in policy.get_base_model().named_modules():
            layer: Any = module
            if isinstance(module, TrainableTokensWrapper):
                for adapter in layer.token_adapter.active_adapters:
                    rows = layer.original_module.weight[layer.token_adapter.token_indices[adapter]]
                    yield f"rows of {name}", rows, layer.token_adapter.trainable_tokens_delta[adapter] - rows
            elif isinstance(module, BaseTunerLayer) and hasattr(module, "get_delta_weight"):
                weight = layer.get_base_layer().weight
                change = sum((layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters), torch.zeros(()))
                yield f"{name}.weight", weight, change.expand_as(weight)
