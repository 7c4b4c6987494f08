"""A decoding step of a Llama-shaped model with few kernel launches.

Decoding one token for a few dozen rows spends most of its time on launching kernels. Here the projections of queries, keys and
values are one matrix product, the two input projections of the gated MLP another, the norm is one kernel, and no Python code
walks a module tree. Qwen2, Qwen3, Llama and Mistral have this shape. The engine compares the first step with the model's own
forward pass, and uses the fused step only if they agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_tasks.attention.shared_prompt import SharedPrompt, UnsupportedError
from grpo_tasks.policy.folded_adapter import LowRankLinear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest allowed difference from the model's own logits, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; a norm is (weight, epsilon)."""

    attention_norm: tuple[Tensor, float]
    qkv: "_Stacked"
    out: "_Residual"
    mlp_norm: tuple[Tensor, float]
    gate_up: "_Stacked"
    down: "_Residual"
    head_norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None
    """Norms of each head's queries and keys (Qwen3)."""
    scale: float
    """Factor of the attention scores."""
    window: int | None


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Projections of one input as one product.

    Where an adapter stays apart, the rows of its A follow those of the weights: the product then gives A x as well.
    """

    weight: Float[Tensor, "rows in"]
    bias: Float[Tensor, " rows"] | None
    up: Float[Tensor, "r out"] | None
    """The adapters' scale * B, transposed, one block per projection."""

    def __call__(self, given: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        found = functional.linear(given, self.weight, self.bias)
        if self.up is None:
            return found
        size = self.up.shape[1]
        return torch.addmm(found[:, :size], found[:, size:], self.up)


@dataclass(frozen=True, slots=True)
class _Residual:
    """A projection whose output is added to its layer's input; views of the weights of `linear`, transposed."""

    linear: nn.Linear | LowRankLinear
    weight: Float[Tensor, "in out"]
    up: Float[Tensor, "r out"] | None

    @classmethod
    def of(cls, module: nn.Module) -> "_Residual":
        linear = _linear(module)
        return cls(linear, linear.weight.detach().t(), linear.up.detach().t() if isinstance(linear, LowRankLinear) else None)

    def __call__(self, hidden: Float[Tensor, "N out"], given: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        if self.linear.bias is not None:
            return hidden + self.linear(given)
        # Product and sum in one kernel.
        hidden = torch.addmm(hidden, given, self.weight)
        if self.up is None:
            return hidden
        return torch.addmm(hidden, functional.linear(given, self.linear.down), self.up)


class FusedDecoder:
    """Decodes with the weights of `model`, a plain model that is not being trained.

    The model's projection weights become views of the fused weights. So the weights exist only once, and later writes into the
    model, such as those of a `sync`, take effect here as well.

    Args:
        model: the model.
        windows: how many tokens a query of each layer sees, itself included; None for all.

    Raises:
        UnsupportedError: the model has another shape.
    """

    def __init__(self, model: PreTrainedModel, windows: Mapping[int, int | None]) -> None:
        config = model.config
        try:
            decoder = getattr(model, model.base_model_prefix)
            self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, _norm(decoder.norm)
            self._layers = [_layer(layer, windows[index]) for index, layer in enumerate(decoder.layers)]
        except AttributeError as error:
            raise UnsupportedError(str(error)) from error
        if config.hidden_act != "silu" or getattr(config, "final_logit_softcapping", None):
            raise UnsupportedError("an activation other than SiLU, or capped logits")
        self._head = model.get_output_embeddings()
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads

    def step(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, "N 1"], past: SharedPrompt) -> Float[Tensor, "N V"]:
        """Logits of the next token.

        Args:
            tokens: the last token of each row.
            positions: its position.
            past: attends to the prompt and the row's earlier tokens, and stores the new keys and values.
        """
        # [N, hidden size], without an axis for tokens: there is one token per row.
        hidden = self._embed(tokens)
        cos, sin = self._rotary(hidden[:, None], positions)
        # A sign at the left half here saves one at every layer; see `_project`.
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer_index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            attended = past.attend(layer_index, query, key, value, layer.scale, layer.window).reshape(len(tokens), -1)
            hidden = layer.out(hidden, attended)  # [N, H D] -> [N, hidden]
            # [N, hidden] -> [N, 2 x intermediate] in one product; down(silu(gate) * up) is the gated MLP (arXiv:2002.05202).
            gate, up = layer.gate_up(_normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = layer.down(hidden, functional.silu(gate) * up)
        logits: Tensor = self._head(_normed(hidden, self._norm))
        return logits

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, 1, D] and keys [N, K, 1, D], values [N, K, 1, D]."""
        # One product gives H query heads, K key heads and K value heads: [N, (H + 2 K) D] -> [N, H + 2 K, D].
        rows, rotated = len(hidden), self._heads + self._key_heads
        split = layer.qkv(_normed(hidden, layer.attention_norm)).view(rows, rotated + self._key_heads, -1)
        both = split[:, :rotated]  # queries and keys are rotated together, values are not
        if layer.head_norms is not None:
            norms = zip(both.split([self._heads, self._key_heads], dim=1), layer.head_norms, strict=True)
            both = torch.cat([_normed(heads, norm) for heads, norm in norms], dim=1)
        # Rotary embedding (arXiv:2104.09864, eq. 34) in the layout of transformers: dimension i is paired with i + D / 2, and the
        # sine of the left half has its sign already. cos and sin are [N, 1, D] and broadcast over the heads.
        left, right = both.chunk(2, dim=-1)
        both = torch.addcmul(both * cos, torch.cat([right, left], dim=-1), sin)
        return both[:, : self._heads, None], both[:, self._heads :, None], split[:, rotated:, None]


def agrees(found: Float[Tensor, "N V"], wanted: Float[Tensor, "N V"]) -> bool:
    """True if two computations of the same logits differ by rounding only."""
    limit = TOLERANCE.get(wanted.dtype, 0.0) * wanted.abs().max()
    return bool(((found - wanted).abs().max() <= limit).item())


def _layer(layer: Any, window: int | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=_Residual.of(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_without_bias(_fuse([mlp.gate_proj, mlp.up_proj])),
        down=_Residual.of(mlp.down_proj),
        head_norms=norms,
        scale=float(attention.scaling),
        window=window,
    )


def _fuse(linears: list[nn.Module]) -> _Stacked:
    """Stack the weights of projections of one input, and make the projections views of them where `sync` writes."""
    layers = [_linear(linear) for linear in linears]
    apart = [layer for layer in layers if isinstance(layer, LowRankLinear)]
    # Linear weights are [out, in], so stacking them along the first axis stacks the outputs.
    weights = [*(layer.weight.detach() for layer in layers), *(layer.down.detach() for layer in apart)]
    fused = torch.cat(weights)
    rows = fused.split([len(weight) for weight in weights])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(biases) not in (0, len(layers)):
        raise UnsupportedError("some projections have a bias and some have none")
    size, rank = sum(len(layer.weight) for layer in layers), sum(len(layer.down) for layer in apart)
    if biases and rank:
        biases.append(fused.new_zeros(rank))
    up = fused.new_zeros(size, rank)
    out = column = 0
    for layer, weight in zip(layers, rows[: len(layers)], strict=True):
        if isinstance(layer, LowRankLinear):
            # Its weight is the base's and never changes; A and B do.
            block = up[out : out + len(weight), column : column + len(layer.down)]
            block.copy_(layer.up)
            layer.up, layer.down = _frozen(block), _frozen(rows[len(layers) + apart.index(layer)])
            column += len(layer.down)
        else:
            layer.weight = _frozen(weight)
        out += len(weight)
    return _Stacked(fused, torch.cat(biases) if biases else None, up.t() if rank else None)


def _frozen(view: Tensor) -> nn.Parameter:
    return nn.Parameter(view, requires_grad=False)


def _without_bias(fused: _Stacked) -> _Stacked:
    if fused.bias is not None:
        raise UnsupportedError("the MLP has biases")
    return fused


def _linear(module: nn.Module) -> nn.Linear | LowRankLinear:
    if type(module) is not nn.Linear and not isinstance(module, LowRankLinear):
        raise UnsupportedError(f"{type(module).__name__} instead of a linear layer")
    return module


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


def _normed(hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), norm[0], norm[1])
