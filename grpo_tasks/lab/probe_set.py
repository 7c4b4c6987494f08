"""The completions that functions are tried on, and the function being tried. Judges nothing.

training rows --by hash--> chosen rows -> probes, row by row -> one batch
samples of the base model                                    -> another
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_tasks.answers.tags import Tags
from grpo_tasks.lab.forecast import GroupSample
from grpo_tasks.lab.probes import Probe, make_probes
from grpo_tasks.rewards.contract import Fault, FunctionScores, Row, ScoreBatch, batch_of, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import LabConfig, RewardConfig, RewardsConfig
from schemas.results.lab import LabCheck

BYTES_PER_TOKEN = 4
"""Probes are not tokenised. One stand-in token id for this many bytes gives functions that count tokens a plausible length."""
SHOWN_CHARS = 500
"""Characters of a completion kept in a check."""


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """Rows, probes and samples."""

    completion: CompletionConfig
    rewards: RewardsConfig
    limits: LabConfig
    rows: Sequence[Row]
    """All training rows."""
    chosen: Sequence[Row]
    """The rows that probes are made from."""
    probes: Sequence[Probe]
    """The probes of all chosen rows, row by row."""
    batch: ScoreBatch
    """The probes as a batch."""
    base: ScoreBatch | None
    """The samples of the base model, group by group; None without samples."""
    base_rows: Sequence[Row]
    """The row of each sample."""

    @property
    def per_row(self) -> int:
        """Number of probes of one row."""
        return len(self.probes) // len(self.chosen)

    def row(self, index: int) -> Row:
        """The row of the probe with this index."""
        return self.chosen[index // self.per_row]


@dataclass(frozen=True, slots=True)
class TriedFunction:
    """The function being tried, with the worker that runs it."""

    name: str
    config: RewardConfig
    worker: RewardWorker

    def score(self, batch: ScoreBatch, size: int) -> FunctionScores | Fault:
        """Score a batch in calls of `size` completions, each under the function's time limit. A fault names its completion."""
        scores: list[float | None] = []
        seconds = 0.0
        for start in range(0, len(batch), size):
            chunk = batch.take(range(start, min(start + size, len(batch))))
            outcome = self.worker.call(self.name, chunk, self.config.time_limit_s)
            if isinstance(outcome, Fault):
                index = outcome.index
                if index is None:
                    index = self.worker.find_failing_completion(self.name, chunk, self.config.time_limit_s)
                return replace(outcome, index=start + (index or 0))
            scores += outcome.scores
            seconds += outcome.seconds
        return FunctionScores(scores, seconds)

    def passed(self, check: str, detail: str = "") -> LabCheck:
        """A check of this function without a finding."""
        return passed(self.name, check, detail)

    def failed(self, check: str, detail: str, row: Row, *, probe: str, text: str) -> LabCheck:
        """A check of this function that found something in a completion."""
        return finding(self.name, check, detail, row, probe=probe, text=text)


def passed(function: str, check: str, detail: str = "") -> LabCheck:
    """A check of a function, or of `stage:NAME`, without a finding."""
    return LabCheck(function=function, check=check, outcome="passed", detail=detail)


def finding(function: str, check: str, detail: str, row: Row, *, probe: str, text: str, warn: bool = False) -> LabCheck:
    """A check that found something, with the row and the completion as an example. It fails unless `warn` is set."""
    return LabCheck(
        function=function,
        check=check,
        outcome="warned" if warn else "failed",
        detail=detail,
        prompt_id=row.prompt_id,
        place=f"{row.source}:{row.line}",
        probe=probe,
        completion=shorten(text, SHOWN_CHARS),
    )


def make_probe_set(
    completion: CompletionConfig,
    rewards: RewardsConfig,
    limits: LabConfig,
    rows: Sequence[Row],
    base_samples: Sequence[GroupSample] | None,
) -> ProbeSet:
    """Choose rows and make their probes.

    Args:
        completion: what an answer is.
        rewards: the weights of the functions.
        limits: how many rows to choose.
        rows: all training rows, at least one. Rows are chosen by prompt_id, a hash, so their order does not matter.
        base_samples: groups sampled from the base model for some of the rows.
    """
    assert rows, "no rows to make probes from"
    chosen = sorted(rows, key=lambda row: row.prompt_id)[: limits.num_rows]
    tags = Tags.of(completion.tags)
    groups = [make_probes(row, tags, completion.equality) for row in chosen]
    probes = [probe for group in groups for probe in group]
    rows_of_probes = [row for row, group in zip(chosen, groups, strict=True) for _ in group]
    batch = probe_batch(rows_of_probes, [probe.text for probe in probes])
    by_id = {row.prompt_id: row for row in rows}
    base_rows = [by_id[sample.prompt_id] for sample in base_samples or [] for _ in sample.completions]
    return ProbeSet(
        completion, rewards, limits, rows, chosen, probes, batch, _base_batch(base_rows, base_samples or []), base_rows
    )


def probe_batch(rows: Sequence[Row], texts: Sequence[str]) -> ScoreBatch:
    """The batch of made-up completions, `texts[i]` for `rows[i]`."""
    return batch_of(rows, texts, [list(text.encode(errors="surrogatepass")[::BYTES_PER_TOKEN]) for text in texts])


def _base_batch(rows: Sequence[Row], samples: Sequence[GroupSample]) -> ScoreBatch | None:
    if not samples:
        return None
    texts = [text for sample in samples for text in sample.completions]
    return batch_of(rows, texts, [ids for sample in samples for ids in sample.completion_ids])
