"""Log-probabilities and entropies of completion tokens under the policy.

Two ways that give the same numbers and gradients:

    shared   each prompt encoded once, its keys and values handed to all completions of the group, gradients through the cache
    plain    prompt and completion as one sequence for every completion

The language-model head works in chunks of tokens and is recomputed in the backward pass, so that logits of [tokens, vocabulary]
never exist at once. What is left out: anything about old policies, references, losses.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from grpo_tasks.policy.batch import TokenBatch, positions

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
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float,
    shared_prefix: bool = True,
    entropy_gradients: bool = False,
) -> TokenScores:
    """Score every token of every completion.

    Args:
        model: a causal language model, with or without a PEFT adapter.
        batch: P prompts and N completions.
        temperature: the one the completions were sampled at.
        shared_prefix: encode each prompt once (needs an ordinary key-value cache and no gradient checkpointing).
        entropy_gradients: let gradients flow through the entropies too.
    """
    hidden = _hidden_shared(model, batch) if shared_prefix else _hidden_plain(model, batch)
    mask = batch.completion_mask
    logps, entropies = _score_tokens(model, hidden[mask], batch.completion_ids[mask], temperature, entropy_gradients)
    blank = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenScores(logps=blank.masked_scatter(mask, logps), entropies=blank.masked_scatter(mask, entropies))


def _hidden_shared(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    decoder, cache = _decoder(model), DynamicCache()
    prompt = decoder(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask.long(),
        position_ids=positions(batch.prompt_mask),
        past_key_values=cache,
        use_cache=True,
    )
    first = prompt.last_hidden_state[:, -1:][batch.prompt_of]
    if batch.completion_ids.shape[1] == 1:
        return first
    cache.batch_select_indices(batch.prompt_of)
    prompt_mask = batch.prompt_mask[batch.prompt_of]
    mask = torch.cat([prompt_mask, batch.completion_mask[:, :-1]], dim=1)
    rest = decoder(
        input_ids=batch.completion_ids[:, :-1],
        attention_mask=mask.long(),
        position_ids=positions(mask)[:, prompt_mask.shape[1] :],
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest.last_hidden_state], dim=1)


def _hidden_plain(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "N T H"]:
    ids = torch.cat([batch.prompt_ids[batch.prompt_of], batch.completion_ids[:, :-1]], dim=1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_of], batch.completion_mask[:, :-1]], dim=1)
    out = _decoder(model)(input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False)
    return out.last_hidden_state[:, batch.prompt_ids.shape[1] - 1 :]


def _decoder(model: PreTrainedModel) -> nn.Module:
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    return getattr(causal, causal.base_model_prefix)


def _score_tokens(
    model: PreTrainedModel,
    hidden: Float[Tensor, "N H"],
    targets: Int[Tensor, " N"],
    temperature: float,
    entropy_gradients: bool,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    head = causal.get_output_embeddings()
    softcap = getattr(causal.config, "final_logit_softcapping", None)

    def score(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(chunk).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logp = torch.log_softmax(logits / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, wanted[:, None]).squeeze(-1), entropy

    rows = max(1, CHUNK_ELEMENTS // causal.config.get_text_config().vocab_size)
    if len(targets) <= rows:
        return score(hidden, targets)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    scored = [checkpoint(score, chunk, wanted, use_reentrant=False) for chunk, wanted in chunks]
    return torch.cat([logp for logp, _ in scored]), torch.cat([entropy for _, entropy in scored])
