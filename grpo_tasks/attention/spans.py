"""Spans of a packed row as a rectangle of slots, for kernels that want equally long rows."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


class Spans:
    """Equally many slots for each of R spans of the row; a short span leaves its last slots empty.

    Args:
        start: where the first span begins in the row.
        lengths: tokens of each span, at least one.
        device: where the index tensors are placed.
        gaps: tokens of the row between a span and the one before it, or `start` for the first; none by default.
    """

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
