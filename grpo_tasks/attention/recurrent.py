"""Layers with a state of their own (Gated DeltaNet, Mamba, short convolutions) over a packed row of prompts and completions.

    prompts       [P, S, H]  --mixer, from nothing-->                  outputs [P, S, H], and the state at each prompt's end
    completions   [N, T, H]  --mixer, from the state of its prompt-->  outputs [N, T, H]

A mixer is the layer that transformers built, with its own kernels. It takes a cache, whose part for one layer is played here by
`RecurrentStates`: the last inputs of its convolutions and its recurrent states. Both carry gradients, so the gradient of a
prompt's state is the sum over its completions. Nothing outlives a call, so gradient checkpointing repeats a layer exactly.

Prompts have their padding on the left, where a state is still zero, and completions on the right, where nobody reads.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from grpo_tasks.attention.shared_prompt import Mixer, PackedRow, Spans
from grpo_tasks.kit.pinned import moved


class RecurrentStates:
    """The states of N rows in one layer, as a mixer finds them in transformers' cache, for one call of the mixer.

    It has the methods of that cache which mixers call, and is its list of layers too. Some mixers (Kimi Linear) have several
    states, which they count by `state_idx`.
    """

    record_past = False

    def __init__(self, *, blank: Bool[Tensor, "N T"] | None = None, continues: bool = False) -> None:
        self.conv_states: dict[int, Tensor] = {}
        """Of each convolution the last inputs [N, C, K], as many as its kernel is wide; zeros before the row's beginning."""
        self.recurrent_states: dict[int, Tensor] = {}
        self._blank, self._continues = blank, continues

    @property
    def layers(self) -> "RecurrentStates":
        """Itself at each index."""
        return self

    def __getitem__(self, layer: int) -> "RecurrentStates":
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        """True if the rows of this call continue others."""
        return self._continues

    def update_conv_state(
        self,
        inputs: Float[Tensor, "N C T"],
        layer_idx: int,  # noqa: ARG002
        *,
        conv_kernel_size: int | None = None,
        state_idx: int = 0,
        **_: Any,
    ) -> Float[Tensor, "N C _"]:
        """The inputs behind those before them, of which the mixer leaves the results out."""
        if self._blank is not None:
            # A projection with a bias is not 0 at padding.
            inputs = inputs.masked_fill(self._blank[:, None], 0.0)
        if self._continues:
            both = torch.cat([self.conv_states[state_idx], inputs], dim=-1)
        else:
            assert conv_kernel_size is not None
            both = functional.pad(inputs, (conv_kernel_size, 0))
            self.conv_states[state_idx] = both[..., -conv_kernel_size:]
        return both

    def update_recurrent_state(self, states: Float[Tensor, "N ..."], layer_idx: int, *, state_idx: int = 0, **_: Any) -> Tensor:  # noqa: ARG002
        """Keep the states at the ends of the rows."""
        self.recurrent_states[state_idx] = states
        return states

    def begin(self, take: Callable[[Tensor], Tensor]) -> "RecurrentStates":
        """What rows begin with that `take` makes of each state [P, ...]."""
        begun = RecurrentStates(continues=True)
        begun.conv_states = {at: take(state) for at, state in self.conv_states.items()}
        begun.recurrent_states = {at: take(state) for at, state in self.recurrent_states.items()}
        return begun


class Beginnings:
    """The P prompts of a row as [P, S], each behind its padding, so that all of them end in the last column."""

    def __init__(self, row: PackedRow) -> None:
        sizes = torch.tensor(row.prompt_lengths)[:, None]  # [P, 1]
        self.width = int(sizes.max())
        real = torch.arange(self.width) >= self.width - sizes  # [P, S]
        self.mask = None if bool(real.all()) else moved(real, row.device)
        """False at padding; None without any."""
        self.filled = moved(real.flatten().nonzero().squeeze(1), row.device)
        """Slots that hold a token, in the order of the row."""
        self._count = len(sizes)

    def __len__(self) -> int:
        return self._count


def mix_prompts(
    beginnings: Beginnings, mixer: Mixer, tokens: Float[Tensor, "A H"]
) -> tuple[Float[Tensor, "A H"], RecurrentStates]:
    """The outputs of a mixer for the tokens of the prompts, and its states at their ends."""
    mask = beginnings.mask
    states = RecurrentStates(blank=None if mask is None else ~mask)
    outputs = mixer(_in_slots(tokens, beginnings), states, mask)  # [P, S, H]
    return _out_of_slots(outputs, beginnings), states


def mix_packed(row: PackedRow, beginnings: Beginnings, mixer: Mixer, hidden: Float[Tensor, "1 L H"]) -> Float[Tensor, "1 L H"]:
    """The outputs of a mixer for each token of a packed row, as if each completion stood alone behind its prompt."""
    prompts, states = mix_prompts(beginnings, mixer, hidden[0, : len(beginnings.filled)])
    if row.own is None or row.groups is None:
        return prompts[None]
    groups, width = row.groups, row.own.width

    def of_prompt(state: Float[Tensor, "P ..."]) -> Float[Tensor, "N ..."]:
        # Not an index that repeats prompts, whose gradient has no fixed order of its sum on a GPU.
        each = state[:, None].expand(-1, groups.width, *state.shape[1:]).flatten(0, 1)
        return each if groups.slots is None else each.index_select(0, groups.slots)

    own = _in_slots(hidden[0, len(beginnings.filled) :], row.own)  # [N, T, H]
    if width == 1:
        # For one token mixers take a kernel for decoding, which has no gradient.
        own = functional.pad(own, (0, 0, 0, 1))
    outputs = mixer(own, states.begin(of_prompt), None)[:, :width]
    return torch.cat([prompts, _out_of_slots(outputs, row.own)])[None]


def _in_slots(tokens: Float[Tensor, "M H"], spans: Beginnings | Spans) -> Float[Tensor, "R W H"]:
    """The tokens of the spans in their slots, and zeros in the others."""
    size = len(spans) * spans.width
    if len(tokens) < size:
        tokens = tokens.new_zeros(size, tokens.shape[1]).index_copy(0, spans.filled, tokens)
    return tokens.unflatten(0, (len(spans), spans.width))


def _out_of_slots(outputs: Float[Tensor, "R W H"], spans: Beginnings | Spans) -> Float[Tensor, "M H"]:
    tokens = outputs.flatten(0, 1)
    return tokens if len(spans.filled) == len(tokens) else tokens.index_select(0, spans.filled)
