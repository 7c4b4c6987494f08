"""Step: check every row against every rule; bad rows are quarantined with file, line and rule."""

from grpo_tasks.answers.extract import check_completion
from grpo_tasks.answers.ground_truths import truths_check
from grpo_tasks.data.report import REPORT, Origin
from grpo_tasks.data.sources import ROWS
from grpo_tasks.data.validation import validate_rows
from grpo_tasks.environments.offered import offering
from grpo_tasks.running.orchestrator import run_logger
from grpo_tasks.running.step import Work, step
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import JudgeInputs
from schemas.results.data import DataReport, PreparedData


@step()
def validate_data(
    work: Work,
    rows: PreparedData,
    inputs: JudgeInputs,
    *,
    model: ModelConfig,
    rollout: RolloutConfig,
    interaction: InteractionConfig,
) -> DataReport:
    """Apply every rule to every row; after writing the report, stop if too many rows are bad or no answer can be right."""
    check_completion(inputs.completion)
    origin = Origin(work.key, work.directory, 0.0, rows.sources)
    if interaction.active:
        # Imports transformers, which a run that skips validation does not need.
        from grpo_tasks.data.chat_tokens import load_counter

        # A prompt has the tokens of its tools too.
        rollout = offering(interaction, rollout, load_counter(model).tokenizer.chat_template)
    try:
        report = validate_rows(
            rows.directory / ROWS,
            inputs,
            origin,
            check_truths=truths_check(inputs.completion),
            model=model,
            rollout=rollout,
            warn=run_logger().warning,
        )
        work.table("validation-rows", _counts(report))
        return report
    finally:
        # Also, and above all, when too many rows are bad.
        if (work.directory / REPORT).exists():
            work.artifact("validation", (work.directory / REPORT).read_text(encoding="utf-8"))


def _counts(report: DataReport) -> list[dict[str, str | float]]:
    split = {"read": report.rows, "to train on": report.train_rows, "held out": report.eval_rows, "rejected": report.quarantined}
    counts: list[dict[str, str | float]] = [{"what": what, "rows": rows, "meaning": ""} for what, rows in split.items()]
    broken = [rule for rule in report.rules if rule.rows]
    return counts + [{"what": f"rejected by {rule.rule}", "rows": rule.rows, "meaning": rule.meaning} for rule in broken]
