"""Step: one stage in a process of its own, followed live."""

from grpo_tasks.data.table import read_table
from grpo_tasks.running.progress import StageProgress
from grpo_tasks.running.step import Work, step
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.kept_prompts import choose_prompts
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.run import RunConfig
from schemas.config.section import UNMERGED
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport
from schemas.results.evaluation import DifficultyReport
from schemas.results.model import ModelRef, StageResult


@step(
    reads=f"completion rewards rollout interaction seed data.tasks {UNMERGED}",
    retries=1,
    resumable=True,
    device=True,
    on_cluster=True,
)
def train_stage(
    work: Work, config: RunConfig, stage: StageConfig, start: ModelRef, data: DataReport, difficulty: DifficultyReport | None
) -> StageResult:
    """Train one stage from the model `start`; an interrupted stage resumes from its last checkpoint. With pass rates the stage
    trains on the prompts that its `keep_pass_rate` leaves."""
    directory = StageDir(work.directory)
    choice = None if difficulty is None else choose_prompts(data.train, read_table(difficulty.pass_rates), stage)
    train = data.train if choice is None else choice.write(directory)
    spec = StageSpec.of(config, stage, start, data, key=work.key, train=train, resources=work.run.resources)
    spec = spec.model_copy(update={"pruning": work.run.pruning})
    # The shipper reads the spec before the stage starts.
    spec.save(directory.spec)
    with StageProgress(stage, directory, ship=work.run.follow(work.directory).ship) as progress:
        result = run_stage(spec, work.directory, tick=progress.tick)
    work.artifact(f"train-{stage.name}", progress.summary(Journal(directory.journal)))
    return result if choice is None else result.model_copy(update={"kept": choice.counts})
