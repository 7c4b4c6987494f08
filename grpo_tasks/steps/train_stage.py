"""Step: one stage in a process of its own, followed live."""

from grpo_tasks.data.table import read_table
from grpo_tasks.running.progress import StageProgress
from grpo_tasks.running.step import Work, step
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.kept_prompts import choose_prompts
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.completion import CompletionConfig
from schemas.config.data import TaskConfig
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport
from schemas.results.difficulty import DifficultyReport
from schemas.results.model import ModelRef, StageResult


@step(
    retries=1,
    resumable=True,
    device=True,
    on_cluster=True,
)
def train_stage(  # noqa: PLR0913 - each of them counts in the key
    work: Work,
    stage: StageConfig,
    start: ModelRef,
    data: DataReport,
    difficulty: DifficultyReport | None,
    *,
    model: ModelConfig,
    completion: CompletionConfig,
    rewards: RewardsConfig,
    rollout: RolloutConfig,
    interaction: InteractionConfig,
    seed: int,
    tasks: dict[str, TaskConfig],
) -> StageResult:
    """Train one stage from the model `start`; an interrupted stage resumes from its last checkpoint. With pass rates the stage
    trains on the prompts that its `keep_pass_rate` leaves."""
    directory = StageDir(work.directory)
    choice = None if difficulty is None else choose_prompts(data.train, read_table(difficulty.pass_rates), stage)
    spec = StageSpec(
        key=work.key,
        stage=stage,
        seed=seed,
        model=model,
        start=start,
        completion=completion,
        rewards=rewards,
        rollout=rollout,
        resources=work.run.resources,
        train=data.train if choice is None else choice.write(directory),
        eval=data.eval,
        tasks=tasks,
        pruning=work.run.pruning,
        interaction=interaction,
    )
    # The shipper reads the spec before the stage starts.
    spec.save(directory.spec)
    with StageProgress(stage, directory, ship=work.run.follow(work.directory).ship) as progress:
        result = run_stage(spec, work.directory, tick=progress.tick)
    work.artifact(f"train-{stage.name}", progress.summary(Journal(directory.journal)))
    return result if choice is None else result.model_copy(update={"kept": choice.counts})
