"""Log-probabilities and entropies of completion tokens under the policy.

Three layouts give the same numbers and gradients:

    merged    encodes each prompt once; its completions attend to that single copy (shared_prompt_attention.py); CPU only
    repeated  encodes each prompt once and repeats its keys and values for its completions; gradients flow through the cache
    plain     runs prompt and completion as one sequence, once per completion

The G completions of a group share their prompt, so the plain layout computes it G times. The other two save that work, which
dominates an update with long prompts.

The language-model head works on chunks of tokens and is recomputed in the backward pass (gradient checkpointing,
arXiv:1604.06174), so that the logits [tokens, vocabulary] of a whole batch never exist at once. This file knows nothing of old
policies, references or losses.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from grpo_tasks.policy.batch import TokenBatch, position_ids
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.sharded import forward_pass
from grpo_tasks.policy.shared_prompt_attention import PromptGroups, TrainedPrompt, shared_prompt_attention
from grpo_tasks.policy.token_rows import logits_of, plain_layer

Layout = Literal["merged", "repeated", "plain"]

CHUNK_ELEMENTS = 16 * 2**20
"""Largest number of logits that exist at once (64 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probability and entropy of each completion token, float32; 0 at padding."""

    logps: Float[Tensor, "N T"]
    """Log-probability (nats) at the sampling temperature, with gradients."""
    entropies: Float[Tensor, "N T"]
    """Entropy (nats) of the distribution the token was drawn from, with gradients only on request."""


def completion_logprobs(
    model: CausalLM,
    batch: TokenBatch,
    *,
    temperature: float,
    layout: Layout = "repeated",
    entropy_gradients: bool = False,
) -> TokenScores:
    """Score every token of every completion.

    Args:
        model: a causal language model, with or without a PEFT adapter.
        batch: P prompts and N completions.
        temperature: the sampling temperature of the completions.
        layout: how prompts and completions pass through the model. "merged" and "repeated" need an ordinary key-value cache and
            no gradient checkpointing.
        entropy_gradients: let gradients flow through the entropies too.

    Raises:
        UnsupportedError: the layout is "merged" and the model's attention is not plain causal attention.
    """
    logps, entropies = forward_pass(
        model, lambda: _scored(model, batch, temperature=temperature, layout=layout, entropy_gradients=entropy_gradients)
    )
    # The [M] scores of real tokens return to their cells of [N, T], row by row. Padding becomes exactly 0, so that sums over T
    # need no mask.
    mask = batch.completion_mask
    blank = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenScores(logps=blank.masked_scatter(mask, logps), entropies=blank.masked_scatter(mask, entropies))


def _scored(
    model: CausalLM, batch: TokenBatch, *, temperature: float, layout: Layout, entropy_gradients: bool
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    # A prompt of one token has no context, and a softmax over no key at all is NaN.
    if layout == "plain" or not batch.context_mask.any(1).all():
        hidden = _hidden_plain(model, batch)
    elif layout == "merged":
        hidden = _hidden_merged(model, batch)
    else:
        hidden = _hidden_repeated(model, batch)
    # Only the M real tokens pass through the head, the most expensive layer of a small model: [N, T, H] -> [N T, H] -> [M, H].
    # Row numbers instead of a boolean mask: the backward pass of index_select adds rows, that of a masked read scatters slowly.
    rows = batch.completion_mask.flatten().nonzero().squeeze(1)
    selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
    targets = batch.completion_ids.flatten().index_select(0, rows)
    causal = causal_model(model)
    return score_tokens(
        causal.get_output_embeddings(),
        selected,
        targets,
        temperature=temperature,
        softcap=getattr(causal.config, "final_logit_softcapping", None),
        entropy_gradients=entropy_gradients,
        chunk_elements=CHUNK_ELEMENTS,
    )


def encode_context(model: CausalLM, batch: TokenBatch) -> DynamicCache:
    """Keys and values [P, K, C, D] of each prompt without its last token, layer by layer; those at padding are meaningless."""
    cache = DynamicCache()
    # No attention mask: padding is on the right, so causal attention hides it from every real token.
    # No position ids: without padding on the left, a token's position is its column.
    _decoder(model)(input_ids=batch.context_ids, past_key_values=cache, use_cache=True)
    return cache


def _hidden_merged(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    cache = encode_context(model, batch)
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    shared = TrainedPrompt(keys, values, batch.context_mask, PromptGroups(batch.prompt_of, len(batch.prompt_ids)))
    # A completion continues its own prompt: its column t has position t + length of that prompt's context, without the padding.
    inputs, lengths = batch.inputs, batch.context_mask.sum(1)[batch.prompt_of]  # [N, T]; [P] -> [N]
    positions = torch.arange(inputs.shape[1], device=inputs.device) + lengths[:, None]  # [T] + [N, 1] -> [N, T]
    with shared_prompt_attention(causal_model(model)):
        out = _decoder(model)(input_ids=inputs, position_ids=positions, use_cache=False, shared_prompt=shared)
    hidden: Tensor = out.last_hidden_state
    return hidden


def _hidden_repeated(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    cache = encode_context(model, batch)
    # [P, K, C, D] -> [N, K, C, D]. This is an indexed read, so the gradients of a group add up in its one encoded prompt.
    cache.batch_select_indices(batch.prompt_of)
    # [N, C + T]. Padding lies between a short context and its completion. So the attention needs a mask here, and positions count
    # real tokens instead of columns.
    mask = torch.cat([batch.context_mask[batch.prompt_of], batch.input_mask], dim=1)
    positions = position_ids(mask)[:, batch.context_ids.shape[1] :]  # [N, T]: only the new columns pass through the model
    out = _decoder(model)(
        input_ids=batch.inputs, attention_mask=mask.long(), position_ids=positions, past_key_values=cache, use_cache=True
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


def _hidden_plain(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    # [N, C + T]: the same columns, mask and positions as in the repeated layout, without a cache. This layout is the reference of
    # the other two, and the only one for gradient checkpointing and sharded weights.
    ids = torch.cat([batch.context_ids[batch.prompt_of], batch.inputs], dim=1)
    mask = torch.cat([batch.context_mask[batch.prompt_of], batch.input_mask], dim=1)
    out = _decoder(model)(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
    hidden: Tensor = out.last_hidden_state[:, batch.context_ids.shape[1] :]  # [N, C + T, H] -> [N, T, H]
    return hidden


def _decoder(model: CausalLM) -> nn.Module:
    """The layers below the language-model head: they return hidden states instead of the much larger logits."""
    causal = causal_model(model)
    return getattr(causal, causal.base_model_prefix)


def score_tokens(
    head: nn.Module,
    hidden: Float[Tensor, "M H"],
    targets: Int[Tensor, " M"],
    *,
    temperature: float,
    softcap: float | None = None,
    entropy_gradients: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-probabilities of M tokens and entropies of their distributions (nats, float32), from the hidden states before them.

    Args:
        head: the language-model head, H -> V.
        hidden: the hidden state that predicts each token.
        targets: the token ids.
        temperature: divides the logits.
        softcap: c of Gemma's c tanh(logits / c) (arXiv:2408.00118); None applies none.
        entropy_gradients: let gradients flow through the entropies.
        chunk_elements: largest number of logits that exist at once, in the backward pass too.
    """

    def score(chunk: Float[Tensor, "m H"], wanted: Int[Tensor, " m"]) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        # float32 before the softmax: a bfloat16 log-probability has 3 digits, and the loss takes the exp of a difference of two.
        logits = logits_of(head, chunk).float()  # [m, V]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        # A [m, V] tensor takes as much memory as the logits themselves, so the lines below make as few as possible.
        logp = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
        if entropy_gradients:
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with torch.no_grad():
                # mul_ works in place: exp() has just made a tensor that nothing else uses.
                entropy = -logp.exp().mul_(logp).sum(-1)
        return logp.gather(-1, wanted[:, None]).squeeze(-1), entropy

    rows = max(1, chunk_elements // cast(nn.Linear, plain_layer(head)).weight.shape[0])  # the weight is [V, H]
    if len(targets) <= rows:
        return score(hidden, targets)
    # A checkpointed chunk keeps its hidden states only, and computes its logits a second time in the backward pass.
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    scored = [checkpoint(score, chunk, wanted, use_reentrant=False) for chunk, wanted in chunks]
    return torch.cat([logp for logp, _ in scored]), torch.cat([entropy for _, entropy in scored])
