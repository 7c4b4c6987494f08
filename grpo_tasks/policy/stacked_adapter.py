"""Several adapters, each trained on the model that the one before was merged into, as one adapter of the first base.

    W + s1 B1 A1 + s2 B2 A2  =  W + [s1 B1, s2 B2] [A1; A2]          the rank is the sum of the ranks

The proof loads the stack with peft over the first base and compares it with the policy that was trained last: the last adapter
over the model that it was trained on. With several adapters the two differ by the rounding of the merges in between.
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

from grpo_tasks.content.model_files import saved_dtype
from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.change import KEPT, Distance, distance, kept, record_completions
from grpo_tasks.policy.load import load_errors, load_policy, load_tokenizer, order_modules
from grpo_tasks.policy.merge import MEAN_TOLERANCE
from schemas.config.model import ModelConfig
from schemas.errors import MergeError, ModelError
from schemas.paths import resolve
from schemas.results.model import PROOF_TOKENS, ModelRef, percent

WEIGHTS = "adapter_model.safetensors"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StackProof:
    """How base + stack agrees with the policy on completions of held-out prompts."""

    prompts: int
    kept: float
    """Share of what all trainings together changed that base + stack has."""
    stack: Distance
    """From the policy, as the next two: of base + stack, of the base alone, of the merged model that was published."""
    base: Distance
    merged: Distance


def stack_adapters(adapters: Sequence[Path], base: ModelRef, directory: Path) -> int:
    """Write one float32 adapter that equals LoRA `adapters` on top of each other into a new folder; returns its rank.

    The first of them was trained on `base`, whose name the stack records. ModelError where one cannot be read, or holds more than
    low-rank matrices.
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
    """A [R, in] and B [out, R]. An adapter that leaves the layer out has zeros there, so that all layers share R."""
    [shapes, *_] = [(given[layer + DOWN], given[layer + UP]) for given in weights if layer + DOWN in given]
    downs, ups = [], []
    for config, given in zip(configs, weights, strict=True):
        down = given.get(layer + DOWN, torch.zeros(config.r, shapes[0].shape[1]))
        up = given.get(layer + UP, torch.zeros(shapes[1].shape[0], config.r))
        downs.append(down.float())
        ups.append(up.float() * float(config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)))
    return {layer + DOWN: torch.cat(downs).contiguous(), layer + UP: torch.cat(ups, dim=1).contiguous()}


def prove_stack(adapter: Path, base: ModelRef, policy: ModelRef, merged: Path, prompts: list[list[dict[str, str]]]) -> StackProof:
    """Compare base + stack with the policy on held-out chats, in float32 on a CPU; the merged model has the chat template.

    MergeError where base + stack has less than 95 % of what training changed, or is not what was published.
    """
    config = ModelConfig(path=base.path, revision=base.revision)
    tokenizer = load_tokenizer(ModelRef(path=str(merged)))
    ids = [prompt_ids(tokenizer, list(chat)) for chat in prompts]
    model = load_policy(policy, config, device=_CPU, dtype="float32")
    said = record_completions(model, tokenizer, ids, PROOF_TOKENS)
    del model
    found = []
    for other in (base.model_copy(update={"adapter": adapter}), base, ModelRef(path=str(merged))):
        gc.collect()  # two models in float32 may be more than the memory holds
        found.append(distance(load_policy(other, config, device=_CPU, dtype="float32"), said))
    stack, alone, published = found
    proof = StackProof(len(prompts), kept(stack, alone), stack, alone, published)
    fix = "check that the base model is the one of the training, with the same revision"
    # float32 arithmetic alone is a large part of a change of a few millionths of a nat.
    if not (proof.kept >= KEPT or stack.mean <= min(MEAN_TOLERANCE["float32"], alone.mean / 2)):
        raise MergeError(
            f"base + adapter has {percent(proof.kept)} of what training changed (limit {percent(KEPT)}): it differs from the "
            f"policy by {stack.mean:.2g} nats per token on average, the base alone by {alone.mean:.2g}; nothing was written",
            place=base.path,
            fix=f"{fix}; if an earlier merge was rounded to bfloat16, use the complete model: grpo download MODEL DIR",
        )
    # Both stand on the same base. The merged model tells whether it is the base of the training.
    tolerance = MEAN_TOLERANCE[saved_dtype(merged) or "bfloat16"]
    if not published.mean <= tolerance:
        raise MergeError(
            f"base + adapter differs from the merged model by {published.mean:.2g} nats per token on average, rounding explains "
            f"at most {tolerance:g}; nothing was written",
            place=base.path,
            fix=fix,
        )
    return proof


def vllm_rank(rank: int) -> int:
    """The `--max-lora-rank` that vLLM needs for an adapter of this rank; the rank itself where vLLM has none so large."""
    return min((size for size in VLLM_RANKS if size >= rank), default=rank)
