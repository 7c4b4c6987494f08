"""The demo's task: two-digit sums and differences, "What is 15 + 27?", every problem once (a + b and b + a are one).

    shuffled by seed:  eval 512, held out from all | train 2,048, the GRPO prompts | rest 5,630, which teach the base with train

Also the scores by which the base model was judged when it was built.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "grpo_tasks" / "demo"
"""Data files and base model, which ship with the package."""
SYSTEM_PROMPT = "Reply with <reasoning>...</reasoning><answer>...</answer>."
"""System message of the demo; the demo preset contains the same text."""

NUM_EVAL = 512
NUM_TRAIN = 2048
TRAIN_FILE = "arithmetic_train.jsonl"
EVAL_FILE = "arithmetic_eval.jsonl"

_STRICT = re.compile(r"\s*<reasoning>(?:(?!</?reasoning>|</?answer>).)+</reasoning>"
                     r"\s*<answer>(?:(?!</?reasoning>|</?answer>).)+</answer>\s*", re.DOTALL)  # fmt: skip
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One sum or difference of two numbers from 10 to 99; never below zero."""

    left: int
    sign: str
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} {self.sign} {self.right}?"

    @property
    def answer(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def turned(self) -> "Problem":
        """The same sum with its numbers exchanged; a difference is returned unchanged."""
        return Problem(self.right, self.sign, self.left) if self.sign == "+" else self


PROBE = Problem(15, "+", 27)
"""The question that every tutorial asks; always held out."""


@dataclass(frozen=True, slots=True)
class Split:
    """All problems in three parts without a common problem, where a + b and b + a count as the same."""

    eval: tuple[Problem, ...]
    train: tuple[Problem, ...]
    rest: tuple[Problem, ...]


def all_problems() -> list[Problem]:
    """Every problem once: sums with the smaller number first, differences with the larger."""
    pairs = [(small, large) for small in range(10, 100) for large in range(small, 100)]
    return [Problem(a, "+", b) for a, b in pairs] + [Problem(b, "-", a) for a, b in pairs]


def split_problems(*, seed: int = 0) -> Split:
    """The three parts, shuffled; in eval and train about half of the sums have the larger number first."""
    rng = random.Random(seed)
    problems = all_problems()
    problems.remove(PROBE)
    rng.shuffle(problems)
    held_out = [PROBE, *problems[: NUM_EVAL - 1]]
    train, rest = problems[NUM_EVAL - 1 :][:NUM_TRAIN], problems[NUM_EVAL - 1 + NUM_TRAIN :]
    return Split(
        eval=(PROBE, *(either_way(problem, rng) for problem in held_out[1:])),
        train=tuple(either_way(problem, rng) for problem in train),
        rest=tuple(rest),
    )


def either_way(problem: Problem, rng: random.Random) -> Problem:
    return problem.turned if rng.random() < 0.5 else problem


def write_rows(path: Path, problems: tuple[Problem, ...]) -> None:
    rows = [json.dumps({"question": problem.question, "answer": str(problem.answer)}) for problem in problems]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8", newline="\n")


def write_task(folder: Path) -> None:
    split = split_problems()
    write_rows(folder / TRAIN_FILE, split.train)
    write_rows(folder / EVAL_FILE, split.eval)


def chat(problem: Problem) -> list[dict[str, str]]:
    """The chat messages of a problem, the same in the base model's training and in the demo."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.question}]


def has_strict_format(completion: str) -> bool:
    """True if the completion consists of one reasoning block, one answer block and nothing else."""
    return _STRICT.fullmatch(completion) is not None


def is_right(completion: str, problem: Problem) -> bool:
    """True if the last answer block contains the right number, whatever text surrounds it."""
    blocks = _ANSWER.findall(completion)
    return bool(blocks) and blocks[-1].strip() == str(problem.answer)
