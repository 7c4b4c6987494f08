"""Layers with a state of their own (Gated DeltaNet, Mamba, short convolutions) over a packed row of prompts and completions.

    prompts       [P, S, H]  --mixer, from nothing-->                  outputs [P, S, H], and the state at each prompt's end
    completions   [N, T, H]  --mixer, from the state of its prompt-->  outputs [N, T, H]

A mixer is the layer that transformers built, with its own kernels. It takes a cache, whose part for one layer is played here by
`RecurrentStates`: the last inputs of its convolutions and its recurrent states. Both carry gradients, so the gradient of a
prompt's state is the sum over its completions. Nothing outlives a call, so gradient checkpointing repeats a layer exactly.

Prompts have their padding on the left, where a state is still zero, and completions on the right, where nobody reads.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from grpo_tasks.attention.shared_prompt import Mixer, PackedRow
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

    def select(self, rows: Int[Tensor, " M"]) -> "RecurrentStates":
        """What M new rows begin with: copies of the states of these rows."""
        chosen = RecurrentStates(continues=True)
        chosen.conv_states = {at: state.index_select(0, rows) for at, state in self.conv_states.items()}
        chosen.recurrent_states = {at: state.index_select(0, rows) for at, state in self.recurrent_states.items()}
        return chosen


class Beginnings:
    """The prompts of a row as [P, S], each behind its padding, so that all of them end in the last column."""

    def __init__(self, row: PackedRow) -> None:
        sizes = torch.tensor(row.prompt_lengths)[:, None]  # [P, 1]
        columns = torch.arange(int(sizes.max())) - (sizes.max() - sizes)  # [P, S], negative at padding
        real = columns >= 0
        self.index = moved((sizes.cumsum(0) - sizes + columns).clamp(min=0), row.device)  # [P, S]
        self.mask = None if bool(real.all()) else moved(real, row.device)
        """False at padding; None without any."""
        self.filled = moved(real.flatten().nonzero().squeeze(1), row.device)
        """Slots that hold a token, in the order of the row."""


def mix_prompts(
    beginnings: Beginnings, mixer: Mixer, hidden: Float[Tensor, "1 L H"]
) -> tuple[Float[Tensor, "A H"], RecurrentStates]:
    """The outputs of a mixer for the A tokens of the prompts, and its states at their ends."""
    mask = beginnings.mask
    states = RecurrentStates(blank=None if mask is None else ~mask)
    tokens = mixer(hidden[0][beginnings.index], states, mask).flatten(0, 1)  # [P, S, H] -> [P S, H]
    return tokens if mask is None else tokens.index_select(0, beginnings.filled), states


def mix_packed(row: PackedRow, beginnings: Beginnings, mixer: Mixer, hidden: Float[Tensor, "1 L H"]) -> Float[Tensor, "1 L H"]:
    """The outputs of a mixer for each token of a packed row, as if each completion stood alone behind its prompt."""
    prompts, states = mix_prompts(beginnings, mixer, hidden)
    if row.own is None:
        return prompts[None]
    own = row.own.read(hidden[:, None])[:, 0]  # [1, 1, L, H] -> [N, 1, T, H] -> [N, T, H]
    if own.shape[1] == 1:
        # For one token mixers take a kernel for decoding, which has no gradient.
        own = functional.pad(own, (0, 0, 0, 1))
    tokens = mixer(own, states.select(row.prompt_of), None)[:, : row.own.width].flatten(0, 1)
    return torch.cat([prompts, tokens if row.own.dense else tokens.index_select(0, row.own.filled)])[None]
