"""Captures decoding steps on a CPU, as CUDA graphs do on a card.

A tape knows which operations ran on which memory, and runs them again on the same memory, with the same shapes and numbers: code
in Python does not run again, and the batch that was captured may be gone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tapes:
    """A `Capture`; the first `failures` captures raise as a card does that cannot capture a step."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.count, self.recorded = failures, 0, list[Tape]()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a step. That runs it, other than on a card, so the first replay has nothing to do."""
        self.count += 1
        if self.count <= self.failures:
            raise RuntimeError("operation not permitted when stream is capturing")
        tape = Tape()
        with tape:
            step()
        tape.seal()
        self.recorded.append(tape)
        return tape.replay


@dataclass(frozen=True)
class _Ref:
    """A tensor of a tape, by its number among those that the step makes, or among those that it finds."""

    number: int
    made: bool


class Tape(TorchDispatchMode):
    """One recorded step."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[Tensor] = []
        """What the step finds: tensors of our own on the same memory, so that no tensor of a batch lives on."""
        self._calls: list[tuple[Any, Any, Any, list[_Ref | None]]] = []
        self._refs: dict[int, _Ref] = {}
        self._alive: list[Tensor] = []
        self._fresh = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it."""
        given = tree_map(self._found, (args, kwargs or {}))
        made = function(*args, **(kwargs or {}))
        results = [self._made(each) if isinstance(each, Tensor) else None for each in tree_leaves(made)]
        self._calls.append((function, *given, results))
        return made

    def seal(self) -> None:
        """Forget the tensors of the recorded run."""
        self._refs.clear()
        self._alive.clear()

    def replay(self) -> None:
        """Run the operations again."""
        if self._fresh:
            self._fresh = False
            return
        made: dict[int, Tensor] = {}

        def tensor(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            return made[value.number] if value.made else self.outside[value.number]

        for function, args, kwargs, results in self._calls:
            found = function(*tree_map(tensor, args), **tree_map(tensor, kwargs))
            made |= {ref.number: each for ref, each in zip(results, tree_leaves(found), strict=True) if ref and ref.made}

    def _found(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._refs:
            self._refs[id(value)] = _Ref(len(self.outside), made=False)
            self.outside.append(value.detach())
            self._alive.append(value)
        return self._refs[id(value)]

    def _made(self, value: Tensor) -> _Ref:
        # An operation in place returns what it was given.
        if id(value) not in self._refs:
            self._refs[id(value)] = _Ref(len(self._alive), made=True)
            self._alive.append(value)
        return self._refs[id(value)]
