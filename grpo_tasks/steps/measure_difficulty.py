"""Step: measure how hard the training prompts are, before any training.

A completion is solved when its reward, by the functions and configured weights of a stage, reaches the share `difficulty.success`
of the full reward: what a completion earns that has the full score of every function that applies. The key holds neither the seed
of the run nor what only training uses, so sweeps, other seeds and retraining use the same measurement. With
`difficulty.pass_rate_column` nothing is sampled. A stage chooses the prompts, by `keep_pass_rate`.
"""

import time
from collections.abc import Sequence

import polars as pl

from grpo_tasks.data.table import read_prompts
from grpo_tasks.evaluation.pass_rates import column_rates, measured_rates, write_rates
from grpo_tasks.evaluation.report import REPORT, SAMPLES
from grpo_tasks.rewards.held_out import solved_samples
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows, run_sampling
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.results.data import PromptTable
from schemas.results.evaluation import DifficultyReport
from schemas.results.model import ModelRef


@step(
    reads="difficulty -difficulty.min_prompts completion rewards stages.name stages.rewards data.tasks.rewards "
    f"rollout interaction seed {UNMERGED} -model.gradient_checkpointing",
    retries=1,
    device=True,
    on_cluster=True,
)
def measure_difficulty(work: Work, config: RunConfig, label: str, start: ModelRef, prompts: PromptTable) -> DifficultyReport:
    """Sample every training prompt from the model `start`, all completions at once, and note how often each prompt is solved."""
    began, given = time.perf_counter(), config.difficulty
    rows = read_prompts(prompts.path)
    if given.pass_rate_column is not None:
        rates = column_rates(rows, given.pass_rate_column, [stage.name for stage in config.stages])
    else:
        spec = SampleSpec.of(config, start, prompts.path, work.run.resources, num_samples=given.samples)

        def draw(only: Sequence[str] | None, numbers: range) -> pl.DataFrame:
            run_sampling(spec.part(only, numbers), work.directory)
            return pl.read_parquet(work.directory / SAMPLES)

        samples = solved_samples(draw, chosen_rows(prompts.path, None), config, log=work.directory / "rewards.log")
        rates = measured_rates(samples, config)
        samples.write_parquet(work.directory / SAMPLES)
    report = write_rates(rates, rows, config, work.directory, key=work.key, label=label)
    work.artifact(f"difficulty-{label}", (work.directory / REPORT).read_text(encoding="utf-8"))
    return report.model_copy(update={"seconds": time.perf_counter() - began})
