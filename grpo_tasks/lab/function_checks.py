"""The checks of one reward function: it scores every probe, and must keep what any function has to keep.

contract     (a fault) returns a finite number or None per completion, within its time limit
applies      scores some completion
same_score   does not score everything alike
determinism  scores the same completions the same again, also in another order
speed        is fast for completions of ordinary length, and for texts of a million characters
gaming       pays nothing gamed more than the perfect completion
gold         (the built-in correctness only) gives the ground truth of every row the full score
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_tasks.content.modules import own_modules
from grpo_tasks.lab.judge_checks import JUDGED_ROWS
from grpo_tasks.lab.probe_set import ProbeSet, TriedFunction, probe_batch
from grpo_tasks.lab.probes import PERFECT, long_texts, perfect_text
from grpo_tasks.rewards.contract import FunctionScores, RewardFault, ScoreBatch, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig
from schemas.prompts import PromptRow
from schemas.results.lab import LabCheck

CHARS_PER_TOKEN = 4
"""Characters of a completion of the configured length for each token."""
LONG_TEXT_FACTOR = 10.0
"""A completion of a million characters may take this many times the limit."""
LONG_TEXT_WAIT = 10.0
"""It is given up after this many times what it may take: a hang on it does not stop a run, so it need not be waited for."""
MAX_SPEED_TRIES = 3
"""How often a call that is too slow is timed again: on a busy machine the first time may be the machine's fault."""
SAME_SCORE = 1e-9
"""Scores that differ by no more than this are equal."""
MAX_NAMED_TAGS = 4

_TAG = re.compile(r"</([A-Za-z_][\w-]{0,30})>")


@dataclass(frozen=True, slots=True)
class FunctionFindings:
    """What the lab found out about one function."""

    checks: list[LabCheck]
    scores: list[float | None] | None = None
    """The scores of the probes; None when the function broke its contract."""
    base_scores: list[float | None] | None = None
    """The scores of the samples of the base model; None without samples or when the function broke its contract."""


def check_function(
    name: str, config: RewardConfig, probe_set: ProbeSet, worker: RewardWorker, *, max_completion_length: int
) -> FunctionFindings:
    """All checks of one function. When it breaks its contract the other checks mean nothing and are left out.

    Args:
        name: its name in the configuration.
        config: its settings.
        probe_set: the completions.
        worker: has the function loaded.
        max_completion_length: tokens of the longest completion in training.
    """
    function = TriedFunction(name, config, worker)
    if config.judge is not None:
        return _check_judge(function, probe_set)
    outcome = function.score(probe_set.batch, probe_set.sizes)
    if isinstance(outcome, RewardFault):
        return FunctionFindings([_fault_at(function, outcome, probe_set)])
    base: FunctionScores | RewardFault = FunctionScores([], 0.0)
    if probe_set.base is not None:
        base = function.score(probe_set.base, probe_set.base_sizes)
    if isinstance(base, RewardFault):
        return FunctionFindings([_fault_at_sample(function, base, probe_set)])
    longest = _longest(probe_set, max_completion_length)
    long = function.score(longest, [1] * len(longest))
    if isinstance(long, RewardFault):
        return FunctionFindings([_fault_in(function, long, probe_set.chosen[0], "as long as a completion may be", longest)])
    checks = [function.passed("contract", f"{len(outcome.scores)} completions{_not_scored(outcome.scores)}")]
    checks += _opinions(function, config, probe_set, outcome, [*outcome.scores, *base.scores, *long.scores])
    return FunctionFindings(checks, outcome.scores, base.scores if probe_set.base is not None else None)


def _check_judge(function: TriedFunction, probe_set: ProbeSet) -> FunctionFindings:
    """The contract of a judge, on the probes of a few rows and on the samples; judge_checks.py checks its opinions."""
    few = probe_set.groups[:JUDGED_ROWS]
    indices = [index for group in few for index in group]
    outcome = function.score(probe_set.batch.take(indices), [len(group) for group in few])
    if isinstance(outcome, RewardFault):
        return FunctionFindings([_fault_at(function, replace(outcome, index=indices[outcome.index or 0]), probe_set)])
    base: FunctionScores | RewardFault = FunctionScores([], 0.0)
    if probe_set.base is not None:
        base = function.score(probe_set.base, probe_set.base_sizes)
    if isinstance(base, RewardFault):
        return FunctionFindings([_fault_at_sample(function, base, probe_set)])
    known = dict(zip(indices, outcome.scores, strict=True))
    scores = [known.get(index) for index in range(len(probe_set.probes))]
    checks = [function.passed("contract", f"{len(outcome.scores) + len(base.scores)} completions")]
    return FunctionFindings(checks, scores, base.scores if probe_set.base is not None else None)


def _opinions(
    function: TriedFunction, config: RewardConfig, probe_set: ProbeSet, outcome: FunctionScores, seen: Sequence[float | None]
) -> Iterator[LabCheck]:
    if all(score is None for score in seen):
        detail = f"returned None for every completion of all {len(probe_set.chosen)} rows"
        yield _at_probe(function, "applies", detail, probe_set, 0)
        return
    if ":" in (config.function or ""):
        yield _same_score(function, config, probe_set, seen)
    yield _determinism(function, probe_set, outcome.scores)
    yield _speed(function, probe_set, outcome)
    if probe_set.num_perfect:
        yield _gaming(function, probe_set, outcome.scores)
    if config.function == "correctness" and any(perfect_text(row, probe_set.completion) for row in probe_set.rows):
        yield _gold(function, probe_set)


def _longest(probe_set: ProbeSet, max_completion_length: int) -> ScoreBatch:
    texts = long_texts(probe_set.completion.tags, CHARS_PER_TOKEN * max_completion_length)
    return probe_batch([probe_set.chosen[0]] * len(texts), list(texts.values()), played=probe_set.played)


def _not_scored(scores: Sequence[float | None]) -> str:
    missing = sum(score is None for score in scores)
    return f", does not apply to {missing} of them" if missing else ""


def _same_score(function: TriedFunction, config: RewardConfig, probe_set: ProbeSet, seen: Sequence[float | None]) -> LabCheck:
    known = {score for score in seen if score is not None}
    if len(known) > 1:
        return function.passed("same_score")
    detail = f"gives every completion the same score, {known.pop():g}"
    others = _other_tags(config, probe_set)
    if others:
        names = [tag.strip("</>") for tag in probe_set.completion.tags.in_order[1::2]]
        detail += f": its module looks for the tags {', '.join(others)}, and completion.tags are {' and '.join(names)}"
    return _at_probe(function, "same_score", detail, probe_set, 0)


def _other_tags(config: RewardConfig, probe_set: ProbeSet) -> list[str]:
    """Tags in the source of the user's module that are not the configured ones. The source is read, not run."""
    module = (config.function or "").partition(":")[0]
    file = own_modules(module, probe_set.rewards.module_dirs()).get(module)
    text = file.read_text(encoding="utf-8", errors="replace") if file is not None and file.suffix == ".py" else ""
    ours = set(probe_set.completion.tags.in_order)
    found = dict.fromkeys(name for name in _TAG.findall(text) if f"</{name}>" not in ours)
    return list(found)[:MAX_NAMED_TAGS]


def _determinism(function: TriedFunction, probe_set: ProbeSet, scores: Sequence[float | None]) -> LabCheck:
    order = range(len(scores))
    # Within the call of each row, every completion moves up by one position and the first becomes the last.
    rotated = [index for group in probe_set.groups for index in [*group[1:], group[0]]]
    for when, indices in (("in a second call", order), ("at another position in the batch", rotated)):
        outcome = function.score(probe_set.batch.take(indices), probe_set.sizes)
        if isinstance(outcome, RewardFault):
            return _at_probe(function, "determinism", f"{when}: {outcome.detail}", probe_set, indices[outcome.index or 0])
        for index, again in zip(indices, outcome.scores, strict=True):
            if again != scores[index]:
                return _at_probe(function, "determinism", f"returned {scores[index]}, then {again} {when}", probe_set, index)
    return function.passed("determinism")


def _speed(function: TriedFunction, probe_set: ProbeSet, ordinary: FunctionScores) -> LabCheck:
    limit, row = probe_set.limits.max_seconds_per_completion, probe_set.chosen[0]
    # Only a slow function is worth a second look: the probes were timed when their contract was checked.
    first: FunctionScores | RewardFault = ordinary
    if ordinary.seconds > limit * len(probe_set.batch):
        first = _fastest(function, probe_set.batch, probe_set.sizes, allowed_s=limit * len(probe_set.batch))
    slowest, slowest_kind = 0.0, ""
    for kind, batch, factor, outcome in _timed(function, probe_set, first):
        allowed = limit * factor
        seconds = outcome.seconds / len(batch) if isinstance(outcome, FunctionScores) else 0.0
        if isinstance(outcome, RewardFault) or seconds > allowed:
            slow = f"took {seconds:.3f} s per completion; the limit is {allowed:g} s"
            took = outcome.detail if isinstance(outcome, RewardFault) else slow
            return function.failed("speed", took, row, probe=kind, text=batch.completions[0])
        slowest, slowest_kind = max((slowest, slowest_kind), (seconds, kind))
    return function.passed("speed", f"at most {slowest * 1000:.1f} ms per completion ({slowest_kind})")


def _timed(
    function: TriedFunction, probe_set: ProbeSet, first: FunctionScores | RewardFault
) -> Iterator[tuple[str, ScoreBatch, float, FunctionScores | RewardFault]]:
    """What is timed: a name, the batch, the factor on the limit, and the outcome."""
    yield "ordinary length", probe_set.batch, 1, first
    allowed = probe_set.limits.max_seconds_per_completion * LONG_TEXT_FACTOR
    for kind, text in long_texts(probe_set.completion.tags).items():
        batch = probe_batch([probe_set.chosen[0]], [text], played=probe_set.played)
        yield kind, batch, LONG_TEXT_FACTOR, _fastest(function, batch, [1], allowed_s=allowed, limit_s=allowed * LONG_TEXT_WAIT)


def _fastest(
    function: TriedFunction, batch: ScoreBatch, sizes: Sequence[int], *, allowed_s: float, limit_s: float | None = None
) -> FunctionScores | RewardFault:
    """Score the batch, and again while it takes longer than `allowed_s`; the fastest result."""
    best = function.score(batch, sizes, limit_s)
    for _ in range(MAX_SPEED_TRIES - 1):
        if isinstance(best, RewardFault) or best.seconds <= allowed_s:
            return best
        again = function.score(batch, sizes, limit_s)
        best = again if isinstance(again, RewardFault) else min(best, again, key=lambda values: values.seconds)
    return best


def _gaming(function: TriedFunction, probe_set: ProbeSet, scores: Sequence[float | None]) -> LabCheck:
    worst: tuple[float, int, float] | None = None
    for group in probe_set.groups:
        best = probe_set.perfect(group)
        perfect = scores[best] if best is not None else None
        if perfect is None:
            continue
        for index in group:
            score = scores[index]
            # For a penalty (scores up to 0) a smaller deduction is no gain, so only a score above 0 counts as one.
            if probe_set.probes[index].role == "gamed" and score is not None and score > max(perfect, 0.0) + SAME_SCORE:
                worst = max(filter(None, [worst, (score - perfect, index, perfect)]))
    if worst is None:
        return function.passed("gaming")
    detail = f"earns {scores[worst[1]]:g}, the {PERFECT} completion only {worst[2]:g}"
    return _at_probe(function, "gaming", detail, probe_set, worst[1])


def _gold(function: TriedFunction, probe_set: ProbeSet) -> LabCheck:
    made = [(row, perfect_text(row, probe_set.completion)) for row in probe_set.rows]
    pairs = [(row, text) for row, text in made if text is not None]
    batch = probe_batch([row for row, _ in pairs], [text for _, text in pairs], played=probe_set.played)
    outcome = function.score(batch, [len(batch)])
    if isinstance(outcome, RewardFault):
        missed, detail = [outcome.index or 0], outcome.detail
    else:
        # None: the rewards of the row's task do not include this function.
        missed = [index for index, score in enumerate(outcome.scores) if score not in (1.0, None)]
        detail = _unreadable([pairs[index][0] for index in missed], probe_set)
    if not missed:
        return function.passed("gold", f"{len(pairs)} rows")
    return function.failed("gold", detail, pairs[missed[0]][0], probe=PERFECT, text=pairs[missed[0]][1])


def _unreadable(rows: Sequence[PromptRow], probe_set: ProbeSet) -> str:
    if not rows:
        return ""
    first = f"the ground truth {shorten(rows[0].answer or '', 60)!r} does not get the full score for its own row"
    return f"{first}: the equality {probe_set.completion.equality} cannot read it ({len(rows)} of {len(probe_set.rows)} rows)"


def _at_probe(function: TriedFunction, check: str, detail: str, probe_set: ProbeSet, index: int) -> LabCheck:
    probe = probe_set.probes[index]
    return function.failed(check, detail, probe_set.row(index), probe=probe.kind, text=probe.text)


def _fault_at(function: TriedFunction, fault: RewardFault, probe_set: ProbeSet) -> LabCheck:
    index = fault.index or 0
    return _fault_in(function, fault, probe_set.row(index), probe_set.probes[index].kind, probe_set.batch)


def _fault_at_sample(function: TriedFunction, fault: RewardFault, probe_set: ProbeSet) -> LabCheck:
    assert probe_set.base is not None
    return _fault_in(function, fault, probe_set.base_rows[fault.index or 0], "sample of the base model", probe_set.base)


def _fault_in(function: TriedFunction, fault: RewardFault, row: PromptRow, probe: str, batch: ScoreBatch) -> LabCheck:
    check = function.failed("contract", fault.detail, row, probe=probe, text=batch.completions[fault.index or 0])
    return check.model_copy(update={"source": fault.source, "arguments": fault.arguments, "fix": fault.fix})
