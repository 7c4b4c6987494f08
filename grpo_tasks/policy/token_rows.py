"""Rows of the embeddings, and of the output layer, that belong to added tokens.

peft keeps the trained rows of an adapter by themselves (`trainable_token_indices`): the base stays as it is, and the adapter
stays small. Where the output layer is tied to the embeddings, both read the same trained rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from schemas.errors import ModelError

NOISE = 0.02
"""Standard deviation of the noise on new rows, as a share of that of the other rows."""


@torch.no_grad()
def widen(
    model: PreTrainedModel, vocab_size: int, new_ids: Sequence[int], *, seed: int, like: Mapping[int, Sequence[int]] | None = None
) -> None:
    """Make room for `vocab_size` tokens and give the rows of `new_ids` their initial values, in place.

    A new row is the mean of the known ones, or of the rows that `like` names for it, plus a little noise, so that several new
    tokens differ. The values depend only on the seed and on the known rows.
    """
    if not new_ids:
        return
    known = min(new_ids)
    embedding: Any = model.get_input_embeddings()
    if vocab_size > len(embedding.weight):
        # Without transformers' own initial values: they come from a random generator whose state we do not control.
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    seen: set[int] = set()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight: Any = layer.weight if layer is not None else None
        if weight is None or id(weight) in seen:  # no output layer, or one that is tied
            continue
        seen.add(id(weight))
        # float32: a sum over 150,000 rows in bfloat16 would be far off.
        rows = weight[:known].float()
        noise = torch.randn(len(new_ids), rows.shape[1], generator=torch.Generator().manual_seed(seed))
        average, starts = rows.mean(0), like or {}
        means = [rows[list(starts[number])].mean(0) if number in starts else average for number in new_ids]
        values = torch.stack(means) + NOISE * rows.std(0) * noise.to(rows.device)
        weight[torch.tensor(new_ids, device=weight.device)] = values.to(weight.dtype)


def row_targets(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """The rows to train by the name of their layer, for peft. ModelError where the output layer has a bias."""
    if not ids:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            "the rows of added tokens cannot be trained next to a bias of the output layer",
            place="model.added_tokens",
            fix="model.lora: null",
        )
    names = {id(module): name for name, module in model.named_modules()}
    # With tied weights peft lets the output layer read the rows of the embeddings.
    layers = [embedding] if model.config.tie_word_embeddings or head is None else [embedding, head]
    return {names[id(layer)]: sorted(ids) for layer in layers}


def plain_layer(module: nn.Module) -> nn.Module:
    """The layer itself, without peft's wrapper for trained rows."""
    plain: nn.Module = module.original_module if isinstance(module, TrainableTokensWrapper) else module
    return plain


def logits_of(head: nn.Module, hidden: Float[Tensor, "m H"]) -> Float[Tensor, "m V"]:
    """The output layer, with the trained rows of the active adapter.

    peft's own forward pass copies the weight [V, H] for every chunk of tokens; here only the logits of the trained rows are
    computed twice.
    """
    logits: Tensor = plain_layer(head)(hidden)
    if not isinstance(head, TrainableTokensWrapper):
        return logits
    adapter: Any = head.token_adapter
    for name in () if head.disable_adapters else adapter.active_adapters:
        rows = adapter.trainable_tokens_delta[name].to(head.original_module.weight.dtype)  # [R, H]
        index = torch.tensor(adapter.token_indices[name], device=logits.device)
        logits = logits.index_copy(1, index, functional.linear(hidden, rows).to(logits.dtype))
    return logits


class FoldedRows:
    """Keeps `weight` equal to the weight of an adapted layer, with its trained rows in their places."""

    def __init__(self, source: TrainableTokensWrapper) -> None:
        self._source = source
        self.weight = nn.Parameter(source.original_module.weight.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the trained rows; all others never change."""
        layer: Any = self._source.token_adapter
        for adapter in layer.active_adapters:
            rows: Tensor = layer.trainable_tokens_delta[adapter]
            # copy, not a new tensor: views of the weight see the new rows (fused_decoder.py).
            index = torch.tensor(layer.token_indices[adapter], device=self.weight.device)
            self.weight.index_copy_(0, index, rows.detach().to(self.weight))
