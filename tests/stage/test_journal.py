from grpo_tasks.stage.journal import Journal


def test_a_line_torn_by_a_kill_is_dropped_and_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Journal(path).append(1, {"reward": 0.5})
    with path.open("a") as file:
        file.write('{"step": 2, "metr')
    journal = Journal(path)
    assert journal.last_step == 1
    journal.append(2, {"reward": 0.7})
    assert {step: line["reward"] for step, line in Journal(path).steps.items()} == {1: 0.5, 2: 0.7}


def test_a_repeated_update_keeps_its_first_line(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for reward in (0.5, 0.6):
        journal.append(1, {"reward": reward})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert journal.steps[1] == {"reward": 0.5}
