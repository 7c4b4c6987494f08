"""The last layer of a packed pass, for the tokens that predict something.

    token of the row         all layers but the last    the last layer
    predicts a token         everything                 everything
    any other, of a prompt   everything                 its key and its value

The others' queries, output projection and MLP would cost a pass forward, and one backward with gradients of zero. What a linear
layer or gated MLP leaves out is 0, and nothing reads it. Norms and residual sums are left as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.policy.folded_adapter import CausalLM, decoder_of
from grpo_tasks.policy.lean_layers import LeanMlp, adapts_linear, subclass_of


def predict_only(model: CausalLM) -> None:
    """Let the last layer leave out what nothing reads, in place; only in passes over a packed row."""
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return
    for name, module in list(layers[-1].named_modules()):
        # A mixture of experts sorts the tokens by expert, so it is left as it is. Projections without an adapter stay what they
        # are, because fused decoding reads them.
        adapted = name in ("self_attn.q_proj", "self_attn.o_proj") and adapts_linear(module)
        if adapted or (name == "mlp" and isinstance(module, LeanMlp)):
            module.__class__ = subclass_of(type(module), PredictingTokens)

    def begin(layer: nn.Module, _: tuple[Any, ...], options: dict[str, Any]) -> None:
        attention = options.get("shared_prompt")
        if isinstance(attention, PackedAttention):
            _narrow(layer, attention.predicting)

    # Hooks of the layer and no block around the pass: with gradient checkpointing the layer runs again in the backward pass.
    layers[-1].register_forward_pre_hook(begin, with_kwargs=True)
    layers[-1].register_forward_hook(lambda layer, *_: _narrow(layer, None), always_call=True)


def _narrow(layer: nn.Module, places: Tensor | None) -> None:
    # The compiler would compile the layer anew for each number of tokens.
    if not torch.compiler.is_compiling():
        for module in layer.modules():
            if isinstance(module, PredictingTokens):
                module.places = places


class PredictingTokens:
    """A layer that works token by token, for some tokens of the row."""

    places: Tensor | None = None
    """[R] different places in the row; None for all of it."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer of x [1, L, H] at the places, and 0 elsewhere."""
        places = self.places
        if places is None:
            everywhere: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return everywhere
        found = super().forward(_Take.apply(x[0], places)[None], *args, **kwargs)  # type: ignore[misc]
        put: Tensor = _Put.apply(found[0], places, x.shape[1])
        return put[None]


class _Take(torch.autograd.Function):
    """Some rows of a matrix. The gradient is `_Put`: without repeated rows there is nothing to add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        """The rows [R, H] of x [L, H]."""
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of x."""
        (places,) = ctx.saved_tensors
        return _put(grad, places, ctx.length), None


class _Put(torch.autograd.Function):
    """Rows in their places between rows of zeros, the inverse of `_Take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, length: int) -> Tensor:
        """The matrix [L, H] with these rows [R, H]."""
        ctx.save_for_backward(places)
        return _put(rows, places, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the rows."""
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _put(rows: Tensor, places: Tensor, length: int) -> Tensor:
    return rows.new_zeros(length, rows.shape[1]).index_copy_(0, places, rows)
