"""A judge on trial, before any training: does it agree with people, and what sways it?

gold pairs (question, better, worse)
  agreement    share of pairs on which it prefers the better one; a tie counts half
  order bias   share of pairs whose verdict changes with the order (mode pairwise)
  length bias  share of pairs whose worse completion earns more once empty talk is added to it
  cost         of a completion, from the requests of the trial
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_tasks.judging.frame import ask
from grpo_tasks.judging.judge import Case, Judge, Tally, outcome
from grpo_tasks.judging.verdict import JudgeVerdict
from schemas.config.rewards import JudgeConfig
from schemas.errors import ConfigError

EMPTY_TALK = " In other words, that is how it is, all things considered, and it should be seen in this light."
"""Said again and again, until the text is three times as long and has at least 400 characters more."""
MAX_PAIRS = 10_000
"""Gold pairs that a judge is asked about; the trial says how many more the file holds."""


@dataclass(frozen=True, slots=True)
class GoldPair:
    """Two completions that a person has judged."""

    question: str
    better: str
    worse: str
    reference: str | None = None


_PAIR = TypeAdapter(GoldPair)


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
    left_out: int = 0
    """Gold pairs beyond MAX_PAIRS."""


def read_gold(path: Path) -> list[GoldPair]:
    """The gold pairs of a JSONL file.

    Raises:
        ConfigError: the file cannot be read or holds no pair, or a line is no pair; with its line.
    """
    try:
        # At line feeds only, as JSON Lines has it: str.splitlines would cut a text at U+2028 too.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the gold pairs cannot be read: {error}", place=str(path), fix="name a JSONL file") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        try:
            pairs += [_PAIR.validate_json(line, strict=True)] if line.strip() else []
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


def try_judge(settings: JudgeConfig, pairs: Sequence[GoldPair]) -> Trial:
    """Ask a judge about gold pairs, at most MAX_PAIRS.

    Raises:
        RewardError: the endpoint refuses the requests.
        JudgeUnavailableError: the endpoint does not answer, or max_cost is reached.
    """
    judge, asked = Judge(settings), pairs[:MAX_PAIRS]
    try:
        trial = _points(judge, asked) if settings.mode == "absolute" else _comparisons(judge, asked)
        return replace(trial, left_out=len(pairs) - len(asked))
    finally:
        judge.close()


def padded(text: str) -> str:
    """The text with empty talk behind it."""
    return text + EMPTY_TALK * (1 + max(400, 2 * len(text)) // len(EMPTY_TALK))


def _points(judge: Judge, pairs: Sequence[GoldPair]) -> Trial:
    texts = [text for pair in pairs for text in (pair.better, pair.worse, padded(pair.worse))]
    owners = [pair for pair in pairs for _ in range(3)]
    shown = judge.settings.reference_column is not None
    cases = [Case(pair.question, text, pair.reference if shown else None) for pair, text in zip(owners, texts, strict=True)]
    found = judge.score(cases)
    scores = [score or 0.0 for score in found.scores]
    better, worse, longer = scores[::3], scores[1::3], scores[2::3]
    agreed = [1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in zip(better, worse, strict=True)]
    swayed = [more > bad for more, bad in zip(longer, worse, strict=True)]
    return _trial(pairs, agreed, None, swayed, found.tally, found.tally.unjudged)


def _comparisons(judge: Judge, pairs: Sequence[GoldPair]) -> Trial:
    questions, tally = [], Tally()
    for pair in pairs:
        asked = {"question": pair.question}
        for first, second in ((pair.better, pair.worse), (padded(pair.worse), pair.worse)):
            questions += [ask(judge.settings, asked, [first, second]), ask(judge.settings, asked, [second, first])]
    verdicts = judge.decide(questions, tally)
    wins = [_share(first, second) for first, second in zip(verdicts[::2], verdicts[1::2], strict=True)]
    turned = [
        first is not None and second is not None and first.value != 1.0 - second.value
        for first, second in zip(verdicts[::4], verdicts[1::4], strict=True)
    ]
    agreed = [1.0 if share > 0.5 else 0.5 if share == 0.5 else 0.0 for share in wins[::2]]
    return _trial(pairs, agreed, turned, [share > 0.5 for share in wins[1::2]], tally, verdicts.count(None))


def _share(first: JudgeVerdict | None, second: JudgeVerdict | None) -> float:
    """What training would give the first text of the first order; without a sound verdict a tie."""
    return 0.5 if first is None or second is None else outcome(first, second)[0][0]


def _trial(
    pairs: Sequence[GoldPair],
    agreed: Sequence[float],
    turned: Sequence[bool] | None,
    swayed: Sequence[bool],
    tally: Tally,
    unjudged: int,
) -> Trial:
    count = len(pairs)
    return Trial(
        pairs=count,
        agreement=sum(agreed) / count,
        order_bias=None if turned is None else sum(turned) / count,
        length_bias=sum(swayed) / count,
        requests=tally.asked,
        cost=tally.cost,
        unjudged=unjudged,
    )
