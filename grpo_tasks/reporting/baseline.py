"""What a run with GRPO gained over rejection sampling on the same data, prompt by prompt.

The baseline is the newest such run that MLflow has. What this module does not do: decide about a promotion.
"""

from grpo_tasks.reporting.compare import Comparison, compare_runs
from grpo_tasks.tracking.past_runs import find_rejection_run, load_past_run
from schemas.config.run import RunConfig


def has_grpo(config: RunConfig) -> bool:
    """Whether a stage of the run trains by GRPO."""
    return any(stage.kind == "grpo" for stage in config.stages)


def against_rejection(config: RunConfig, run_id: str, data_digest: str) -> Comparison | None:
    """The run of rejection sampling first, this run second; None where the run has no GRPO, or MLflow no baseline.

    Args:
        config: of this run.
        run_id: of this run; its merged model was evaluated.
        data_digest: of the data that both trained on.
    """
    if not has_grpo(config):
        return None
    baseline = find_rejection_run(data_digest, config.tracking)
    if baseline is None:
        return None
    return compare_runs(load_past_run(baseline, config.tracking), load_past_run(run_id, config.tracking))
