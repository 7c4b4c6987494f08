"""Layers of the trained policy that keep and compute less. Up to rounding they give the numbers of those they replace.

    LeanAdapter    a LoRA layer that computes in the precision of its input, and keeps the input and x A^T
    LeanNorm       an RMS norm, in one kernel on CUDA; keeps its input and 1 / rms
    LeanMlp        a gated MLP that keeps its two inner projections, and makes their product again in the backward pass

In bfloat16 they save 60 % of what a pass keeps for each token. An instance changes its class and nothing else, so weights, names
and hooks stay; a norm or an MLP is replaced only if its class gives the same numbers on a small example. torch.compile gets the
original layer. L counts tokens, I and O inputs and outputs of a layer, r the rank. Shapes stand in comments, because
torch.compile cannot read the checks that annotations become in the tests.

In passes over a packed row, the last layer computes only what is read (`predict_only`): of a token of a prompt that predicts
nothing, its key and its value. The others' queries, output projection and MLP would cost a pass forward, and one backward with
gradients of zero. What a linear layer or gated MLP leaves out is 0, and nothing reads it. Norms and residual sums are left as
they are.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.policy.folded_adapter import CausalLM, decoder_of

_silu_backward, _gelu_backward = torch.ops.aten.silu_backward, torch.ops.aten.gelu_backward

# Where the small examples are computed, whatever the default device is.
CPU = torch.device("cpu")

Function = TypeVar("Function", bound=Callable[..., Any])


def _once(function: Function) -> Function:
    """functools.cache with the types of the function; mypy takes the hash of a class for that of its instances."""
    return cast(Function, cache(function))


def use_lean_layers(model: nn.Module) -> None:
    """Let the layers of a policy that is trained keep less, in place."""
    for module in list(model.modules()):
        if isinstance(module, LeanAdapter | LeanNorm | LeanMlp):
            continue
        kind = type(module)
        if adapts_linear(module):
            module.__class__ = subclass_of(kind, LeanAdapter)
        elif norm_offset(kind) is not None:
            module.__class__ = subclass_of(kind, LeanNorm, offset=norm_offset(kind))
        elif _activation(module) is not None and is_gated_mlp(kind):
            module.__class__ = subclass_of(kind, LeanMlp)


@_once
def subclass_of(kind: type, lean: type, **attributes: Any) -> type:
    """A subclass with the name of the class it replaces: transformers finds some modules by the names of their classes."""
    names = {"__module__": kind.__module__, "__doc__": lean.__doc__, "replaced": kind, **attributes}
    return type(kind.__name__, (lean, kind), names)


def published_class(module: nn.Module) -> type:
    """The class that a module had before its layer became lean."""
    kind: type = type(module)
    while "replaced" in vars(kind):
        kind = vars(kind)["replaced"]
    return kind


def adapts_linear(module: nn.Module) -> bool:
    """True for a LoRA layer over a linear one, quantized or not."""
    base = getattr(module, "base_layer", None) if isinstance(module, LoraLayer) else None
    return isinstance(base, nn.Linear) or type(base).__name__ in ("Linear4bit", "Linear8bitLt")


class LeanAdapter:
    """base(x) + scale (x A^T) B^T (LoRA, arXiv:2106.09685), in the precision of x."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The adapted layer, [*batch, I] -> [*batch, O]; dropout, several adapters and variants such as DoRA are left to peft."""
        adapter = None if torch.compiler.is_compiling() else low_rank(self)
        if adapter is None or args or kwargs:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        base = self.base_layer
        if _is_frozen_linear(base):
            result: Tensor = AdaptedLinear.apply(x, base.weight, base.bias, *adapter)
        else:
            result = AddLowRank.apply(base(x), x, *adapter)
        return result


def _is_frozen_linear(layer: nn.Module) -> bool:
    # Quantized layers keep their weights in a form of their own, and biases may be trained.
    return type(layer) is nn.Linear and not any(parameter.requires_grad for parameter in layer.parameters())


def low_rank(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """A, B and the scale of the one plain adapter that is active in a LoRA layer; None if that is not what is active."""
    if layer.disable_adapters or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in layer.lora_variant or layer.lora_bias.get(names[0]):
        return None
    if layer.training and not isinstance(layer.lora_dropout[names[0]], nn.Identity):
        return None
    return layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight, layer.scaling[names[0]]


class AdaptedLinear(torch.autograd.Function):
    """A frozen linear layer with its adapter. Adapters of one input keep it once, because all of them keep the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """W x + bias + scale B A x [*batch, O], with A [r, I] and B [O, r]."""
        ctx.scale, ctx.trained = scale, a.dtype
        a, b = a.to(x.dtype), b.to(x.dtype)
        result, inner = _adapted(x.flatten(0, -2), weight, bias, a, b, scale)
        ctx.save_for_backward(x, inner, weight, a, b)
        return as_shape(result, (*x.shape[:-1], result.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of x, A and B, these in the adapter's precision."""
        x, inner, weight, a, b = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        d_inner, d_a, d_b = _low_rank_backward(rows, x.flatten(0, -2), inner, b, ctx.scale)
        # The first layer reads embeddings, which need no gradient.
        d_x = _input_gradient(rows, weight, d_inner, a).view(x.shape) if ctx.needs_input_grad[0] else None
        return d_x, None, None, d_a.to(ctx.trained), d_b.to(ctx.trained), None


def as_shape(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A new result in another shape. torch lets no model add in place to a view that a function returned, as Falcon does."""
    reshaped: Tensor = torch.ops.aten._unsafe_view(result, shape)
    return reshaped


def _adapted(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # W x + bias + scale B A x [L, O] of x [L, I], and A x [L, r].
    inner = x @ a.T
    # In place, because nothing else has seen the result of the frozen layer: the sum costs no kernel of its own.
    return functional.linear(x, weight, bias).addmm_(inner, b.T, alpha=scale), inner


def _input_gradient(grad: Tensor, weight: Tensor, d_inner: Tensor, a: Tensor) -> Tensor:
    # Of x [L, I], from the gradients of both results of `_adapted`.
    return (grad @ weight).addmm_(d_inner, a)


class AddLowRank(torch.autograd.Function):
    """y + scale (x A^T) B^T: the adapter of a layer that computes y in a way of its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """The sum [*batch, O] of y [*batch, O], which stays as it is, and x [*batch, I] through A [r, I] and B [O, r]."""
        ctx.scale, ctx.trained = scale, a.dtype
        a, b = a.to(y.dtype), b.to(y.dtype)
        inner = x.flatten(0, -2).to(y.dtype) @ a.T  # [L, r]
        ctx.save_for_backward(x, inner, a, b)
        return as_shape(torch.addmm(y.flatten(0, -2), inner, b.T, alpha=scale), y.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of y, x, A and B."""
        x, inner, a, b = ctx.saved_tensors
        d_inner, d_a, d_b = _low_rank_backward(grad.flatten(0, -2), x.flatten(0, -2), inner, b, ctx.scale)
        # The first layer reads embeddings, which need no gradient.
        d_x = (d_inner @ a).view(x.shape).to(x.dtype) if ctx.needs_input_grad[1] else None
        return grad, d_x, d_a.to(ctx.trained), d_b.to(ctx.trained), None


def _low_rank_backward(grad: Tensor, x: Tensor, inner: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    # Gradients of x A^T [L, r], A [r, I] and B [O, r], from those of the result [L, O].
    d_inner = _scaled(grad, b, scale)
    return d_inner, _token_sum(d_inner.T, x.to(d_inner.dtype)), _token_sum(grad.T, inner, scale)


def _token_sum(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """A product [M, L] x [L, N] over the tokens of a pass, tens of thousands: of 16-bit factors a float32 sum, else as they are.

    Rounded to 16 bits, a gradient would have 3 digits, and in float16 the first of all products to overflow.
    """
    if left.dtype not in (torch.bfloat16, torch.float16):
        return _scaled(left, right, scale)
    if left.device.type == "cpu":
        return _scaled(left.float(), right.float(), scale)  # torch has no product with another dtype there
    product = torch.mm(left, right, out_dtype=torch.float32)
    return product if scale == 1.0 else product.mul_(scale)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    # With beta 0 the first argument is not read, and the factor costs no kernel of its own.
    return torch.addmm(left.new_empty(1, 1), left, right, beta=0, alpha=scale)


class LeanNorm:
    """x / rms(x) * (offset + weight) (arXiv:1910.07467), rounded once.

    With an offset the product is taken in float32, as Gemma's own norms do: 1 + weight in 16 bits would lose the small weights.
    """

    offset: float

    def forward(self: Any, x: Tensor) -> Tensor:
        """The normed x [*batch, H], in its precision."""
        if torch.compiler.is_compiling():
            compiled: Tensor = super().forward(x)  # type: ignore[misc]
            return compiled
        weight = self.offset + self.weight.float() if self.offset else self.weight.to(x.dtype)
        epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        result: Tensor = RmsNorm.apply(x, weight, float(epsilon))
        return result


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight, computed in the precision of the weight. Keeps x and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """The normed x, in the precision of x."""
        normed, inverse = norm_forward(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of x, and of the weight where it is trained."""
        x, weight, inverse = ctx.saved_tensors
        return *norm_backward(grad, x, weight, inverse, trained=ctx.needs_input_grad[1]), None


def norm_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normed x, and 1 / rms [*batch, 1] in float32; one kernel on CUDA, and two casts where the weight is wider than x."""
    if x.is_cuda:
        normed, inverse = torch.ops.aten._fused_rms_norm(x.to(weight.dtype), [x.shape[-1]], weight, epsilon)
        return normed.to(x.dtype), inverse
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * inverse).mul_(weight.float()).to(x.dtype), inverse


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, *, trained: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and, if it is trained, of the weight; one kernel on CUDA."""
    if x.is_cuda:
        given, wide = grad.to(weight.dtype), x.to(weight.dtype)
        d_x, d_weight = torch.ops.aten._fused_rms_norm_backward(given, wide, [x.shape[-1]], inverse, weight, [True, trained])
        return d_x.to(x.dtype), d_weight
    given, wide = grad.float(), x.float()
    d_weight = (given * wide).mul_(inverse).flatten(0, -2).sum(0).to(weight.dtype) if trained else None
    # With y = x / rms and s = grad * weight: dx = (s - y mean(s y)) / rms = s / rms - x (s . x) / (H rms^3)
    slope = given * weight.float()
    along = torch.linalg.vecdot(slope, wide)[..., None] * inverse.pow(3) / -x.shape[-1]
    return slope.mul_(inverse).addcmul_(wide, along).to(x.dtype), d_weight


@_once
def norm_offset(kind: type[nn.Module]) -> float | None:
    """What the class adds to its weight (0 in most models, 1 in Gemma's); None if it is no RMS norm of that kind."""
    if not kind.__name__.endswith("RMSNorm"):
        return None
    weight = torch.linspace(0.5, 2.0, 8, device=CPU)
    for offset in (0.0, 1.0):

        def formula(x: Tensor, offset: float = offset) -> Tensor:
            return functional.rms_norm(x, (8,), offset + weight, 1e-3)

        if _agrees(kind, {"weight": weight, "variance_epsilon": 1e-3, "eps": 1e-3}, formula):
            return offset
    return None


class LeanMlp:
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """The gated MLP of x [*batch, H]."""
        if torch.compiler.is_compiling():
            compiled: Tensor = super().forward(x)  # type: ignore[misc]
            return compiled
        gate, up, activation, down = self.gate_proj(x), self.up_proj(x), _activation(self), self.down_proj
        adapter = low_rank(down) if isinstance(down, LeanAdapter) else None
        if adapter is not None and _is_frozen_linear(down.base_layer):
            result: Tensor = GatedDown.apply(gate, up, activation, down.base_layer.weight, down.base_layer.bias, *adapter)
        else:
            result = down(GatedProduct.apply(gate, up, activation))
        return result


Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""A function of one number, and its gradient: (gradient of the result, argument) -> gradient of the argument."""
ACTIVATIONS: dict[str, Activation] = {
    "silu": (functional.silu, _silu_backward),
    "gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), lambda grad, x: _gelu_backward(grad, x, approximate="tanh")),
}
_ACTIVATION_OF = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}


def _activation(mlp: Any) -> str | None:
    return _ACTIVATION_OF.get(type(getattr(mlp, "act_fn", None)).__name__)


@_once
def is_gated_mlp(kind: type[nn.Module]) -> bool:
    """True if the class computes down(act(gate(x)) * up(x)) with layers of these names."""
    torch_state = torch.get_rng_state()
    parts = {name: nn.Linear(8, 8, device=CPU) for name in ("gate_proj", "up_proj", "down_proj")}
    torch.set_rng_state(torch_state)

    def formula(x: Tensor) -> Tensor:
        result: Tensor = parts["down_proj"](functional.silu(parts["gate_proj"](x)) * parts["up_proj"](x))
        return result

    return _agrees(kind, {**parts, "act_fn": nn.SiLU()}, formula)


def _agrees(kind: type[nn.Module], attributes: dict[str, Any], formula: Callable[[Tensor], Tensor]) -> bool:
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    x = torch.linspace(-2.0, 3.0, 16, device=CPU).view(2, 8)
    try:
        with torch.no_grad():
            return torch.allclose(module(x), formula(x), rtol=1e-5, atol=1e-6)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False


class GatedProduct(torch.autograd.Function):
    """act(gate) * up. Keeps gate and up, which the layers before it made anyway."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """[*batch, I], as both."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation][0](gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of gate and up."""
        gate, up = ctx.saved_tensors
        function, slope = ACTIVATIONS[ctx.activation]
        return slope(grad * up, gate), grad * function(gate), None


class GatedDown(torch.autograd.Function):
    """The product act(gate) * up through an adapted layer with a frozen weight. The product is made again, not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: str,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        """W p + bias + scale B A p with p = act(gate) * up [*batch, I]."""
        product = (ACTIVATIONS[activation][0](gate) * up).flatten(0, -2)  # [L, I]
        ctx.activation, ctx.scale, ctx.trained = activation, scale, a.dtype
        a, b = a.to(product.dtype), b.to(product.dtype)
        result, inner = _adapted(product, weight, bias, a, b, scale)
        ctx.save_for_backward(gate, up, weight, inner, a, b)
        return result.view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of gate, up, A and B."""
        gate, up, weight, inner, a, b = ctx.saved_tensors
        function, slope = ACTIVATIONS[ctx.activation]
        rows, active = grad.flatten(0, -2), function(gate)
        d_inner, d_a, d_b = _low_rank_backward(rows, (active * up).flatten(0, -2), inner, b, ctx.scale)
        d_product = _input_gradient(rows, weight, d_inner, a).view(gate.shape)
        d_gate, d_up = slope(d_product * up, gate), d_product * active
        return d_gate, d_up, None, None, None, d_a.to(ctx.trained), d_b.to(ctx.trained), None


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
    # The compiler would compile the layer again for each number of tokens.
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
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)  # [L, H] -> [R, H]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _put(grad, places, ctx.length), None


class _Put(torch.autograd.Function):
    """Rows in their places between rows of zeros, the inverse of `_Take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        return _put(rows, places, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _put(rows: Tensor, places: Tensor, length: int) -> Tensor:
    return rows.new_zeros(length, rows.shape[1]).index_copy_(0, places, rows)  # [R, H] -> [L, H]
