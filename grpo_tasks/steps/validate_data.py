"""Step: check every row against every rule; bad rows are quarantined with file, line and rule."""

from grpo_tasks.answers.extract import check_completion
from grpo_tasks.data.offered_tools import with_offered_tools
from grpo_tasks.data.sources import ROWS
from grpo_tasks.data.validation import REPORT, Origin, validate_rows
from grpo_tasks.running.orchestrator import run_logger
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.results.data import DataReport, PreparedData


@step(reads=f"data validation completion seed rollout interaction {UNMERGED}")
def validate_data(work: Work, config: RunConfig, rows: PreparedData) -> DataReport:
    """Apply every rule to every row; after writing the report, stop if too many rows are bad or no answer can be right."""
    check_completion(config.completion)
    try:
        report = validate_rows(
            rows.directory / ROWS,
            with_offered_tools(config),
            Origin(work.key, work.directory, 0.0, rows.sources),
            warn=run_logger().warning,
        )
        counts = {
            "read": report.rows,
            "to train on": report.train_rows,
            "held out": report.eval_rows,
            "rejected": report.quarantined,
        }
        known = [(what, count, "") for what, count in counts.items()]
        known += [(f"rejected by {rule.rule}", rule.rows, rule.meaning) for rule in report.rules if rule.rows]
        work.table("validation-rows", [{"what": what, "rows": count, "meaning": meaning} for what, count, meaning in known])
        return report
    finally:
        # Also, and above all, when too many rows are bad.
        if (work.directory / REPORT).exists():
            work.artifact("validation", (work.directory / REPORT).read_text(encoding="utf-8"))
