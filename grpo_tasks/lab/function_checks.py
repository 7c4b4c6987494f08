"""One reward function on the bench: called on every probe, and judged by what any function has to keep.

    contract     returns one finite number or None per completion, on probes and on the base model's samples
    determinism  the same completions again, also in another order, score the same
    speed        seconds per completion, texts of a million characters included
    gaming       nothing gamed earns more than the perfect completion
    gold         (the built-in correctness) the ground truth of every row earns the full score

What holds for the sum of a stage is stages.py's business.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_tasks.answers.extract import Tags
from grpo_tasks.lab.probe_set import Bench, Subject, probe_batch
from grpo_tasks.lab.probes import PERFECT, long_texts, perfect_text
from grpo_tasks.rewards.contract import Fault, FunctionScores, Row, ScoreBatch, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig
from schemas.results import LabCheck

LONG_TEXT_PATIENCE = 10.0
"""How many times the limit a completion of a million characters may take."""
SPEED_TRIES = 3
ABOVE = 1e-9
"""Scores that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one function did on the bench."""

    checks: list[LabCheck]
    scores: list[float | None] | None = None
    """Of the probes; None when the contract was broken."""
    base_scores: list[float | None] | None = None
    """Of the base model's samples."""


def try_function(name: str, config: RewardConfig, bench: Bench, worker: RewardWorker) -> Trial:
    """Every check of one function; after a broken contract the others say nothing and are left out."""
    subject = Subject(name, config, worker)
    trial = _contract(subject, bench)
    if trial.scores is None:
        return trial
    checks = [
        *trial.checks,
        _determinism(subject, bench, trial.scores),
        _speed(subject, bench),
        _gaming(subject, bench, trial.scores),
    ]
    if config.function == "correctness":
        checks.append(_gold(subject, bench))
    return replace(trial, checks=checks)


def _contract(subject: Subject, bench: Bench) -> Trial:
    outcome = subject.ask(bench.batch, bench.kinds)
    if isinstance(outcome, Fault):
        return Trial([_at_probe(subject, "contract", _say(outcome), bench, outcome.index or 0)])
    check = _nothing_missing(subject, bench, outcome.scores)
    base = subject.ask(bench.base, bench.kinds) if bench.base is not None else None
    if isinstance(base, Fault):
        return Trial([_at_sample(subject, base, bench)])
    scores = outcome.scores if check.outcome == "passed" else None
    return Trial([check], scores, base.scores if base is not None else None)


def _nothing_missing(subject: Subject, bench: Bench, scores: Sequence[float | None]) -> LabCheck:
    """None says that a function does not apply to a row: then it says so for every completion of the row."""
    rows = [scores[start : start + bench.kinds] for start in range(0, len(scores), bench.kinds)]
    silent = [all(score is None for score in row) for row in rows]
    for number, (row, nothing) in enumerate(zip(rows, silent, strict=True)):
        if not nothing and None in row:
            detail = "returned None for this completion and a score for others of the same row: they could not be compared"
            return _at_probe(subject, "contract", detail, bench, number * bench.kinds + row.index(None))
    if all(silent):
        return _at_probe(subject, "contract", f"returned None for every completion of all {len(rows)} rows", bench, 0)
    return subject.passed(
        "contract", f"{len(scores)} completions" + (f", {sum(silent)} rows do not apply" if any(silent) else "")
    )


def _determinism(subject: Subject, bench: Bench, scores: Sequence[float | None]) -> LabCheck:
    kinds, order = bench.kinds, range(len(scores))
    # Each completion moves to the place before, inside its row's call.
    turned = [index - index % kinds + (index + 1) % kinds for index in order]
    for what, indices in (("when asked again", order), ("in another place of the batch", turned)):
        outcome = subject.ask(bench.batch.take(indices), kinds)
        if isinstance(outcome, Fault):
            return _at_probe(subject, "determinism", f"{_say(outcome)} {what}", bench, indices[outcome.index or 0])
        for index, again in zip(indices, outcome.scores, strict=True):
            if again != scores[index]:
                return _at_probe(subject, "determinism", f"scored {scores[index]}, and {again} {what}", bench, index)
    return subject.passed("determinism")


def _speed(subject: Subject, bench: Bench) -> LabCheck:
    limit = bench.limits.max_seconds_per_completion
    slowest, where = 0.0, ""
    for kind, batch, patience in _timed_batches(bench):
        allowed = limit * patience
        outcome = _quickest(subject, batch, bench.kinds, limit_s=allowed * len(batch))
        seconds = outcome.seconds / len(batch) if isinstance(outcome, FunctionScores) else 0.0
        if isinstance(outcome, Fault) or seconds > allowed:
            detail = _say(outcome) if isinstance(outcome, Fault) else f"{seconds:.3f} s for one completion, limit {allowed:g} s"
            return subject.failed("speed", detail, bench.chosen[0], probe=kind, text=batch.completions[0])
        slowest, where = max((slowest, where), (seconds, kind))
    return subject.passed("speed", f"slowest {slowest * 1000:.1f} ms for one completion ({where})")


def _timed_batches(bench: Bench) -> Iterator[tuple[str, ScoreBatch, float]]:
    """What is timed, and how many times the limit it may take."""
    yield "ordinary length", bench.batch, 1
    for kind, text in long_texts(Tags.of(bench.rewards.tags)).items():
        yield kind, probe_batch([bench.chosen[0]], [text]), LONG_TEXT_PATIENCE


def _quickest(subject: Subject, batch: ScoreBatch, size: int, *, limit_s: float) -> FunctionScores | Fault:
    """The quickest of a few tries, as long as they are too slow: a busy machine is no fault of the function."""
    best = subject.ask(batch, size)
    for _ in range(SPEED_TRIES - 1):
        if isinstance(best, Fault) or best.seconds <= limit_s:
            return best
        again = subject.ask(batch, size)
        best = again if isinstance(again, Fault) else min(best, again, key=lambda values: values.seconds)
    return best


def _gaming(subject: Subject, bench: Bench, scores: Sequence[float | None]) -> LabCheck:
    worst: tuple[float, int] | None = None
    for index, probe in enumerate(bench.probes):
        score, perfect = scores[index], scores[index - index % bench.kinds]
        # A penalty that is a little smaller is no reward: what is not above 0 gains nothing by itself.
        if probe.role == "gamed" and score is not None and perfect is not None and score > max(perfect, 0.0) + ABOVE:
            worst = max(filter(None, [worst, (score - perfect, index)]))
    if worst is None:
        return subject.passed("gaming")
    index = worst[1]
    detail = f"scores {scores[index]:g}, the {PERFECT} completion only {scores[index - index % bench.kinds]:g}"
    return _at_probe(subject, "gaming", detail, bench, index)


def _gold(subject: Subject, bench: Bench) -> LabCheck:
    tags = Tags.of(bench.rewards.tags)
    batch = probe_batch(bench.rows, [perfect_text(row, tags) for row in bench.rows])
    outcome = subject.ask(batch, len(batch))
    if isinstance(outcome, Fault):
        missed, detail = [outcome.index or 0], _say(outcome)
    else:
        missed = [index for index, score in enumerate(outcome.scores) if score != 1.0]
        detail = _unreadable([bench.rows[index] for index in missed], bench)
    if not missed:
        return subject.passed("gold", f"{len(bench.rows)} rows")
    return subject.failed("gold", detail, bench.rows[missed[0]], probe=PERFECT, text=batch.completions[missed[0]])


def _unreadable(rows: Sequence[Row], bench: Bench) -> str:
    if not rows:
        return ""
    first = f"the ground truth {shorten(rows[0].answer, 60)!r} does not earn its own row the full score"
    return f"{first}: equality {bench.rewards.equality} cannot read it ({len(rows)} of {len(bench.rows)} rows)"


def _say(fault: Fault) -> str:
    return "; ".join(filter(None, [fault.detail, fault.source, fault.fix]))


def _at_probe(subject: Subject, check: str, detail: str, bench: Bench, index: int) -> LabCheck:
    probe = bench.probes[index]
    return subject.failed(check, detail, bench.row(index), probe=probe.kind, text=probe.text)


def _at_sample(subject: Subject, fault: Fault, bench: Bench) -> LabCheck:
    assert bench.base is not None
    index = fault.index or 0
    text = bench.base.completions[index]
    return subject.failed("contract", _say(fault), bench.base_rows[index], probe="sample of the base model", text=text)
