"""Base + adapter into one model, with the proof that it is the same policy.

    base + adapter --float32 merge--> merged --rounded to the saved dtype--> files --reloaded--> compared

The merge itself is computed and checked in float32; then what was written is read back and compared again, so that a fault of
the arithmetic, of tied embeddings or of the file is found before anybody downloads the model.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.policy.batch import TokenBatch, pad, token_batch
from grpo_tasks.policy.chat import Message, prompt_ids
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.logprobs import completion_logprobs
from schemas.errors import MergeError
from schemas.results import MergeFigures, MergeSpec, ModelRef

MERGE_TOLERANCE = 2e-3
"""Largest |difference| of a token's log-probability allowed between base + adapter and the merge, both in float32."""
MEAN_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest mean |difference| allowed after rounding to the saved dtype (8, 11 and 24 bits of mantissa)."""


@dataclass(frozen=True, slots=True)
class _Greedy:
    ids: list[list[int]]
    logps: Float[Tensor, "N T"]
    batch: TokenBatch


def merge(spec: MergeSpec, directory: Path, *, device: torch.device) -> MergeFigures:
    """Merge, save to `directory`/model, reload and compare.

    Raises:
        MergeError: the merged or the reloaded model differs from base + adapter.
    """
    tokenizer = load_tokenizer(spec.ref)
    policy = load_policy(spec.ref, spec.model, device=device, dtype="float32")
    before = _greedy(policy, tokenizer, spec)
    merged = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    merge_difference = _difference(merged, before).max().item()
    if not merge_difference <= MERGE_TOLERANCE:
        raise MergeError(
            f"merged and base + adapter differ by {merge_difference:.2g} nats in a token's log-probability",
            place=str(spec.ref.adapter),
            fix="check that the adapter belongs to this base model",
        )
    target = directory / "model"
    _save(merged, tokenizer, target, dtype=spec.model.merged_dtype)
    return _compare_reloaded(spec, target, before, merge_difference=merge_difference, device=device)


def _compare_reloaded(
    spec: MergeSpec, target: Path, before: _Greedy, *, merge_difference: float, device: torch.device
) -> MergeFigures:
    tokenizer = load_tokenizer(ModelRef(path=str(target)))
    reloaded = load_policy(ModelRef(path=str(target)), spec.model, device=device, dtype="float32")
    difference = _difference(reloaded, before)
    tolerance = MEAN_TOLERANCE[spec.model.merged_dtype]
    if not difference.mean().item() <= tolerance:
        raise MergeError(
            f"the saved model differs from base + adapter by {difference.mean().item():.2g} nats a token on average, "
            f"more than rounding to {spec.model.merged_dtype} explains ({tolerance})",
            place=str(target),
            fix="model.merged_dtype: float32",
        )
    return MergeFigures(
        sha256=folder_sha256(target),
        prompts=len(spec.prompts),
        merge_difference=merge_difference,
        max_logprob_difference=difference.max().item(),
        mean_logprob_difference=difference.mean().item(),
        tolerance=tolerance,
        greedy_agreement=_agreement(before.ids, _greedy(reloaded, tokenizer, spec).ids),
        size_bytes=sum(path.stat().st_size for path in target.iterdir()),
    )


def _save(model: CausalLM, tokenizer: PreTrainedTokenizerBase, target: Path, *, dtype: str) -> None:
    model.to(getattr(torch, dtype)).save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    model.float()


@torch.no_grad()
def _greedy(model: CausalLM, tokenizer: PreTrainedTokenizerBase, spec: MergeSpec) -> _Greedy:
    prompts = [prompt_ids(tokenizer, _chat(chat)) for chat in spec.prompts]
    ids, mask = pad(prompts, left=True)
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.long().to(model.device),
        max_new_tokens=spec.max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    completions = [_until_end(row, tokenizer) for row in out[:, ids.shape[1] :].tolist()]
    batch = token_batch(prompts, completions, range(len(prompts)), device=model.device)
    return _Greedy(completions, completion_logprobs(model, batch, temperature=1.0, layout="plain").logps, batch)


def _chat(chat: list[dict[str, str]]) -> list[Message]:
    return list(chat)


def _until_end(row: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row


@torch.no_grad()
def _difference(model: CausalLM, before: _Greedy) -> Float[Tensor, " tokens"]:
    now = completion_logprobs(model, before.batch, temperature=1.0, layout="plain")
    return (now.logps - before.logps)[before.batch.completion_mask].abs()


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        total += max(len(one), len(other))
        for left, right in zip(one, other, strict=False):
            if left != right:
                break
            same += 1
    return same / max(1, total)
