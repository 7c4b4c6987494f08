"""Each step of the pipeline with the sections of the config that it depends on: if one of them changes, the step runs again."""

from collections.abc import Sequence

from flows.flow_run import FlowRun
from grpo_tasks.data.table import read_table
from grpo_tasks.evaluation.guards import check_guard_pattern, compare_guard, guard_data, guard_scoring
from grpo_tasks.evaluation.paired import deciding_metric
from grpo_tasks.evaluation.regressions import require_endings
from grpo_tasks.stage.gate import require_pass_at_group
from grpo_tasks.stage.kept_prompts import choose_prompts, require_prompts
from grpo_tasks.steps.check_guard import check_guard
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.measure_difficulty import measure_difficulty
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.probe_rewards import probe_rewards
from grpo_tasks.steps.train_stage import train_stage
from grpo_tasks.steps.validate_data import validate_data
from grpo_tasks.tracking.models import Champion, current_champion, fetch_champion
from schemas.config.evaluation import GUARD, EvaluationConfig, PromotionGuard
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.run import JudgeInputs, LabInputs, RunConfig
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport, GuardData
from schemas.results.difficulty import DifficultyReport
from schemas.results.evaluation import EvalReport, GuardCheck
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, ModelRef, Sampling, StageResult

MEASURING_SEED = 0
"""Seed of measured pass rates. It is not the seed of the run, so that runs with other seeds use the same measurement."""


def base_model(config: RunConfig) -> ModelRef:
    """The model that the first stage starts from."""
    return ModelRef(path=config.model.path, revision=config.model.revision)


def validated_data(run: FlowRun) -> DataReport:
    """Read the data and check every row."""
    config = run.config
    rows = prepare_data(run, config.data)
    inputs = JudgeInputs(data=config.data, validation=config.validation, completion=config.completion, seed=config.seed)
    return validate_data(run, rows, inputs, model=config.model.unmerged(), rollout=config.rollout, interaction=config.interaction)


def probed_rewards(run: FlowRun, data: DataReport) -> LabReport:
    """Test every reward of every stage before any training."""
    config = run.config
    stages = [_reward_settings(stage) for stage in config.stages if stage.rewards]
    tasks = config.task_rewards()
    inputs = LabInputs(
        completion=config.completion,
        rewards=config.rewards,
        stages=stages,
        lab=config.lab,
        success=config.difficulty.success,
        supervised_first=config.supervised_first,
        tasks=tasks,
    )
    return probe_rewards(
        run,
        data,
        inputs,
        model=config.model.unmerged(),
        rollout=config.rollout,
        interaction=config.interaction,
        seed=config.seed,
    )


def _reward_settings(stage: StageConfig) -> StageConfig:
    """The stage without the settings that do not concern its rewards: a new learning rate is no reason to probe them again."""
    group = stage.num_generations
    return StageConfig(name=stage.name, rewards=stage.rewards, num_generations=group, per_device_train_batch_size=group)


def measured_difficulty(run: FlowRun, start: ModelRef, data: DataReport) -> DifficultyReport | None:
    """The pass rates of the training prompts for the stages that do not measure their own; None where no stage has any.

    Stops when `keep_pass_rate` of one of these stages leaves too few prompts.
    """
    difficulty = run.config.difficulty
    stages = [stage for stage in run.config.stages if stage.kind != "sft" and not stage.measure_difficulty]
    if not stages or (difficulty.samples == 0 and difficulty.pass_rate_column is None):
        return None
    return _difficulty(run, "start", start, data, stages)


def _difficulty(run: FlowRun, label: str, start: ModelRef, data: DataReport, stages: Sequence[StageConfig]) -> DifficultyReport:
    config = run.config
    report = measure_difficulty(
        run,
        label,
        start,
        data.train_table,
        config.difficulty_of(stages, measured=stages[0].measure_difficulty),
        model=_sampled_model(config.model, start),
        rollout=config.rollout,
        interaction=config.interaction,
        seed=config.seed if config.model.added_tokens else MEASURING_SEED,
    )
    rates = read_table(report.pass_rates)
    for stage in stages:
        require_pass_at_group(rates, stage)
        require_prompts(choose_prompts(data.train, rates, stage).counts, stage, config.difficulty.min_prompts)
    return report


def _sampled_model(model: ModelConfig, start: ModelRef) -> ModelConfig:
    """The settings of the model without those that only training or merging uses, which are no reason to measure again."""
    neutral = ModelConfig()
    # A server needs the rank of an adapter.
    lora = neutral.lora if start.adapter is None and model.lora is not None else model.lora
    update = {"gradient_checkpointing": neutral.gradient_checkpointing, "lora": lora}
    return model.unmerged().model_copy(update=update)


def trained_stage(
    run: FlowRun, stage: StageConfig, start: ModelRef, data: DataReport, difficulty: DifficultyReport | None
) -> StageResult:
    """Train one stage from the model `start`, on the prompts that its `keep_pass_rate` leaves.

    Args:
        run: the run of the flow.
        stage: the stage.
        start: the model that it starts from.
        data: the validated data.
        difficulty: what `measured_difficulty` returned; a stage with `measure_difficulty` measures its own.
    """
    config = run.config
    if stage.measure_difficulty:
        difficulty = _difficulty(run, stage.name, start, data, [stage])
    return train_stage(
        run,
        stage,
        start,
        data,
        None if stage.kind == "sft" else difficulty,
        model=config.model.unmerged(),
        completion=config.completion,
        rewards=config.rewards,
        rollout=config.rollout,
        interaction=config.interaction,
        seed=config.seed,
        tasks=config.data.tasks,
    )


def merged_model(run: FlowRun, ref: ModelRef, data: DataReport) -> MergeProof:
    """Merge the adapter of a model into its base, and prove it."""
    config = run.config
    return merge_adapter(
        run,
        ref,
        data,
        model=config.model,
        chat_template_kwargs=config.rollout.chat_template_kwargs,
        sampling=Sampling.of(config.rollout),
        interaction=config.interaction,
        system_prompt=config.merged_system_prompt,
    )


def evaluation_of(run: FlowRun, label: str, ref: ModelRef, data: DataReport) -> EvalReport:
    """Evaluate a model on the held-out prompts."""
    config = run.config
    rollout = config.rollout.model_copy(update={"engine": config.evaluation.engine or config.rollout.engine})
    report = evaluate_model(
        run,
        label,
        ref,
        data,
        model=config.model.unmerged(),
        completion=config.completion,
        rollout=rollout,
        interaction=config.interaction,
        # A limit that is checked here is no reason to sample again.
        evaluation=config.evaluation.model_copy(update={"max_truncated": EvaluationConfig().max_truncated}),
        scoring=config.scoring(),
        seed=config.seed,
    )
    # Demonstrations can teach the end, and a conversation may run out of turns though each of them ends.
    if label == "base" and not config.supervised_first and not config.interaction.active:
        require_endings(report, config.evaluation, config.rollout)
    if label == "base":
        # Before any training: an error when no held-out figure can decide about promotion.
        deciding_metric(config.promotion, report)
    return report


def rivals_of(
    run: FlowRun, merged: MergeProof, base: EvalReport, data: DataReport
) -> tuple[Champion | None, Sequence[EvalReport]]:
    """The champion, and what the new model must beat: the evaluation of the base, and of a champion that is another model."""
    if not run.config.promotion.against_champion:
        return current_champion(run.tracked.store, run.config.registered_model), [base]
    folder = run.output / "champions"
    found = fetch_champion(run.config.registered_model, run.config.tracking, folder.resolve(), store=run.tracked.store)
    if found is None:
        return None, [base]
    champion, ref = found
    if champion.sha256 == merged.sha256:
        return champion, [base]
    return champion, [base, evaluation_of(run, "champion", ref, data)]


def checked_guards(run: FlowRun) -> list[GuardData]:
    """Check the prompts of every guard of the promotion, before any training."""
    config, found = run.config, []
    validation = config.validation.model_copy(update={"min_train_rows": 0, "min_eval_rows": 1})
    for guard in config.promotion.guards:
        check_guard_pattern(guard)
        inputs = JudgeInputs(
            data=guard_data(config, guard), validation=validation, completion=config.completion, seed=config.seed
        )
        found.append(check_guard(run, guard.name, inputs, model=config.model.unmerged(), rollout=config.rollout))
    return found


def measured_guards(run: FlowRun, label: str, ref: ModelRef, data: Sequence[GuardData]) -> list[EvalReport]:
    """Evaluate a model on the prompts of every guard."""
    guards = run.config.promotion.guards
    return [_guard_evaluation(run, guard, label, ref, rows) for guard, rows in zip(guards, data, strict=True)]


def _guard_evaluation(run: FlowRun, guard: PromotionGuard, label: str, ref: ModelRef, data: GuardData) -> EvalReport:
    config = run.config
    return evaluate_model(
        run,
        f"{GUARD}{guard.name}-{label}",
        ref,
        data,
        model=config.model.unmerged(),
        completion=config.completion,
        rollout=config.rollout.model_copy(update={"engine": config.evaluation.engine or config.rollout.engine}),
        # An environment begins with rows of its own kind, which the prompts of a guard are not.
        interaction=config.interaction if config.interaction.tools else InteractionConfig(),
        evaluation=config.evaluation,
        scoring=guard_scoring(config, guard),
        seed=config.seed,
    )


def guard_checks(run: FlowRun, final: EvalReport, rival: EvalReport, data: Sequence[GuardData]) -> list[GuardCheck]:
    """Compare the merged model with the champion, or the base, on the prompts of every guard."""
    promotion = run.config.promotion
    ours, theirs = (measured_guards(run, report.label, report.model, data) for report in (final, rival))
    return [
        compare_guard(guard, left, right, against=rival.label, questions=_questions(rows), alpha=promotion.alpha)
        for guard, left, right, rows in zip(promotion.guards, ours, theirs, data, strict=True)
    ]


def _questions(data: GuardData) -> dict[str, str]:
    rows = read_table(data.eval).select("prompt_id", "prompt")
    return {prompt_id: messages[-1]["content"] for prompt_id, messages in rows.iter_rows()}
