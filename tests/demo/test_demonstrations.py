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
        (Problem(12, "+", 34), "<reasoning>ones 2+4=6, tens 1+3=4</reasoning><answer>46</answer>"),
        (Problem(99, "+", 99), "<reasoning>ones 9+9=18, tens 9+9+1=19</reasoning><answer>198</answer>"),
        (Problem(42, "-", 27), "<reasoning>ones 12-7=5, tens 4-2-1=1</reasoning><answer>15</answer>"),
        (Problem(31, "-", 29), "<reasoning>ones 11-9=2, tens 3-2-1=0</reasoning><answer>2</answer>"),
        (Problem(50, "-", 50), "<reasoning>ones 0-0=0, tens 5-5=0</reasoning><answer>0</answer>"),
    ],
)
def test_the_working_goes_digit_by_digit_with_carry_and_borrow(problem: Problem, completion: str) -> None:
    assert good_completion(problem) == completion


def test_every_problems_good_completion_is_strict_and_right() -> None:
    for problem in all_problems():
        completion = good_completion(problem)
        assert has_strict_format(completion)
        assert is_right(completion, problem)
        for left, right in re.findall(r"([\d+-]+)=(\d+)", completion):
            terms = re.findall(r"[+-]?\d+", left)
            assert sum(map(int, terms)) == int(right)


def test_an_error_in_the_working_is_followed_up_into_the_answer() -> None:
    assert work_out(Problem(15, "+", 27), ones_error=1).answer == "43"
    assert work_out(Problem(15, "+", 27), tens_error=3).answer == "72"


def test_shares_of_shapes_and_faults_are_whole() -> None:
    assert sum(SHAPES.values()) == pytest.approx(1)
    assert sum(FAULTS.values()) == pytest.approx(1)


def test_the_demonstrations_hold_a_fifth_strict_and_at_most_a_third_right() -> None:
    drawn = draw_demonstrations(split_problems().train, 20_000, random.Random(1))
    strict = sum(has_strict_format(item.completion) for item in drawn) / len(drawn)
    right = sum(is_right(item.completion, item.problem) for item in drawn) / len(drawn)
    assert strict == pytest.approx(next(iter(SHAPES.values())), abs=0.01)
    assert 0.2 < right < 0.37


def test_the_likeliest_shape_is_not_the_wanted_one_and_all_begin_alike() -> None:
    shares = list(SHAPES.values())
    assert max(shares[1:]) > shares[0] + 0.1
    assert all(shape.startswith("<reasoning>{working}") for shape in SHAPES)


def test_the_same_seed_draws_the_same_demonstrations() -> None:
    problems = split_problems().rest
    assert draw_demonstrations(problems, 50, random.Random(3)) == draw_demonstrations(problems, 50, random.Random(3))
