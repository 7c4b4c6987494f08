"""A decoding step of a Llama-shaped model in few kernels.

Decoding one token for a few dozen rows is mostly the cost of starting kernels. Here the projections of queries, keys and values
are one matrix product, those of the gated MLP another, the norm is one kernel, and Python walks no module tree. Qwen2, Qwen3,
Llama, Mistral and their like have this shape; the first step is compared with the model's own forward, and what is not equal is
not used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_tasks.policy.shared_prompt_attention import SharedPrompt, UnsupportedError

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of logits from the model's own, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; norms as (weight, epsilon)."""

    attention_norm: tuple[Tensor, float]
    qkv: tuple[Tensor, Tensor | None]
    out: nn.Linear
    mlp_norm: tuple[Tensor, float]
    gate_up: Tensor
    down: nn.Linear
    head_norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None
    """Of queries and keys (Qwen3)."""
    scale: float


class FusedDecoder:
    """Takes over the weights of `model`, a plain model whose projections nobody else uses; they become views of the fused ones,
    so what is written into the model later is seen here.

    Raises:
        UnsupportedError: the model has another shape.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        try:
            decoder = getattr(model, model.base_model_prefix)
            self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, _norm(decoder.norm)
            self._layers = [_layer(layer) for layer in decoder.layers]
        except AttributeError as error:
            raise UnsupportedError(str(error)) from error
        if config.hidden_act != "silu" or getattr(config, "final_logit_softcapping", None):
            raise UnsupportedError("another activation, or capped logits")
        self._head = model.get_output_embeddings()
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads

    def step(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, "N 1"], past: SharedPrompt) -> Float[Tensor, "N V"]:
        """Logits of the next token."""
        hidden = self._embed(tokens)
        cos, sin = self._rotary(hidden[:, None], positions)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            attended = past.attend(index, query, key, value, layer.scale).reshape(len(tokens), -1)
            hidden = hidden + functional.linear(attended, layer.out.weight, layer.out.bias)
            gate, up = functional.linear(_normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down.weight, layer.down.bias)
        logits: Tensor = self._head(_normed(hidden, self._norm))
        return logits

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, 1, D] and keys [N, K, 1, D], values [N, K, 1, D]."""
        rows, rotated = len(hidden), self._heads + self._key_heads
        split = functional.linear(_normed(hidden, layer.attention_norm), *layer.qkv).view(rows, rotated + self._key_heads, -1)
        both = split[:, :rotated]
        if layer.head_norms is not None:
            norms = zip(both.split([self._heads, self._key_heads], dim=1), layer.head_norms, strict=True)
            both = torch.cat([_normed(part, norm) for part, norm in norms], dim=1)
        left, right = both.chunk(2, dim=-1)
        both = both * cos + torch.cat([-right, left], dim=-1) * sin
        return both[:, : self._heads, None], both[:, self._heads :, None], split[:, rotated:, None]


def agrees(found: Float[Tensor, "N V"], wanted: Float[Tensor, "N V"]) -> bool:
    """Whether two ways of computing the same logits differ by rounding only."""
    limit = TOLERANCE.get(wanted.dtype, 0.0) * wanted.abs().max()
    return bool(((found - wanted).abs().max() <= limit).item())


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=_linear(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_without_bias(_fuse([mlp.gate_proj, mlp.up_proj])),
        down=_linear(mlp.down_proj),
        head_norms=norms,
        scale=float(attention.scaling),
    )


def _fuse(linears: list[nn.Module]) -> tuple[Tensor, Tensor | None]:
    parts = [_linear(linear) for linear in linears]
    fused = torch.cat([part.weight.detach() for part in parts])
    for part, rows in zip(parts, fused.split([len(part.weight) for part in parts]), strict=True):
        part.weight = nn.Parameter(rows, requires_grad=False)
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        raise UnsupportedError("some projections with a bias, some without")
    return fused, torch.cat(biases) if biases else None


def _without_bias(fused: tuple[Tensor, Tensor | None]) -> Tensor:
    if fused[1] is not None:
        raise UnsupportedError("an MLP with biases")
    return fused[0]


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise UnsupportedError(f"{type(module).__name__} instead of a linear layer")
    return module


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


def _normed(hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), norm[0], norm[1])
