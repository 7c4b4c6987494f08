"""What stands where in a packed row: all prompts, then the own parts of all completions, without padding.

    row        [ prompt 1 | prompt 2 | ... | completion 1 | completion 2 | ... ]

A prompt attends to itself, causally. A completion attends to its prompt and, causally, to itself. The common start of several
completions is a part of their prompt here (policy/batch.py). In this room L counts the tokens of the row, H the query heads, K
the key heads, and D the width of a head. There are P prompts, and N completions with an own part. The longest prompt has S
tokens, the longest own part T.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_tasks.attention.shared_prompt import PromptGroups


class Spans:
    """Equally many slots for each of R spans of the row, before which `gaps` lie; short spans leave their last slots empty."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device, gaps: Sequence[int] | None = None) -> None:
        self.lengths, self.width, self.start = list(lengths), max(lengths), start
        neighbours = gaps is None or not any(gaps)
        self.dense = neighbours and min(lengths) == self.width
        """All spans are neighbours and equally long, so that the slots are a view of the row."""
        columns = torch.arange(self.width)
        sizes = torch.tensor(self.lengths)
        starts = start + sizes.cumsum(0) - sizes + (0 if gaps is None else torch.tensor(gaps).cumsum(0))  # [R]
        real = columns < sizes[:, None]  # [R, W]
        # Empty slots repeat a token of the row. What is computed for them is finite, and never read.
        index = torch.where(real, starts[:, None] + columns, start)
        self.index = index.to(device)  # [R, W]
        self.empty = (~real).to(device)  # [R, W]
        self.filled = real.flatten().nonzero().squeeze(1).to(device)  # slots that hold a token, in the order of the row
        self._places = None if neighbours else index[real].to(device)
        """The tokens of spans that are no neighbours."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all spans."""
        return sum(self.lengths)

    def read(self, row: Float[Tensor, "1 H L D"]) -> Float[Tensor, "R H W D"]:
        """The tokens of the spans, in their slots."""
        tokens = row[0].transpose(0, 1)  # [L, H, D]
        if self.dense:
            found = tokens[self.start : self.start + self.tokens].unflatten(0, (len(self), self.width))
        else:
            found = tokens.index_select(0, self.index.flatten()).unflatten(0, (len(self), self.width))
        return found.transpose(1, 2)  # [R, W, H, D] -> [R, H, W, D]

    def write(self, slots: Float[Tensor, "R H W D"], row: Float[Tensor, "L H D"]) -> None:
        """Copy the tokens in their slots into the row."""
        tokens = slots.transpose(1, 2).flatten(0, 1)  # [R W, H, D]
        found = tokens if len(self.filled) == len(tokens) else tokens.index_select(0, self.filled)
        if self._places is None:
            row[self.start : self.start + self.tokens] = found
        else:
            row.index_copy_(0, self._places, found)


class PackedRow:
    """Which token of the row belongs to which prompt or completion. All of it is known on the host.

    A completion may have no own tokens in the row. Of a prompt a hidden state is read after the last layer only for the tokens of
    its tail, at least one; all by default.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        own_lengths: Sequence[int],
        prompt_of: Sequence[int],
        device: torch.device,
        tail_lengths: Sequence[int] | None = None,
    ) -> None:
        present = [(length, prompt) for length, prompt in zip(own_lengths, prompt_of, strict=True) if length]
        self.prompt_lengths = list(prompt_lengths)
        self.tail_lengths = list(tail_lengths or prompt_lengths)
        self.own_lengths = [length for length, _ in present]
        self.prompts_of = [prompt for _, prompt in present]
        """Prompt of each completion with an own part."""
        self.device = device

    @cached_property
    def prompts(self) -> Spans:
        """The spans of the prompts."""
        return Spans(0, self.prompt_lengths, self.device)

    @cached_property
    def tails(self) -> Spans:
        """The spans at the end of the prompts that are read after the last layer."""
        gaps = [length - tail for length, tail in zip(self.prompt_lengths, self.tail_lengths, strict=True)]
        return Spans(0, self.tail_lengths, self.device, gaps)

    @cached_property
    def own(self) -> Spans | None:
        """Completions without their last token, which predicts nothing; None when no completion has another one."""
        return Spans(sum(self.prompt_lengths), self.own_lengths, self.device) if self.own_lengths else None

    @cached_property
    def prompt_of(self) -> Int[Tensor, " N"]:
        """`prompts_of` as a tensor."""
        return torch.tensor(self.prompts_of, dtype=torch.long, device=self.device)

    @cached_property
    def groups(self) -> PromptGroups | None:
        """How completions are placed beside their prompt; None without completions."""
        return PromptGroups(self.prompt_of, len(self.prompt_lengths)) if self.own_lengths else None
