"""A resumed stage repeats updates and writes none of their lines twice; whoever follows the files reads each line once."""

import json

import pytest

from grpo_tasks.stage.journal import Events, Journal, JsonLinesTail, read_events
from schemas.errors import TrainingError


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_update_and_its_events_are_written_once(tmp_path):
    for reward in (0.5, 0.6):
        journal, events = Journal(tmp_path / "metrics.jsonl"), Events(tmp_path / "events.jsonl")
        journal.append(1, {"reward": reward})
        events.report(1, "reward_error", "row 3")
        events.report(1, "reward_error", "row 4")
        events.append(1, "resumed", "from the checkpoint of update 1")
    assert [line["metrics"] for line in lines(journal.path)] == [{"reward": 0.5}] == [journal.steps[1]]
    assert [line["detail"] for line in lines(events.path) if line["event"] == "reward_error"] == ["row 3", "row 4"]
    assert [line["event"] for line in lines(events.path)].count("resumed") == 2


def test_the_other_ranks_of_a_stage_write_no_files(tmp_path):
    events = Events(tmp_path / "events.jsonl", writes=False)
    events.report(1, "entropy_collapse", "0.01")
    assert not events.path.exists()


def test_an_incomplete_line_is_dropped_and_written_again(tmp_path):
    path, events_file = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    Journal(path).append(1, {"reward": 0.5})
    Events(events_file).report(1, "entropy_collapse", "0.01")
    for each in (path, events_file):
        each.write_bytes(each.read_bytes() + each.read_bytes()[:20])
    journal = Journal(path)
    assert journal.last_step == 1
    journal.append(2, {"reward": 0.7})
    Events(events_file).report(2, "entropy_collapse", "0.01")
    assert {step: line["reward"] for step, line in Journal(path).steps.items()} == {1: 0.5, 2: 0.7}
    assert [line["step"] for line in read_events(events_file)] == [1, 2]


@pytest.mark.parametrize("damage", [b"\xff", b"\x00", b"\n", b"\r", b"[" * 20_000, b"null"])
def test_a_damaged_line_is_named_with_its_number_and_not_changed(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for step in range(1, 6):
        journal.append(step, {"reward": 0.5})
    complete = path.read_bytes()
    middle = complete.index(b'"metrics"', complete.index(b'"step": 3'))
    path.write_bytes(complete[:middle] + damage + complete[middle + 1 :])
    before = path.read_bytes()
    with pytest.raises(TrainingError, match="damaged") as refused:
        Journal(path)
    assert refused.value.place == f"{path}:3"
    assert len(str(refused.value)) < 600
    assert path.read_bytes() == before


def test_a_bad_figure_and_a_journal_folder_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "metrics": {"reward": "high"}}\n')
    with pytest.raises(TrainingError, match="damaged"):
        Journal(path)
    with pytest.raises(TrainingError, match="cannot be read"):
        read_events(tmp_path)


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


def test_a_damaged_line_is_named_with_its_number_in_the_file(path):
    tail = JsonLinesTail(path, {"step": int})
    path.write_text('{"step": 1}\n')
    assert steps(tail) == [1]
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step": "three"}\n')
    with pytest.raises(TrainingError, match="damaged") as refused:
        tail.read()
    assert refused.value.place == f"{path}:3"
    assert "remove that line" in refused.value.fix


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
