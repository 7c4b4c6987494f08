"""Step: the reward lab. It tries all reward functions, on made-up completions and samples of the base model, before training."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import read_prompts
from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.report import report_markdown
from grpo_tasks.lab.run import LabFindings, lab_error, run_lab, weighed
from grpo_tasks.processes.child import LOG
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, run_sampling
from grpo_tasks.running.step import Work, step
from schemas.config.rollout import TEMPLATE_DATE, RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.prompts import PromptRow
from schemas.results.data import DataReport, LabCheck, LabReport
from schemas.results.model import ModelRef

NO_REWARDS = "no stage has rewards"
"""Why a run of demonstrations alone has nothing to check."""
NOT_SAMPLED = "rewards: tools and environments have to work first"


@step(
    reads="completion rewards lab difficulty.success data.tasks.rewards stages.name stages.kind stages.rewards "
    f"stages.num_generations rollout interaction seed {UNMERGED}",
    device=True,
    on_cluster=True,
)
def probe_rewards(work: Work, config: RunConfig, start: ModelRef, data: DataReport) -> LabReport:
    """Check contract, determinism, speed, order, gaming and signal. A fault stops the run with a LabError, and so does any other
    finding when `lab.strict` is set."""
    began = time.perf_counter()
    stages = [stage for stage in config.stages if stage.rewards]
    if not stages:
        return LabReport(key=work.key, directory=work.directory, seconds=0.0, checks=[], forecasts=[], left_out=[NO_REWARDS])
    rows, log = read_prompts(data.train), work.directory / LOG
    checks = [weighed(check, config.lab) for check in [*_date(config.rollout), *_played(config, rows, log)]]
    if any(check.outcome == "failed" for check in checks):
        # Nothing can be sampled from conversations that go wrong by themselves.
        return _reported(work, LabFindings(checks, [], pl.DataFrame(), [NOT_SAMPLED]), began)
    group, prompts = stages[0].num_generations, config.lab.num_prompts
    spec = SampleSpec.of(config, start, data.train, work.run.resources, num_samples=group, max_prompts=prompts)
    run_sampling(spec, work.directory)
    table = pl.read_parquet(work.directory / SAMPLES)
    columns = ["completion", "token_ids", *(["conversation"] if "conversation" in table.columns else [])]
    groups = [GroupSample(*row) for row in table.group_by("prompt_id", maintain_order=True).agg(columns).iter_rows()]
    findings = run_lab(config, rows, groups, log=log)
    return _reported(work, replace(findings, checks=[*checks, *findings.checks]), began)


def _date(rollout: RolloutConfig) -> list[LabCheck]:
    """A warning where the chat template writes a day into every prompt: the policy has seen no other."""
    day = rollout.chat_template_kwargs.get(TEMPLATE_DATE)
    detail = f"the chat template writes a date: {day} in all prompts of this run, and by default in those of the merged model"
    return [] if day is None else [LabCheck(function="data", check="date", outcome="warned", detail=detail)]


def _played(config: RunConfig, rows: Sequence[PromptRow], log: Path) -> list[LabCheck]:
    """The trial of tools or an environment."""
    if not config.interaction.active:
        return []
    # Imports transformers, which other runs do without here.
    from grpo_tasks.data.chat_tokens import load_counter
    from grpo_tasks.lab.environment_checks import check_interaction

    counter = load_counter(config.model)
    return check_interaction(
        config.interaction,
        rows,
        chat_template=counter.tokenizer.chat_template or "",
        count_tokens=counter.count,
        completion=config.completion,
        log=log,
    )


def _reported(work: Work, findings: LabFindings, began: float) -> LabReport:
    """Write tables and report; raises LabError if a check failed."""
    findings.probes.write_parquet(work.directory / "probes.parquet")
    markdown = report_markdown(findings.checks, findings.forecasts, findings.left_out)
    (work.directory / "report.md").write_text(markdown, encoding="utf-8")
    work.artifact("reward-lab", markdown)
    report = LabReport(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        checks=findings.checks,
        forecasts=findings.forecasts,
        left_out=findings.left_out,
    )
    if report.failures:
        raise lab_error(report)
    return report
