"""What the pipeline does around its steps: the settings of each use of a step, and what must hold for the run to continue."""

from collections.abc import Mapping, Sequence

from flows.flow_run import FlowRun
from grpo_tasks.data.table import read_table
from grpo_tasks.evaluation.guards import check_guard_pattern, compare_guard, guard_data, guard_scoring, require_endings
from grpo_tasks.evaluation.statistics import deciding_metric
from grpo_tasks.stage.kept_prompts import choose_prompts, require_pass_at_group, require_prompts
from grpo_tasks.steps.check_guard import check_guard
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.measure_difficulty import measure_difficulty
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.publish_model import publish_model
from grpo_tasks.steps.train_stage import train_stage
from grpo_tasks.steps.validate_data import validate_data
from grpo_tasks.tracking.models import current_champion, fetch_champion
from grpo_tasks.tracking.registry import tag_version
from schemas.config.evaluation import GUARD, PromotionGuard
from schemas.config.rollout import InteractionConfig
from schemas.config.run import RunConfig, Scoring
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport, GuardData, PromptTable
from schemas.results.evaluation import DifficultyReport, EvalReport, GuardCheck
from schemas.results.model import ModelRef, StageResult
from schemas.results.publication import Publication, Trained


def base_model(config: RunConfig) -> ModelRef:
    """The model that the first stage starts from."""
    adapter = config.start_from and config.start_from.resolve()
    return ModelRef(path=config.model.path, revision=config.model.revision, adapter=adapter)


def validated_data(run: FlowRun) -> DataReport:
    """Read the data and check every row."""
    return validate_data(run, run.config, prepare_data(run, run.config))


def num_steps(config: RunConfig) -> int:
    """How many steps a run of the pipeline has, if the champion need not be evaluated."""
    guards, stages = len(config.promotion.guards), config.stages
    evaluated = len(stages) if config.evaluation.stages else 1
    measured = bool(measured_at_start(config)) + sum(stage.measure_difficulty for stage in stages)
    # The data, the lab, the base, merge, merged model, publication, report; each guard is checked, then evaluated three times.
    return 8 + 4 * guards + measured + len(stages) + evaluated


def measured_difficulty(run: FlowRun, start: ModelRef, data: DataReport) -> DifficultyReport | None:
    """The pass rates of the training prompts for the stages that do not measure their own; None where no stage has any.

    Stops when `keep_pass_rate` of one of these stages leaves too few prompts.
    """
    stages = measured_at_start(run.config)
    return _difficulty(run, "start", start, data, stages) if stages else None


def measured_at_start(config: RunConfig) -> list[StageConfig]:
    """The stages that use the pass rates of the start of the run; none where there are no pass rates."""
    difficulty = config.difficulty
    if difficulty.samples == 0 and difficulty.pass_rate_column is None:
        return []
    return [stage for stage in config.stages if stage.kind != "sft" and not stage.measure_difficulty]


def _difficulty(run: FlowRun, label: str, start: ModelRef, data: DataReport, stages: Sequence[StageConfig]) -> DifficultyReport:
    config = run.config
    report = measure_difficulty(run, *difficulty_inputs(config, label, start, data, stages))
    rates = read_table(report.pass_rates)
    for stage in stages:
        require_pass_at_group(rates, stage)
        require_prompts(choose_prompts(data.train, rates, stage).counts, stage, config.difficulty.min_prompts)
    return report


def difficulty_inputs(
    config: RunConfig, label: str, start: ModelRef, data: DataReport, stages: Sequence[StageConfig]
) -> tuple[RunConfig, str, ModelRef, PromptTable]:
    """What the step that measures pass rates for these stages is given."""
    measured, adapter = stages[0].measure_difficulty, start.adapter is not None
    return config.difficulty_of(stages, measured=measured, adapter=adapter), label, start, data.train_table


def trained_stage(
    run: FlowRun, stage: StageConfig, start: ModelRef, data: DataReport, difficulty: DifficultyReport | None
) -> StageResult:
    """Train one stage from `start`, on the prompts that its `keep_pass_rate` leaves; `difficulty`: see `measured_difficulty`."""
    if stage.measure_difficulty:
        difficulty = _difficulty(run, stage.name, start, data, [stage])
    return train_stage(run, run.config, stage, start, data, None if stage.kind == "sft" else difficulty)


def evaluation_of(run: FlowRun, label: str, ref: ModelRef, data: DataReport) -> EvalReport:
    """Evaluate a model on the held-out prompts."""
    config = run.config
    report = evaluate_model(run, *evaluation_inputs(config, label, ref, data))
    # Demonstrations can teach the end, and a conversation may run out of turns though each of them ends.
    if label == "base" and not config.supervised_first and not config.interaction.active:
        require_endings(report, config.evaluation, config.rollout)
    if label == "base":
        # Before any training: an error when no held-out figure can decide about promotion.
        deciding_metric(config.promotion, report)
    return report


def evaluation_inputs(
    config: RunConfig, label: str, ref: ModelRef, data: DataReport
) -> tuple[RunConfig, str, ModelRef, DataReport, Scoring | None]:
    """What the step that evaluates a model is given."""
    return config.evaluated(), label, ref, data, config.scoring()


def published(run: FlowRun, trained: Trained, tags: Mapping[str, str]) -> Publication:
    """Compare the merged model with its rivals, register it and decide."""
    config, base, policy, final = run.config, trained.evaluations[0], *trained.evaluations[-2:]
    store, champion, rivals = run.tracked.store, None, [base]
    if config.promotion.against_champion:
        # What the new model must beat: the base, and a champion that is another model.
        found = fetch_champion(config.registered_model, config.tracking, (run.output / "champions").resolve())
        champion = found and found[0]
        if found is not None and found[0].sha256 != trained.merged.sha256:
            run.steps += bool(run.steps)
            rivals.append(evaluation_of(run, "champion", found[1], trained.data))
    else:
        champion = current_champion(store, config.registered_model)
    guards = _compare_guards(run, final, rivals[-1], trained.guards)
    made = publish_model(run, config, trained.merged, final, rivals, policy=policy, champion=champion, guards=guards)
    tag_version(made.model_name, made.model_version, tags, store)
    run.announce(made, champion)
    return made


def validate_guards(run: FlowRun) -> list[GuardData]:
    """Check the prompts of every guard of the promotion, before any training."""
    config = run.config
    return [check_guard(run, guard_config(config, guard), guard.name) for guard in config.promotion.guards]


def guard_config(config: RunConfig, guard: PromotionGuard) -> RunConfig:
    """The config that reads the prompts of a guard as held-out rows."""
    check_guard_pattern(guard)
    validation = config.validation.model_copy(update={"min_train_rows": 0, "min_eval_rows": 1})
    return config.model_copy(update={"data": guard_data(config, guard), "validation": validation})


def evaluate_guards(run: FlowRun, label: str, ref: ModelRef, data: Sequence[GuardData]) -> list[EvalReport]:
    """Evaluate a model on the prompts of every guard."""
    return [evaluate_model(run, *inputs) for inputs in guard_inputs(run.config, label, ref, data)]


def guard_inputs(
    config: RunConfig, label: str, ref: ModelRef, data: Sequence[GuardData]
) -> list[tuple[RunConfig, str, ModelRef, DataReport, Scoring | None]]:
    """What the step that evaluates a model is given, for each guard."""
    # A guard that saw fewer prompts would find a loss less often, and let more models pass.
    every = config.evaluation.model_copy(update={"max_half_width": None, "max_minutes": None})
    config = config.evaluated().model_copy(update={"evaluation": every})
    if not config.interaction.tools:
        # An environment begins with rows of its own kind, which the prompts of a guard are not.
        config = config.model_copy(update={"interaction": InteractionConfig()})
    return [
        (config, f"{GUARD}{guard.name}-{label}", ref, rows, guard_scoring(config, guard))
        for guard, rows in zip(config.promotion.guards, data, strict=True)
    ]


def _compare_guards(run: FlowRun, final: EvalReport, rival: EvalReport, data: Sequence[GuardData]) -> list[GuardCheck]:
    promotion, found = run.config.promotion, []
    ours, theirs = (evaluate_guards(run, report.label, report.model, data) for report in (final, rival))
    for guard, left, right, rows in zip(promotion.guards, ours, theirs, data, strict=True):
        prompts = read_table(rows.eval).select("prompt_id", "prompt").iter_rows()
        questions = {prompt_id: messages[-1]["content"] for prompt_id, messages in prompts}
        found.append(compare_guard(guard, left, right, against=rival.label, questions=questions, alpha=promotion.alpha))
    return found
