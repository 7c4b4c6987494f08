"""Some completions of base and merged model are traces with their verdicts, bounded in number and each logged once."""

import polars as pl
import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking import records
from grpo_tasks.tracking.runs import open_run


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_completions_are_traces_with_ground_truth_and_verdicts_once(
    database, make_config, data_report, make_evaluation, monkeypatch
):
    monkeypatch.setattr(records, "MAX_TRACES", 2)
    config, client = make_config(database), MlflowClient(database)
    ids = pl.read_parquet(data_report.eval)["prompt_id"].to_list()[:3]
    evaluations = [make_evaluation("base"), make_evaluation("format", key="e" * 16), make_evaluation("merged", key="c" * 16)]
    for evaluation in evaluations:
        rows = {"prompt_id": [one for one in ids for _ in range(2)], "sample": [0, 1] * 3, "completion": list("abcdef")}
        verdicts = {"correct": [True, False] * 3, "strict_format": [True] * 6, "reward": [1.5] * 6, "token_ids": [[1]] * 6}
        pl.DataFrame(rows | verdicts).write_parquet(evaluation.samples)
    for _ in range(2):
        with open_run(config, key="k") as run:
            run.record(data_report)
            for evaluation in evaluations:
                run.record(evaluation)
        found = client.search_traces(locations=[run.experiment_id])
        assert sorted(trace.info.tags["grpo.sample"] for trace in found) == sorted(
            f"{label}/{prompt}/0" for label in ("base", "merged") for prompt in ids[:2]
        )
        # As after a kill between the work and its marker.
        client.delete_tag(run.run_id, "grpo.recorded")
    [trace] = [trace for trace in found if trace.info.tags["grpo.sample"] == f"merged/{ids[1]}/0"]
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.run_id
    assert trace.data.spans[0].inputs == {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}
    assert trace.data.spans[0].outputs == {"role": "assistant", "content": "c"}
    judged = {assessment.name: assessment.value for assessment in trace.info.assessments}
    assert judged == {"correct": True, "format": True, "reward": 1.5, "expected_response": "2"}
