"""Step: write the report of the run as one self-contained HTML page."""

import time
from collections.abc import Mapping, Sequence

from grpo_tasks.report import RunResults, against_rejection, markdown, write_html
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.results.data import DataReport, LabReport
from schemas.results.evaluation import DifficultyReport, EvalReport
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import PublishedFacts, ReportResult
from schemas.secret import hide


@step()
def write_report(
    work: Work,
    config: RunConfig,
    data: DataReport,
    lab: LabReport,
    difficulty: DifficultyReport | None,
    *,
    evaluations: Sequence[EvalReport],
    stages: Sequence[StageResult],
    proof: MergeProof,
    decision: PublishedFacts,
    sections: Mapping[str, str],
) -> ReportResult:
    """Report data, rewards, curves, answers before and after, evaluation, merge proof, costs and the decision."""
    began = time.perf_counter()
    results = RunResults(
        config=config,
        run_id=work.run.tracked.run_id,
        flow_run_id=work.run.flow_run_id,
        data=data,
        lab=lab,
        evaluations=evaluations,
        stages=stages,
        proof=proof,
        decision=decision,
        difficulty=difficulty,
        sections=sections,
        baseline=against_rejection(config, work.run.tracked.run_id, data.digest),
    )
    html = write_html(results, work.directory)
    text = hide(markdown(results))
    (work.directory / "report.md").write_text(text, encoding="utf-8")
    work.artifact("report", text)
    return ReportResult(key=work.key, directory=work.directory, seconds=time.perf_counter() - began, html=html)
