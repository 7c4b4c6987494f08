"""The checks of one reward function: it scores every probe, and must keep what any function has to keep.

    contract     returns a finite number or None per completion, for probes and for samples of the base model
    determinism  scores the same completions the same again, also in another order
    speed        stays within the time limit per completion, also for texts of a million characters
    gaming       pays nothing gamed more than the perfect completion
    gold         (the built-in correctness only) gives the ground truth of every row the full score

stage_checks.py checks the sum of a stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_tasks.answers.tags import Tags
from grpo_tasks.lab.probe_set import ProbeSet, TriedFunction, probe_batch
from grpo_tasks.lab.probes import PERFECT, long_texts, perfect_text
from grpo_tasks.rewards.contract import Fault, FunctionScores, Row, ScoreBatch, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig
from schemas.results.lab import LabCheck

LONG_TEXT_FACTOR = 10.0
"""A completion of a million characters may take this many times the limit."""
MAX_SPEED_TRIES = 3
"""How often a call that is too slow is timed again: on a busy machine the first time may be the machine's fault."""
SAME_SCORE = 1e-9
"""Scores that differ by no more than this are equal."""


@dataclass(frozen=True, slots=True)
class FunctionFindings:
    """What the lab found out about one function."""

    checks: list[LabCheck]
    scores: list[float | None] | None = None
    """The scores of the probes; None when the function broke its contract."""
    base_scores: list[float | None] | None = None
    """The scores of the samples of the base model; None without samples or when the function broke its contract."""


def check_function(name: str, config: RewardConfig, probe_set: ProbeSet, worker: RewardWorker) -> FunctionFindings:
    """All checks of one function. When it breaks its contract the other checks mean nothing and are left out."""
    function = TriedFunction(name, config, worker)
    findings = _contract(function, probe_set)
    if findings.scores is None:
        return findings
    checks = [
        *findings.checks,
        _determinism(function, probe_set, findings.scores),
        _speed(function, probe_set),
        _gaming(function, probe_set, findings.scores),
    ]
    if config.function == "correctness":
        checks.append(_gold(function, probe_set))
    return replace(findings, checks=checks)


def _contract(function: TriedFunction, probe_set: ProbeSet) -> FunctionFindings:
    outcome = function.score(probe_set.batch, probe_set.per_row)
    if isinstance(outcome, Fault):
        return FunctionFindings([_at_probe(function, "contract", _words(outcome), probe_set, outcome.index or 0)])
    check = _nothing_missing(function, probe_set, outcome.scores)
    base = function.score(probe_set.base, probe_set.per_row) if probe_set.base is not None else None
    if isinstance(base, Fault):
        return FunctionFindings([_at_sample(function, base, probe_set)])
    scores = outcome.scores if check.outcome == "passed" else None
    return FunctionFindings([check], scores, base.scores if base is not None else None)


def _nothing_missing(function: TriedFunction, probe_set: ProbeSet, scores: Sequence[float | None]) -> LabCheck:
    """None means that the function does not apply to a row. Then it must be None for every completion of the row."""
    rows = [scores[start : start + probe_set.per_row] for start in range(0, len(scores), probe_set.per_row)]
    inapplicable = [all(score is None for score in row) for row in rows]
    for number, (row, nothing) in enumerate(zip(rows, inapplicable, strict=True)):
        if not nothing and None in row:
            detail = "returned None for this completion and a score for others of the same row, so they cannot be compared"
            return _at_probe(function, "contract", detail, probe_set, number * probe_set.per_row + row.index(None))
    if all(inapplicable):
        return _at_probe(function, "contract", f"returned None for every completion of all {len(rows)} rows", probe_set, 0)
    return function.passed(
        "contract", f"{len(scores)} completions" + (f", does not apply to {sum(inapplicable)} rows" if any(inapplicable) else "")
    )


def _determinism(function: TriedFunction, probe_set: ProbeSet, scores: Sequence[float | None]) -> LabCheck:
    kinds, order = probe_set.per_row, range(len(scores))
    # Within the call of each row, every completion moves up by one position and the first becomes the last.
    rotated = [index - index % kinds + (index + 1) % kinds for index in order]
    for when, indices in (("in a second call", order), ("at another position in the batch", rotated)):
        outcome = function.score(probe_set.batch.take(indices), kinds)
        if isinstance(outcome, Fault):
            return _at_probe(function, "determinism", f"{when}: {_words(outcome)}", probe_set, indices[outcome.index or 0])
        for index, again in zip(indices, outcome.scores, strict=True):
            if again != scores[index]:
                return _at_probe(function, "determinism", f"returned {scores[index]}, then {again} {when}", probe_set, index)
    return function.passed("determinism")


def _speed(function: TriedFunction, probe_set: ProbeSet) -> LabCheck:
    limit = probe_set.limits.max_seconds_per_completion
    slowest, slowest_kind = 0.0, ""
    for kind, batch, factor in _timed_batches(probe_set):
        allowed = limit * factor
        outcome = _fastest(function, batch, probe_set.per_row, limit_s=allowed * len(batch))
        seconds = outcome.seconds / len(batch) if isinstance(outcome, FunctionScores) else 0.0
        if isinstance(outcome, Fault) or seconds > allowed:
            detail = (
                _words(outcome)
                if isinstance(outcome, Fault)
                else f"took {seconds:.3f} s per completion; the limit is {allowed:g} s"
            )
            return function.failed("speed", detail, probe_set.chosen[0], probe=kind, text=batch.completions[0])
        slowest, slowest_kind = max((slowest, slowest_kind), (seconds, kind))
    return function.passed("speed", f"at most {slowest * 1000:.1f} ms per completion ({slowest_kind})")


def _timed_batches(probe_set: ProbeSet) -> Iterator[tuple[str, ScoreBatch, float]]:
    """What is timed: a name, the batch, and the factor on the limit."""
    yield "ordinary length", probe_set.batch, 1
    for kind, text in long_texts(Tags.of(probe_set.completion.tags)).items():
        yield kind, probe_batch([probe_set.chosen[0]], [text]), LONG_TEXT_FACTOR


def _fastest(function: TriedFunction, batch: ScoreBatch, size: int, *, limit_s: float) -> FunctionScores | Fault:
    """Score the batch, and again while it takes longer than `limit_s`; the fastest result."""
    best = function.score(batch, size)
    for _ in range(MAX_SPEED_TRIES - 1):
        if isinstance(best, Fault) or best.seconds <= limit_s:
            return best
        again = function.score(batch, size)
        best = again if isinstance(again, Fault) else min(best, again, key=lambda values: values.seconds)
    return best


def _gaming(function: TriedFunction, probe_set: ProbeSet, scores: Sequence[float | None]) -> LabCheck:
    worst: tuple[float, int] | None = None
    for index, probe in enumerate(probe_set.probes):
        score, perfect = scores[index], scores[index - index % probe_set.per_row]
        # For a penalty (scores up to 0) a smaller deduction is no gain, so only a score above 0 counts as one.
        if probe.role == "gamed" and score is not None and perfect is not None and score > max(perfect, 0.0) + SAME_SCORE:
            worst = max(filter(None, [worst, (score - perfect, index)]))
    if worst is None:
        return function.passed("gaming")
    index = worst[1]
    detail = f"earns {scores[index]:g}, the {PERFECT} completion only {scores[index - index % probe_set.per_row]:g}"
    return _at_probe(function, "gaming", detail, probe_set, index)


def _gold(function: TriedFunction, probe_set: ProbeSet) -> LabCheck:
    tags = Tags.of(probe_set.completion.tags)
    batch = probe_batch(probe_set.rows, [perfect_text(row, tags) for row in probe_set.rows])
    outcome = function.score(batch, len(batch))
    if isinstance(outcome, Fault):
        missed, detail = [outcome.index or 0], _words(outcome)
    else:
        missed = [index for index, score in enumerate(outcome.scores) if score != 1.0]
        detail = _unreadable([probe_set.rows[index] for index in missed], probe_set)
    if not missed:
        return function.passed("gold", f"{len(probe_set.rows)} rows")
    return function.failed("gold", detail, probe_set.rows[missed[0]], probe=PERFECT, text=batch.completions[missed[0]])


def _unreadable(rows: Sequence[Row], probe_set: ProbeSet) -> str:
    if not rows:
        return ""
    first = f"the ground truth {shorten(rows[0].answer or '', 60)!r} does not get the full score for its own row"
    return f"{first}: the equality {probe_set.completion.equality} cannot read it ({len(rows)} of {len(probe_set.rows)} rows)"


def _words(fault: Fault) -> str:
    return "; ".join(filter(None, [fault.detail, fault.source, fault.fix]))


def _at_probe(function: TriedFunction, check: str, detail: str, probe_set: ProbeSet, index: int) -> LabCheck:
    probe = probe_set.probes[index]
    return function.failed(check, detail, probe_set.row(index), probe=probe.kind, text=probe.text)


def _at_sample(function: TriedFunction, fault: Fault, probe_set: ProbeSet) -> LabCheck:
    assert probe_set.base is not None
    index = fault.index or 0
    text = probe_set.base.completions[index]
    return function.failed("contract", _words(fault), probe_set.base_rows[index], probe="sample of the base model", text=text)
