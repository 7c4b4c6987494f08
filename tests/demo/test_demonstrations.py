"""What the base is taught: right working by default, and faults in the stated shares."""

import random
import re

import pytest

from tests.demo.arithmetic import Problem, all_problems, has_strict_format, is_right, split_problems
from tests.demo.build import FAULTS, SHAPES, draw_demonstrations, good_completion, work_out


@pytest.mark.parametrize(
    ("problem", "completion"),
    [
        (Problem(15, "+", 27), "<reasoning>ones 5+7=12, tens 1+2+1=4</reasoning><answer>42</answer>"),
        (Problem(99, "+", 99), "<reasoning>ones 9+9=18, tens 9+9+1=19</reasoning><answer>198</answer>"),
        (Problem(42, "-", 27), "<reasoning>ones 12-7=5, tens 4-2-1=1</reasoning><answer>15</answer>"),
    ],
)
def test_the_working_goes_digit_by_digit_with_carry_and_borrow(problem, completion):
    assert good_completion(problem) == completion


def test_every_problems_good_completion_is_strict_and_right():
    for problem in all_problems():
        completion = good_completion(problem)
        assert has_strict_format(completion)
        assert is_right(completion, problem)
        for left, right in re.findall(r"([\d+-]+)=(\d+)", completion):
            assert sum(map(int, re.findall(r"[+-]?\d+", left))) == int(right)
    # An error in the working is followed up into the answer.
    assert work_out(Problem(15, "+", 27), ones_error=1).answer == "43"


def test_the_demonstrations_hold_a_fifth_strict_and_at_most_a_third_right():
    assert sum(SHAPES.values()) == pytest.approx(1) == sum(FAULTS.values())
    drawn = draw_demonstrations(split_problems().train, 20_000, random.Random(1))
    strict = sum(has_strict_format(item.completion) for item in drawn) / len(drawn)
    right = sum(is_right(item.completion, item.problem) for item in drawn) / len(drawn)
    assert strict == pytest.approx(next(iter(SHAPES.values())), abs=0.01)
    assert 0.2 < right < 0.37
