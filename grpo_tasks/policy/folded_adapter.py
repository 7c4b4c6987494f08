"""A copy of the policy for sampling: decoding through an adapter takes 1.3 to 1.5 times as long.

    float32 base    one weight W + scale B A, computed afresh from the untouched base at each `sync`
    16-bit base     W as it is, next to it A and scale B, two small products more per layer

A 16-bit weight keeps 8 (bfloat16) or 11 bits: folded in, 95 % of a first update with a learning rate of 1e-5 would be rounded
away. Only a copy for others to load (`fold=True`) is folded whatever its precision. All weights that are not adapted are shared
with the trained model, and no base weight ever changes.
"""

import copy
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_tasks.kit.pinned import moved

CausalLM: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model, with or without an adapter on top."""


def causal_model(model: CausalLM) -> PreTrainedModel:
    """The model without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def decoder_of(model: CausalLM) -> nn.Module:
    """The layers below the language-model head, which return hidden states instead of the much larger logits."""
    causal = causal_model(model)
    decoder: nn.Module | None = getattr(causal, causal.base_model_prefix, None)
    if decoder is None:
        # The prefix of Llama 4 names no module of its text models.
        embeddings = causal.get_input_embeddings()
        decoder = next(child for child in causal.children() if any(part is embeddings for part in child.modules()))
    return decoder


def folded_weight(layer: LoraLinear) -> Float[Tensor, "out in"]:
    """W + scale * B A of an adapted layer (LoRA, arXiv:2106.09685, eq. 3), in float32."""
    # float32, so that a small B A is not lost before the sum is rounded once to the layer's precision.
    folded: Tensor = layer.base_layer.weight.float()
    for adapter in layer.active_adapters:
        folded = folded + layer.get_delta_weight(adapter).float()
    return folded


class LowRankLinear(nn.Module):
    """W x + bias + up (down x): an adapted layer whose low-rank term stays apart."""

    def __init__(self, layer: LoraLinear, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        rank = sum(layer.r[adapter] for adapter in layer.active_adapters)
        self.weight, self.bias = weight, bias
        self.transposed: bool = layer.fan_in_fan_out
        """The weight is [in, out], as that of GPT-2's Conv1D."""
        self.down = nn.Parameter(weight.new_empty(rank, layer.in_features), requires_grad=False)
        """A of the active adapters [r, in], one above the other."""
        self.up = nn.Parameter(weight.new_empty(layer.out_features, rank), requires_grad=False)
        """scale * B [out, r], side by side."""

    @torch.no_grad()
    def follow(self, layer: LoraLinear) -> None:
        """Take over the adapter's current weights."""
        # copy_ keeps the storage, so that views of it (fused_decoder.py) see the new weights.
        self.down.copy_(torch.cat([layer.lora_A[adapter].weight for adapter in layer.active_adapters]))
        ups = [layer.lora_B[adapter].weight.float() * layer.scaling[adapter] for adapter in layer.active_adapters]
        self.up.copy_(torch.cat(ups, dim=1))

    def forward(self, given: Float[Tensor, "*N in"]) -> Float[Tensor, "*N out"]:
        """The adapted layer."""
        low = functional.linear(given, self.down)
        weight = self.weight.t() if self.transposed else self.weight
        return functional.linear(given, weight, self.bias) + functional.linear(low, self.up)


class FoldedRows:
    """Keeps `weight` equal to the weight of an adapted layer, with its trained rows in their places."""

    def __init__(self, source: TrainableTokensWrapper) -> None:
        self._source = source
        self.weight = nn.Parameter(source.original_module.weight.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the trained rows; all others never change."""
        layer: Any = self._source.token_adapter
        for adapter in layer.active_adapters:
            rows: Tensor = layer.trainable_tokens_delta[adapter]
            # copy, not a new tensor: views of the weight see the new rows (fused_decoder.py).
            index = moved(torch.tensor(layer.token_indices[adapter]), self.weight.device)
            self.weight.index_copy_(0, index, rows.detach().to(self.weight))


def stays_apart(layer: LoraLinear) -> bool:
    """True if adding the adapter to the layer's weight would round much of it away."""
    weight: Tensor = layer.base_layer.weight
    return weight.dtype != torch.float32


class FoldedPolicy:
    """Holds `model`, a plain causal model that equals base + adapter as of the last `sync`; `fold` folds 16-bit weights too."""

    def __init__(self, policy: CausalLM, *, fold: bool = False) -> None:
        self._fold = fold
        self._pairs: list[tuple[LoraLinear, Any]] = []
        """Adapted layers and their counterparts in the copy."""
        self._rows: dict[int, FoldedRows] = {}
        """Weights with trained rows, by the id of the base weight; tied layers share one."""
        self.model: PreTrainedModel = policy
        if isinstance(policy, PeftModel):
            self.model = self._copy_without_adapter(policy.get_base_model())
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Recompute the weights of the adapted layers; `copy_` rounds them once to the copy's precision."""
        # copy_ keeps the storage, so that views of it (fused_decoder.py) see the new weights.
        for lora, plain in self._pairs:
            if isinstance(plain, LowRankLinear):
                plain.follow(lora)
            else:
                plain.weight.copy_(folded_weight(lora))
        for rows in self._rows.values():
            rows.sync()

    def _copy_without_adapter(self, base: PreTrainedModel) -> PreTrainedModel:
        # deepcopy takes every tensor in `memo` for already copied: the copy has modules of its own and shares all tensors.
        shared = {id(tensor): tensor for tensor in [*base.parameters(), *base.buffers()]}
        twin = copy.deepcopy(base, memo=shared)
        for name, module in list(twin.named_modules()):
            original: Any = base.get_submodule(name)
            if isinstance(module, TrainableTokensWrapper):
                # Where the output layer is tied to the embeddings, both have the same base weight.
                key = id(original.original_module.weight)
                if key not in self._rows:
                    self._rows[key] = FoldedRows(original)
                inner: Any = module.original_module
                inner.weight = self._rows[key].weight
                twin.set_submodule(name, inner)
            if not isinstance(module, LoraLinear):
                continue  # layers of other kinds stay as peft built them, and share their adapter
            layer: Any = original.base_layer
            if not self._fold and stays_apart(original):
                apart = LowRankLinear(original, layer.weight, layer.bias)
                twin.set_submodule(name, apart)
                self._pairs.append((original, apart))
                continue
            # A layer of the base's own class, which may compute W x in a way of its own. LoRA does not train biases, so they
            # are shared like all other weights.
            plain = copy.copy(layer)
            weight = nn.Parameter(torch.empty_like(layer.weight), requires_grad=False)
            plain._parameters = {**layer._parameters, "weight": weight}
            twin.set_submodule(name, plain)
            self._pairs.append((original, plain))
        return twin.eval()
