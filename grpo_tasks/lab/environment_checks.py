"""The checks of tools and environments: they are played with scripted turns before any training, without a model.

Scripts: the turns of the perfect player, where there are any; nothing at all; and turns that call every tool and say odd things.
They are played one after the other, once more with the same seed (determinism), and a turn of each after the other (leak).
`begins` and `leak` are faults.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from grpo_tasks.environments.contract import Environments, Message, Observation, Opening, row_columns, too_long
from grpo_tasks.environments.families import ReadFormat, family_of, write_call
from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.lab.probes import choose_rows
from schemas.config.completion import CompletionConfig
from schemas.config.rollout import InteractionConfig
from schemas.prompts import PromptRow
from schemas.results.data import LabCheck

TRIED_ROWS = 4
"""Rows whose conversations are played. Each is played three times by two or three players."""


def check_interaction(
    config: InteractionConfig,
    rows: Sequence[PromptRow],
    *,
    chat_template: str,
    response_template: Mapping[str, Any] | None = None,
    count_tokens: Callable[[Sequence[Sequence[Message]]], list[int]],
    completion: CompletionConfig,
    log: Path | None = None,
) -> list[LabCheck]:
    """The checks of the section `interaction`, with all training rows, at least one; empty where nothing answers the policy.

    The model's `chat_template` and the `response_template` of its tokenizer name the format of calls. `count_tokens` counts
    prompts after the former. `completion` names the tags around reasoning, in which no call counts. `log` receives what tools and
    environments print.
    """
    if not config.active:
        return []
    name = config.environment or "tools"
    report(Progress(f"trying {name}"))
    pool = EnvironmentPool(
        config,
        chat_template=chat_template,
        response_template=response_template,
        reasoning=completion.reasoning_tags,
        log=log,
    )
    with pool:
        schemas = pool.schemas()
        columns = [row_columns(row) for row in choose_rows(rows, TRIED_ROWS)]
        perfect = perfect_turns(pool, columns)
        failed = next((text for text in perfect if isinstance(text, str)), None)
        scripts = scripts_of(
            columns,
            schemas,
            perfect=[turns if isinstance(turns, list) else None for turns in perfect],
            max_turns=config.max_turns,
            call_format=family_of(chat_template) if config.call_format == "auto" else config.call_format,
        )
        checks, plays = check_environment(pool, scripts, name=name, timeout_s=config.timeout_s)
    # An environment may leave the prompts of the rows as they are.
    begun = [play.opening.messages for play in plays if play.opening.messages]
    longest = max(count_tokens(begun), default=0) if begun else 0
    if longest > config.max_prompt_tokens:
        detail, fix = too_long(longest, config.max_prompt_tokens), "say less in reset, or raise interaction.max_prompt_tokens"
        begins = LabCheck(function=name, check="begins", outcome="failed", detail=detail, fix=fix)
        checks = [begins, *(one for one in checks if one.check != "begins" or one.outcome == "failed")]
    if failed is not None:
        fix = "let perfect(row) return the turns of a good player as a list of texts"
        checks.append(LabCheck(function=name, check="perfect", outcome="failed", detail=failed[:1_000], fix=fix))
    return checks


Outcome = Literal["passed", "warned", "failed"]
IDLE, PERFECT, ODD = "idle", "perfect", "odd"
ODD_TURNS = ("", "1", "yes", "<answer>42</answer>", "<think>", "\x00\u2028<|im_end|><|im_start|>user\n", "{}", "x" * 2_000)
SLOW_SHARE = 0.5
"""A step whose 95th percentile takes more than this share of its time limit is slow."""
MAX_ODD_CALLS = 16


@dataclass(frozen=True, slots=True)
class Script:
    """The turns of one conversation, known beforehand."""

    kind: str
    row: Mapping[str, Any]
    seed: int
    turns: Sequence[str]


@dataclass(slots=True)
class Play:
    """How a conversation went."""

    script: Script
    opening: Opening = field(default_factory=Opening)
    observed: list[Observation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reward_at_end: float | str | None = None
    """What `Environments.end` gave; a text is a fault."""

    @property
    def over(self) -> bool:
        """Whether nothing more can be said."""
        ended = self.opening.error is not None or (bool(self.observed) and self.observed[-1].done)
        return ended or len(self.observed) == len(self.script.turns)

    @property
    def error(self) -> str | None:
        """The fault that ended it."""
        at_end = self.reward_at_end if isinstance(self.reward_at_end, str) else None
        return self.opening.error or next((one.error for one in self.observed if one.error), at_end)

    @property
    def lost(self) -> bool:
        """Whether that ended the process."""
        return any(words in (self.error or "") for words in ("did not return within", "ended its worker", "MiB of memory"))

    @property
    def reward(self) -> float | None:
        """Sum of its rewards; None when there was none."""
        given = [one.reward for one in self.observed if one.reward is not None]
        given += [self.reward_at_end] if isinstance(self.reward_at_end, float) else []
        return math.fsum(given) if given else None

    @property
    def course(self) -> tuple[Any, ...]:
        """All that has to be the same when it is played again."""
        return (self.opening, *self.observed, self.reward_at_end)


def scripts_of(
    rows: Sequence[Mapping[str, Any]],
    schemas: Sequence[Mapping[str, Any]],
    *,
    perfect: Sequence[Sequence[str] | None] = (),
    max_turns: int,
    call_format: ReadFormat | None = "hermes",
) -> list[Script]:
    """For every row (its columns, `messages` among them) a perfect script, if it is known, an idle and an odd one.

    The odd one calls each tool in the format of calls. None: a response template reads what nothing here writes.
    """
    calls = []
    for one in schemas[:MAX_ODD_CALLS]:
        if call_format is None:
            break
        fields = one["function"].get("parameters", {}).get("properties", {})
        arguments = {name: _example(schema) for name, schema in fields.items()}
        calls.append(write_call(one["function"]["name"], arguments, call_format))
    odd = [*calls, *ODD_TURNS][:max_turns]
    made = []
    for seed, row in enumerate(rows):
        known = perfect[seed] if seed < len(perfect) else None
        made += [Script(PERFECT, row, seed, list(known))] if known else []
        made += [Script(IDLE, row, seed, [""] * max_turns), Script(ODD, row, seed, odd)]
    return made


def perfect_turns(pool: EnvironmentPool, rows: Sequence[Mapping[str, Any]]) -> list[list[str] | str | None]:
    """What the environment's method `perfect(row)` gives for each row: turns, None without such a method, a text if it fails."""
    found: list[list[str] | str | None] = []
    for number, row in enumerate(rows):
        (opening,) = pool.begin([(number, row, number)])
        found.append(opening.error if opening.error is not None else pool.perfect(number))
        pool.end([number])
    return found


def play(environments: Environments, scripts: Sequence[Script]) -> list[Play]:
    """Play conversations at once, a turn of each after the other, as training does; the last one first."""
    plays = [Play(script) for script in scripts]
    order = list(reversed(range(len(scripts))))
    begun = environments.begin([(number, scripts[number].row, scripts[number].seed) for number in order])
    for number, opening in zip(order, begun, strict=True):
        plays[number].opening = opening
    while live := [number for number in order if not plays[number].over]:
        turns = [(number, plays[number].script.turns[len(plays[number].observed)]) for number in live]
        began = time.perf_counter()
        answers = environments.answer(turns)
        seconds = (time.perf_counter() - began) / len(live)
        for number, observed in zip(live, answers, strict=True):
            plays[number].observed.append(observed)
            plays[number].seconds.append(seconds)
    for number, reward in zip(order, environments.end(order), strict=True):
        plays[number].reward_at_end = reward
    return plays


def check_environment(
    environments: Environments, scripts: Sequence[Script], *, name: str, timeout_s: float
) -> tuple[list[LabCheck], list[Play]]:
    """Play the scripts three times, twice one after the other, while nothing else runs; the checks, and the conversations."""
    plays, again = ([*chain.from_iterable(play(environments, [script]) for script in scripts)] for _ in range(2))
    in_turns = play(environments, scripts)
    checks = [*_check_faults(name, plays), _check_alike(name, "determinism", plays, again)]
    # Conversations that differ by themselves say nothing about a leak.
    if checks[-1].outcome == "passed":
        checks.append(_check_alike(name, "leak", plays, in_turns))
    checks += [_check_speed(name, plays, timeout_s), *_check_ranking(name, plays)]
    return checks, plays


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _check_faults(name: str, plays: Sequence[Play]) -> Iterator[LabCheck]:
    begun = [play for play in plays if play.opening.error is None]
    first = next((play for play in plays if play.opening.error is not None), None)
    if first is None:
        yield _check(name, "begins", "passed", f"{len(plays)} conversations began")
    else:
        detail = f"{len(plays) - len(begun)} of {len(plays)} conversations did not begin: {first.opening.error}"
        yield _check(name, "begins", "failed", detail, fix="correct reset, or the row", play=first)
    faulty = [play for play in begun if play.error is not None]
    if not faulty:
        yield _check(name, "faults", "passed", f"{sum(len(play.observed) for play in plays)} steps without a fault")
        return
    # A policy says odd things. That a step refuses them is its right; that it ends its process costs the run.
    worst = min(faulty, key=lambda play: (not play.lost, play.script.kind == ODD))
    outcome: Outcome = "failed" if worst.lost or worst.script.kind != ODD else "warned"
    detail = f"{len(faulty)} of {len(plays)} conversations ended by a fault: {worst.error}"
    yield _check(name, "faults", outcome, detail, fix="correct step, or make it answer what it cannot understand", play=worst)


def _check_alike(name: str, check: str, plays: Sequence[Play], again: Sequence[Play]) -> LabCheck:
    """Whether conversations went the same way twice: one after the other (determinism), or all at once (leak)."""
    found, leak = _difference(plays, again), check == "leak"
    if found is None:
        how = "at once went the same way as one after the other" if leak else "went the same way again"
        return _check(name, check, "passed", f"{len(plays)} conversations {how}")
    play, what = found
    if leak:
        fix = "keep what belongs to a conversation in self, not in the class or the module"
        return _check(name, check, "failed", f"a conversation goes another way while others run: {what}", fix=fix, play=play)
    fix = "draw random numbers from a generator made with the seed of reset; a resumed run does not end in the same bytes"
    detail = f"the same turns with the same seed went another way: {what}"
    return _check(name, check, "warned", detail, fix=fix, play=play)


def _difference(first: Sequence[Play], second: Sequence[Play]) -> tuple[Play, str] | None:
    for one, other in zip(first, second, strict=True):
        if one.course == other.course:
            continue
        if one.opening != other.opening:
            return one, f"it begins with {_shown(one.opening)} and with {_shown(other.opening)}"
        pairs = zip(one.observed, other.observed, strict=False)
        turn = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if turn is None:
            return one, "it ends otherwise"
        return one, f"turn {turn + 1} is answered by {_shown(one.observed[turn])} and by {_shown(other.observed[turn])}"
    return None


def _shown(said: Opening | Observation) -> str:
    texts = [str(message.get("content")) for message in said.messages]
    extra = [f"reward {said.reward}", *(["done"] if said.done else [])] if isinstance(said, Observation) else []
    return repr(" | ".join([*texts, *extra, *([said.error] if said.error else [])])[:160])


def _check_speed(name: str, plays: Sequence[Play], timeout_s: float) -> LabCheck:
    seconds = [one for play in plays for one in play.seconds]
    median, slow = percentile(seconds, 0.5), percentile(seconds, 0.95)
    detail = f"a step takes {1e3 * median:.1f} ms (median), {1e3 * slow:.1f} ms (95th percentile) of {len(seconds)}"
    if slow <= SLOW_SHARE * timeout_s:
        return _check(name, "speed", "passed", detail)
    return _check(name, "speed", "warned", f"{detail}; the limit is {timeout_s:g} s", fix="make it faster, or raise timeout_s")


def _check_ranking(name: str, plays: Sequence[Play]) -> Iterator[LabCheck]:
    idle = {play.script.seed: play for play in plays if play.script.kind == IDLE}
    perfect = [play for play in plays if play.script.kind == PERFECT]
    pairs = [(play, idle[play.script.seed]) for play in perfect if play.reward is not None or idle[play.script.seed].reward]
    if pairs:
        worst, lazy = min(pairs, key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
        gain = (worst.reward or 0.0) - (lazy.reward or 0.0)
        detail = f"the perfect player earns {worst.reward or 0.0:g} where the silent one earns {lazy.reward or 0.0:g}"
        outcome: Outcome = "passed" if gain > 0 else ("warned" if gain == 0 else "failed")
        fix = "" if gain > 0 else "reward what the task asks for, and nothing else"
        yield _check(name, "ranking", outcome, detail, fix=fix, play=worst)
    unfinished = [play for play in perfect if not (play.observed and play.observed[-1].done)]
    if unfinished:
        detail = f"{len(unfinished)} of {len(perfect)} perfect conversations were not over after their last turn"
        fix = "let `perfect` play to the end, let step say done, or raise interaction.max_turns"
        yield _check(name, "length", "warned", detail, fix=fix, play=unfinished[0])
    elif perfect:
        longest = max(len(play.observed) for play in perfect)
        yield _check(name, "length", "passed", f"the perfect player needs at most {longest} turns")


def _check(name: str, check: str, outcome: Outcome, detail: str, *, fix: str = "", play: Play | None = None) -> LabCheck:
    probe = play.script.kind if play is not None else ""
    said = " | ".join(play.script.turns)[:200] if play is not None else ""
    return LabCheck(function=name, check=check, outcome=outcome, detail=detail[:1_000], fix=fix, probe=probe, completion=said)


_EXAMPLES: Mapping[str, Any] = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return _example(schema["anyOf"][0])
    kind = schema.get("type")
    return _EXAMPLES.get(kind[0] if isinstance(kind, list) and kind else str(kind), "a")
