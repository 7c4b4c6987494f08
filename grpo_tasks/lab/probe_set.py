"""What reward functions are tried on, and how a finding names its row and completion. Judges nothing.

chosen rows -> probes (row by row, the same kinds in the same order) -> one batch
base model's samples -> another
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_tasks.answers.extract import Tags
from grpo_tasks.lab.forecast import GroupSample
from grpo_tasks.lab.probes import Probe, make_probes
from grpo_tasks.rewards.contract import Fault, FunctionScores, Row, ScoreBatch, batch_of, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import LabConfig, RewardConfig, RewardsConfig
from schemas.results import LabCheck

BYTES_PER_ID = 4
"""Probes have no tokenizer: their token ids stand in, one for so many bytes."""
COMPLETION_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Bench:
    """Rows, probes and samples."""

    rewards: RewardsConfig
    limits: LabConfig
    rows: Sequence[Row]
    """All training rows."""
    chosen: Sequence[Row]
    """Rows that probes are made from."""
    probes: Sequence[Probe]
    batch: ScoreBatch
    """The probes as a batch."""
    base: ScoreBatch | None
    """The base model's samples, group by group."""
    base_rows: Sequence[Row]
    """The rows they answer, one per sample."""

    @property
    def kinds(self) -> int:
        """Probes per row."""
        return len(self.probes) // len(self.chosen)

    def row(self, index: int) -> Row:
        """The row of a probe."""
        return self.chosen[index // self.kinds]


@dataclass(frozen=True, slots=True)
class Subject:
    """The function being tried."""

    name: str
    config: RewardConfig
    worker: RewardWorker

    def ask(self, batch: ScoreBatch, size: int) -> FunctionScores | Fault:
        """Score a batch in calls of `size` completions, each under the function's time limit; a fault names its completion."""
        scores: list[float | None] = []
        seconds = 0.0
        for start in range(0, len(batch), size):
            part = batch.take(range(start, min(start + size, len(batch))))
            outcome = self.worker.call(self.name, part, self.config.time_limit_s)
            if isinstance(outcome, Fault):
                index = outcome.index
                if index is None:
                    index = self.worker.find_failing_completion(self.name, part, self.config.time_limit_s)
                return replace(outcome, index=start + (index or 0))
            scores += outcome.scores
            seconds += outcome.seconds
        return FunctionScores(scores, seconds)

    def passed(self, check: str, detail: str = "") -> LabCheck:
        """A check that found nothing."""
        return passed(self.name, check, detail)

    def failed(self, check: str, detail: str, row: Row, *, probe: str, text: str) -> LabCheck:
        """A check that found something in this completion."""
        return found(self.name, check, detail, row, probe=probe, text=text)


def passed(function: str, check: str, detail: str = "") -> LabCheck:
    """A check of a function (or `stage:NAME`) that found nothing."""
    return LabCheck(function=function, check=check, outcome="passed", detail=detail)


def found(function: str, check: str, detail: str, row: Row, *, probe: str, text: str, warn: bool = False) -> LabCheck:
    """A check that found something, with row and completion as the example."""
    return LabCheck(
        function=function,
        check=check,
        outcome="warned" if warn else "failed",
        detail=detail,
        prompt_id=row.prompt_id,
        place=f"{row.source}:{row.line}",
        probe=probe,
        completion=shorten(text, COMPLETION_SHOWN),
    )


def lay_bench(
    rewards: RewardsConfig, limits: LabConfig, rows: Sequence[Row], base_samples: Sequence[GroupSample] | None
) -> Bench:
    """Choose rows and make their probes. The choice goes by prompt_id, a hash: the same for any order of the rows."""
    assert rows, "no rows to make probes from"
    chosen = sorted(rows, key=lambda row: row.prompt_id)[: limits.num_rows]
    tags = Tags.of(rewards.tags)
    groups = [make_probes(row, tags, rewards.equality) for row in chosen]
    probes = [probe for group in groups for probe in group]
    owners = [row for row, group in zip(chosen, groups, strict=True) for _ in group]
    batch = probe_batch(owners, [probe.text for probe in probes])
    by_id = {row.prompt_id: row for row in rows}
    base_rows = [by_id[sample.prompt_id] for sample in base_samples or [] for _ in sample.completions]
    return Bench(rewards, limits, rows, chosen, probes, batch, _base_batch(base_rows, base_samples or []), base_rows)


def probe_batch(rows: Sequence[Row], texts: Sequence[str]) -> ScoreBatch:
    """Made-up completions as a batch."""
    return batch_of(rows, texts, [list(text.encode(errors="surrogatepass")[::BYTES_PER_ID]) for text in texts])


def _base_batch(rows: Sequence[Row], samples: Sequence[GroupSample]) -> ScoreBatch | None:
    if not samples:
        return None
    texts = [text for sample in samples for text in sample.completions]
    return batch_of(rows, texts, [ids for sample in samples for ids in sample.completion_ids])
