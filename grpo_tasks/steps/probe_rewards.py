"""Step: the reward lab. It tries all reward functions, on made-up completions and samples of the base model, before training."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import PromptRow, read_prompts
from grpo_tasks.lab.forecast import GroupSample
from grpo_tasks.lab.report import report_markdown
from grpo_tasks.lab.run import LabFindings, lab_error, run_lab, weighed
from grpo_tasks.processes.entry import LOG
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, run_sampling
from grpo_tasks.running.step import Work, step
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import TEMPLATE_DATE, RolloutConfig
from schemas.config.run import LabInputs
from schemas.results.data import DataReport
from schemas.results.lab import LabCheck, LabReport
from schemas.results.model import ModelRef

NO_REWARDS = "no stage has rewards"
"""Why a run of demonstrations alone has nothing to check."""
NOT_SAMPLED = "rewards: tools and environments have to work first"


@step(
    device=True,
    on_cluster=True,
)
def probe_rewards(
    work: Work,
    data: DataReport,
    inputs: LabInputs,
    *,
    model: ModelConfig,
    rollout: RolloutConfig,
    interaction: InteractionConfig,
    seed: int,
) -> LabReport:
    """Check contract, determinism, speed, order, gaming and signal. A fault stops the run with a LabError, and so does any other
    finding when `lab.strict` is set."""
    began = time.perf_counter()
    if not inputs.stages:
        return LabReport(key=work.key, directory=work.directory, seconds=0.0, checks=[], forecasts=[], left_out=[NO_REWARDS])
    rows = read_prompts(data.train)
    played = _played(interaction, inputs, rows, model, work.directory / LOG)
    checks = [weighed(check, inputs.lab) for check in [*_date(rollout), *played]]
    if any(check.outcome == "failed" for check in checks):
        # Nothing can be sampled from conversations that go wrong by themselves.
        return _reported(work, LabFindings(checks, [], pl.DataFrame(), [NOT_SAMPLED]), began)
    spec = SampleSpec(
        model=model,
        ref=ModelRef(path=model.path, revision=model.revision),
        prompts=data.train,
        max_prompts=inputs.lab.num_prompts,
        num_samples=inputs.stages[0].num_generations,
        temperature=rollout.temperature,
        greedy=False,
        rollout=rollout,
        resources=work.run.resources,
        seed=seed,
        interaction=interaction,
        completion=inputs.completion,
    )
    run_sampling(spec, work.directory)
    findings = run_lab(
        inputs,
        rows,
        _groups(work.directory / SAMPLES),
        tasks=inputs.tasks,
        max_completion_length=rollout.max_completion_length,
        log=work.directory / LOG,
    )
    return _reported(work, replace(findings, checks=[*checks, *findings.checks]), began)


def _date(rollout: RolloutConfig) -> list[LabCheck]:
    """A warning where the chat template writes a day into every prompt: the policy has seen no other."""
    day = rollout.chat_template_kwargs.get(TEMPLATE_DATE)
    detail = f"the chat template writes a date: {day} in all prompts of this run, and by default in those of the merged model"
    return [] if day is None else [LabCheck(function="data", check="date", outcome="warned", detail=detail)]


def _played(
    interaction: InteractionConfig, inputs: LabInputs, rows: Sequence[PromptRow], model: ModelConfig, log: Path
) -> list[LabCheck]:
    """The trial of tools or an environment."""
    if not interaction.active:
        return []
    # Imports transformers, which other runs do without here.
    from grpo_tasks.data.chat_tokens import load_counter
    from grpo_tasks.lab.environment_checks import check_interaction

    counter = load_counter(model)
    return check_interaction(
        interaction,
        rows,
        chat_template=counter.tokenizer.chat_template or "",
        count_tokens=counter.count,
        completion=inputs.completion,
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


def _groups(samples: Path) -> list[GroupSample]:
    table = pl.read_parquet(samples)
    columns = ["completion", "token_ids", "finish_reason", *(["conversation"] if "conversation" in table.columns else [])]
    table = table.group_by("prompt_id", maintain_order=True).agg(columns)
    return [GroupSample(*row) for row in table.iter_rows()]
