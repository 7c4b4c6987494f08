"""What a run will take, said before it starts (grpo_tasks/planning/time_plan.py has the arithmetic).

    validated rows    ->  how many           -\
    earlier results   ->  what is left        ---> time of each step and of the whole, settings that shorten it
    trial, in a child ->  how fast           -/
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl

from flows.flow_run import FlowRun
from flows.model_names import DATE, DTYPE, with_local_model
from flows.steps import base_model, difficulty_inputs, evaluation_inputs, guard_config, guard_inputs, measured_at_start
from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.planning.time_plan import FINISHED, Estimate, Rows, estimate, least_seconds
from grpo_tasks.processes.child import RESULT, SPEC, run_module
from grpo_tasks.running.orchestrator import run_logger, show_artifact, slots_of
from grpo_tasks.running.step import Left, holding
from grpo_tasks.stage.journal import update_seconds
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.steps.check_guard import check_guard
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.measure_difficulty import measure_difficulty
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.probe_rewards import probe_rewards
from grpo_tasks.steps.train_stage import train_stage
from grpo_tasks.steps.validate_data import validate_data
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, UserError
from schemas.metrics import duration_text
from schemas.paths import resolve
from schemas.results.base import StepResult
from schemas.results.data import DataReport, GuardData
from schemas.results.speed import DEMONSTRATIONS, Speed

MODULE = "grpo_tasks.grpo.speed"
"""Module that tries the machine, in a process of its own: only that loads torch."""
SHORT_S = 10.0
"""A run that may take no longer than this on a fast machine is not worth a trial."""


def tell_cost(run: FlowRun, data: DataReport, guards: Sequence[GuardData]) -> None:
    """Log what is left of a run and how long it will take, after a trial of a few seconds; show it in Prefect and MLflow."""
    if run.pruning is not None:
        # The runs of a sweep begin at different times, and share steps and the machine.
        return
    config, log = run.config, run_logger()
    left = list(left_of(run, config, data, guards))
    if all(one.result is not None for one in left):
        return
    rows = rows_of(data, guards)
    size = sum(file.stat().st_size for file in Path(resolve(config.model.path)).glob("*.safetensors"))
    if least_seconds(config, rows, size, cores=config.resources.num_threads or os.cpu_count() or 1) < SHORT_S:
        log.info("not estimated: so short a run is not worth a trial")
        return
    if reason := why_not_measured(config):
        log.info("not estimated: %s; %s", reason, work_of(config, rows, run.output))
        return
    log.info("estimating the run: a trial of a few seconds")
    report(Progress("trying this machine"))
    try:
        with holding(slots_of(config.resources)):
            speed = measured(config, data)
    except UserError as error:
        # Whatever is wrong, the step that it concerns says it better.
        log.warning("not estimated: %s", error.message.partition("\n")[0])
        return
    found = estimate(config, speed, rows, done={} if run.fresh else updates_done(left))
    log.info("estimate: %s", found.headline())
    log.info("estimate of each step: %s", ", ".join(f"{step.label} {duration_text(step.seconds)}" for step in found.steps))
    for one in found.savings:
        log.info("estimate: --set %s saves about %s", one.setting, duration_text(one.seconds))
    text = f"# Estimate before the run\n\n{as_markdown(found.sections())}"
    show_artifact("estimate", text, "What the run was expected to take")
    run.tracked.handle.text(text, "estimate.md")


def estimate_of(config: RunConfig, *, fresh: bool) -> Estimate:
    """What `tell_cost` would tell, without a run: the data is read and the machine tried in folders that go away.

    `ConfigError` where no trial can tell it, with what is known all the same.
    """
    real = (config.resources.output_dir / config.name).resolve()
    with tempfile.TemporaryDirectory() as name:
        scratch, resources = Path(name), config.resources
        if not any((real / name).is_file() for name in (DATE, DTYPE)):
            # The first run in a folder leaves the day and the precision there; a dry run leaves nothing.
            config = config.model_copy(update={"resources": resources.model_copy(update={"output_dir": scratch})})
        config = with_local_model(config).model_copy(update={"resources": resources})

        def folder(of: str) -> Path:
            (scratch / of).mkdir()
            return scratch / of

        prepared = prepare_data.made_in(folder("rows"), resources, config)
        data = validate_data.made_in(folder("data"), resources, config, prepared)
        guards = [
            check_guard.made_in(folder(f"guard-{guard.name}"), resources, guard_config(config, guard), guard.name)
            for guard in config.promotion.guards
        ]
        rows = rows_of(data, guards)
        reason = why_not_measured(config)
        if not reason and slots_of(resources):
            reason = "another run may use the GPU; grpo run waits for it, and then says how long it will take"
        if reason:
            raise ConfigError(f"not estimated: {reason}", place="--measure", fix=f"leave it out; {work_of(config, rows, real)}")
        run = SimpleNamespace(output=real, fresh=False, resources=resources)
        done = {} if fresh else updates_done(list(left_of(run, config, data, guards)))
        return estimate(config, measured(config, data), rows, done=done)


def why_not_measured(config: RunConfig) -> str:
    """Why no trial can tell how long a run takes; empty where one can."""
    if "vllm" in (config.rollout.engine, config.evaluation.engine):
        return "rollout servers sample, and they are not started yet"
    if config.resources.cluster.engine == "ray":
        return "the stages run on a cluster"
    if config.resources.num_processes > 1:
        return "several processes train a stage together"
    return "how long a conversation is depends on its environment" if config.interaction.active else ""


def work_of(config: RunConfig, rows: Rows, folder: Path) -> str:
    """How much a run computes, and how long its updates take if earlier ones in its folder tell."""
    updates = sum(stage.num_updates(rows.train) for stage in config.stages)
    completions = sum(stage.num_updates(rows.train) * stage.completions_per_update for stage in config.stages)
    said, seconds = f"at most {updates:,} updates with {completions:,} completions", update_seconds(folder)
    return said if seconds is None else f"{said}, about {duration_text(seconds * updates)} as fast as earlier runs here"


def rows_of(data: DataReport, guards: Sequence[GuardData]) -> Rows:
    """How many rows there are, and how long their prompts."""
    tokens = pl.read_parquet(data.train, columns=["prompt_tokens"])["prompt_tokens"].mean()
    assert isinstance(tokens, float), "there are rows to train on"
    return Rows(data.train_rows, data.eval_rows, tokens, [(guard.label, guard.eval_rows) for guard in guards])


def measured(config: RunConfig, data: DataReport) -> Speed:
    """Rates and lengths of completions by a trial in a child process, which leaves nothing behind."""
    with tempfile.TemporaryDirectory() as name:
        trial_spec(config, data).save(Path(name) / SPEC)
        for settings in [stage.demonstrations for stage in config.stages if stage.demonstrations is not None][:1]:
            (Path(name) / DEMONSTRATIONS).write_text(settings.model_dump_json(), encoding="utf-8")
        run_module(MODULE, Path(name))
        return Speed.load(Path(name) / RESULT)


def trial_spec(config: RunConfig, data: DataReport) -> StageSpec:
    """The stage that the trial tries: the first one that samples."""
    stages = [stage for stage in config.stages if stage.kind != "sft"] or config.stages
    # Neither a second adapter for the KL, nor what takes minutes to begin with, nor a check of whose completions they are.
    change = {"beta": 0.0, "max_sampling_logp_difference": None, "importance_sampling_correction": "none"}
    given = (config, stages[0].model_copy(update=change), base_model(config), data)
    resources = config.resources.model_copy(update={"compile": False})
    return StageSpec.of(*given, key="trial", train=data.train, resources=resources)


def left_of(run: Any, config: RunConfig, data: DataReport, guards: Sequence[GuardData]) -> Iterator[Left[StepResult]]:
    """What earlier runs have left of each step, as far as the results are there that it needs; in the order of the pipeline."""
    model = base_model(config)
    yield probe_rewards.left(run, config, model, data)
    difficulty = None
    if at_start := measured_at_start(config):
        difficulty = measure_difficulty.left(run, *difficulty_inputs(config, "start", model, data, at_start))
        yield difficulty
    for inputs in [evaluation_inputs(config, "base", model, data), *guard_inputs(config, "base", model, guards)]:
        yield evaluate_model.left(run, *inputs)
    for stage in config.stages:
        rates = difficulty
        if stage.measure_difficulty:
            rates = measure_difficulty.left(run, *difficulty_inputs(config, stage.name, model, data, [stage]))
            yield rates
        if stage.kind == "sft":
            rates = None
        elif rates is not None and rates.result is None:
            return
        trained = train_stage.left(run, config, stage, model, data, None if rates is None else rates.result)
        yield trained
        if trained.result is None:
            return
        model = trained.result.model
        if config.evaluation.stages or stage is config.stages[-1]:
            yield evaluate_model.left(run, *evaluation_inputs(config, stage.name, model, data))
    merged = merge_adapter.left(run, config, model, data)
    yield merged
    if merged.result is not None:
        model = merged.result.model
        for inputs in [evaluation_inputs(config, "merged", model, data), *guard_inputs(config, "merged", model, guards)]:
            yield evaluate_model.left(run, *inputs)


def updates_done(left: Sequence[Left[StepResult]]) -> dict[str, int]:
    """By label: FINISHED, or the updates of an unfinished stage up to its last checkpoint."""
    done = {}
    for one in left:
        checkpoints = StageDir(one.directory).checkpoints.glob("step-*")
        steps = [int(path.name.removeprefix("step-")) for path in checkpoints if path.name.removeprefix("step-").isdigit()]
        done[one.label] = FINISHED if one.result is not None else max(steps, default=0)
    return done
