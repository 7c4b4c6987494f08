"""The completions that functions are tried on. Judges nothing.

training rows --by hash--> chosen rows -> probes, row by row -> one batch
samples of the base model                                    -> another
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_tasks.content.conversations import Played, played_of
from grpo_tasks.content.places import row_place
from grpo_tasks.lab.forecast import GroupSample
from grpo_tasks.lab.probes import PERFECT, Probe, make_probes
from grpo_tasks.rewards.contract import ScoreBatch, batch_of, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import LabConfig, RewardsConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.prompts import PLAIN, PromptRow
from schemas.results.data import LabCheck

BYTES_PER_TOKEN = 4
"""Probes are not tokenised. One stand-in token id for this many bytes gives functions that count tokens a plausible length."""
SHOWN_CHARS = 200
"""Characters of a completion kept in a check."""


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """Rows, probes and samples."""

    completion: CompletionConfig
    rewards: RewardsConfig
    limits: LabConfig
    rows: Sequence[PromptRow]
    """All training rows."""
    chosen: Sequence[PromptRow]
    """The rows that probes are made from."""
    probes: Sequence[Probe]
    """The probes of all chosen rows, row by row."""
    groups: Sequence[range]
    """Indices of the probes of each chosen row."""
    batch: ScoreBatch
    """The probes as a batch."""
    base: ScoreBatch | None
    """The samples of the base model, group by group; None without samples."""
    base_rows: Sequence[PromptRow]
    """The row of each sample."""
    base_sizes: Sequence[int]
    """Number of samples of each group."""

    @property
    def played(self) -> bool:
        """Whether tools or an environment answer."""
        return self.base is not None and bool(self.base.played)

    @property
    def sizes(self) -> list[int]:
        """Number of probes of each chosen row."""
        return [len(group) for group in self.groups]

    def row(self, index: int) -> PromptRow:
        """The row of the probe with this index."""
        return next(row for row, group in zip(self.chosen, self.groups, strict=True) if index in group)

    def perfect(self, group: range) -> int | None:
        """Index of the perfect probe of a row; None when the row has none."""
        return group[0] if self.probes[group[0]].kind == PERFECT else None

    @property
    def num_perfect(self) -> int:
        """Number of chosen rows with a perfect probe."""
        return sum(self.perfect(group) is not None for group in self.groups)

    def finding(self, function: str, check: str, detail: str, index: int, *, warn: bool = False) -> LabCheck:
        """A check that found something in the probe with this index."""
        probe = self.probes[index]
        return finding(function, check, detail, self.row(index), probe=probe.kind, text=probe.text, warn=warn)


def passed(function: str, check: str, detail: str = "") -> LabCheck:
    """A check of a function, or of `stage:NAME`, without a finding."""
    return LabCheck(function=function, check=check, outcome="passed", detail=detail)


def finding(
    function: str, check: str, detail: str, row: PromptRow, *, probe: str = "", text: str = "", warn: bool = False
) -> LabCheck:
    """A check that found something, with the row and the completion as an example. It fails unless `warn` is set."""
    return LabCheck(
        function=function,
        check=check,
        outcome="warned" if warn else "failed",
        detail=detail,
        prompt_id=row.prompt_id,
        place=row_place(row.source, row.line),
        probe=probe,
        completion=shorten(text, SHOWN_CHARS),
    )


def choose_rows(rows: Sequence[PromptRow], num: int) -> list[PromptRow]:
    """The rows that probes are made from, by prompt_id. It is a hash, so the order of the rows does not matter."""
    assert rows, "no rows to make probes from"
    return sorted(rows, key=lambda row: row.prompt_id)[:num]


def own_golds(gold: str | None, chosen: Sequence[PromptRow], worker: RewardWorker) -> list[str | None]:
    """The user's own good completion of each row (`lab.gold`); None where there is none.

    Raises:
        ConfigError: no row has the column, or the function cannot be used.
        RewardError: the function hangs, or ends the worker process.
    """
    if gold is None:
        return [None] * len(chosen)
    if ":" in gold:
        return worker.gold_completions(gold, list(map(_as_dict, chosen)))
    values = [row.extra.get(gold) for row in chosen]
    if all(value is None for value in values):
        columns = sorted({name for row in chosen for name in row.extra})
        raise ConfigError(
            f"the data have no column {gold}",
            place="lab.gold",
            fix=f"one of {', '.join(columns) or 'none: there are no further columns'}, or package.module:function",
        )
    # Texts, or chat messages of which the last one counts.
    chats = [value if isinstance(value, list) and value and isinstance(value[-1], Mapping) else None for value in values]
    texts = [value if chat is None else chat[-1].get("content") for value, chat in zip(values, chats, strict=True)]
    return [None if text is None else str(text) for text in texts]


def make_probe_set(
    config: RunConfig,
    rows: Sequence[PromptRow],
    chosen: Sequence[PromptRow],
    golds: Sequence[str | None],
    base_samples: Sequence[GroupSample] | None,
) -> ProbeSet:
    """Make the probes of the chosen rows, of which `golds` are the user's own good completions."""
    made = [make_probes(row, config.completion, gold) for row, gold in zip(chosen, golds, strict=True)]
    probes = [probe for group in made for probe in group]
    starts = [sum(map(len, made[:number])) for number in range(len(made))]
    rows_of_probes = [row for row, group in zip(chosen, made, strict=True) for _ in group]
    samples, base = base_samples or [], None
    by_id = {row.prompt_id: row for row in rows}
    base_rows = [by_id[sample.prompt_id] for sample in samples for _ in sample.completions]
    if samples:
        base = batch_of(
            base_rows,
            [text for sample in samples for text in sample.completions],
            [ids for sample in samples for ids in sample.completion_ids],
            prompt_ids=[_prompt_stand_in(row) for row in base_rows],
            played=[played_of(text) for sample in samples for text in sample.conversations],
        )
    return ProbeSet(
        completion=config.completion,
        rewards=config.rewards,
        limits=config.lab,
        rows=rows,
        chosen=chosen,
        probes=probes,
        groups=[range(start, start + len(group)) for start, group in zip(starts, made, strict=True)],
        batch=probe_batch(
            rows_of_probes, [probe.text for probe in probes], played=any(sample.conversations for sample in samples)
        ),
        base=base,
        base_rows=base_rows,
        base_sizes=[len(sample.completions) for sample in samples],
    )


def probe_batch(rows: Sequence[PromptRow], texts: Sequence[str], *, played: bool = False) -> ScoreBatch:
    """The batch of made-up completions, `texts[i]` for `rows[i]`; with `played` each is a conversation that nobody answered."""
    ids, turns = list(map(_stand_in, texts)), []
    for row, text, own in zip(rows, texts, ids, strict=True) if played else ():
        turn = {"text": text, "start": 0, "end": len(own), "finish_reason": "stop"}
        turn |= {"reward": None, "calls": 0, "errors": 0, "info": {}}
        turns.append(Played(row.messages, [{"role": "assistant", "content": text}], [turn], None, answered=False))
    return batch_of(rows, texts, ids, prompt_ids=[_prompt_stand_in(row) for row in rows], played=turns)


def _stand_in(text: str) -> list[int]:
    return list(text.encode(errors="surrogatepass")[::BYTES_PER_TOKEN])


def _prompt_stand_in(row: PromptRow) -> list[int]:
    return _stand_in("".join(message.get("content", "") for message in row.messages))


def _as_dict(row: PromptRow) -> dict[str, Any]:
    messages = [dict(message) for message in row.messages]
    plain = bool(messages) and messages[0].get("role") == PLAIN
    return {
        **row.extra,
        "prompt": messages[0]["content"] if plain else messages,
        "answer": row.answer if row.answers is None else list(row.answers),
    }
