from grpo_tasks.stage.guards import alarms
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


def test_an_alarm_rings_once_when_the_kl_stays_high(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    rung = {}
    for step in range(1, 31):
        journal.append(step, {"kl": 0.1 if step < 10 else 0.9, "reward_std": 0.4})
        rung |= {step: alarms(journal, step)}
    ringing = {step: found for step, found in rung.items() if found}
    assert len(ringing) == 1
    [(step, found)] = ringing.items()
    assert 10 < step < 20
    assert "lower the learning rate" in found["kl_blow_up"]


def test_a_healthy_run_rings_nothing(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 40):
        journal.append(step, {"kl": 0.02, "reward_std": 0.3, "frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.0})
        assert alarms(journal, step) == {}
