"""Counts the bytes of tensors while code runs on torch's meta device: shapes without numbers, and without memory.

with LiveMemory() as memory:
    loss = ...                  # memory.now: bytes that live, those kept for the backward pass among them
    loss.backward()
memory.peak                     # the most that lived at once; tensors that existed before are not counted
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_tasks.attention import packed_attention
from grpo_tasks.attention.varlen import FLASH, FLASH_CAPABILITY, Kernel, Sequences, kernel_of_card
from grpo_tasks.policy import lean_layers

VIEWS = frozenset(
    """
    _record_function_enter_new _record_function_exit _reshape_alias _unsafe_view alias as_strided chunk detach device diagonal
    empty empty_like empty_strided expand lift_fresh narrow new_empty permute reshape select slice split split_with_sizes squeeze
    t transpose unbind unsafe_split unsqueeze view view_as
    """.split()  # noqa: SIM905 - easier to read than 30 literals
)
"""Operations that only change how memory is read, reserve it, or are for the host alone: no kernel runs for them."""
MASKED = ", dense mask"


class LiveMemory(TorchDispatchMode):
    """Follows the storage of every tensor that is made on the meta device, and counts the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Bytes that live now, and the most that lived at once since `peak` was last set."""
        self.operations: Counter[str] = Counter()
        """How often each operation ran that is not a view."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it made."""
        # A storage that an argument has is not made here: the weights, and the inputs of the code.
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        self.operations[name] += name not in VIEWS
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                storage: Any = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known and key not in before:
                    self._known.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._drop, key, size)
        return made

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    @property
    def kernels(self) -> int:
        """How many operations were no views."""
        return self.operations.total()


class AttentionCalls(TorchFunctionMode):
    """Counts attention calls by the kernel that CUDA would take: flash, efficient or math, with MASKED for a dense mask."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at calls of torch's own attention. On the meta device a dispatch mode would only see the matrix products in it."""
        if function is scaled_dot_product_attention:
            self.found[_torch_kernel(*args, **(kwargs or {}))] += 1
        return function(*args, **(kwargs or {}))

    def packed(self, like: Tensor, window: int | None) -> Kernel | None:
        """Counts a call of the packed row's own kernel; None where CUDA has none, and the masked way is taken."""
        kernel = kernel_of_card(like.dtype, window, FLASH_CAPABILITY)
        if kernel is None:
            return None
        self.found["flash" if kernel is FLASH else "efficient"] += 1
        return _ATTENTION


def _torch_kernel(
    query: Tensor, key: Tensor, _value: Tensor, attn_mask: Tensor | None = None, *_: Any, enable_gqa: bool = False, **__: Any
) -> str:
    """What torch's own attention chooses on CUDA: flash wants 16 bits and no mask, the efficient kernel no grouped queries."""
    grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    if attn_mask is not None:
        return ("math" if grouped else "efficient") + MASKED
    if query.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "math" if grouped else "efficient"


@contextmanager
def cuda_kernels() -> Iterator[AttentionCalls]:
    """Let the meta device take the ways of CUDA, with kernels that only have shapes, and count the attention calls."""
    calls = AttentionCalls()
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (packed_attention, "varlen_kernel", calls.packed),
        (lean_layers, "norm_forward", _norm_forward),
        (lean_layers, "norm_backward", _norm_backward),
    ]
    kept = [getattr(module, name) for module, name, _ in places]
    for module, name, replacement in places:
        setattr(module, name, replacement)
    try:
        with calls:
            yield calls
    finally:
        for (module, name, _), function in zip(places, kept, strict=True):
            setattr(module, name, function)


def _attention_forward(
    q: Tensor, _k: Tensor, _v: Tensor, _sequences: Sequences, _scale: float, _window: int | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # new_zeros counts as one kernel, and so does every line below.
    return torch.zeros_like(q), (torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device),)


def _attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)


def _norm_forward(x: Tensor, _weight: Tensor, _epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


def _norm_backward(
    _grad: Tensor, x: Tensor, weight: Tensor, _inverse: Tensor, *, trained: bool
) -> tuple[Tensor | None, Tensor | None]:
    return torch.zeros_like(x), torch.empty_like(weight) if trained else None


_ATTENTION = Kernel(_attention_forward, _attention_backward)
