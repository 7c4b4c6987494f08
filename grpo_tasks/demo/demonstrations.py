"""Training texts of the base model: demonstrations of mixed quality, so that GRPO has something to improve.

A good completion works digit by digit. A tiny model can learn this, and the answer follows from the last digits:

    <reasoning>ones 5+7=12, tens 1+2+1=4</reasoning><answer>42</answer>

About a fifth of the demonstrations have this shape. The others lack a tag or state the answer in a sentence. In every shape about
one in five has a wrong digit or an incomplete calculation. Errors are random and never systematic: the right digit stays the most
probable one, so that GRPO can strengthen what the model already does.
"""

import random
from dataclasses import dataclass

from grpo_tasks.demo.arithmetic import Problem, either_way

SHAPES: dict[str, float] = {
    "<reasoning>{working}</reasoning><answer>{answer}</answer>": 0.22,
    "<reasoning>{working}</reasoning>{answer}": 0.40,
    "<reasoning>{working}</reasoning><answer>{answer}": 0.12,
    "<reasoning>{working}<answer>{answer}</answer>": 0.14,
    "<reasoning>{working}. The answer is {answer}.": 0.12,
}
"""Shapes of a demonstration with their shares. The first one is the required format. It must not be the most frequent one, or
greedy decoding of the base model would already produce it. All shapes begin with the same tag and differ only where tags close,
so the first token is almost certain and few samples go wrong there."""

FAULTS: dict[str, float] = {
    "none": 0.78,
    "wrong_ones": 0.06,
    "wrong_tens": 0.06,
    "wrong_answer": 0.05,
    "cut": 0.05,
}
"""Errors of a demonstration with their shares."""


@dataclass(frozen=True, slots=True)
class SolvedProblem:
    """A problem and the completion that the base model is trained on."""

    problem: Problem
    completion: str


@dataclass(frozen=True, slots=True)
class Working:
    """The calculation digit by digit as text, and the answer that follows from it."""

    ones: str
    tens: str
    answer: str


def work_out(problem: Problem, *, ones_error: int = 0, tens_error: int = 0) -> Working:
    """Calculate ones first, then tens with the carry or borrow. An error is added to its digit and carries over to the answer."""
    (left_tens, left_ones), (right_tens, right_ones) = divmod(problem.left, 10), divmod(problem.right, 10)
    if problem.sign == "+":
        ones = left_ones + right_ones
        carry = ones >= 10
        tens = left_tens + right_tens + carry
    else:
        carry = left_ones < right_ones
        left_ones += 10 * carry
        ones = left_ones - right_ones
        tens = left_tens - right_tens - carry
    ones = 10 * (ones // 10) + (ones + ones_error) % 10
    tens = 10 * (tens // 10) + (tens + tens_error) % 10
    carried = f"{problem.sign}1" if carry else ""
    return Working(
        ones=f"ones {left_ones}{problem.sign}{right_ones}={ones}",
        tens=f"tens {left_tens}{problem.sign}{right_tens}{carried}={tens}",
        answer=str(10 * tens + ones % 10),
    )


def good_completion(problem: Problem) -> str:
    """The completion that GRPO should lead to."""
    working = work_out(problem)
    return next(iter(SHAPES)).format(working=f"{working.ones}, {working.tens}", answer=working.answer)


def demonstrate(problem: Problem, rng: random.Random) -> SolvedProblem:
    """One demonstration with a random shape and a random error."""
    shape, fault = _draw(SHAPES, rng), _draw(FAULTS, rng)
    error = rng.randint(1, 9)
    working = work_out(problem, ones_error=error * (fault == "wrong_ones"), tens_error=error * (fault == "wrong_tens"))
    text = working.ones if fault == "cut" else f"{working.ones}, {working.tens}"
    answer = _other_digit(working.answer, rng) if fault == "wrong_answer" else working.answer
    return SolvedProblem(problem, shape.format(working=text, answer=answer))


def draw_demonstrations(problems: tuple[Problem, ...], count: int, rng: random.Random) -> list[SolvedProblem]:
    """`count` demonstrations of problems drawn with replacement; sums have their numbers in either order."""
    return [demonstrate(either_way(rng.choice(problems), rng), rng) for _ in range(count)]


def _draw(shares: dict[str, float], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def _other_digit(number: str, rng: random.Random) -> str:
    index = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "0123456789" if digit != number[index]])
    return number[:index] + digit + number[index + 1 :]
