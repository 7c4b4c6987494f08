"""Step: check every row of the prompts of a guard of the promotion, by the rules of the held-out rows."""

import time

from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.validation import REPORT, Origin, validate_rows
from grpo_tasks.running.orchestrator import run_logger
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.results.data import GuardData


@step(reads=f"data validation completion seed rollout {UNMERGED}")
def check_guard(work: Work, config: RunConfig, label: str) -> GuardData:
    """Read the prompts of a guard and apply every rule; stop if too many rows are bad."""
    began = time.perf_counter()
    sources = load_sources(config.data, directory=work.directory)
    try:
        report = validate_rows(
            work.directory / ROWS,
            config,
            Origin(work.key, work.directory, time.perf_counter() - began, sources),
            warn=run_logger().warning,
        )
    finally:
        if (work.directory / REPORT).exists():
            work.artifact(f"guard-{label}", (work.directory / REPORT).read_text(encoding="utf-8"))
    return GuardData.model_validate(report.model_dump() | {"label": label})
