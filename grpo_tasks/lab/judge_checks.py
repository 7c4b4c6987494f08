"""The checks of a judge, before any training: does it agree with people, and what sways it?

It is asked about gold pairs (question, better, worse), in mode pairwise in both orders, and about the worse one with empty talk
added to it; a tie counts half. A judge costs money, so it scores fewer probes than a function of code, and neither its
determinism nor its speed is checked: its verdicts are cached, and its time is the endpoint's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_tasks.judging.frame import ask
from grpo_tasks.judging.judge import Case, Judge, Tally, outcome
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.lab.probes import passed
from schemas.config.rewards import JudgeConfig, RewardsConfig
from schemas.errors import ConfigError
from schemas.results.data import LabCheck

JUDGED_ROWS = 4
EMPTY_TALK = " In other words, that is how it is, all things considered, and it should be seen in this light."
"""Said again and again, until the text is three times as long and has at least 400 characters more."""
MAX_PAIRS = 10_000
"""Gold pairs that a judge is asked about; the report says how many more the file holds."""


@dataclass(frozen=True, slots=True)
class GoldPair:
    """Two completions that a person has judged."""

    question: str
    better: str
    worse: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What the trial of a judge found."""

    pairs: int
    agreement: float
    order_bias: float | None
    """None: mode absolute asks about one completion at a time."""
    length_bias: float
    requests: int
    """Requests that were answered; those from the cache are not among them."""
    cost: float
    """Of these requests, in the currency of the prices."""
    unjudged: int
    """Questions without any sound verdict."""


def check_judges(names: list[str], rewards: RewardsConfig) -> tuple[list[LabCheck], list[str]]:
    """The checks of every judge among the reward functions, and what could not be measured."""
    checks: list[LabCheck] = []
    left_out: list[str] = []
    for name in names:
        settings = rewards.resolve(name)
        judge = settings.judge if settings is not None else None
        if judge is None:
            continue
        if judge.gold is None:
            left_out.append(
                f"agreement, order_bias, length_bias and cost of {name}: name pairs that people judged with judge.gold"
            )
            continue
        pairs = read_gold(judge.gold)
        if len(pairs) > MAX_PAIRS:
            more = f"{len(pairs) - MAX_PAIRS:,} more gold pairs of {name}"
            left_out.append(f"{more}: the judge is asked about the first {MAX_PAIRS:,}")
        report(Progress(f"asking the judge of {name}"))
        checks += _checks(name, judge, try_judge(judge, pairs[:MAX_PAIRS]))
    return checks, left_out


def _checks(name: str, judge: JudgeConfig, trial: Trial) -> Iterator[LabCheck]:
    def judged(check: str, detail: str, good: bool, limit: str) -> LabCheck:
        if good:
            return passed(name, check, f"{detail} {of_pairs}")
        return LabCheck(function=name, check=check, outcome="failed", detail=f"{detail} {of_pairs}; {limit}")

    of_pairs = f"of {trial.pairs} gold pairs"
    detail, limit = f"prefers what people prefer in {trial.agreement:.0%}", f"min_agreement {judge.min_agreement:g}"
    yield judged("agreement", detail, trial.agreement >= judge.min_agreement, limit)
    if trial.order_bias is not None:
        detail, limit = (
            f"changes its verdict with the order in {trial.order_bias:.0%}",
            f"max_order_bias {judge.max_order_bias:g}",
        )
        yield judged("order_bias", detail, trial.order_bias <= judge.max_order_bias, limit)
    detail = f"prefers the same completion with empty talk behind it in {trial.length_bias:.0%}"
    yield judged("length_bias", detail, trial.length_bias <= judge.max_length_bias, f"max_length_bias {judge.max_length_bias:g}")
    if trial.unjudged:
        detail = f"{trial.unjudged} questions have no sound verdict"
        yield LabCheck(function=name, check="verdicts", outcome="failed", detail=detail)
    # A comparison without a reference is one of two completions.
    questions = 1 if judge.mode == "absolute" else 2 * (judge.opponents if judge.reference_column is None else 1)
    requests = 1_000 * questions * judge.votes
    cost = "; every verdict of the trial was cached"
    if trial.requests:
        cost = f" and cost about {requests * trial.cost / trial.requests:.2f}"
    yield passed(name, "cost", f"1,000 completions take about {requests:,} requests{cost}")


def read_gold(path: Path) -> list[GoldPair]:
    """The gold pairs of a JSONL file; ConfigError: it cannot be read or holds none, or a line is none."""
    try:
        # At line feeds only, as JSON Lines has it: str.splitlines would cut a text at U+2028 too.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the gold pairs cannot be read: {error}", place=str(path), fix="name a JSONL file") from error
    pairs, reader = [], TypeAdapter(GoldPair)
    for number, line in enumerate(lines, 1):
        try:
            pairs += [reader.validate_json(line, strict=True)] if line.strip() else []
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"the line is no gold pair: {' '.join(map(str, first['loc']))}: {first['msg']}"[:300],
                place=f"{path}:{number}",
                fix="write an object with the texts question, better and worse, and reference if you use one",
            ) from error
    if not pairs:
        raise ConfigError(
            "there is no gold pair", place=str(path), fix='write {"question": ..., "better": ..., "worse": ...} lines'
        )
    return pairs


def padded(text: str) -> str:
    """The text with empty talk behind it."""
    return text + EMPTY_TALK * (1 + max(400, 2 * len(text)) // len(EMPTY_TALK))


def try_judge(settings: JudgeConfig, pairs: Sequence[GoldPair]) -> Trial:
    """Ask a judge about gold pairs. Errors are those of JudgeClient.send."""
    judge = Judge(settings)
    try:
        return _points(judge, pairs) if settings.mode == "absolute" else _comparisons(judge, pairs)
    finally:
        judge.close()


def _points(judge: Judge, pairs: Sequence[GoldPair]) -> Trial:
    shown = judge.settings.reference_column is not None
    found = judge.score(
        [
            Case(pair.question, text, pair.reference if shown else None)
            for pair in pairs
            for text in (pair.better, pair.worse, padded(pair.worse))
        ]
    )
    scores = [score or 0.0 for score in found.scores]
    better, worse, longer = scores[::3], scores[1::3], scores[2::3]
    agreed = [1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in zip(better, worse, strict=True)]
    swayed = sum(more > bad for more, bad in zip(longer, worse, strict=True))
    tally, num = found.tally, len(pairs)
    return Trial(num, sum(agreed) / num, None, swayed / num, tally.asked, tally.cost, tally.unjudged)


def _comparisons(judge: Judge, pairs: Sequence[GoldPair]) -> Trial:
    questions, tally, num = [], Tally(), len(pairs)
    for pair in pairs:
        asked = {"question": pair.question}
        for first, second in ((pair.better, pair.worse), (padded(pair.worse), pair.worse)):
            questions += [ask(judge.settings, asked, [first, second]), ask(judge.settings, asked, [second, first])]
    verdicts = judge.decide(questions, tally)
    # What training would give the first text of the first order; without a sound verdict a tie.
    wins = [
        0.5 if first is None or second is None else outcome(first, second)[0][0]
        for first, second in zip(verdicts[::2], verdicts[1::2], strict=True)
    ]
    turned = [
        first is not None and second is not None and first.value != 1.0 - second.value
        for first, second in zip(verdicts[::4], verdicts[1::4], strict=True)
    ]
    agreed = sum(1.0 if share > 0.5 else 0.5 if share == 0.5 else 0.0 for share in wins[::2])
    swayed = sum(share > 0.5 for share in wins[1::2])
    return Trial(num, agreed / num, sum(turned) / num, swayed / num, tally.asked, tally.cost, verdicts.count(None))
