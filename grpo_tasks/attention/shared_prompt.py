"""Attention in which the completions of a group read one copy of their prompt's keys and values.

A key-value cache that is repeated for every completion is read and copied G times. Here the queries of a group are placed side by
side and attend to the prompt's keys once:

    queries of a group  --fold-->  [P, K, M, D] x prompt keys [P, K, S, D]  --unfold-->  [N, H, T, D]

It is registered with transformers as an attention implementation. Without the argument `shared_prompt` it is ordinary scaled
dot-product attention, so a model can keep it. Soft caps and attention sinks raise `UnsupportedError`.

PackedAttention serves training, DecodedPrompt decoding. DecodedPrompt raises `UnsupportedError` for sliding windows too; the
caller then repeats the cache. In this file S counts the tokens of the encoded context, which ends before the prompt's last token
(batch.py).
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
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
        value: Float[Tensor, "N K T D"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "N H T D"]:
        """Attention of new tokens to their prompt and to each other.

        Args:
            layer: index of the decoder layer.
            query: queries of the new tokens, rotated to their positions.
            key: their keys, rotated; K divides H (grouped-query attention).
            value: their values.
            scale: factor of the attention scores, usually D ** -0.5.
            window: how many tokens a query sees, itself included; None for all.

        Raises:
            UnsupportedError: the window is not supported.
        """


def use_shared_prompts(model: PreTrainedModel) -> None:
    """Let the model attend through the `shared_prompt` that its forward pass receives, and as before without one.

    It stays so: with gradient checkpointing the layers run again in the backward pass, outside of any `with` block.
    """
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
    attended = shared_prompt.attend(module.layer_idx, query, key, value, scale, sliding_window)  # type: ignore[arg-type]
    # transformers expects [N, T, H, D] back.
    return attended.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def no_mask(device: torch.device) -> Tensor:
    """A mask that nothing reads. transformers passes a mask with four dimensions on as it is, and would build one otherwise."""
    return torch.empty(1, 1, 1, 1, device=device)


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
        """Place the rows of a group, and the query heads that share a key head, side by side: M = width (H / K) T.

        Args:
            rows: N rows with H heads.
            heads: K, the number of key heads.
        """
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


def _bias(mask: Bool[Tensor, "P S"], dtype: torch.dtype) -> Float[Tensor, "P 1 1 S"]:
    """Added to attention scores: 0 for real tokens, -inf for padding."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, None, None, :]


class DecodedPrompt:
    """For decoding: each step adds one token to every row, and rows that have ended can be dropped.

    Args:
        keys: keys of the context, layer by layer.
        values: values of the context, layer by layer.
        mask: True for the real tokens of the context.
        prompt_of: prompt of each row.
        max_length: largest number of new tokens per row.
    """

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "P K S D"]],
        values: Sequence[Float[Tensor, "P K S D"]],
        mask: Bool[Tensor, "P S"],
        prompt_of: Int[Tensor, " N"],
        max_length: int,
    ) -> None:
        self._keys, self._values = list(keys), list(values)
        # float32 like the scores it is added to.
        self._bias = None if mask.all() else _bias(mask, torch.float32)
        self._prompt_of = prompt_of
        self._groups = PromptGroups(prompt_of, len(mask))
        self._own: list[tuple[Tensor, Tensor]] = []
        self._max_length = max_length
        self.length = 0
        """New tokens of each row before the current step."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H 1 D"],
        key: Float[Tensor, "N K 1 D"],
        value: Float[Tensor, "N K 1 D"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "N H 1 D"]:
        """See `SharedPrompt`; T is 1.

        With one query per row the scores are small, so both parts go through one softmax and no log-sum-exp is needed.
        """
        if window is not None:
            raise UnsupportedError("attention with sliding_window")
        own_keys, own_values = self._append(layer, key, value)  # [N, K, L, D], L tokens so far
        rows, heads = key.shape[:2]
        # Scaling the query costs D products per head, scaling the scores S + L.
        query = query * scale
        # [P, K, M, D] x [P, K, D, S] -> [P, K, M, S] with M = width H / K. The softmax runs in float32.
        prompt = torch.matmul(self._groups.fold(query, heads), self._keys[layer].transpose(2, 3)).float()
        if self._bias is not None:
            prompt = prompt + self._bias
        # [N, K, H / K, D] x [N, K, D, L] -> [N, K, H / K, L]
        own = torch.matmul(query.view(rows, heads, -1, query.shape[-1]), own_keys.transpose(2, 3)).float()
        # The prompt's scores, the larger part, stay folded; only the few scores of the own tokens are rearranged to join them.
        folded = self._groups.fold(own.view(rows, -1, 1, own.shape[-1]), heads)
        weights = torch.cat([prompt, folded], dim=-1).softmax(-1).to(value.dtype)
        size = prompt.shape[-1]  # S: columns up to here weigh the prompt's values, the others the own values
        from_prompt = torch.matmul(weights[..., :size], self._values[layer])
        own_weights = self._groups.unfold(weights[..., size:], 1).view(own.shape)
        return self._groups.unfold(from_prompt, 1) + torch.matmul(own_weights, own_values).view(query.shape)

    def keep_rows(self, rows: Int[Tensor, " R"]) -> None:
        """Drop all other rows, and the prompts that have no row left.

        Args:
            rows: the indices of the rows that stay, ascending.
        """
        self._prompt_of = self._prompt_of[rows]
        # unique sorts, so prompts keep their order; the inverse renumbers the rows' prompts without gaps.
        alive, self._prompt_of = torch.unique(self._prompt_of, return_inverse=True)
        if len(alive) < self._groups.num_prompts:
            self._keys = [keys[alive] for keys in self._keys]
            self._values = [values[alive] for values in self._values]
            self._bias = None if self._bias is None else self._bias[alive]
        self._groups = PromptGroups(self._prompt_of, len(alive))
        self._own = [(self._select(keys, rows), self._select(values, rows)) for keys, values in self._own]

    def _append(
        self, layer: int, key: Float[Tensor, "N K 1 D"], value: Float[Tensor, "N K 1 D"]
    ) -> tuple[Float[Tensor, "N K L D"], Float[Tensor, "N K L D"]]:
        """The row's own keys and values with those of the current token."""
        if layer == len(self._own):
            # First step: room for all tokens at once, because a concatenation per step would copy the past each time.
            shape = (*key.shape[:2], self._max_length, key.shape[3])
            self._own.append((key.new_empty(shape), value.new_empty((*shape[:3], value.shape[3]))))
        keys, values = self._own[layer]
        keys[:, :, self.length] = key[:, :, 0]
        values[:, :, self.length] = value[:, :, 0]
        return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

    def _select(self, own: Float[Tensor, "N K L D"], rows: Int[Tensor, " R"]) -> Float[Tensor, "R K L D"]:
        # L is max_length here. Only the columns that are filled are copied.
        kept = own.new_empty((len(rows), *own.shape[1:]))
        kept[:, :, : self.length] = own[:, :, : self.length][rows]
        return kept
