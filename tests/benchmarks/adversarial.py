"""`python -m tests.benchmarks.adversarial`: what is tried against rewards and data, and how it comes out (2 minutes).

The cases are those of the tests, and more of them: every game with a hundred answers, ten thousand seeded soups.
"""

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.rewards.contract import RewardFault, batch_of
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardsConfig
from schemas.errors import DataError
from schemas.prompts import PromptRow
from tests.answers.test_equality import HOSTILE
from tests.data.test_sources import BROKEN, UNREADABLE, faults, load
from tests.rewards.test_builtin import GAMES, LONG, OF_TEXT, TAGS, score, total
from tests.rewards.test_worker import BREACHES, FUNCTIONS, LIMIT_S

WORK = "15 and 27 make together what is asked for"
SOUPS = 10_000
BLANKS = ("", " ", "\n\t", "\u200b", "\u2800", "\ufeff")
Line = tuple[str, int, str]


def main() -> None:
    """Try everything, print one line a kind."""
    print("| tried | cases | outcome |\n|---|---:|---|")
    for tried in (_long, _expressions, _games, _soups, _empty, _listings, _functions, _lines, _files):
        for what, cases, outcome in tried():
            print(f"| {what} | {cases:,} | {outcome} |", flush=True)


def _honest(answer: str) -> str:
    return f"<reasoning>{WORK}</reasoning><answer>{answer}</answer>"


def _long() -> Iterator[Line]:
    slowest = max((_seconds(lambda name=name, text=text: score(name, text)), name) for name in OF_TEXT for text in LONG.values())
    yield (
        "a million characters of words, tags, half tags, digits, brackets, blanks, ...; each built-in reward",
        len(OF_TEXT) * len(LONG),
        f"slowest {slowest[0] * 1000:.0f} ms ({slowest[1]})",
    )


def _expressions() -> Iterator[Line]:
    right, seconds = 0, []
    for text in HOSTILE:
        began = time.process_time()
        right += answers_equal(text, "7", "math")
        seconds.append(time.process_time() - began)
    yield (
        "expressions that never end (towers, factorials, sums, brackets, code), mathematical equality",
        len(HOSTILE),
        f"{right} taken for the truth; longest {max(seconds):.1f} s of computing time",
    )


def _games() -> Iterator[Line]:
    shares = {
        (total(game.format(work=WORK, answer=answer), answer) / total(_honest(answer), answer), name)
        for name, game in GAMES.items()
        for answer in map(str, range(100))
    }
    best, name = max(shares)
    cases = 100 * len(GAMES)
    yield (
        "games: stuffed, appended, nested, repeated tags; several answers; an answer in the reasoning; ...",
        cases,
        (f"the best ({name}) earns {best:.0%} of honest work"),
    )


def _soups() -> Iterator[Line]:
    draw = random.Random(1)
    parts = [*TAGS.in_order, *TAGS.in_order, "42", " ", "so 15 + 27 = 42", "\n", "<", "answer>", "7"]
    soups = ["".join(draw.choices(parts, k=draw.randint(1, 14))) for _ in range(SOUPS)]
    # A soup may come out as an honest completion by chance.
    earned = [total(text) for text in soups if score("format", text) == [0.0]]
    share = max(earned) / total(_honest("42"))
    yield "soups of tags and text without the format", len(earned), f"the best earns {share:.0%} of honest work"


def _empty() -> Iterator[Line]:
    texts = [*BLANKS, *(f"<reasoning>{WORK}</reasoning><answer>{blank}</answer>" for blank in BLANKS)]
    best = max(score(name, text)[0] for name in OF_TEXT for text in texts)
    yield "empty and invisible answers, each built-in reward", len(OF_TEXT) * len(texts), f"the best earns {best:g}"


def _listings() -> Iterator[Line]:
    kinds = [(how, between) for how in ("exact", "numeric", "math", "choice") for between in (" ", ", ", "; ", " or ", "\n")]
    right = 0
    for how, between in kinds:
        known = list("ABCD") if how == "choice" else [str(number) for number in range(25)]
        right += sum(answers_equal(between.join(known), truth, how) for truth in known)
    cases = sum(4 if how == "choice" else 25 for how, _ in kinds)
    yield "listings of every answer, all four equalities", cases, f"{right} taken for the truth"


def _functions() -> Iterator[Line]:
    row = PromptRow("0" * 16, "train.jsonl", 1, ({"role": "user", "content": "What is 15 + 27?"},), "42", 9, {})
    batch = batch_of([row, row], ["good", "bad"], [[1], [2]], step=1)
    named = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        lines = FUNCTIONS.splitlines()
        Path("my_rewards.py").write_text("\n".join(line[4:] for line in lines))
        for name, kind, words in BREACHES:
            config = RewardsConfig.model_validate({"functions": {name: {"function": f"my_rewards:{name}"}}})
            with RewardWorker(config, [name]) as worker:
                outcome = worker.call(name, batch, LIMIT_S.get(name, 30.0))
            named += isinstance(outcome, RewardFault) and outcome.kind == kind and words in outcome.detail
    yield "reward functions that hang, crash, raise, or return the wrong count, type or number", len(BREACHES), f"{named} named"


def _lines() -> Iterator[Line]:
    counted = 0
    for line, rule in BROKEN.values():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.write_bytes(b"\n".join([b'{"question": "q", "answer": "1"}', line, b'{"question": "q", "answer": "1"}', b""]))
            counted += faults(load(Path(folder), str(path))) == {1: [], 2: [rule], 3: []}
    yield (
        "broken lines: cut off, NUL, wrong encoding, 10 MB, deep nesting, doubled keys, wrong types, ...",
        len(BROKEN),
        f"{counted} quarantined with line and rule, their neighbours kept",
    )


def _files() -> Iterator[Line]:
    counted = 0
    for name, content, says in UNREADABLE.values():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            try:
                load(Path(folder), str(Path(folder) / name))
            except DataError as error:
                counted += says in error.message and name in error.place and bool(error.fix)
    tried = "files: empty, broken UTF-16, packed, another format, broken, open quotes, ..."
    yield tried, len(UNREADABLE), f"{counted} refused by name"


def _seconds(call: object) -> float:
    times = []
    for _ in range(3):
        began = time.process_time()
        call()  # type: ignore[operator]
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    main()
