"""Several adapters, each trained on the model that the one before was merged into, as one adapter of the first base.

    W + s1 B1 A1 + s2 B2 A2  =  W + [s1 B1, s2 B2] [A1; A2]          the rank is the sum of the ranks

The scales are folded into B, so the stack has scale 1. The proof loads the stack with peft over the base and compares it with the
merged model.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.config import PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_tasks.policy.load import load_errors, load_policy, load_tokenizer, order_modules
from grpo_tasks.policy.merge import MEAN_TOLERANCE, greedy_completions, logprob_difference
from schemas.config.model import ModelConfig
from schemas.errors import MergeError, ModelError
from schemas.paths import resolve
from schemas.results.model import PROOF_TOKENS, MergeSpec, ModelRef

WEIGHTS = "adapter_model.safetensors"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""
NOISE = 1.1
"""How many times as far from the merged model as the base alone the adapter may be where rounding hides what it learned."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StackProof:
    """How well base + stack agrees with the merged model on greedy completions of held-out prompts."""

    prompts: int
    mean_difference: float
    """Mean absolute difference (nats) of a token's log-probability."""
    base_difference: float
    """The same of the base without the adapter, for comparison."""
    tolerance: float
    """Largest mean difference (nats) that is allowed: the merged model is rounded once for each adapter."""


def stack_adapters(adapters: Sequence[Path], base: ModelRef, directory: Path) -> int:
    """Write one adapter that equals `adapters` on top of each other.

    Args:
        adapters: folders of LoRA adapters, the first one trained on `base`.
        base: the model that the stack belongs to; its name is recorded in the adapter.
        directory: a new folder; gets adapter_config.json and adapter_model.safetensors in float32.

    Returns:
        The rank of the stack.

    Raises:
        ModelError: an adapter cannot be read, or holds more than low-rank matrices.
    """
    configs = [_config(folder) for folder in adapters]
    weights: list[dict[str, Tensor]] = []
    for folder in adapters:
        with load_errors("the adapter", str(folder)):
            weights.append(load_file(folder / WEIGHTS))
    layers = sorted({name.removesuffix(DOWN) for given in weights for name in given if name.endswith(DOWN)})
    stacked = {name: tensor for layer in layers for name, tensor in _stack_layer(layer, configs, weights).items()}
    rank = sum(config.r for config in configs)
    directory.mkdir(parents=True)
    save_file(stacked, directory / WEIGHTS, metadata={"format": "pt"})
    made = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank,
        target_modules=sorted({layer.rpartition(".")[2] for layer in layers}),
        base_model_name_or_path=resolve(base.path),
        revision=base.revision,
        inference_mode=True,
    )
    made.save_pretrained(str(directory))
    order_modules(directory / "adapter_config.json")
    return rank


def _config(folder: Path) -> LoraConfig:
    with load_errors("the adapter", str(folder)):
        config = PeftConfig.from_pretrained(str(folder))
    plain = isinstance(config, LoraConfig) and config.bias == "none" and not config.use_dora
    if not plain or config.rank_pattern or config.alpha_pattern or config.modules_to_save or config.trainable_token_indices:
        raise ModelError(
            "the adapter holds more than low-rank matrices of one rank, and vLLM loads no such adapter",
            place=str(folder),
            fix="serve the merged model: grpo download MODEL DIR",
        )
    return config


def _stack_layer(layer: str, configs: Sequence[LoraConfig], weights: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A [R, in] and B [out, R] of a layer. An adapter that leaves the layer out has zeros there, so that all layers share R."""
    [shapes, *_] = [(given[layer + DOWN], given[layer + UP]) for given in weights if layer + DOWN in given]
    downs, ups = [], []
    for config, given in zip(configs, weights, strict=True):
        down = given.get(layer + DOWN, torch.zeros(config.r, shapes[0].shape[1]))
        up = given.get(layer + UP, torch.zeros(shapes[1].shape[0], config.r))
        downs.append(down.float())
        ups.append(up.float() * _scale(config))
    return {layer + DOWN: torch.cat(downs).contiguous(), layer + UP: torch.cat(ups, dim=1).contiguous()}


def _scale(config: LoraConfig) -> float:
    return float(config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r))


def prove_stack(
    adapter: Path, base: ModelRef, merged: Path, prompts: list[list[dict[str, str]]], *, dtype: str, merges: int
) -> StackProof:
    """Compare base + adapter, loaded by peft, with the merged model in float32 on a CPU.

    Args:
        adapter: folder of the stack.
        base: the original base weights.
        merged: folder of the merged model.
        prompts: held-out chats.
        dtype: precision that the merged model was saved in.
        merges: how many adapters were merged one after the other, each with one rounding to `dtype`.

    Raises:
        MergeError: the two differ by more than rounding explains.
        ModelError: the base or the merged model cannot be loaded.
    """
    ref, config = ModelRef(path=str(merged)), ModelConfig(path=base.path, revision=base.revision)
    spec = MergeSpec(model=config, ref=ref, prompts=prompts, max_new_tokens=PROOF_TOKENS)
    model = load_policy(ref, config, device=_CPU, dtype="float32")
    reference = greedy_completions(model, load_tokenizer(ref), spec)
    del model
    gc.collect()  # two models in float32 may be more than the memory holds
    means = []
    for weights in (base.model_copy(update={"adapter": adapter}), base.model_copy(update={"adapter": None})):
        means.append(logprob_difference(load_policy(weights, config, device=_CPU, dtype="float32"), reference).mean().item())
        gc.collect()
    proof = StackProof(len(prompts), means[0], means[1], MEAN_TOLERANCE[dtype] * merges)
    if not proof.mean_difference <= proof.tolerance:
        raise MergeError(
            f"base + adapter differs from the merged model by {proof.mean_difference:.2g} nats per token on average, "
            f"rounding explains at most {proof.tolerance:.2g}; nothing was written",
            place=base.path,
            fix="check that the base model is the one of the training, with the same revision",
        )
    # After a short training the base alone is within the tolerance. Rounding never makes the right adapter worse than none.
    if proof.mean_difference > max(MEAN_TOLERANCE["float32"], NOISE * proof.base_difference):
        raise MergeError(
            f"base + adapter differs from the merged model by {proof.mean_difference:.2g} nats per token on average, and the "
            f"base alone by {proof.base_difference:.2g}; nothing was written",
            place=base.path,
            fix="check that the base model is the one of the training, with the same revision",
        )
    return proof


def vllm_rank(rank: int) -> int:
    """The `--max-lora-rank` that vLLM needs for an adapter of this rank; the rank itself where vLLM has none so large."""
    return min((size for size in VLLM_RANKS if size >= rank), default=rank)
