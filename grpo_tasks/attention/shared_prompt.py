"""Attention in which the completions of a group read one copy of their prompt's keys and values.

    queries of a group  --fold-->  [P, K, M, D] x prompt keys [P, K, S, D]  --unfold-->  [N, H, T, D]

A cache repeated for every completion is read and copied G times. Registered with transformers; without the argument
`shared_prompt` it is ordinary scaled dot-product attention. Soft caps and attention sinks raise `UnsupportedError`. S counts the
tokens of the encoded context, which ends before the prompt's last token (policy/batch.py).
"""

from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grpo_shared_prompt"
"""The attention implementation's name in transformers."""


class UnsupportedError(Exception):
    """The model is of a kind that this implementation does not cover."""


@runtime_checkable
class SharedPrompt(Protocol):
    """The object that a forward pass receives as `shared_prompt=`."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H T D"],
        key: Float[Tensor, "N K T D"],
        value: Float[Tensor, "N K T _"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "N H T _"]:
        """Attention of new tokens to their prompt and to each other in a decoder layer.

        Queries and keys are rotated to their positions; K divides H (grouped-query attention). `scale` is the factor of the
        scores, usually D ** -0.5, and `window` how many tokens a query sees, itself included; None for all.
        """


def use_shared_prompts(model: PreTrainedModel) -> None:
    """Let the model attend through the `shared_prompt` that its forward pass receives, from now on, and as before without one."""
    model.config._attn_implementation = NAME


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
    window = _window_in_mask(module) if sliding_window is None else sliding_window
    attended = shared_prompt.attend(module.layer_idx, query, key, value, scale, window)  # type: ignore[arg-type]
    # transformers expects [N, T, H, D] back.
    return attended.transpose(1, 2), None


def _window_in_mask(module: nn.Module) -> int | None:
    """The window of a layer by its config. Some models (Qwen2Moe, Phimoe) have it in their mask alone, which is not built."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    return getattr(config, "sliding_window", None) or None if slides else None


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

    def __init__(self, prompt_of: Int[Tensor, " N"], num_prompts: int) -> None:
        counts = torch.bincount(prompt_of, minlength=num_prompts)
        self.num_prompts, self.width = num_prompts, int(counts.max())
        # Sorted by prompt, a row's rank within its group is its place in the order minus the place of the group's first row.
        order = prompt_of.argsort(stable=True)  # [N]
        first = (counts.cumsum(0) - counts)[prompt_of[order]]  # [P] -> [N]
        slots = torch.empty_like(prompt_of)
        slots[order] = prompt_of[order] * self.width + torch.arange(len(order), device=order.device) - first
        # The usual case: equal groups whose rows are neighbours. Row n is slot n then, and nothing has to be copied.
        dense = len(slots) == num_prompts * self.width and bool((slots[1:] > slots[:-1]).all())
        self.slots = None if dense else slots

    def fold(self, rows: Shaped[Tensor, "N H T D"], heads: int) -> Shaped[Tensor, "P K M D"]:
        """Place the rows of a group, and the query heads that share one of K key heads, side by side: M = width (H / K) T."""
        if self.slots is not None:
            padded = rows.new_zeros(self.num_prompts * self.width, *rows.shape[1:])
            rows = padded.index_copy(0, self.slots, rows)
        # [P width, H, T, D] -> [P, width, K, H / K, T, D] -> [P, K, width, H / K, T, D] -> [P, K, width (H / K) T, D]
        split = rows.view(self.num_prompts, self.width, heads, -1, *rows.shape[2:])
        return split.transpose(1, 2).reshape(self.num_prompts, heads, -1, rows.shape[-1])

    def unfold(self, folded: Float[Tensor, "P K M D"], length: int) -> Float[Tensor, "N H T D"]:
        """The inverse of `fold`, for rows of `length` tokens."""
        prompts, heads, _, depth = folded.shape
        # [P, K, M, D] -> [P, K, width, H / K, T, D] -> [P, width, K, H / K, T, D] -> [P width, H, T, D]
        split = folded.reshape(prompts, heads, self.width, -1, length, depth).transpose(1, 2)
        rows = split.reshape(prompts * self.width, -1, length, depth)
        return rows if self.slots is None else rows.index_select(0, self.slots)
