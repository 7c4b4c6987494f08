"""Step: the reward lab. It tries all reward functions, on made-up completions and samples of the base model, before training.

It reads the demonstrations first, if there are any, so that faults in them cost no evaluation and no earlier stage.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl

from grpo_tasks.content.conversations import played_of
from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.tokenizer import rendered_all, set_template_defaults, template_variables
from grpo_tasks.data.offered_tools import with_offered_tools
from grpo_tasks.data.table import read_prompts
from grpo_tasks.evaluation.statistics import wilson_interval
from grpo_tasks.kit.files import remove
from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.report import prompt_markdown, report_markdown
from grpo_tasks.lab.run import LabFindings, lab_error, run_lab, sampled_signal, weighed
from grpo_tasks.processes.child import LOG, SPEC, run_module
from grpo_tasks.rollout.parts import PARTS, sample_in_parts
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec
from grpo_tasks.running.step import Work, step
from schemas.config.rollout import TEMPLATE_DATE, RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.prompts import PLAIN, Message, PromptRow
from schemas.results.data import DataReport, LabCheck, LabReport, PromptsUsed
from schemas.results.evaluation import CONFIDENCE
from schemas.results.model import ModelRef

NO_REWARDS = "no stage has rewards"
"""Why a run of demonstrations alone has nothing to check."""
LEAST_PROMPTS = 8
"""Groups that are sampled at least."""
NOT_SAMPLED = "rewards: tools and environments have to work first"


@step(
    reads="completion rewards lab difficulty.success data.tasks.rewards stages.name stages.kind stages.rewards "
    f"stages.num_generations stages.demonstrations rollout interaction seed {UNMERGED}",
    keeps=(PARTS,),
    device=True,
    on_cluster=True,
)
def probe_rewards(work: Work, config: RunConfig, start: ModelRef, data: DataReport) -> LabReport:
    """Check contract, determinism, speed, order, gaming and signal. A fault stops the run with a LabError, and so does any other
    finding when `lab.strict` is set; a DataError where too many rows lack a demonstration that a stage wants."""
    began = time.perf_counter()
    _read_demonstrations(work, config, data)
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
    half_width = partial(_half_width, config=config, rows=rows, log=log)
    used = sample_in_parts(spec, work.directory, config.lab, half_width, least=LEAST_PROMPTS, key=work.key)
    samples = pl.read_parquet(work.directory / SAMPLES)
    findings = run_lab(config, rows, _groups(samples), log=log)
    remove(work.directory / PARTS)
    # An environment may begin otherwise than the row.
    begun = played_of(samples["conversation"][0]).prompt if config.interaction.active else rows[0].messages
    return _reported(work, replace(findings, checks=[*checks, *findings.checks]), began, used, _first_prompt(config, begun))


def _read_demonstrations(work: Work, config: RunConfig, data: DataReport) -> None:
    taught = [(stage.name, stage.demonstrations) for stage in config.stages if stage.demonstrations is not None]
    if not taught:
        return
    # Imports transformers, which other runs do without here.
    from grpo_tasks.data.demonstrations import DemonstrationsSpec

    shown = with_offered_tools(config).rollout.chat_template_kwargs
    for name, settings in taught:
        folder = work.directory / f"demonstrations-{name}"
        folder.mkdir()
        DemonstrationsSpec(
            stage=name,
            settings=settings,
            max_tokens=config.interaction.longest(config.rollout),
            model=config.model,
            template=shown,
            train=data.train,
        ).save(folder / SPEC)
        run_module("grpo_tasks.data.demonstrations", folder)


def _first_prompt(config: RunConfig, messages: Sequence[Message]) -> str:
    """A chat as the model reads it, offered tools included, and the settings of its template; nothing for a plain prompt."""
    from grpo_tasks.data.chat_tokens import load_counter

    if messages[0]["role"] == PLAIN:
        return ""
    given, tokenizer = config.rollout.chat_template_kwargs, load_counter(config.model).tokenizer
    variables = [f"`{name}: {json.dumps(given[name]) if name in given else 'not set'}`" for name in template_variables(tokenizer)]
    set_template_defaults(tokenizer, with_offered_tools(config).rollout.chat_template_kwargs)
    with limited_templates(config.model.path):
        [text] = rendered_all(tokenizer, [messages], opened=True)
    return prompt_markdown(str(text), variables)


def _groups(samples: pl.DataFrame) -> list[GroupSample]:
    columns = ["completion", "token_ids", *(["conversation"] if "conversation" in samples.columns else [])]
    return [GroupSample(*row) for row in samples.group_by("prompt_id", maintain_order=True).agg(columns).iter_rows()]


def _half_width(samples: pl.DataFrame, config: RunConfig, rows: Sequence[PromptRow], log: Path) -> float | None:
    groups = _groups(samples)
    share = sampled_signal(config, rows, samples, groups, log=log)
    if share is None:
        return None
    low, high = wilson_interval(share, len(groups), CONFIDENCE)
    return (high - low) / 2


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
        response_template=counter.tokenizer.response_template,
        count_tokens=counter.count,
        completion=config.completion,
        log=log,
    )


def _reported(work: Work, findings: LabFindings, began: float, used: PromptsUsed | None = None, prompt: str = "") -> LabReport:
    """Write tables and report; raises LabError if a check failed."""
    findings.probes.write_parquet(work.directory / "probes.parquet")
    markdown = report_markdown(findings.checks, findings.forecasts, findings.left_out, used) + prompt
    (work.directory / "report.md").write_text(markdown, encoding="utf-8")
    work.artifact("reward-lab", markdown)
    report = LabReport(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        checks=findings.checks,
        forecasts=findings.forecasts,
        left_out=findings.left_out,
        prompts_used=used,
    )
    if report.failures:
        raise lab_error(report)
    return report
