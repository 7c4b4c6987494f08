"""A pretend accelerator: tensors with real numbers in the memory of the host, which say that they are on `card:0`.

An operation on tensors of both places raises an error, as it does with CUDA. Wherever the host waits for the card, because of a
number or of a copy that is not `non_blocking`, the line of our code is recorded in `WAITS`. So is a copy to the card that is
`non_blocking` and comes from memory that is not pinned: CUDA may wait for it all the same (`PAGEABLE`).

The card works on what is launched, in order. Where the host has waited for all of it, the card waits for the host until the next
operation; that line is recorded in `IDLES`.
"""

import sys
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext

import safetensors.torch
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("card")
CARD = torch.device("card:0")
WAITS = Counter()
"""How often each line waited: ("learner.py:120", operation) -> times."""

IDLES = Counter()
"""How often the card had nothing to do until a line gave it work: "learner.py:120" -> times."""
LOG = []
"""The lines that waited, in their order, and what a test adds."""
PAGEABLE = "copy of pageable memory"

# CUDA accepts these with tensors of both places: copies, and reads by an index on the host.
BOTH_PLACES = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "lift_fresh", "set_"}
# The size of the result or the result itself is a number on the card.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "multinomial"}
# Its gradient reads by the mask, inside one operation.
WAITING |= {"masked_scatter_backward"}
WAITING |= {"_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"}
NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "set_"}
INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


class Memory:
    """Bytes on the card, from `watch` on."""

    def __init__(self):
        self.peak, self._storages = None, {}

    def watch(self):
        """Start, or forget the peak so far."""
        self.peak = self.now

    @property
    def now(self):
        """Of the storages that live; FSDP2 frees one by making it empty."""
        self._storages = {key: storage for key, storage in self._storages.items() if storage() is not None}
        return sum(storage().nbytes() for storage in self._storages.values())

    def add(self, host):
        """A tensor was made."""
        if self.peak is not None:
            storage = host.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)
            self.peak = max(self.peak, self.now)


MEMORY = Memory()


class Queue:
    """What the host has launched and the card may still work on."""

    def __init__(self):
        self.launched, self.empty = 0, True

    def launch(self):
        """An operation that is no view, or a copy."""
        line = _line()
        if line is None:
            return
        self.launched += 1
        if self.empty:
            IDLES[line] += 1
            self.empty = False

    def wait(self, until=None):
        """The host waits for what was launched first, `until` so many operations; None: for all."""
        if _line() is not None and until in (None, self.launched):
            self.empty = True


QUEUE = Queue()


class OnCard(torch.Tensor):
    """A tensor on the card; `host` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CARD
        )
        made.host = host
        MEMORY.add(host)
        return made

    def tolist(self):
        _record("tolist")
        QUEUE.wait()
        return self.host.tolist()

    def untyped_storage(self):
        return self.host.untyped_storage()

    def storage(self):
        return self.host.storage()

    def __repr__(self):
        return f"OnCard({self.host})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class Card(TorchDispatchMode):
    """Sends every operation through `run`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def _line():
    """Of our code; the stand-in for a kernel of CUDA reads numbers that the kernel does not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("/reference_kernel.py"):
            return None
        if "/grpo_tasks/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _record(waited):
    line = _line()
    if waited is not None and line is not None:
        WAITS[line, waited] += 1
        LOG.append(line)


def _is_card(device):
    return device is not None and torch.device(device).type == "card"


def _wait(function, args, kwargs, cards):
    """What the host waits for in this call; None if it goes on at once."""
    name, wanted = function._schema.name.partition("::")[2], kwargs.get("device")
    if name in ("_to_copy", "copy_"):
        source, given = (args[0], wanted) if name == "_to_copy" else (args[1], args[0].device)
        if not source.numel():
            return None
        from_card, to_card = isinstance(source, OnCard), _is_card(given) if given is not None else bool(cards)
        blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if from_card and not to_card:
            return "copy to the host"
        if from_card or not to_card:
            return None
        return "copy to the card" if blocking else None if hasattr(source, "pinned") else PAGEABLE
    if not cards:
        return None
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return name
    if name in INDEXED and isinstance(args[0], OnCard):
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        # One number written by a mask is a masked_fill.
        if masks and not (len(args) > 2 and args[2].dim() == 0):
            return f"{name} by a mask"
        return f"{name} by numbers of the host" if any(not isinstance(index, OnCard) for index in indices) else None
    return name if name in WAITING else None


def run(function, args, kwargs):
    name = function._schema.name.partition("::")[2]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    cards = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    # A number on the host may meet tensors of the card; a tensor with axes may not.
    if cards and name not in BOTH_PLACES and any(not isinstance(tensor, OnCard) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} at {_line()}")
    waited = _wait(function, args, kwargs, cards)
    _record(waited)
    wanted = kwargs.get("device")
    on_card = _is_card(wanted) if wanted is not None else bool(cards)
    if name == "copy_":
        on_card = isinstance(args[0], OnCard)

    def host(value):
        if isinstance(value, OnCard):
            return value.host
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "card" else value

    if function is torch.ops.aten.mm.dtype:  # no CPU has it
        function, args = torch.mm, [factor.host.to(args[2]) for factor in args[:2]]
    found = function(*tree_map(host, args), **tree_map(host, kwargs))
    if (cards or on_card) and name not in NO_WORK and not function.is_view:
        QUEUE.launch()
    if waited == "copy to the host" and kwargs.get("non_blocking"):
        found.behind = QUEUE.launched  # who reads it waits for so many operations
    elif waited not in (None, PAGEABLE):
        QUEUE.wait()
    if not on_card:
        return found
    known = {id(tensor.host): tensor for tensor in cards}

    def carded(value):
        if not isinstance(value, torch.Tensor):
            return value
        # An operation in place returns its argument.
        return known[id(value)] if id(value) in known else OnCard(value)

    return tree_map(carded, found)


class _OnHost(TorchFunctionMode):
    """torch.tensor fills the memory of its device itself, past the dispatcher; here on the host, and then it moves.

    Pinned memory is a mark here. Without CUDA torch has none.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if function is torch.Tensor.pin_memory or kwargs.pop("pin_memory", False):
            pinned = args[0].clone() if function is torch.Tensor.pin_memory else function(*args, **kwargs)
            pinned.pinned = True
            return pinned
        if function is torch.tensor and device is not None and _is_card(device):
            del kwargs["device"]
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.tolist and hasattr(args[0], "behind"):
            QUEUE.wait(until=args[0].behind)
        return function(*args, **kwargs)


@contextmanager
def card():
    """Inside it, tensors can be made on the card."""
    with _OnHost(), Card():
        yield


class Stream:
    """A stream or an event of the card, which works on one thing after the other. FSDP2 asks for both."""

    def __init__(self, *_, **__):
        pass

    def wait(self, *_):
        pass

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, *_):
        return Stream()


torch.card.Stream = torch.card.Event = Stream
torch.card.current_stream = lambda _=None: Stream()
torch.card.stream = lambda _: nullcontext()
# Gradient checkpointing enters autocast again for the second forward pass, whether it is on or not.
torch.card.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


# Deterministic torch fills new memory with NaN, of a wrapped tensor after its numbers have been written.
torch.utils.deterministic.fill_uninitialized_memory = False
# A wrapped tensor cannot be one of inference mode.
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()


_move = torch.nn.Module.to


def _to(module, *args, **options):
    # A module that moves to the card keeps its parameters, and so the tie between embeddings and output layer.
    torch.__future__.set_swap_module_params_on_conversion(any(isinstance(arg, torch.device) and _is_card(arg) for arg in args))
    try:
        return _move(module, *args, **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


torch.nn.Module.to = _to


def _save_from_card(write):
    """safetensors copies tensors of CUDA to the host before it writes them; the same for the card."""

    def save(tensors, *args, **options):
        on_host = {name: tensor.host if isinstance(tensor, OnCard) else tensor for name, tensor in tensors.items()}
        return write(on_host, *args, **options)

    return save


safetensors.torch.save_file = _save_from_card(safetensors.torch.save_file)
