"""Merge base and adapter into one model, and prove that it is the same policy.

    base + adapter --merge in float32--> merged --round to the saved dtype--> files --reload--> compare

The proof samples greedy completions from base + adapter and compares the log-probabilities of their tokens: first with the merged
model in float32, then with the model reloaded from its files. So errors of the arithmetic, of tied embeddings or of the files are
found before anybody downloads the model.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.content.tokenizer import set_system_prompt
from grpo_tasks.policy.batch import TokenBatch, pad, token_batch
from grpo_tasks.policy.chat import Message, completion_text, end_token_ids, prompt_ids
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_policy, load_tokenizer, name_end_tokens
from grpo_tasks.policy.logprobs import completion_logprobs
from schemas.errors import MergeError
from schemas.results.model import GreedyAnswer, MergeFigures, MergeSpec, ModelRef

MERGE_TOLERANCE = 2e-3
"""Largest allowed difference (nats) of a token's log-probability between base + adapter and the merged model, in float32."""
MEAN_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest allowed mean difference (nats per token) after rounding to the saved dtype (24, 8 and 11 bits of significand)."""

RECORDED_ANSWERS = 4
"""Prompts whose greedy answers are recorded. A published model must repeat them."""


@dataclass(frozen=True, slots=True)
class GreedyCompletions:
    """Greedy completions of base + adapter, and their log-probabilities."""

    ids: list[list[int]]
    logps: Float[Tensor, "N T"]
    batch: TokenBatch


def merge(spec: MergeSpec, directory: Path, *, device: torch.device) -> MergeFigures:
    """Merge, save to `directory`/model, reload and compare; returns the figures of the proof.

    Raises:
        MergeError: the merged or the reloaded model differs from base + adapter.
    """
    tokenizer = load_tokenizer(spec.ref, spec.model, spec.chat_template_kwargs)
    policy = load_policy(spec.ref, spec.model, device=device, dtype="float32")
    before = greedy_completions(policy, tokenizer, spec)
    merged = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    merge_difference = logprob_difference(merged, before).max().item()
    if not merge_difference <= MERGE_TOLERANCE:
        raise MergeError(
            f"the merged model and base + adapter differ by {merge_difference:.2g} nats in a token's log-probability, "
            f"the limit is {MERGE_TOLERANCE}",
            place=str(spec.ref.adapter),
            fix="check that the adapter belongs to this base model",
        )
    if spec.system_prompt is not None:
        set_system_prompt(tokenizer, spec.system_prompt)
    target = directory / "model"
    _save(merged, tokenizer, target, dtype=spec.model.merged_dtype)
    # Two copies of the weights in float32 would be the largest need for memory of a whole run.
    del policy, merged
    gc.collect()  # modules refer to each other in cycles
    return _compare_reloaded(spec, target, before, merge_difference=merge_difference, device=device)


def _compare_reloaded(
    spec: MergeSpec, target: Path, before: GreedyCompletions, *, merge_difference: float, device: torch.device
) -> MergeFigures:
    tokenizer = load_tokenizer(ModelRef(path=str(target)))
    _check_system_prompt(tokenizer, spec, target)
    reloaded = load_policy(ModelRef(path=str(target)), spec.model, device=device, dtype="float32")
    difference = logprob_difference(reloaded, before)
    tolerance = MEAN_TOLERANCE[spec.model.merged_dtype]
    if not difference.mean().item() <= tolerance:
        raise MergeError(
            f"the saved model differs from base + adapter by {difference.mean().item():.2g} nats per token on average, "
            f"rounding to {spec.model.merged_dtype} explains at most {tolerance}",
            place=str(target),
            fix="model.merged_dtype: float32",
        )
    after = greedy_completions(reloaded, tokenizer, spec)
    return MergeFigures(
        sha256=folder_sha256(target),
        prompts=len(spec.prompts),
        merge_difference=merge_difference,
        max_logprob_difference=difference.max().item(),
        mean_logprob_difference=difference.mean().item(),
        tolerance=tolerance,
        greedy_agreement=_agreement(before.ids, after.ids),
        size_bytes=sum(path.stat().st_size for path in target.iterdir()),
        answers=[
            GreedyAnswer(messages=chat, text=completion_text(tokenizer, ids))
            for chat, ids in zip(spec.prompts[:RECORDED_ANSWERS], after.ids, strict=False)
        ],
    )


def _check_system_prompt(tokenizer: PreTrainedTokenizerBase, spec: MergeSpec, target: Path) -> None:
    """Refuse a template that writes the system prompt otherwise when it adds it than when a conversation brings it."""
    opening = {"role": "system", "content": spec.system_prompt}
    for chat in spec.prompts:
        if chat[0] == opening and chat[1:] and prompt_ids(tokenizer, chat[1:]) != prompt_ids(tokenizer, chat):
            raise MergeError(
                "the chat template of the merged model does not give the prompt of the training to a conversation without a "
                "system message",
                place=str(target / "chat_template.jinja"),
                fix="model.merged_system_prompt: false; conversations must then bring the system prompt",
            )


def _save(model: CausalLM, tokenizer: PreTrainedTokenizerBase, target: Path, *, dtype: str) -> None:
    name_end_tokens(model, tokenizer)
    model.to(getattr(torch, dtype)).save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


@torch.no_grad()
def greedy_completions(model: CausalLM, tokenizer: PreTrainedTokenizerBase, spec: MergeSpec) -> GreedyCompletions:
    """Greedy completions of a spec's prompts, with the log-probabilities of their tokens."""
    prompts = [prompt_ids(tokenizer, _chat(chat)) for chat in spec.prompts]
    # [N, S], padded on the left: generate() continues every row at the last column.
    ids, mask = pad(prompts, left=True)
    ends = end_token_ids(tokenizer, model.generation_config.eos_token_id)
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.long().to(model.device),
        max_new_tokens=spec.max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        # Those of the base's generation_config.json would change the answers, and no server of ours applies them.
        repetition_penalty=1.0,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    # [N, S + T] -> [N, T]; rows that end early are filled with padding, which _until_end removes.
    completions = [_until_end(row, ends | {tokenizer.pad_token_id}) for row in out[:, ids.shape[1] :].tolist()]
    batch = token_batch(prompts, completions, range(len(prompts)), device=model.device)
    return GreedyCompletions(completions, completion_logprobs(model, batch, temperature=1.0, layout="plain").logps, batch)


def _chat(chat: list[dict[str, str]]) -> list[Message]:
    return list(chat)


def _until_end(row: list[int], ends: frozenset[int | None]) -> list[int]:
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row


@torch.no_grad()
def logprob_difference(model: CausalLM, before: GreedyCompletions) -> Float[Tensor, " tokens"]:
    """Absolute differences (nats) between a model's log-probabilities of the tokens of `before` and the recorded ones."""
    now = completion_logprobs(model, before.batch, temperature=1.0, layout="plain")
    return (now.logps - before.logps)[before.batch.completion_mask].abs()  # [N, T] -> [real tokens]


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference: after it the two continue different texts and cannot be compared."""
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        total += max(len(one), len(other))
        for left, right in zip(one, other, strict=False):
            if left != right:
                break
            same += 1
    return same / max(1, total)
