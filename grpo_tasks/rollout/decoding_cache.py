"""Keys and values of a batch that is being decoded, in tensors whose shapes stay the same from step to step.

The rows of a group read one copy of their prompt's keys and values. The queries of a group are placed side by side ("folded", as
in attention/shared_prompt.py) and attend to it in one product; each row's own tokens are kept row by row. Both kinds of scores go
through one softmax.

Which column is written and which columns are visible depends on `column`, a tensor on the device. So every step between two calls
of `make_room` or `keep_rows` runs the same operations on the same shapes and addresses, and a CUDA graph can replay it.

N rows, P prompts, W rows of the largest group, S tokens of the longest context (a prompt without its last token, batch.py), L
columns for own tokens, K key heads, R query heads per key head, H = K R query heads, D width of a head.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from grpo_tasks.attention.recurrent import RecurrentStates
from grpo_tasks.attention.shared_prompt import Mixer, UnsupportedError
from grpo_tasks.kit.pinned import moved
from grpo_tasks.rollout.graphs import Place

LAYOUT = (
    "_fold", "_unfold", "_prompt_lengths", "_row_lengths", "_places", "_real", "_padding", "_columns", "_nothing", "_hidden"
)  # fmt: skip
"""Tensors that a step reads besides keys and values."""


class DecodingCache:
    """One copy of each prompt's keys and values, padded behind `lengths`, and those of the new tokens of every row."""

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "P K S _"]],
        values: Sequence[Float[Tensor, "P K S _"]],
        lengths: Sequence[int],
        prompt_of: Sequence[int],
        *,
        layers: Sequence[int] | None = None,
        states: Mapping[int, RecurrentStates] | None = None,
    ) -> None:
        if len({layer.shape[1] for layer in keys}) != 1:
            raise UnsupportedError("layers with different numbers of key heads")
        self._keys, self._values = list(keys), list(values)
        self._slots = {layer: slot for slot, layer in enumerate(range(len(keys)) if layers is None else layers)}
        """Where the keys of a layer are."""
        self._heads, self._device = keys[0].shape[1], keys[0].device
        self._lengths, self._prompt_of, self._copies = list(lengths), list(prompt_of), 0
        # Keys and values of a layer in one tensor [2, N, K, L, D], so that both can be written at once.
        shape = (2, len(prompt_of), self._heads, 0)
        self._own = [key.new_zeros(*shape, max(key.shape[3], value.shape[3])) for key, value in zip(keys, values, strict=True)]
        self._column = torch.zeros(1, dtype=torch.long, device=self._device)
        self.windows: dict[int, int | None] = {}
        """The window of each layer, as the model's forward pass gave it."""
        self._biases: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self._scores: dict[tuple[int, int, int], Tensor] = {}
        self._nothing, self._hidden = keys[0].new_zeros(()), keys[0].new_full((), -torch.inf)
        self._place: Place | None = None
        self._width: int | None = None
        every = moved(torch.tensor(self._prompt_of), self._device)
        self._states = {layer: StepStates(each, every) for layer, each in (states or {}).items()}
        """Of layers with a state of their own: they differ from row to row after the first step."""
        self._lay_out()
        self.make_room(0)

    @property
    def longest(self) -> int:
        """Tokens of the longest context, padding included."""
        return len(self._places)

    def make_room(self, columns: int) -> None:
        """Room for `columns` own tokens per row, at least as many as before."""
        for layer, own in enumerate(self._own):  # one by one, so that all of them never exist in both sizes
            # Zeros: a column that is not yet written has the weight 0, and 0 times a random bit pattern may be NaN.
            longer = own.new_zeros(*own.shape[:3], columns, own.shape[4])  # [2, N, K, L, D]
            longer[..., : own.shape[3], :] = own
            self._own[layer] = self._placed(f"own {layer}", longer)
        self._columns = self._placed("_columns", torch.arange(columns, device=self._device))

    def settle(self, place: Place, context: int) -> None:
        """See `StaticState`. All prompts stay, and as many slots for rows of each as the largest group has now."""
        self._place, self._width = place, max(Counter(self._prompt_of).values())
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            # [P, K, S, D] -> [P, K, context, D]. Zeros, as in `make_room`.
            padding = (0, 0, 0, max(0, context - keys.shape[2]))
            self._keys[layer] = place(f"keys {layer}", functional.pad(keys, padding))
            self._values[layer] = place(f"values {layer}", functional.pad(values, padding))
        self._change_states(lambda state: state)
        self._lay_out()

    def reads(self) -> list[Tensor]:
        """See `StaticState`."""
        states = [state for each in self._states.values() for state in each.tensors()]
        return [*self._keys, *self._values, *self._own, *states, *(getattr(self, name) for name in LAYOUT)]

    def keep_rows(self, rows: Sequence[int], copies: int) -> None:
        """Drop all other rows, and the prompts that have no row left; `copies` of the first row fill the batch up."""
        prompt_of = [self._prompt_of[row] for row in rows]
        prompts = sorted(set(prompt_of)) if self._width is None else list(range(len(self._lengths)))
        if len(prompts) < len(self._lengths):
            kept = moved(torch.tensor(prompts), self._device)
            for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
                self._keys[layer], self._values[layer] = keys.index_select(0, kept), values.index_select(0, kept)
            self._lengths = [self._lengths[prompt] for prompt in prompts]
        self._prompt_of, self._copies = [prompts.index(prompt) for prompt in prompt_of], copies
        chosen = moved(torch.tensor([*rows, *[rows[0]] * copies]), self._device)
        for layer, own in enumerate(self._own):
            self._own[layer] = self._placed(f"own {layer}", own.index_select(1, chosen))
        self._change_states(lambda state: state.index_select(0, chosen))
        self._lay_out()

    def begin_step(self, column: Int[Tensor, " 1"]) -> Int[Tensor, "N 1"]:
        """Begin the step in which every row, having `column` own tokens, gets another one; returns its position in each row."""
        # Which columns are visible is worked out once per step, for all layers with the same window.
        self._column, self._biases, self._scores = column, {}, {}
        return self._row_lengths + column

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H 1 D"],
        key: Float[Tensor, "N K 1 D"],
        value: Float[Tensor, "N K 1 _"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "N H 1 _"]:
        """Attention of one new token per row to its prompt and to the row's own tokens; see `SharedPrompt`."""
        slot = self._slots.get(layer)
        if slot is None:
            raise UnsupportedError("layers that share their keys and values")
        for own, new in zip(self._own[slot], (key, value), strict=True):
            own[..., : new.shape[-1]].index_copy_(2, self._column, new)
        return self.read(slot, query, scale, window)

    def recur(self, layer: int, mixer: Mixer, hidden: Float[Tensor, "N 1 H"]) -> Float[Tensor, "N 1 H"]:
        """One step of each row from its own state; see `SharedPrompt`."""
        outputs: Tensor = mixer(hidden, self._states[layer], None)
        return outputs

    def append(self, layer: int, both: Float[Tensor, "N 2 K D"]) -> None:
        """Store the keys and the values of the current token."""
        self._own[layer].index_copy_(3, self._column, both.transpose(0, 1)[..., None, :])

    def read(self, layer: int, query: Float[Tensor, "N H 1 D"], scale: float, window: int | None) -> Float[Tensor, "N H 1 _"]:
        """Attention to the prompt and to the tokens stored so far; arguments as for `attend`."""
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)  # [P K, S, D]
        size, depth = keys.shape[1], values.shape[2]  # S, D
        own_keys, own_values = self._own[layer].flatten(1, 2)  # [N K, L, D]
        own_keys, own_values = own_keys[..., : keys.shape[2]], own_values[..., :depth]
        self.windows[layer] = window
        if window not in self._biases:
            self._biases[window] = self._visible(window)
        prompt_bias, own_bias = self._biases[window]
        queries = query.reshape(len(own_keys), -1, query.shape[-1])  # [N, H, 1, D] -> [N K, R, D]
        folded = queries.index_select(0, self._fold).view(len(keys), -1, query.shape[-1])  # [P K W, R, D] -> [P K, W R, D]
        # Scores and weights have D columns more between the prompt's S and the own L. Their weights are 0, and the part of the
        # result that the prompt gives takes their place, so that one gather takes it and the own weights back to the rows.
        scores = self._score_rows(folded.shape[1], depth, own_keys.shape[1])  # [P K, W R, S + D + L]
        # One kernel multiplies, scales and adds the bias; with beta = 0 the bias is not read.
        bias, beta = (own_bias[..., :1], 0.0) if prompt_bias is None else (prompt_bias, 1.0)
        multiply_into(scores[..., :size], partial(torch.baddbmm, bias, folded, keys.transpose(1, 2), beta=beta, alpha=scale))
        own = torch.baddbmm(own_bias, queries, own_keys.transpose(1, 2), alpha=scale)  # [N K, R, L]
        # The prompt's scores, the larger part, stay folded; the few scores of the own tokens are rearranged to join them.
        torch.index_select(own, 0, self._fold, out=_slots(scores, queries.shape[1])[..., size + depth :])
        weights = scores.softmax(-1)  # in float32 inside, whatever the dtype
        multiply_into(weights[..., size : size + depth], partial(torch.bmm, weights[..., :size], values))
        # index_select takes slots back to rows: [P K W, R, D + L] -> [N K, R, D + L]
        rows = _slots(weights, queries.shape[1])[..., size:].index_select(0, self._unfold)
        attended = torch.baddbmm(rows[..., :depth], rows[..., depth:], own_values)
        return attended.view(query.shape[0], query.shape[1], 1, -1)

    def _score_rows(self, queries: int, depth: int, own: int) -> Float[Tensor, "_ M C"]:
        """Room for the scores of a layer, [P K, W R, S + D + L], with -inf in the middle; all layers of a shape share it."""
        shape = queries, depth, own
        if shape not in self._scores:
            size = len(self._places)
            scores = self._keys[0].new_empty(len(self._lengths) * self._heads, queries, size + depth + own)
            scores[..., size : size + depth].fill_(-torch.inf)
            self._scores[shape] = scores
        return self._scores[shape]

    def _visible(self, window: int | None) -> tuple[Tensor | None, Tensor]:
        """Added to the scores: 0 at visible columns, -inf elsewhere. [P K, 1, S], None if all of it is visible, and [1, 1, L].

        All rows are at the same column and the rows of a prompt at the same position, so rows need no masks of their own.
        """
        own = self._columns <= self._column
        if window is None:
            return self._padding, self._bias(own)[None, None]
        own = own & (self._columns > self._column - window)
        # A context token at position s is seen from position length + column if that is less than `window` away.
        seen = self._real & (self._places > self._prompt_lengths + self._column - window)  # [P, S]
        return self._per_head(self._bias(seen)), self._bias(own)[None, None]

    def _bias(self, seen: Tensor) -> Tensor:
        return torch.where(seen, self._nothing, self._hidden)

    def _per_head(self, bias: Float[Tensor, "P S"]) -> Float[Tensor, "_ 1 S"]:
        return bias.repeat_interleave(self._heads, 0, output_size=len(bias) * self._heads)[:, None]

    def _lay_out(self) -> None:
        """Which rows stand side by side. On the host: reading sizes from the device would make the host wait."""
        heads, width = torch.arange(self._heads), self._width or max(Counter(self._prompt_of).values())
        taken: Counter[int] = Counter()
        slots = []  # of each row, [N]
        for prompt in self._prompt_of:
            slots.append(prompt * width + taken[prompt])
            taken[prompt] += 1
        slots += slots[:1] * self._copies
        rows = torch.zeros(len(self._lengths) * width, dtype=torch.long)  # row in each slot; an empty slot repeats row 0
        real = torch.tensor(slots[: len(self._prompt_of)])
        rows[real] = torch.arange(len(real))
        # [P, W] -> [P, 1, W] K + [K, 1] -> [P, K, W]: place of the slot's queries among [N K]
        self._fold = moved((rows.view(-1, 1, width) * self._heads + heads[:, None]).flatten(), self._device)
        # Slot p W + w of head k is at (p K + k) W + w among [P K W].
        slot = torch.tensor(slots)[:, None]
        self._unfold = moved(((slot // width * self._heads + heads) * width + slot % width).flatten(), self._device)
        self._prompt_lengths = moved(torch.tensor(self._lengths), self._device)[:, None]  # [P, 1]
        every = [*self._prompt_of, *self._prompt_of[:1] * self._copies]
        self._row_lengths = moved(torch.tensor([self._lengths[prompt] for prompt in every]), self._device)[:, None]  # [N, 1]
        self._places = torch.arange(self._keys[0].shape[2], device=self._device)  # [S]
        self._real = self._places < self._prompt_lengths  # [P, S]
        # Where a graph is replayed, a batch without padding runs the same operations as any other.
        padded = self._width is not None or min(self._lengths) < len(self._places)
        self._padding = self._per_head(self._bias(self._real)) if padded else None
        if self._place is not None:
            for name in LAYOUT:
                if hasattr(self, name):
                    setattr(self, name, self._place(name, getattr(self, name)))

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer, states in self._states.items():

            def changed(name: str, state: Tensor, layer: int = layer) -> Tensor:
                return self._placed(f"{name} {layer}", change(state))

            states.move(changed)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._place is None else self._place(name, tensor)


class StepStates(RecurrentStates):
    """States of N rows that stay where they are: a step replaces their numbers."""

    def __init__(self, prompts: RecurrentStates, rows: Int[Tensor, " N"]) -> None:
        """Each row begins with a copy of the state of its prompt."""
        super().__init__(continues=True)
        begun = prompts.begin(lambda state: state.index_select(0, rows))
        self.conv_states, self.recurrent_states = begun.conv_states, begun.recurrent_states

    def tensors(self) -> list[Tensor]:
        """All states."""
        return [*self.conv_states.values(), *self.recurrent_states.values()]

    def move(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Put what `change` makes of each state, by its name, in its place."""
        self.conv_states = {at: change(f"conv {at}", state) for at, state in self.conv_states.items()}
        self.recurrent_states = {at: change(f"recurrent {at}", state) for at, state in self.recurrent_states.items()}

    def update_conv_state(self, inputs: Float[Tensor, "N C 1"], layer_idx: int, **options: Any) -> Float[Tensor, "N C _"]:
        """See `RecurrentStates`. Most mixers update it themselves, in place as well."""
        both = super().update_conv_state(inputs, layer_idx, **options)
        state = self.conv_states[options.get("state_idx", 0)]
        state.copy_(both[..., -state.shape[-1] :])
        return both

    def update_recurrent_state(
        self,
        states: Float[Tensor, "N ..."],
        layer_idx: int,  # noqa: ARG002
        *,
        state_idx: int = 0,
        **_: Any,
    ) -> Tensor:
        """See `RecurrentStates`."""
        return self.recurrent_states[state_idx].copy_(states)


def multiply_into(part: Tensor, multiply: Callable[..., Tensor]) -> None:
    """Put a product of batches of matrices, for which `multiply` accepts `out`, into a view with gaps between its rows."""
    if part.device.type == "cpu":
        # torch multiplies a batch at once only where the result has no gaps. Matrix by matrix takes several times as long.
        part.copy_(multiply())
    else:
        multiply(out=part)


def _slots(folded: Float[Tensor, "_ M C"], heads: int) -> Float[Tensor, "_ R C"]:
    """[P K, W R, C] -> [P K W, R, C]."""
    return folded.unflatten(1, (-1, heads)).flatten(0, 1)
