"""Each step of the pipeline with the sections of the config that it depends on: if one of them changes, the step runs again."""

from collections.abc import Sequence

from flows.flow_run import FlowRun
from grpo_tasks.evaluate_model import evaluate_model
from grpo_tasks.evaluation.paired import deciding_metric
from grpo_tasks.prepare_data import prepare_data
from grpo_tasks.probe_rewards import probe_rewards
from grpo_tasks.tracking.models import Champion, fetch_champion
from grpo_tasks.train_stage import train_stage
from grpo_tasks.validate_data import validate_data
from schemas.config.run import JudgeInputs, LabInputs, RunConfig
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, ModelRef, StageResult


def base_model(config: RunConfig) -> ModelRef:
    """The model that the first stage starts from."""
    return ModelRef(path=config.model.path, revision=config.model.revision)


def validated_data(run: FlowRun) -> DataReport:
    """Read the data and check every row."""
    config = run.config
    rows = prepare_data(run, config.data)
    inputs = JudgeInputs(data=config.data, validation=config.validation, completion=config.completion, seed=config.seed)
    return validate_data(run, rows, inputs, model=config.model, rollout=config.rollout)


def probed_rewards(run: FlowRun, data: DataReport) -> LabReport:
    """Test every reward of every stage before any training."""
    config = run.config
    stages = [_reward_settings(stage) for stage in config.stages]
    inputs = LabInputs(completion=config.completion, rewards=config.rewards, stages=stages, lab=config.lab)
    return probe_rewards(run, data, inputs, model=config.model, rollout=config.rollout, seed=config.seed)


def _reward_settings(stage: StageConfig) -> StageConfig:
    """The stage without the settings that do not concern its rewards: a new learning rate is no reason to probe them again."""
    group = stage.num_generations
    return StageConfig(name=stage.name, rewards=stage.rewards, num_generations=group, per_device_train_batch_size=group)


def trained_stage(run: FlowRun, stage: StageConfig, start: ModelRef, data: DataReport) -> StageResult:
    """Train one stage from the model `start`."""
    config = run.config
    return train_stage(
        run,
        stage,
        start,
        data,
        model=config.model,
        completion=config.completion,
        rewards=config.rewards,
        rollout=config.rollout,
        seed=config.seed,
        tasks=config.data.tasks,
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
        model=config.model,
        completion=config.completion,
        rollout=rollout,
        evaluation=config.evaluation,
        scoring=config.scoring(),
        seed=config.seed,
    )
    if label == "base":
        # Before any training: an error when no held-out figure can decide about promotion.
        deciding_metric(config.promotion, report)
    return report


def rivals_of(
    run: FlowRun, merged: MergeProof, base: EvalReport, data: DataReport
) -> tuple[Champion | None, Sequence[EvalReport]]:
    """The evaluations that the new model must beat: that of the base, and of the champion unless it is the same model."""
    folder = run.output / "champions"
    found = fetch_champion(run.config.registered_model, run.config.tracking, folder.resolve())
    if found is None:
        return None, [base]
    champion, ref = found
    if champion.sha256 == merged.sha256:
        return champion, [base]
    return champion, [base, evaluation_of(run, "champion", ref, data)]
