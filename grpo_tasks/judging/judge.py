"""Texts -> scores between 0 and 1 by a judge: points or comparisons, votes, cache, limits.

    absolute   one question for each completion
    pairwise   two questions for each pair, a before b and b before a; the score is the share of comparisons won

A completion that tries to talk to the judge scores 0, and so does one without any sound verdict: whatever confuses a judge must
not pay. Both are counted.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from grpo_tasks.judging.client import JudgeClient
from grpo_tasks.judging.frame import Completion, JudgeVerdict, MalformedError, Question, ask, combined, parse
from grpo_tasks.judging.store import Entry, JudgeLimits, VerdictStore
from schemas.config.rewards import JudgeConfig

_NOTES = ("", "unjudged", "manipulation")
"""What is remarkable about a completion; of several notes the last one here counts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A completion to judge."""

    question: str
    completion: Completion
    reference: str | None = None
    """Text of the reference reply; None: there is none."""


@dataclass(slots=True)
class Tally:
    """What judging a batch took."""

    asked: int = 0
    cached: int = 0
    """Questions whose verdict was in the cache."""
    malformed: int = 0
    manipulations: int = 0
    """Completions that tried to talk to the judge."""
    unjudged: int = 0
    """Completions without any sound verdict; in mode pairwise with a comparison that has none."""
    cost: float = 0.0


@dataclass(slots=True)
class Judgement:
    """The scores of a batch."""

    scores: list[float | None]
    """One for each case; None where there is nothing to compare it with."""
    notes: list[str]
    """For each case what is remarkable: manipulation, unjudged, or nothing."""
    tally: Tally


class Judge:
    """Scores completions; holds the connections and the cache."""

    def __init__(self, settings: JudgeConfig) -> None:
        self.settings, self.store = settings, VerdictStore(settings.cache)
        self.limits = JudgeLimits(settings, self.store)
        self.client = JudgeClient(settings, self.limits)

    def score(self, cases: Sequence[Case]) -> Judgement:
        """The scores of completions; those of one question follow each other. Errors are those of JudgeClient.send."""
        tally = Tally()
        scores, notes = (self._absolute if self.settings.mode == "absolute" else self._pairwise)(cases, tally)
        tally.manipulations, tally.unjudged = notes.count("manipulation"), notes.count("unjudged")
        return Judgement(scores, notes, tally)

    def decide(self, questions: Sequence[Question], tally: Tally) -> list[JudgeVerdict | None]:
        """The verdict on each question by all votes; None where no vote was sound."""
        votes = range(self.settings.votes)
        asked = [(question, vote) for question in questions for vote in votes]
        # Equal questions are asked once.
        unique = {question.key(self.settings, vote): (question, vote) for question, vote in asked}
        with ThreadPoolExecutor(self.limits.concurrency, thread_name_prefix="judge") as pool:
            waiting = {key: pool.submit(self._vote, key, *pair) for key, pair in unique.items()}
            try:
                found = {key: future.result() for key, future in waiting.items()}
            except BaseException:
                # What is in flight is recorded; nothing new begins.
                pool.shutdown(cancel_futures=True)
                raise
        for _, part in found.values():
            tally.asked += part.asked
            tally.cached += part.cached
            tally.malformed += part.malformed
            tally.cost += part.cost
        verdicts = []
        for question in questions:
            each = [found[question.key(self.settings, vote)][0] for vote in votes]
            verdicts.append(combined([one for one in each if one is not None]))
        return verdicts

    def close(self) -> None:
        """Close connections and cache."""
        self.client.close()
        self.store.close()

    def _vote(self, key: str, question: Question, vote: int) -> tuple[JudgeVerdict | None, Tally]:
        settings, tally = self.settings, Tally()
        known = self.store.find(key)
        if known is not None:
            # Damaged on disk: asked again.
            with suppress(MalformedError):
                verdict = parse(known, question, settings)
                tally.cached = 1
                return verdict, tally
        for attempt in range(settings.max_malformed + 1):
            # The cost stays reserved until it is recorded.
            with self.limits.turn(self.client.expected_cost(question)):
                # Another seed: the same one would bring the same malformed reply.
                reply = self.client.send(question, vote=vote + attempt * settings.votes)
                sound, problem = None, ""
                try:
                    sound = parse(reply.text, question, settings)
                except MalformedError as error:
                    problem = str(error) or "malformed"
                cost = self.client.cost(reply.prompt_tokens, reply.completion_tokens)
                counts = (reply.prompt_tokens, reply.completion_tokens, cost)
                self.store.add(Entry(key, settings.model, vote, question.messages, reply.text, problem, *counts))
            tally.asked, tally.cost = tally.asked + 1, tally.cost + cost
            if sound is not None:
                return sound, tally
            tally.malformed += 1
        return None, tally

    def _absolute(self, cases: Sequence[Case], tally: Tally) -> tuple[list[float | None], list[str]]:
        questions = []
        for case in cases:
            reference = {} if case.reference is None else {"reference": case.reference}
            questions.append(ask(self.settings, {"question": case.question} | reference, [case.completion]))
        verdicts = self.decide(questions, tally)
        notes = ["unjudged" if one is None else "manipulation" if one.manipulators else "" for one in verdicts]
        return [0.0 if one is None or one.manipulators else one.value for one in verdicts], notes

    def _pairwise(self, cases: Sequence[Case], tally: Tally) -> tuple[list[float | None], list[str]]:
        questions, pairs = [], compared(cases, self.settings)
        for one, other in pairs:
            mine, texts = cases[one].completion, {"question": cases[one].question}
            theirs: Completion = cases[other].completion if other is not None else cases[one].reference or ""
            questions += [ask(self.settings, texts, [mine, theirs]), ask(self.settings, texts, [theirs, mine])]
        verdicts = self.decide(questions, tally)
        won: dict[int, list[float]] = {}
        notes = [""] * len(cases)
        for pair, first, second in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            for index, value, note in zip(pair, *outcome(first, second), strict=True):
                if index is not None:
                    won.setdefault(index, []).append(value)
                    notes[index] = max(notes[index], note, key=_NOTES.index)
        shares = [sum(won[index]) / len(won[index]) if index in won else None for index in range(len(cases))]
        # One comparison is enough: a text that talks to the judge in one prompt does so in all of them.
        return [0.0 if note == "manipulation" else share for share, note in zip(shares, notes, strict=True)], notes


def outcome(first: JudgeVerdict | None, second: JudgeVerdict | None) -> tuple[tuple[float, float], tuple[str, str]]:
    """Scores and notes of both sides of a comparison, which was asked in both orders.

    One sound verdict is enough to accuse: what confuses the judge in one order must not hide what it saw in the other.
    """

    def accuse(in_first: str, in_second: str) -> bool:
        labels = ((first, in_first), (second, in_second))
        return any(verdict is not None and label in verdict.manipulators for verdict, label in labels)

    accused = (accuse("a", "b"), accuse("b", "a"))
    if any(accused):
        notes = ("manipulation" if accused[0] else "", "manipulation" if accused[1] else "")
        return (float(not accused[0]), float(not accused[1])), notes
    if first is None or second is None:
        return (0.0, 0.0), ("unjudged", "unjudged")
    value = (first.value + 1.0 - second.value) / 2
    return (value, 1.0 - value), ("", "")


def compared(cases: Sequence[Case], settings: JudgeConfig) -> list[tuple[int, int | None]]:
    """Which completions are compared: each with its reference (None), or with the next ones of its group."""
    if settings.reference_column is not None:
        return [(index, None) for index, case in enumerate(cases) if case.reference is not None]
    pairs: set[tuple[int, int]] = set()
    for _, group in groupby(range(len(cases)), key=lambda index: cases[index].question):
        members = list(group)
        for position, one in enumerate(members):
            for step in range(1, min(settings.opponents, len(members) - 1) + 1):
                other = members[(position + step) % len(members)]
                pairs.add((min(one, other), max(one, other)))
    return sorted(pairs)
