"""Attention in which the completions of a group read one copy of their prompt's keys and values.

    queries of a group  --fold-->  [P, K, M, D] x prompt keys [P, K, S, D]  --unfold-->  [N, H, T, D]

A cache repeated for every completion is read and copied G times. Registered with transformers; without the argument
`shared_prompt` it is ordinary scaled dot-product attention. Soft caps and attention sinks raise `UnsupportedError`.

With gradients, all prompts and then all completions are one row without padding (`PackedRow`). A prompt attends to itself,
causally. A completion attends to its prompt and, causally, to itself. The common start of several completions is a part of their
prompt here (policy/batch.py). In this room L counts the tokens of the row, H the query heads, K the key heads, and D the width of
a head. There are P prompts, and N completions with an own part. The longest prompt has S tokens, the longest own part T.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_tasks.kit.pinned import moved

NAME = "grpo_shared_prompt"
"""Our attention's name in transformers."""


Mixer = Callable[..., Tensor]
"""A layer with a state of its own: (tokens [N, T, H], states, mask [N, T] that is False at padding, or None) -> [N, T, H]."""


class UnsupportedError(Exception):
    """A kind of model that shared prompts do not cover."""


@runtime_checkable
class SharedPrompt(Protocol):
    """What a forward pass receives as `shared_prompt=`."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H T D"],
        key: Float[Tensor, "N K T D"],
        value: Float[Tensor, "N K T _"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "N H T _"]:
        """Attention of new tokens to their prompt and to each other, with rotated queries and keys; K divides H.

        `scale` is the factor of the scores, usually D ** -0.5, and `window` how many tokens a query sees, itself included.
        """

    def recur(self, layer: int, mixer: Mixer, hidden: Float[Tensor, "N T H"]) -> Float[Tensor, "N T H"]:
        """What a layer with a state of its own makes of the new tokens, each row from the state of its prompt (recurrent.py)."""


def use_shared_prompts(model: PreTrainedModel) -> None:
    """Let the model attend through the `shared_prompt` of a forward pass, from now on, and as before without one."""
    model.config._attn_implementation = NAME


# The compiler would compile it again for each layer, whose number chooses its kind, and give up after eight; below it, for each
# pass, whose index tensors differ.
@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prompt: SharedPrompt | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if shared_prompt is None:
        options |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    # transformers passes what is special about a layer's attention by these names; s_aux holds the attention sinks.
    other = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if other or dropout:
        raise UnsupportedError(f"attention with {', '.join(other) or 'dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module
    if sliding_window is None:
        # Some models (Qwen2Moe, Phimoe) have the window of a layer in their mask alone, which is not built.
        kinds = getattr(layer.config, "layer_types", None)
        if kinds is None or kinds[layer.layer_idx] == "sliding_attention":
            sliding_window = getattr(layer.config, "sliding_window", None) or None
    attended = shared_prompt.attend(layer.layer_idx, query, key, value, scale, sliding_window)
    # transformers expects [N, T, H, D] back.
    return attended.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@cache
def no_mask(device: torch.device) -> Tensor:
    """A mask that nothing reads. transformers passes a mask with four dimensions on as it is, and would build one otherwise.

    nan: a layer that drops the keyword argument `shared_prompt` attends by this mask, and its result shows it.
    """
    with torch.inference_mode(mode=False):
        return torch.full((1, 1, 1, 1), torch.nan, device=device)


class PromptGroups:
    """Which of N rows belong to which of P prompts, and how rows become one block of queries per prompt.

    Each prompt has `width` slots, as many as the largest group has rows. Row n goes to slot prompt_of[n] * width + its rank in
    the group. Smaller groups leave slots empty: those hold zeros, and what is computed for them is never read back.
    """

    def __init__(self, prompts_of: Sequence[int], num_prompts: int, device: torch.device) -> None:
        # On the host, which would wait for the width else.
        prompt_of = torch.tensor(prompts_of)
        counts = torch.bincount(prompt_of, minlength=num_prompts)
        self.num_prompts, self.width = num_prompts, int(counts.max())
        # Sorted by prompt, a row's rank within its group is its place in the order minus the place of the group's first row.
        order = prompt_of.argsort(stable=True)  # [N]
        first = (counts.cumsum(0) - counts)[prompt_of[order]]  # [P] -> [N]
        slots = torch.empty_like(prompt_of)
        slots[order] = prompt_of[order] * self.width + torch.arange(len(order)) - first
        # The usual case: equal groups whose rows are neighbours. Row n is slot n then, and nothing has to be copied.
        dense = len(slots) == num_prompts * self.width and bool((slots[1:] > slots[:-1]).all())
        self.slots = None if dense else moved(slots, device)

    def fold(self, rows: Shaped[Tensor, "N H T D"], heads: int) -> Shaped[Tensor, "P K M D"]:
        """Place the rows of a group, and the query heads that share one of K key heads, side by side: M = width (H / K) T."""
        if self.slots is not None:
            padded = rows.new_zeros(self.num_prompts * self.width, *rows.shape[1:])
            rows = padded.index_copy(0, self.slots, rows)
        # [P width, H, T, D] -> [P, width, K, H / K, T, D] -> [P, K, width, H / K, T, D] -> [P, K, width (H / K) T, D]
        split = rows.view(self.num_prompts, self.width, heads, -1, *rows.shape[2:])
        return split.transpose(1, 2).reshape(self.num_prompts, heads, -1, rows.shape[-1])

    def unfold(self, folded: Float[Tensor, "P K M D"], length: int) -> Float[Tensor, "N H T D"]:
        """The inverse of `fold`, with T = `length`."""
        prompts, heads, _, depth = folded.shape
        # [P, K, M, D] -> [P, K, width, H / K, T, D] -> [P, width, K, H / K, T, D] -> [P width, H, T, D]
        split = folded.reshape(prompts, heads, self.width, -1, length, depth).transpose(1, 2)
        rows = split.reshape(prompts * self.width, -1, length, depth)
        return rows if self.slots is None else rows.index_select(0, self.slots)


class Spans:
    """Equally many slots for each of R spans of the row, before which `gaps` lie; short spans leave their last slots empty."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device, gaps: Sequence[int] | None = None) -> None:
        self.lengths, self.width = list(lengths), max(lengths)
        self._tokens = slice(start, start + sum(lengths))
        neighbours = gaps is None or not any(gaps)
        self.dense = neighbours and min(lengths) == self.width
        """All spans are neighbours and equally long, so that the slots are a view of the row."""
        columns = torch.arange(self.width)
        sizes = torch.tensor(self.lengths)
        starts = start + sizes.cumsum(0) - sizes + (0 if gaps is None else torch.tensor(gaps).cumsum(0))  # [R]
        real = columns < sizes[:, None]  # [R, W]
        # Empty slots repeat a token of the row. What is computed for them is finite, and never read.
        index = torch.where(real, starts[:, None] + columns, start)
        self.index = moved(index, device)  # [R, W]
        self.empty = moved(~real, device)  # [R, W]
        self.filled = moved(real.flatten().nonzero().squeeze(1), device)  # slots that hold a token, in the order of the row
        self._places = None if neighbours else moved(index[real], device)
        """The tokens of spans that are no neighbours."""

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, row: Float[Tensor, "1 H L D"]) -> Float[Tensor, "R H W D"]:
        """The tokens of the spans, in their slots."""
        tokens = row[0].transpose(0, 1)  # [L, H, D]
        found = tokens[self._tokens] if self.dense else tokens.index_select(0, self.index.flatten())
        return found.unflatten(0, (len(self), self.width)).transpose(1, 2)  # [R W, H, D] -> [R, W, H, D] -> [R, H, W, D]

    def write(self, slots: Float[Tensor, "R H W D"], row: Float[Tensor, "L H D"]) -> None:
        """Copy the tokens from their slots into the row, in place."""
        tokens = slots.transpose(1, 2).flatten(0, 1)  # [R W, H, D]
        found = tokens if len(self.filled) == len(tokens) else tokens.index_select(0, self.filled)
        if self._places is None:
            row[self._tokens] = found
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
        """Complete prompts."""
        return Spans(0, self.prompt_lengths, self.device)

    @cached_property
    def tails(self) -> Spans:
        """The ends of the prompts, which are read after the last layer."""
        gaps = [length - tail for length, tail in zip(self.prompt_lengths, self.tail_lengths, strict=True)]
        return Spans(0, self.tail_lengths, self.device, gaps)

    @cached_property
    def own(self) -> Spans | None:
        """Completions without their last token, which predicts nothing; None when no completion has another one."""
        return Spans(sum(self.prompt_lengths), self.own_lengths, self.device) if self.own_lengths else None

    @cached_property
    def prompt_of(self) -> Int[Tensor, " N"]:
        """`prompts_of` on the device."""
        return moved(torch.tensor(self.prompts_of, dtype=torch.long), self.device)

    @cached_property
    def groups(self) -> PromptGroups | None:
        """How completions are placed next to their prompt; None without completions."""
        return PromptGroups(self.prompts_of, len(self.prompt_lengths), self.device) if self.own_lengths else None
