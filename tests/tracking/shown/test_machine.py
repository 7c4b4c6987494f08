"""CPU, memory and disk of the machine are metrics of a stage while it is trained, apart from its curves."""

from mlflow import MlflowClient

from grpo_tasks.tracking.journal import Machine
from grpo_tasks.tracking.runs import open_run

from ..conftest import history, write_journal


def test_the_machine_is_measured_while_the_journal_is_shipped(database, make_config, make_stage):
    config, client = make_config(database), MlflowClient(database)
    stage = make_stage(config, steps=3, finish=False)
    with open_run(config, key="k") as run:
        shipper = run.follow(stage.directory)
        shipper.machine = Machine(every_s=0.0)
        assert shipper.ship()
        child = run.child("format", stage.key).run_id
        metrics = client.get_run(child).data.metrics
        assert 0 <= metrics["system/cpu_utilization_percentage"] <= 100
        assert metrics["system/system_memory_usage_megabytes"] > 0
        # A new process finds its position in the journal, not in the samples of the machine.
        write_journal(stage.directory / "metrics.jsonl", range(4, 6))
        again = run.follow(stage.directory)
        assert again.ship()
        assert [step for step, _, _ in history(client, child, "reward")] == [1, 2, 3, 4, 5]
        # Its first sample is due ten seconds after it began.
        assert len(client.get_metric_history(child, "system/cpu_utilization_percentage")) == 1


def test_samples_are_apart_by_the_set_time():
    assert Machine(every_s=3600.0).sample() == {}
    assert Machine(every_s=0.0).sample().keys() >= {"system/cpu_utilization_percentage", "system/disk_available_megabytes"}
