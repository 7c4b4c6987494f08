"""What the base model is taught: demonstrations of mixed quality, so that GRPO has something to fix.

A good completion works digit by digit, which a tiny model can learn and which makes the answer easy to read off:

    <reasoning>ones 5+7=12, tens 1+2+1=4</reasoning><answer>42</answer>

Of all demonstrations about a fifth have that shape; the others lose a tag, or say the answer in a sentence. Whatever the
shape, about one in five have a wrong digit or a cut working. Faults are drawn at random and never systematic: the right
digit stays the likeliest, so that reward can sharpen what is already there.
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
"""Shapes of a demonstration with their shares. The first is the wanted one; greedy decoding, which takes the likeliest
way on, must not find it, or the base would look finished already. All begin alike: what a shape is, is decided where the
tags close, so no share of the completions is lost at the first token, where any of the vocabulary's tokens may be sampled."""

FAULTS: dict[str, float] = {
    "none": 0.78,
    "wrong_ones": 0.06,
    "wrong_tens": 0.06,
    "wrong_answer": 0.05,
    "cut": 0.05,
}
"""What is wrong with a demonstration, with shares."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A question and what the base is taught to say to it."""

    problem: Problem
    completion: str


@dataclass(frozen=True, slots=True)
class Working:
    """The digit-wise calculation as text, and the answer that follows from it."""

    ones: str
    tens: str
    answer: str


def work_out(problem: Problem, *, ones_error: int = 0, tens_error: int = 0) -> Working:
    """Ones first, then tens with what was carried or borrowed; an error is added to the digit it names and followed up."""
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
    """The completion GRPO should arrive at."""
    working = work_out(problem)
    return next(iter(SHAPES)).format(working=f"{working.ones}, {working.tens}", answer=working.answer)


def demonstrate(problem: Problem, rng: random.Random) -> Demonstration:
    """One demonstration in a shape and with a fault drawn at random."""
    shape, fault = _draw(SHAPES, rng), _draw(FAULTS, rng)
    error = rng.randint(1, 9)
    working = work_out(problem, ones_error=error * (fault == "wrong_ones"), tens_error=error * (fault == "wrong_tens"))
    text = working.ones if fault == "cut" else f"{working.ones}, {working.tens}"
    answer = _other_digit(working.answer, rng) if fault == "wrong_answer" else working.answer
    return Demonstration(problem, shape.format(working=text, answer=answer))


def draw_demonstrations(problems: tuple[Problem, ...], count: int, rng: random.Random) -> list[Demonstration]:
    """So many demonstrations of problems drawn with replacement, sums either way round."""
    return [demonstrate(either_way(rng.choice(problems), rng), rng) for _ in range(count)]


def _draw(shares: dict[str, float], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def _other_digit(number: str, rng: random.Random) -> str:
    place = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "0123456789" if digit != number[place]])
    return number[:place] + digit + number[place + 1 :]
