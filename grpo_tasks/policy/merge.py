"""Merge base and adapter into one model, and prove that what was learned is what is saved.

    merge in float32 -> round to a precision -> files -> reload -> compare: keeps 95 %, or the next precision

The proof compares at every position of the policy's completions of held-out prompts (change.py): the merged model in float32,
then the one reloaded from its files. bfloat16 keeps 8 bits of a weight, float16 11: a careful training changes less than that.
"""

import gc
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.content.tokenizer import completion_text, prompt_ids, set_system_prompt
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.policy import change
from grpo_tasks.policy.change import KEPT, Distance, PolicyRecord, Shares, distance
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import generation_of, load_base, load_policy, load_tokenizer
from grpo_tasks.policy.text_tower import complete, outside_text_tower
from schemas.errors import MergeError
from schemas.results.model import (
    GreedyAnswer,
    MergedDtype,
    MergeFigures,
    MergeSpec,
    ModelRef,
    RefusedPrecision,
    percent,
)

MERGE_TOLERANCE = 2e-3
"""Largest allowed difference (nats) of a token's log-probability between base + adapter and the merged model, in float32."""
MEAN_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest allowed mean difference (nats per token) after rounding to the saved dtype (24, 8 and 11 bits of significand)."""
PRECISIONS: tuple[MergedDtype, ...] = ("bfloat16", "float16", "float32")
"""What `merged_dtype: auto` tries in turn."""
FLOAT16_LARGEST = 65504.0
"""Largest number of float16. A weight or an activation beyond it becomes infinite."""
HEADROOM = 2.0
"""How many times as large activations may become as those of the proof's texts."""

RECORDED_ANSWERS = 4
"""Prompts whose greedy answers are recorded. A published model must repeat them."""
_NAMED = 3
"""Weights that a message names."""
_SAME = 1e-5
"""Difference of two fingerprints of the same weight over its norm, by the order of the sums."""


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """Two numbers that differ where two weights differ, so that a weight need not be kept."""

    norm: float
    mark: float
    """u' W v with fixed random vectors u and v: other signs, or rows in another order, have the same norm."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> "_Fingerprint":
        values = weight.detach().float().reshape(len(weight) if weight.ndim > 1 else 1, -1)
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(size, generator=generator).to(values.device) for size in values.shape)
        return cls(torch.linalg.vector_norm(values, dtype=torch.float64).item(), (left @ (values @ right)).item())

    def difference(self, other: "_Fingerprint | None") -> float:
        """From another one, over the norm; infinite where there is none."""
        if other is None:
            return math.inf
        return max(abs(other.norm - self.norm), abs(other.mark - self.mark)) / max(self.norm, 1e-12)

    def named(self, name: str, other: "_Fingerprint | None") -> str:
        """For a message."""
        if other is None:
            return f"{name} (missing)"
        if abs(other.norm - self.norm) <= _SAME * self.norm:
            return f"{name} (other values of the same norm)"
        return f"{name} (norm {other.norm:.4g} instead of {self.norm:.4g})"


@dataclass(frozen=True, slots=True)
class _Evidence:
    """About a policy before anything is saved."""

    record: PolicyRecord
    base: Distance
    """How far the base is from the policy: what training changed."""
    shares: Mapping[MergedDtype, Shares]
    """What each precision keeps of the change of the weights."""
    merge_difference: float


def merge(spec: MergeSpec, directory: Path, *, device: torch.device) -> MergeFigures:
    """Merge, save to `directory`/model, reload and compare; returns the figures of the proof.

    MergeError where the merged or the reloaded model differs from base + adapter, or the precision that the config names keeps
    too little of what training changed.
    """
    tokenizer = load_tokenizer(spec.ref, spec.model, spec.chat_template_kwargs)
    evidence, merged = _measured_merge(spec, tokenizer, device)
    if spec.system_prompt is not None:
        set_system_prompt(tokenizer, spec.system_prompt)
    target, refused = directory / "model", list[RefusedPrecision]()
    asked = spec.model.merged_dtype
    for dtype in PRECISIONS if asked == "auto" else (asked,):
        reason = _unfit(dtype, evidence)
        if reason is None:
            model = merged if merged is not None else _merged(load_policy(spec.ref, spec.model, device=device, dtype="float32"))
            merged = None
            shutil.rmtree(target, ignore_errors=True)
            model.generation_config = generation_of(model, tokenizer, spec.sampling)
            report(Progress(f"saving the merged model in {dtype}"))
            saved = _save(model, tokenizer, target, dtype=dtype)
            complete(target, spec.model.path, spec.model.revision, dtype)
            # Two copies of the weights in float32 would be the largest need for memory of a whole run.
            del model
            gc.collect()  # modules refer to each other in cycles
            found = _compared(spec, target, evidence, saved, dtype=dtype, device=device)
            if isinstance(found, MergeFigures):
                return found.model_copy(update={"refused": refused})
            reason = found
        refused.append(reason)
    shutil.rmtree(target, ignore_errors=True)
    raise _no_precision(spec, evidence, refused)


def _measured_merge(
    spec: MergeSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[_Evidence, CausalLM | None]:
    policy = load_policy(spec.ref, spec.model, device=device, dtype="float32")
    prompts = [prompt_ids(tokenizer, chat) for chat in spec.prompts]
    said = change.record_completions(policy, tokenizer, prompts, spec.max_new_tokens)
    dtypes = [getattr(torch, name) for name in PRECISIONS]
    if isinstance(policy, PeftModel):
        with policy.disable_adapter():
            base = distance(policy, said)
        found = change.weight_shares(policy, None, dtypes)
    else:
        # Trained in full, which took several copies of the weights in float32; two are less. In model.dtype first: so it started.
        started = load_base(ModelRef(path=spec.model.path, revision=spec.model.revision), spec.model, device=device).float()
        base, found = distance(started, said), change.weight_shares(policy, started, dtypes)
        del started
    # Each adapted weight as it must be after the merge; none of a model that was trained in full.
    changed = change.changes(policy, None) if isinstance(policy, PeftModel) else ()
    expected = {name: _Fingerprint.of(weight + delta) for name, weight, delta in changed if name.endswith(".weight")}
    merged = _merged(policy)
    exact = distance(merged, said)
    shares = {name: found[getattr(torch, name)] for name in PRECISIONS}
    if not exact.max <= MERGE_TOLERANCE:
        wrong = _differing(expected, _weights(merged)) or _least_kept(shares["float32"])
        raise MergeError(
            f"the merged model and base + adapter differ by {exact.max:.2g} nats in a token's log-probability, "
            f"the limit is {MERGE_TOLERANCE}; most in {wrong}",
            place=str(spec.ref.adapter or spec.ref.path),
            fix="check that the adapter belongs to this base model",
        )
    return _Evidence(said, base, shares, exact.max), merged


def _merged(policy: CausalLM) -> CausalLM:
    merged: CausalLM = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    return merged


def _unfit(dtype: MergedDtype, evidence: _Evidence) -> RefusedPrecision | None:
    """Why a precision cannot hold the policy, by its weights and activations alone."""
    share = evidence.shares[dtype].total
    largest = evidence.record.largest * HEADROOM
    if dtype == "float16" and not largest <= FLOAT16_LARGEST:
        reason = f"layers reach values of {evidence.record.largest:.3g}, and float16 ends at {FLOAT16_LARGEST:.0f}"
    elif not share >= KEPT:
        reason = f"it keeps {percent(share)} of the change of the weights"
    else:
        return None
    return RefusedPrecision(dtype=dtype, kept_weights=share, reason=reason)


def _compared(
    spec: MergeSpec,
    target: Path,
    evidence: _Evidence,
    saved: Mapping[str, _Fingerprint],
    *,
    dtype: MergedDtype,
    device: torch.device,
) -> MergeFigures | RefusedPrecision:
    """The figures of the model in `target`, of which each weight was `saved` so, or why its precision is refused."""
    tokenizer = load_tokenizer(ModelRef(path=str(target)))
    _check_system_prompt(tokenizer, spec, target)
    reloaded = load_policy(ModelRef(path=str(target)), spec.model, device=device, dtype="float32")
    found, tolerance = distance(reloaded, evidence.record), MEAN_TOLERANCE[dtype]
    share, weights = change.kept(found, evidence.base), evidence.shares[dtype].total
    close = found.mean <= tolerance
    # float32 is the end of the line, and its arithmetic alone is a large part of a change of a few millionths of a nat.
    enough = share >= KEPT or (dtype == "float32" and close)
    if not (close and enough):
        far = f"differs from base + adapter by {found.mean:.2g} nats per token on average (limit {tolerance:g})"
        wrong = _differing(saved, _weights(reloaded))
        if wrong:
            raise MergeError(
                f"the saved model holds other weights than the merged one, and {far}: {wrong}",
                place=str(target),
                fix="run the same command again; if the error stays, the disk or a library damages the files",
            )
        lost = f"it keeps {percent(share)} of what the policy changed" if share > 0 else "the base is nearer to the policy"
        reason = f"it {far}" if not close else lost
        return RefusedPrecision(dtype=dtype, kept_weights=weights, kept=share, reason=reason)
    prompts = [text.prompt for text in evidence.record.texts if text.greedy][:RECORDED_ANSWERS]
    return MergeFigures(
        sha256=folder_sha256(target),
        dtype=dtype,
        prompts=len(spec.prompts),
        kept=share,
        kept_weights=weights,
        base_kl=evidence.base.kl,
        merged_kl=found.kl,
        merge_difference=evidence.merge_difference,
        max_logprob_difference=found.max,
        mean_logprob_difference=found.mean,
        base_logprob_difference=evidence.base.mean,
        tolerance=tolerance,
        greedy_agreement=found.agreement,
        base_greedy_agreement=evidence.base.agreement,
        size_bytes=sum(path.stat().st_size for path in target.iterdir()),
        answers=_answers_of_users(spec, reloaded, tokenizer, prompts, target),
    )


def _answers_of_users(
    spec: MergeSpec, reloaded: CausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], target: Path
) -> list[GreedyAnswer]:
    """What a user of the files gets, who sets nothing but the length; refused where the training would have gone on otherwise."""
    given, trained = (
        change.complete(reloaded, tokenizer, prompts, spec.max_new_tokens, greedy=True, sampling=sampling)
        for sampling in (None, spec.sampling)
    )
    if given != trained:
        raise MergeError(
            "transformers' generate does not answer with the saved model as the training did",
            place=str(target / "generation_config.json"),
            fix="report it with config.json and generation_config.json of the base model",
        )
    texts = [completion_text(tokenizer, answer.completion) for answer in given]
    return [GreedyAnswer(messages=chat, text=text) for chat, text in zip(spec.prompts, texts, strict=False)]


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


def _no_precision(spec: MergeSpec, evidence: _Evidence, refused: Sequence[RefusedPrecision]) -> MergeError:
    [*_, last] = refused
    asked = spec.model.merged_dtype
    said = "; ".join(f"{one.dtype}: {one.reason}" for one in refused)
    others = [
        f"{name} {percent(evidence.shares[name].total)}" for name in PRECISIONS if name not in {one.dtype for one in refused}
    ]
    would = f"; of the change of the weights, others would keep: {', '.join(others)}" if others else ""
    return MergeError(
        f"merged and rounded, the model is no longer what was trained ({said}; limit {percent(KEPT)}). Least is left in "
        f"{_least_kept(evidence.shares[last.dtype])}{would}",
        place="model.merged_dtype" if asked != "auto" else str(spec.ref.adapter or spec.ref.path),
        fix="check that the adapter belongs to this base model" if asked == "auto" else "model.merged_dtype: auto",
    )


def _least_kept(shares: Shares) -> str:
    worst = sorted(shares.each.items(), key=lambda item: item[1])[:_NAMED]
    return ", ".join(f"{name} ({percent(share)})" for name, share in worst) or "no weight, for none was changed"


def _differing(ours: Mapping[str, _Fingerprint], theirs: Mapping[str, _Fingerprint]) -> str:
    # The weights that differ, most first.
    by_size = {name: weight.difference(theirs.get(name)) for name, weight in ours.items()}
    worst = sorted((name for name in by_size if not by_size[name] <= _SAME), key=lambda name: -by_size[name])
    named = [ours[name].named(name, theirs.get(name)) for name in worst[:_NAMED]]
    return ", ".join(named) + (f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else "")


def _weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, _Fingerprint]:
    # Each weight after rounding. Tied weights have both names, as in their files.
    return {name: _Fingerprint.of(weight.to(dtype)) for name, weight in model.named_parameters(remove_duplicate=False)}


def _save(model: CausalLM, tokenizer: PreTrainedTokenizerBase, target: Path, *, dtype: str) -> dict[str, _Fingerprint]:
    # Returns each weight as it must be in the files; those of a vision tower stay in the precision of the base.
    weights = _weights(model, getattr(torch, dtype))
    for name in outside_text_tower(weights):
        del weights[name]
    model.to(getattr(torch, dtype)).save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    return weights
