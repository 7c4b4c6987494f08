"""Decoding steps that a CUDA graph replays, and the memory that they read. Both live with the engine, not with a batch.

A graph launches all kernels of a step at once, but reads and writes the addresses that it was captured with. So what a step reads
is copied to a place that stays: the tensors of a name begin at one address, whatever their shape. A later batch of the same
shapes, in this rollout or in another one, finds its graph there. The weights of the policy are written in place (`sync`).
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

EAGER_STEPS = 3
"""Steps of a shape before its graph is captured. They are part of the work, and let the libraries allocate their buffers."""
MOST_GRAPHS = 8
"""Graphs that are kept; the oldest is dropped for a new one. Each has memory of the driver (planning/memory_plan.py)."""

Step = Callable[[], None]
Capture = Callable[[Step], Step]
"""Records a step without running it, and returns what replays it; RuntimeError where the step cannot be recorded."""
Place = Callable[[str, Tensor], Tensor]
"""Copies a tensor to the place of that name; see `Graphs.place`."""


class CudaCapture:
    """Captures steps as CUDA graphs. What they make lies in one pool of memory, because no two of them run at the same time."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None

    def __call__(self, step: Step) -> Step:
        """See `Capture`."""
        if not self._graphs:
            # The allocator gives up a pool with its last graph, and refuses its handle from then on.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Capturing runs no kernel. One that fails ends on its own stream; the outer block returns to the present one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=self._pool):
            step()
        self._graphs.add(graph)
        return graph.replay


class Graphs:
    """The graphs of an engine, by what they read. Without a `capture` every step runs by itself, and nothing has a fixed place.

    If a capture fails, all further steps of the engine run by themselves, after one warning.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._replays: dict[Hashable, Step] = {}
        self._memory: dict[str, Tensor] = {}
        self._key: Hashable = None
        self._eager_steps = 0

    @property
    def enabled(self) -> bool:
        """True if steps are captured."""
        return self._capture is not None

    @property
    def num_bytes(self) -> int:
        """Of the memory that stays between batches, without the pool of the graphs."""
        return sum(memory.nbytes for memory in self._memory.values())

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, copied to the place of that name, where it ends the life of the one before it."""
        if not self.enabled:
            return tensor
        memory = self._memory.get(name)
        if memory is None or memory.numel() < tensor.numel() or memory.dtype != tensor.dtype:
            # Graphs that have read the old place could never be replayed again.
            self._replays.clear()
            memory = self._memory[name] = tensor.new_empty(tensor.numel())
        return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def use(self, reads: Sequence[Tensor], *settings: Hashable) -> None:
        """The steps to come read these tensors, and compute by these settings."""
        # Whatever has moved has another address, so a graph is replayed on the very memory that it was captured with.
        self._key = settings, tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in reads)
        self._eager_steps = 0

    def run(self, step: Step) -> None:
        """One step. It is given at each call and not kept: a batch would live as long as its graph."""
        replay = self._replays.get(self._key)
        if replay is None and self._eager_steps == EAGER_STEPS:
            replay = self._captured(step)
        if replay is not None:
            replay()
            return
        step()
        self._eager_steps += 1

    def release(self) -> None:
        """Give all memory back; the next batch captures its graphs again."""
        self._replays.clear()
        self._memory.clear()

    def _captured(self, step: Step) -> Step | None:
        if self._capture is None:
            return None
        try:
            replay = self._capture(step)
        except RuntimeError as error:
            why = str(error)
        else:
            if len(self._replays) == MOST_GRAPHS:
                del self._replays[next(iter(self._replays))]
            self._replays[self._key] = replay
            return replay
        # Behind the handler: until its end the error holds the broken graph.
        self._capture = None
        self.release()
        gc.collect()
        warnings.warn(
            f"CUDA graphs cannot be used, so decoding is slower, and the card may have lost some memory to the failed capture "
            f"until this process ends ({why})",
            stacklevel=3,
        )
        return None
