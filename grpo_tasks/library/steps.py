"""The steps of the pipeline as plain functions: no server, no tracking, no skipped steps.

    load_data -> DataReport -> train_stage -> StageResult -> merge -> MergeProof -> evaluate -> EvalReport
               measure_difficulty -> DifficultyReport --^                           generate -> texts

    from grpo_tasks.library.steps import evaluate, generate, load_data, merge, train_stage
    from schemas.config.load import load_config

    def brief(completions, **columns):
        return [1.0 if len(completion[0]["content"]) < 80 else 0.0 for completion in completions]

    config = load_config("demo", ["stages.0.max_steps=20"])
    data = load_data(config, "work/data")
    stage = train_stage(config, "format", data, "work/format", rewards={"brief": brief})
    merged = merge(config, stage.model, data, "work/merged")
    print(evaluate(config, merged.model, data, "work/evaluation").metrics["format_rate"])
    print(generate(config, merged.model, ["What is 15 + 27?"]))

Each function writes its files into the folder that it is given, and returns the same result object as the step of the pipeline
(schemas/results/). The next function takes that object. Training, merging and sampling run in a child process, so their memory
is free afterwards and a crash does not take the notebook along. Errors that the user can fix are `schemas.errors.UserError`s.

Left out: the reward lab (`grpo rewards`), the model registry, and the decision about the champion.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_tasks.data.table import read_table
from grpo_tasks.library.own_rewards import Reward, add_rewards
from grpo_tasks.running.step import Inputs, Made, Step
from grpo_tasks.stage.kept_prompts import choose_prompts, require_prompts
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.measure_difficulty import measure_difficulty as measure_step
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.train_stage import train_stage as train_step
from grpo_tasks.steps.validate_data import validate_data
from schemas.config.run import RunConfig, Scoring
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.results.data import DataReport
from schemas.results.evaluation import DifficultyReport, EvalReport
from schemas.results.model import MergeProof, ModelRef, StageResult


def base_model(config: RunConfig) -> ModelRef:
    """The base model of a config: where training starts by default, and what to compare a trained model with."""
    return ModelRef(path=config.model.path, revision=config.model.revision)


def load_data(config: RunConfig, directory: str | Path) -> DataReport:
    """Read and validate the data of a config.

    Args:
        config: its sections data, validation, completion, model (the tokenizer) and rollout.
        directory: gets train.parquet, eval.parquet, quarantine.parquet and report.md.

    Returns:
        The verdict, with the paths of the accepted rows.

    Raises:
        DataError: a file cannot be read, or too many rows are bad; the message names file, line and rule.
    """
    folder = _folder(directory)
    return validate_data.made_in(folder, config.resources, config, prepare_data.made_in(folder, config.resources, config))


def measure_difficulty(
    config: RunConfig, data: DataReport, directory: str | Path, *, start: ModelRef | None = None
) -> DifficultyReport:
    """Measure how often each training prompt is solved, by the rewards of each stage of the config.

    Args:
        config: its sections difficulty (`samples`, or `pass_rate_column`), completion, rewards, stages, rollout and resources.
        data: what `load_data` returned.
        directory: gets pass_rates.parquet, report.md, and samples.parquet with every completion.
        start: the model to sample from; by default the base model.

    Returns:
        Histograms and counts, with the path of the table. `train_stage` takes it and keeps the prompts in `keep_pass_rate`.

    Raises:
        ConfigError: the config asks for no samples and names no column.
        DataError: a value of the column is no number between 0 and 1.
    """
    if config.difficulty.pass_rate_column is None and config.difficulty.samples == 0:
        raise ConfigError("nothing would be sampled", place="difficulty.samples", fix="difficulty.samples: 8")
    start = start or base_model(config)
    inputs = config.difficulty_of(config.stages, adapter=start.adapter is not None), "start", start, data.train_table
    return measure_step.made_in(_folder(directory), config.resources, *inputs)


def train_stage(
    config: RunConfig,
    stage: str | StageConfig,
    data: DataReport,
    directory: str | Path,
    *,
    start: ModelRef | None = None,
    rewards: Mapping[str, Reward] | None = None,
    difficulty: DifficultyReport | None = None,
    in_process: bool = False,
) -> StageResult:
    """Train one stage. Calling it again resumes an interrupted stage, and only reads a finished one.

    Args:
        config: its sections model, rewards, rollout, resources and the seed.
        stage: a stage of the config by name, or a stage of your own.
        data: what `load_data` returned.
        directory: the stage directory (grpo_tasks/stage/stage_dir.py lists its files; metrics.jsonl has a line for each update).
        start: the model to start from, for example the `model` of an earlier `StageResult`; by default the base model.
        rewards: reward functions to use besides those of the stage, by name: a function with TRL's signature
            `f(prompts, completions, **columns) -> list[float]`, or "package.module:function".
        difficulty: what `measure_difficulty` returned. The stage then trains on the prompts that its `keep_pass_rate` leaves.
        in_process: train in this process, for a debugger. By default a child process trains.

    Returns:
        The trained model (`model`), the mean metrics of the last updates (`metrics`), and why the stage ended (`stopped`).

    Raises:
        ConfigError: a reward function cannot be used here, or the directory holds another stage.
        RewardError, TrainingError: the stage failed.
    """
    folder, start = _folder(directory), start or base_model(config)
    config = config.model_copy(update={"rewards": add_rewards(config.rewards, rewards or {}, folder)})
    settings = config.stage(stage) if isinstance(stage, str) else stage
    names = [*settings.rewards, *(name for name in rewards or {} if name not in settings.rewards)]
    settings = settings.model_copy(update={"rewards": names})
    key = train_step.key(config.resources, config, settings, start, data, difficulty)
    train = data.train
    if difficulty is not None:
        choice = choose_prompts(data.train, read_table(difficulty.pass_rates), settings)
        require_prompts(choice.counts, settings, config.difficulty.min_prompts)
        train = choice.write(StageDir(folder))
    spec = StageSpec.of(config, settings, start, data, key=key, train=train, resources=config.resources)
    return run_stage(spec, folder, in_process=in_process)


def make(step: Step[Inputs, Made], directory: str | Path, config: RunConfig, *inputs: Any) -> Made:
    """What any step of grpo_tasks/steps makes in a folder, such as one that you have added.

    Args:
        step: the step, for example `grpo_tasks.steps.validate_data.validate_data`.
        directory: gets its files.
        config: the settings; the step reads those that it declares.
        inputs: its further inputs, in their order.
    """
    made: Callable[..., Made] = step.made_in
    return made(_folder(directory), config.resources, config, *inputs)


def merge(config: RunConfig, model: ModelRef, data: DataReport, directory: str | Path) -> MergeProof:
    """Merge the adapter of a trained model into its base, save the result and prove that it is the same policy.

    Args:
        config: its section model (`merged_dtype`, `merged_system_prompt`, `added_tokens`), rollout (the variables of the chat
            template, and how tokens are drawn), `data.system_prompt`, and the section interaction, whose tools the template of
            the merged model shows.
        model: `StageResult.model`.
        data: its held-out prompts are used for the proof.
        directory: gets model/, which `transformers` loads without this package.

    Raises:
        MergeError: the merged or the saved model differs from base + adapter.
    """
    return merge_adapter.made_in(_folder(directory), config.resources, config, model, data)


def evaluate(
    config: RunConfig,
    model: ModelRef,
    data: DataReport,
    directory: str | Path,
    *,
    label: str = "model",
    rewards: Mapping[str, Reward] | None = None,
) -> EvalReport:
    """Evaluate a model on the held-out prompts. Reward functions run in a process of their own.

    Args:
        config: its sections evaluation, completion, rewards, rollout, resources and the seed.
        model: `base_model(config)`, `StageResult.model` or `MergeProof.model`.
        data: what `load_data` returned.
        directory: gets samples.parquet (every completion with its scores) and report.md.
        label: name of the model in the report.
        rewards: functions that are reported besides those of the config, by name, as in `train_stage`.

    Returns:
        Each metric of schemas/metrics.py EVALUATION with its confidence interval.
    """
    folder = _folder(directory)
    scoring = _scoring(config, rewards or {}, folder)
    return evaluate_model.made_in(folder, config.resources, config.evaluated(), label, model, data, scoring)


def _scoring(config: RunConfig, rewards: Mapping[str, Reward], folder: Path) -> Scoring | None:
    """The reward functions of an evaluation; those that the caller adds are reported and have no weight."""
    scoring = config.scoring()
    if not rewards:
        return scoring
    section = scoring.rewards if scoring is not None else config.rewards
    weighted, reported = (scoring.weighted, scoring.reported) if scoring is not None else ([], [])
    reported = [*reported, *rewards]
    section = add_rewards(section, rewards, folder)
    return Scoring(rewards=section, weighted=weighted, reported=reported, tasks=config.task_rewards(reported))


def generate(
    config: RunConfig, model: ModelRef, questions: Sequence[str], *, num_samples: int = 1, temperature: float = 0.0
) -> list[list[str]]:
    """Ask a model questions in this process, with the system prompt of the config; its tools or its environment answer the model.

    Args:
        config: its sections model, data (`system_prompt`), rollout (lengths and stop strings), interaction, completion, resources
            and the seed.
        model: as in `evaluate`.
        questions: one user message each.
        num_samples: completions per question.
        temperature: 0 always takes the most likely token.

    Returns:
        For each question its completions; of a conversation the last turn. A warning names each conversation that a fault of its
        environment ended.

    Raises:
        UserError: the model, a tool or the environment cannot be loaded.
    """
    # Imports torch, which the other functions leave to their child processes.
    from grpo_tasks.library.questions import ask

    drawn = ask(config, model, questions, num_samples=num_samples, temperature=temperature)
    for question, completions in zip(questions, drawn, strict=True):
        for one in completions:
            if one.conversation is not None and one.conversation.error is not None:
                warnings.warn(f"{question[:80]!r}: its conversation ended early: {one.conversation.error}", stacklevel=2)
    return [[completion.text for completion in each] for each in drawn]


def _folder(directory: str | Path) -> Path:
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
