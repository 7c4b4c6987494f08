"""A growing file of JSON lines is read line by complete line, each line once."""

import pytest

from grpo_tasks.stage.journal import JsonLinesTail
from schemas.errors import TrainingError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def steps(tail):
    return [line["step"] for line in tail.read()]


def test_each_complete_line_is_read_once(path):
    tail = JsonLinesTail(path, {"step": int})
    assert steps(tail) == [], "there is no file yet"
    path.write_text('{"step": 1}\n{"st')
    assert (steps(tail), steps(tail)) == ([1], [])
    with path.open("a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert (steps(tail), steps(tail)) == ([2, 3], [])


def test_a_truncated_or_removed_file_is_read_from_its_start(path):
    tail = JsonLinesTail(path, {"step": int})
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert steps(tail) == [1, 2]
    path.write_text('{"step": 1}\n')
    assert steps(tail) == [1]
    path.unlink()
    assert steps(tail) == []
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert steps(tail) == [1, 2]


def test_a_damaged_line_is_named_with_its_number(path):
    tail = JsonLinesTail(path, {"step": int})
    path.write_text('{"step": 1}\n')
    assert steps(tail) == [1]
    with path.open("a") as file:
        file.write('{"step": "two"}\n')
    with pytest.raises(TrainingError, match="damaged") as refused:
        tail.read()
    assert refused.value.place == f"{path}:2"
