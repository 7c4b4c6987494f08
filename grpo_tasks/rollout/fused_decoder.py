"""A decoding step of a Llama-shaped model with few kernel launches.

Decoding one token for a few dozen rows spends most of its time on launching kernels. Here the projections of queries, keys and
values are one matrix product, the two input projections of the gated MLP another, the norm is one kernel, and no Python code
walks a module tree. Qwen2, Qwen3, Llama and Mistral have this shape.

On a CPU most of the time of a pretrained model goes into products of a few rows with large weights. In float32 these are
computed as W x^T, and the residual stream is a transposed [hidden size, N], which the products are added to in place. BLAS
multiplies x W^T of 4 to 64 rows more slowly (docs/benchmarks.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_tasks.attention.shared_prompt import UnsupportedError
from grpo_tasks.policy.folded_adapter import LowRankLinear
from grpo_tasks.policy.structure import angles_depend_on_length
from grpo_tasks.rollout.decoding_cache import DecodingCache, multiply_into

LARGE = 2**18
"""Weights of a matrix from which on W x^T is taken. The embedded model, whose matrices are smaller, decodes no faster with it."""


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
    """Projections of one input as one product; where an adapter stays apart, the rows of its A follow those of the weights."""

    weight: Float[Tensor, "rows in"]
    bias: Float[Tensor, " rows"] | None
    up: Float[Tensor, "r out"] | None
    """The adapters' scale * B, transposed, one block per projection."""

    def __call__(self, given: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        found = _product(given, self.weight, self.bias)
        if self.up is None:
            return found
        size = self.up.shape[1]
        return found[:, :size].addmm_(found[:, size:], self.up)


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

    def add(self, hidden: Float[Tensor, "N out"], given: Float[Tensor, "N in"]) -> None:
        """Add the projection of `given` to `hidden`, in place."""
        if self.linear.bias is not None:
            hidden += self.linear(given)
            return
        # Product and sum in one kernel.
        hidden.addmm_(given, self.weight)
        if self.up is not None:
            hidden.addmm_(functional.linear(given, self.linear.down), self.up)


class FusedDecoder:
    """Decodes with the weights of `model`, a plain model that is not being trained; UnsupportedError where it has another shape.

    Its projections become views of the fused weights, so later writes into them, such as those of a `sync`, take effect here as
    well. Where another model has the same weights, as the trained base has those of a copy, they exist twice from then on (`grpo
    plan` counts them). `windows` says how many tokens a query of each layer sees; None for all.
    """

    def __init__(self, model: PreTrainedModel, windows: Mapping[int, int | None]) -> None:
        config = model.config
        try:
            decoder = getattr(model, model.base_model_prefix)
            self.angles = torch.empty(0)
            """Of each position, [M, 2, D]: cosines and sines."""
            self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, _norm(decoder.norm)
            self._layers = [_layer(layer, windows[index]) for index, layer in enumerate(decoder.layers)]
        except AttributeError as error:
            raise UnsupportedError(str(error)) from error
        if config.hidden_act != "silu" or getattr(config, "final_logit_softcapping", None):
            raise UnsupportedError("an activation other than SiLU, or capped logits")
        self._head = model.get_output_embeddings()
        self._transposed = _weights_first(self._layers[0].gate_up.weight)
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        if angles_depend_on_length(model):
            raise UnsupportedError("rotary angles that depend on the length")
        self.reserve(1)
        depth = self.angles.shape[-1]
        if len(self._layers[0].qkv.weight) < (self._heads + 3 * self._key_heads) * depth:
            raise UnsupportedError("heads that are rotated in part")
        self._same = torch.eye(depth, dtype=self.angles.dtype, device=self.angles.device)
        # x @ turned = [-x_right, x_left] for x = [x_left, x_right].
        self._turned = self._same.roll(depth // 2, dims=1)
        self._turned[depth // 2 :].neg_()

    def reserve(self, positions: int) -> None:
        """Compute the angles of positions below `positions`, for the steps to come."""
        if len(self.angles) < positions:
            weight = self._head.weight
            every = torch.arange(positions, device=weight.device)[None]
            # [1, M, D] each -> [M, 2, D]; the argument gives the dtype.
            self.angles = torch.stack(self._rotary(weight[:1, None], every), dim=2)[0]

    def step(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, "N 1"], past: DecodingCache) -> Float[Tensor, "N V"]:
        """Logits after the last token of each row, whose keys and values are added to those that are there."""
        # [N, hidden size], without an axis for tokens: there is one token per row.
        hidden = self._embed(tokens)
        if self._transposed:
            hidden = hidden.t().contiguous().t()  # the same numbers, in memory as [hidden size, N]
        # The rotary embedding (arXiv:2104.09864, eq. 34) of each row's position, as a matrix [N, D, D] that heads are multiplied
        # by. It has the layout of transformers: dimension i is paired with i + D / 2.
        cos, sin = self.angles.index_select(0, positions[:, 0]).split(1, dim=1)  # [N, 1, D]
        rotation = torch.addcmul(self._same * cos, self._turned, sin)
        for layer_index, layer in enumerate(self._layers):
            query, both = self._project(layer, hidden, rotation)
            past.append(layer_index, both)
            attended = past.read(layer_index, query, layer.scale, layer.window).reshape(len(tokens), -1)
            layer.out.add(hidden, attended)  # [N, H D] -> [N, hidden]
            # [N, hidden] -> [N, 2 x intermediate] in one product; down(silu(gate) * up) is the gated MLP (arXiv:2002.05202).
            gate, up = layer.gate_up(_normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            layer.down.add(hidden, functional.silu(gate) * up)
        normed = _normed(hidden, self._norm)
        # Sampling reads the logits row by row, several times.
        plain = type(self._head) is nn.Linear
        logits: Tensor = _product(normed, self._head.weight, self._head.bias).contiguous() if plain else self._head(normed)
        return logits

    def _project(
        self, layer: _Layer, hidden: Float[Tensor, "N _"], rotation: Float[Tensor, "N D D"]
    ) -> tuple[Float[Tensor, "N H 1 D"], Float[Tensor, "N 2 K D"]]:
        """Rotated queries; rotated keys and values."""
        # One product gives room for K rotated keys, K values, K keys and H queries: [N, (3 K + H) D] -> [N, 3 K + H, D].
        heads = layer.qkv(_normed(hidden, layer.attention_norm)).unflatten(1, (-1, rotation.shape[-1]))
        count = self._key_heads
        rotated, _, key, query = heads.split([count, count, count, self._heads], dim=1)
        if layer.head_norms is not None:
            query, key = _normed(query, layer.head_norms[0]), _normed(key, layer.head_norms[1])
        # Rotated keys next to the values are stored together, in one kernel.
        multiply_into(rotated, partial(torch.bmm, key, rotation))
        return torch.bmm(query, rotation)[:, :, None], heads[:, : 2 * count].unflatten(1, (2, count))


def _layer(layer: Any, window: int | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
    gate_up = _fuse([mlp.gate_proj, mlp.up_proj])
    if gate_up.bias is not None:
        raise UnsupportedError("the MLP has biases")
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_fuse([attention.v_proj, attention.k_proj, attention.q_proj], room=len(_linear(attention.k_proj).weight)),
        out=_Residual.of(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=_Residual.of(mlp.down_proj),
        head_norms=norms,
        scale=float(attention.scaling),
        window=window,
    )


def _fuse(linears: list[nn.Module], *, room: int = 0) -> _Stacked:
    """Stack the weights of projections of one input, which become views of it, behind `room` zeros to write results to."""
    layers = [_linear(linear) for linear in linears]
    apart = [layer for layer in layers if isinstance(layer, LowRankLinear)]
    # Linear weights are [out, in], so stacking them along the first axis stacks the outputs.
    weights = [*(layer.weight.detach() for layer in layers), *(layer.down.detach() for layer in apart)]
    empty = weights[0].new_zeros(room, weights[0].shape[1])
    fused = torch.cat([empty, *weights])
    rows = fused[room:].split([len(weight) for weight in weights])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(biases) not in (0, len(layers)):
        raise UnsupportedError("some projections have a bias and some have none")
    size, rank = room + sum(len(layer.weight) for layer in layers), sum(len(layer.down) for layer in apart)
    if biases:
        biases = [fused.new_zeros(room), *biases, fused.new_zeros(rank)]
    up = fused.new_zeros(size, rank)
    out, column = room, 0
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


def _product(given: Float[Tensor, "N in"], weight: Float[Tensor, "out in"], bias: Tensor | None) -> Float[Tensor, "N out"]:
    """W x + b of a few rows x; in memory [out, N] where the weights come first."""
    if not _weights_first(weight):
        return functional.linear(given, weight, bias)
    turned = weight @ given.t() if bias is None else torch.addmm(bias[:, None], weight, given.t())
    return turned.t()


def _weights_first(weight: Tensor) -> bool:
    # Products in 16 bits are another library's (oneDNN), and have not been measured.
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LARGE


def _frozen(view: Tensor) -> nn.Parameter:
    return nn.Parameter(view, requires_grad=False)


def _linear(module: nn.Module) -> nn.Linear | LowRankLinear:
    if type(module) is not nn.Linear and not isinstance(module, LowRankLinear):
        raise UnsupportedError(f"{type(module).__name__} instead of a linear layer")
    return module


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


def _normed(hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), norm[0], norm[1])
