"""The checks of one reward function: it scores every probe, and must keep what any function has to keep.

A broken contract (no finite number or None per completion, within the time limit) is a fault, and then nothing else is checked.
`gold` is for the built-in correctness: the ground truth of every row gets the full score.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_tasks.content.modules import added_code, own_modules
from grpo_tasks.lab.judge_checks import JUDGED_ROWS
from grpo_tasks.lab.probes import BOXED, PERFECT, ProbeSet, finding, long_texts, passed, perfect_text, probe_batch
from grpo_tasks.rewards.contract import FunctionScores, RewardFault, ScoreBatch, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig
from schemas.errors import JudgeUnavailableError
from schemas.prompts import PromptRow
from schemas.results.data import LabCheck

CHARS_PER_TOKEN = 4
LENGTH_MARGIN = 4
"""Tokens may be longer than CHARS_PER_TOKEN: speed is tried on texts this many times as long, which may take as many times the
limit."""
MAX_SPEED_TRIES = 3
"""How often a call that is too slow is timed: the first one may load a model or fill a cache."""
SAME_SCORE = 1e-9
ORDINARY = "ordinary length"
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


@dataclass(frozen=True, slots=True)
class FunctionTrial:
    """A function that is being tried, with the worker that has it loaded."""

    name: str
    config: RewardConfig
    probe_set: ProbeSet
    worker: RewardWorker

    def run(self, max_completion_length: int) -> FunctionFindings:
        """All checks. When the function breaks its contract the other checks mean nothing and are left out.

        A judge scores the probes of a few rows and the samples; judge_checks.py checks its opinions.
        """
        probe_set, is_judge = self.probe_set, self.config.judge is not None
        groups = probe_set.groups[:JUDGED_ROWS] if is_judge else probe_set.groups
        indices = [index for group in groups for index in group]
        outcome = self.score(probe_set.batch.take(indices), [len(group) for group in groups])
        if isinstance(outcome, RewardFault):
            at = indices[outcome.index or 0]
            return self._broken(outcome, probe_set.row(at), probe_set.probes[at].kind, probe_set.probes[at].text)
        base_scores = None
        if probe_set.base is not None:
            base = self.score(probe_set.base, probe_set.base_sizes)
            if isinstance(base, RewardFault):
                at = base.index or 0
                return self._broken(base, probe_set.base_rows[at], "sample of the base model", probe_set.base.completions[at])
            base_scores = base.scores
        known = dict(zip(indices, outcome.scores, strict=True))
        scores = [known.get(index) for index in range(len(probe_set.probes))]
        if is_judge:
            detail = f"{len(outcome.scores) + len(base_scores or [])} completions"
            return FunctionFindings([passed(self.name, "contract", detail)], scores, base_scores)
        chars = CHARS_PER_TOKEN * max_completion_length
        texts = long_texts(probe_set.completion.tags, chars)
        longest = self._made_up(*texts.values())
        long = self.score(longest, [1] * len(longest))
        if isinstance(long, RewardFault):
            text = longest.completions[long.index or 0]
            return self._broken(long, probe_set.chosen[0], "as long as a completion may be", text)
        missing = sum(score is None for score in scores)
        detail = f"{len(scores)} completions" + (f", does not apply to {missing} of them" if missing else "")
        opinions = self._opinions(outcome, [*scores, *(base_scores or []), *long.scores], LENGTH_MARGIN * chars)
        return FunctionFindings([passed(self.name, "contract", detail), *opinions], scores, base_scores)

    def score(self, batch: ScoreBatch, sizes: Sequence[int]) -> FunctionScores | RewardFault:
        """Score a batch in calls of these sizes, each under the function's time limit. A fault names its completion."""
        limit_s = self.config.call_limit_s
        scores: list[float | None] = []
        seconds = computing_s = 0.0
        for size in sizes:
            start = len(scores)
            chunk = batch.take(range(start, start + size))
            outcome = self.worker.call(self.name, chunk, limit_s)
            if isinstance(outcome, RewardFault):
                index = outcome.index
                if outcome.kind == "unavailable":
                    raise JudgeUnavailableError(f"reward {self.name}: {outcome.detail}", place=outcome.source, fix=outcome.fix)
                if index is None and self.config.judge is None:
                    index = self.worker.find_failing_completion(self.name, chunk, limit_s)
                return replace(outcome, index=start + (index or 0))
            scores += outcome.scores
            seconds += outcome.seconds
            computing_s += outcome.computing_s
        return FunctionScores(scores, seconds, computing_s=computing_s)

    def _made_up(self, *texts: str) -> ScoreBatch:
        return probe_batch([self.probe_set.chosen[0]] * len(texts), texts, played=self.probe_set.played)

    def _broken(self, fault: RewardFault, row: PromptRow, probe: str, text: str) -> FunctionFindings:
        check = finding(self.name, "contract", fault.detail, row, probe=probe, text=text)
        details = {"source": fault.source, "arguments": fault.arguments, "fix": fault.fix}
        return FunctionFindings([check.model_copy(update=details)])

    def _opinions(self, outcome: FunctionScores, seen: Sequence[float | None], longest: int) -> Iterator[LabCheck]:
        config, probe_set = self.config, self.probe_set
        known = {score for score in seen if score is not None}
        if not known:
            yield self._applies_never()
            return
        if ":" in (config.function or ""):
            yield self._same_score(seen)
        yield self._determinism(outcome.scores)
        yield self._speed(outcome, longest)
        if probe_set.num_perfect:
            yield self._gaming(outcome.scores)
        if config.function == "correctness":
            yield from self._gold()

    def _applies_never(self) -> LabCheck:
        probe_set = self.probe_set
        detail = f"returned None for every completion of all {len(probe_set.chosen)} rows"
        check = probe_set.finding(self.name, "applies", detail, 0)
        # Is it the form of the ground truths? math_verify reads LaTeX only between two $ or in a box.
        columns = probe_set.batch.columns
        texts = all(isinstance(one, str) for one in columns["answer"])
        latex = {
            name: [f"${one}$" for one in values] for name, values in columns.items() if texts and values == columns["answer"]
        }
        again = self.score(replace(probe_set.batch, columns={**columns, **latex}), probe_set.sizes)
        if isinstance(again, RewardFault) or all(score is None for score in again.scores):
            return check
        module, _, name = (self.config.function or "").partition(":")
        lines = [f"    columns[{column!r}] = [f'${{one}}$' for one in columns[{column!r}]]" for column in latex]
        code = [f"def {name}_latex(completions, **columns):", *lines, f"    return {name}(completions=completions, **columns)"]
        fix = added_code(module, name, f"{name}_latex", code, probe_set.rewards.module_dirs())
        return check.model_copy(
            update={"detail": f"{detail}; it scores them when the ground truth is written as LaTeX, $...$", "fix": fix}
        )

    def _same_score(self, seen: Sequence[float | None]) -> LabCheck:
        boxes = {at for at, probe in enumerate(self.probe_set.probes) if probe.kind == BOXED}
        known = {score for at, score in enumerate(seen) if score is not None and at not in boxes}
        if len(known) > 1:
            return passed(self.name, "same_score")
        detail = f"gives every completion the same score, {min(known):g}" if known else "scores no completion"
        if boxed := {score for at in boxes if (score := seen[at]) is not None} - known:
            detail += f", and only an answer in \\boxed{{...}} another, {max(boxed):g}: it reads LaTeX, as math_verify does"
            fix = "set completion.format: boxed, and ask for it: data.system_prompt: 'Put the final answer into \\boxed{}.'"
            return self.probe_set.finding(self.name, "same_score", detail, 0).model_copy(update={"fix": fix})
        # The user's module is read, not run.
        module = (self.config.function or "").partition(":")[0]
        file = own_modules(module, self.probe_set.rewards.module_dirs()).get(module)
        source = file.read_text(encoding="utf-8", errors="replace") if file is not None and file.suffix == ".py" else ""
        ours = self.probe_set.completion.tags.in_order
        others = list(dict.fromkeys(name for name in _TAG.findall(source) if f"</{name}>" not in ours))[:MAX_NAMED_TAGS]
        if others:
            names = [tag.strip("</>") for tag in ours[1::2]]
            detail += f": its module looks for the tags {', '.join(others)}, and completion.tags are {' and '.join(names)}"
        return self.probe_set.finding(self.name, "same_score", detail, 0)

    def _determinism(self, scores: Sequence[float | None]) -> LabCheck:
        probe_set = self.probe_set
        # Within the call of each row, every completion moves up by one position and the first becomes the last.
        rotated = [index for group in probe_set.groups for index in [*group[1:], group[0]]]
        for when, indices in (("in a second call", range(len(scores))), ("at another position in the batch", rotated)):
            outcome = self.score(probe_set.batch.take(indices), probe_set.sizes)
            if isinstance(outcome, RewardFault):
                at = indices[outcome.index or 0]
                return probe_set.finding(self.name, "determinism", f"{when}: {outcome.detail}", at)
            for index, again in zip(indices, outcome.scores, strict=True):
                if again != scores[index]:
                    detail = f"returned {scores[index]}, then {again} {when}"
                    return probe_set.finding(self.name, "determinism", detail, index)
        return passed(self.name, "determinism")

    def _speed(self, ordinary: FunctionScores, longest: int) -> LabCheck:
        slowest, slowest_kind = 0.0, ""
        for kind, batch, allowed, outcome in self._timed(ordinary, longest):
            seconds = outcome.computing_s / len(batch) if isinstance(outcome, FunctionScores) else 0.0
            if isinstance(outcome, RewardFault) or seconds > allowed:
                size = "" if kind == ORDINARY else f" of {longest:,} characters"
                slow = f"computed {seconds:.3f} s for a completion{size}; the limit is {allowed:g} s"
                took = outcome.detail if isinstance(outcome, RewardFault) else slow
                return finding(self.name, "speed", took, self.probe_set.chosen[0], probe=kind, text=batch.completions[0])
            slowest, slowest_kind = max((slowest, slowest_kind), (seconds, kind))
        return passed(self.name, "speed", f"computes at most {slowest * 1000:.1f} ms for a completion ({slowest_kind})")

    def _timed(
        self, ordinary: FunctionScores, longest: int
    ) -> Iterator[tuple[str, ScoreBatch, float, FunctionScores | RewardFault]]:
        """What is timed: a name, the batch, the seconds that a completion may take, and the outcome."""
        probe_set, limit = self.probe_set, self.probe_set.limits.max_seconds_per_completion
        # The probes were timed when their contract was checked; only a slow function is worth a second look.
        yield ORDINARY, probe_set.batch, limit, self._fastest(ordinary, probe_set.batch, probe_set.sizes, limit)
        allowed = limit * LENGTH_MARGIN
        for kind, text in long_texts(probe_set.completion.tags, longest).items():
            batch = self._made_up(text)
            yield kind, batch, allowed, self._fastest(self.score(batch, [1]), batch, [1], allowed)

    def _fastest(
        self, first: FunctionScores | RewardFault, batch: ScoreBatch, sizes: Sequence[int], allowed: float
    ) -> FunctionScores | RewardFault:
        """The first outcome, or a faster one: the batch is scored again while a completion takes longer than allowed."""
        best = first
        for _ in range(MAX_SPEED_TRIES - 1):
            if isinstance(best, RewardFault) or best.computing_s <= allowed * len(batch):
                break
            again = self.score(batch, sizes)
            best = again if isinstance(again, RewardFault) else min(best, again, key=lambda values: values.computing_s)
        return best

    def _gaming(self, scores: Sequence[float | None]) -> LabCheck:
        worst: tuple[float, int, float] | None = None
        for group in self.probe_set.groups:
            best = self.probe_set.perfect(group)
            perfect = scores[best] if best is not None else None
            if perfect is None:
                continue
            for index in group:
                score = scores[index]
                # For a penalty (scores up to 0) a smaller deduction is no gain, so only a score above 0 counts as one.
                gamed = self.probe_set.probes[index].role == "gamed"
                if gamed and score is not None and score > max(perfect, 0.0) + SAME_SCORE:
                    worst = max(filter(None, [worst, (score - perfect, index, perfect)]))
        if worst is None:
            return passed(self.name, "gaming")
        detail = f"earns {scores[worst[1]]:g}, the {PERFECT} completion only {worst[2]:g}"
        return self.probe_set.finding(self.name, "gaming", detail, worst[1])

    def _gold(self) -> Iterator[LabCheck]:
        rows, completion = self.probe_set.rows, self.probe_set.completion
        pairs = [(row, text) for row in rows if (text := perfect_text(row, completion)) is not None]
        if not pairs:
            return
        batch = probe_batch([row for row, _ in pairs], [text for _, text in pairs], played=self.probe_set.played)
        outcome = self.score(batch, [len(batch)])
        if isinstance(outcome, RewardFault):
            missed, detail = [outcome.index or 0], outcome.detail
        else:
            # None: the rewards of the row's task do not include this function.
            missed, detail = [index for index, score in enumerate(outcome.scores) if score not in (1.0, None)], ""
        if not missed:
            yield passed(self.name, "gold", f"{len(pairs)} rows")
            return
        row, text = pairs[missed[0]]
        if not detail:
            truth = f"the ground truth {shorten(row.answer or '', 60)!r} does not get the full score for its own row"
            detail = f"{truth}: the equality {completion.equality} cannot read it ({len(missed)} of {len(rows)} rows)"
        yield finding(self.name, "gold", detail, row, probe=PERFECT, text=text)
