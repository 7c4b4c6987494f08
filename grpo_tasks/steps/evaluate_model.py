"""Step: evaluate one model on the held-out prompts."""

import time
from functools import partial

import polars as pl

from grpo_tasks.evaluation.report import LEAST_PROMPTS, SAMPLES, evaluate_samples, widest_half
from grpo_tasks.kit.files import remove
from grpo_tasks.rewards.held_out import reward_columns
from grpo_tasks.rollout.parts import PARTS, sample_in_parts
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig, Scoring
from schemas.config.section import UNMERGED
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import ModelRef


@step(
    reads=f"completion rollout interaction evaluation -evaluation.max_truncated -evaluation.engine seed {UNMERGED}",
    retries=1,
    keeps=(PARTS,),
    device=True,
    on_cluster=True,
)
def evaluate_model(
    work: Work, config: RunConfig, label: str, ref: ModelRef, data: DataReport, scoring: Scoring | None
) -> EvalReport:
    """Sample completions in a child process, then score them; reward functions run in a process of their own."""
    began, evaluation = time.perf_counter(), config.evaluation
    spec = SampleSpec.of_evaluation(config, ref, data.eval, work.run.resources)
    rows, rewards = chosen_rows(data.eval, evaluation.max_prompts), None
    half_width = partial(widest_half, prompts=rows, completion=config.completion, evaluation=evaluation)
    used = sample_in_parts(spec, work.directory, evaluation, half_width, least=LEAST_PROMPTS, key=work.key)
    if scoring is not None:
        samples, log = pl.read_parquet(work.directory / SAMPLES), work.directory / "rewards.log"
        rewards = reward_columns(samples, rows, scoring, completion=config.completion, per_prompt=evaluation.num_samples, log=log)
    report = evaluate_samples(
        work.directory,
        key=work.key,
        label=label,
        model=ref,
        prompts=rows,
        completion=config.completion,
        evaluation=evaluation,
        rewards=rewards,
        prompts_used=used,
    )
    remove(work.directory / PARTS)
    work.artifact(f"evaluation-{label}", (work.directory / "report.md").read_text(encoding="utf-8"))
    figures = [{"metric": name, **interval.model_dump()} for name, interval in report.metrics.items()]
    work.table(f"evaluation-{label}-figures", figures)
    return report.model_copy(update={"seconds": time.perf_counter() - began})
