"""Log-probabilities and entropies of completion tokens under the policy.

Three layouts that give the same numbers and gradients:

    merged    each prompt encoded once; its completions attend to that one copy (shared_prompt.py), on a CPU
    repeated  each prompt encoded once, its keys and values repeated for its completions, gradients through the cache
    plain     prompt and completion as one sequence for every completion

The language-model head works in chunks of tokens and is recomputed in the backward pass, so that logits of [tokens, vocabulary]
never exist at once. What is left out: anything about old policies, references, losses.
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

Layout = Literal["merged", "repeated", "plain"]

CHUNK_ELEMENTS = 16 * 2**20
"""Most logits that exist at once (64 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy thinks of each completion token; padding holds 0."""

    logps: Float[Tensor, "N T"]
    """log-probability (nats) at the sampling temperature; carries gradients."""
    entropies: Float[Tensor, "N T"]
    """Entropy (nats) of the distribution the token came from; carries gradients only when asked to."""


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
        temperature: the one the completions were sampled at.
        layout: how prompts and completions go through the model; merged and repeated need an ordinary key-value cache and no
            gradient checkpointing.
        entropy_gradients: let gradients flow through the entropies too.
    """
    logps, entropies = forward_pass(
        model, lambda: _scored(model, batch, temperature=temperature, layout=layout, entropy_gradients=entropy_gradients)
    )
    mask = batch.completion_mask
    blank = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenScores(logps=blank.masked_scatter(mask, logps), entropies=blank.masked_scatter(mask, entropies))


def _scored(
    model: CausalLM, batch: TokenBatch, *, temperature: float, layout: Layout, entropy_gradients: bool
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    # A prompt of one token has no context to share.
    if layout == "plain" or not batch.context_mask.any(1).all():
        hidden = _hidden_plain(model, batch)
    elif layout == "merged":
        hidden = _hidden_merged(model, batch)
    else:
        hidden = _hidden_repeated(model, batch)
    # Row numbers rather than a mask: the gradient of an indexed read is an addition, that of a masked one a slow scatter.
    places = batch.completion_mask.flatten().nonzero().squeeze(1)
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
    targets = batch.completion_ids.flatten().index_select(0, places)
    causal = causal_model(model)
    return score_tokens(
        causal.get_output_embeddings(),
        chosen,
        targets,
        temperature=temperature,
        softcap=getattr(causal.config, "final_logit_softcapping", None),
        entropy_gradients=entropy_gradients,
        chunk_elements=CHUNK_ELEMENTS,
    )


def encode_context(model: CausalLM, batch: TokenBatch) -> DynamicCache:
    """Keys and values of each prompt without its last token; what stands at padding is not to be looked at."""
    cache = DynamicCache()
    _decoder(model)(input_ids=batch.context_ids, past_key_values=cache, use_cache=True)
    return cache


def _hidden_merged(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    cache = encode_context(model, batch)
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    shared = TrainedPrompt(keys, values, batch.context_mask, PromptGroups(batch.prompt_of, len(batch.prompt_ids)))
    inputs, lengths = batch.inputs, batch.context_mask.sum(1)[batch.prompt_of]
    after = torch.arange(inputs.shape[1], device=inputs.device) + lengths[:, None]
    with shared_prompt_attention(causal_model(model)):
        out = _decoder(model)(input_ids=inputs, position_ids=after, use_cache=False, shared_prompt=shared)
    hidden: Tensor = out.last_hidden_state
    return hidden


def _hidden_repeated(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    cache = encode_context(model, batch)
    cache.batch_select_indices(batch.prompt_of)
    mask = torch.cat([batch.context_mask[batch.prompt_of], batch.input_mask], dim=1)
    places = position_ids(mask)[:, batch.context_ids.shape[1] :]
    out = _decoder(model)(
        input_ids=batch.inputs, attention_mask=mask.long(), position_ids=places, past_key_values=cache, use_cache=True
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


def _hidden_plain(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    ids = torch.cat([batch.context_ids[batch.prompt_of], batch.inputs], dim=1)
    mask = torch.cat([batch.context_mask[batch.prompt_of], batch.input_mask], dim=1)
    out = _decoder(model)(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
    hidden: Tensor = out.last_hidden_state[:, batch.context_ids.shape[1] :]
    return hidden


def _decoder(model: CausalLM) -> nn.Module:
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
    """log-probabilities of M tokens and the entropies of their distributions (nats), from the hidden states that predict them.

    At most `chunk_elements` logits exist at once, in the backward pass too.
    """

    def score(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(chunk).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        # Each of these is as large as all logits of the chunk, so none is made that is not needed.
        logp = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
        if entropy_gradients:
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with torch.no_grad():
                entropy = -logp.exp().mul_(logp).sum(-1)
        return logp.gather(-1, wanted[:, None]).squeeze(-1), entropy

    rows = max(1, chunk_elements // cast(nn.Linear, head).weight.shape[0])
    if len(targets) <= rows:
        return score(hidden, targets)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    scored = [checkpoint(score, chunk, wanted, use_reentrant=False) for chunk, wanted in chunks]
    return torch.cat([logp for logp, _ in scored]), torch.cat([entropy for _, entropy in scored])
