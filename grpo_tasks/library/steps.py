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

import hashlib
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from grpo_tasks.answers.extract import check_completion
from grpo_tasks.answers.ground_truths import truths_check
from grpo_tasks.content.hashes import file_sha256, folder_sha256
from grpo_tasks.content.modules import modules_sha256
from grpo_tasks.data.report import Origin
from grpo_tasks.data.sources import load_sources
from grpo_tasks.data.table import read_chats, read_prompts, read_table
from grpo_tasks.data.validation import validate_rows
from grpo_tasks.environments.offered import offering
from grpo_tasks.evaluation.pass_rates import column_rates, measured_rates, write_rates
from grpo_tasks.evaluation.report import SAMPLES, evaluate_samples
from grpo_tasks.library.own_rewards import Reward, add_rewards, rewards_sha256
from grpo_tasks.policy.merge_proof import PROOF_PROMPTS, merge_and_prove
from grpo_tasks.rewards.held_out import reward_columns
from grpo_tasks.rewards.screening import solved_samples
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows, run_sampling
from grpo_tasks.stage.kept_prompts import choose_prompts, require_prompts
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.rollout import RolloutConfig
from schemas.config.run import JudgeInputs, RunConfig, ScoringInputs
from schemas.config.section import Section
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.paths import resolve
from schemas.results.base import Result
from schemas.results.data import DataReport
from schemas.results.difficulty import DifficultyReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import PROOF_TOKENS, MergeProof, MergeSpec, ModelRef, Sampling, StageResult


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
    began, folder = time.perf_counter(), _folder(directory)
    check_completion(config.completion)
    loaded = load_sources(config.data, directory=folder)
    inputs = JudgeInputs(data=config.data, validation=config.validation, completion=config.completion, seed=config.seed)
    origin = Origin(_key(inputs), folder, time.perf_counter() - began, loaded.sources)
    return validate_rows(
        loaded.path,
        inputs,
        origin,
        check_truths=truths_check(config.completion),
        model=config.model,
        rollout=_offering(config),
    )


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
    began, folder, inputs = time.perf_counter(), _folder(directory), config.difficulty_of(config.stages)
    rows = read_prompts(data.train)
    if inputs.pass_rate_column is not None:
        rates = column_rates(rows, inputs.pass_rate_column, [stage.name for stage in inputs.stages])
    elif inputs.samples == 0:
        raise ConfigError("nothing would be sampled", place="difficulty.samples", fix="difficulty.samples: 8")
    else:
        spec = SampleSpec.of_training(
            inputs.samples,
            model=config.model,
            ref=start or base_model(config),
            prompts=data.train,
            rollout=config.rollout,
            resources=config.resources,
            seed=config.seed,
            interaction=config.interaction,
            completion=config.completion,
        )

        def draw(only: Sequence[str] | None, numbers: range) -> pl.DataFrame:
            run_sampling(spec.part(only, numbers), folder)
            return pl.read_parquet(folder / SAMPLES)

        samples = solved_samples(draw, chosen_rows(data.train, None), inputs)
        samples.write_parquet(folder / SAMPLES)
        rates = measured_rates(samples, inputs)
    report = write_rates(rates, rows, inputs, folder, key=_key(inputs, file_sha256(data.train)), label="start")
    return report.model_copy(update={"seconds": time.perf_counter() - began})


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
    section = add_rewards(config.rewards, rewards or {}, folder)
    settings = config.stage(stage) if isinstance(stage, str) else stage
    names = [*settings.rewards, *(name for name in rewards or {} if name not in settings.rewards)]
    spec = StageSpec(
        key="",
        stage=settings.model_copy(update={"rewards": names}),
        seed=config.seed,
        model=config.model.unmerged(),
        start=start,
        completion=config.completion,
        rewards=section,
        rollout=config.rollout,
        resources=config.resources,
        train=data.train if difficulty is None else _kept(config, settings, data, difficulty, folder),
        eval=data.eval,
        tasks=config.data.tasks,
        interaction=config.interaction,
    )
    # The stage is another one if the contents of its model, data, rewards or tools are others, even under the same names.
    contents = [*_model_sha256(start), file_sha256(spec.train), file_sha256(data.eval), rewards_sha256(section)]
    interaction = config.interaction
    contents += [modules_sha256(name.partition(":")[0], interaction.module_dirs()) for name in interaction.own_code]
    unkeyed = spec.model_copy(update={"resources": type(spec.resources)(**spec.resources.ways)})
    return run_stage(spec.model_copy(update={"key": _key(unkeyed, *contents)}), folder, in_process=in_process)


def _kept(config: RunConfig, stage: StageConfig, data: DataReport, difficulty: DifficultyReport, folder: Path) -> Path:
    choice = choose_prompts(data.train, read_table(difficulty.pass_rates), stage)
    require_prompts(choice.counts, stage, config.difficulty.min_prompts)
    return choice.write(StageDir(folder))


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
    spec = MergeSpec(
        model=config.model,
        ref=model,
        prompts=read_chats(data.eval, limit=PROOF_PROMPTS),
        max_new_tokens=PROOF_TOKENS,
        chat_template_kwargs=_offering(config).chat_template_kwargs,
        system_prompt=config.merged_system_prompt,
        sampling=Sampling.of(config.rollout),
    )
    return merge_and_prove(spec, _folder(directory), key=_key(spec))


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
    began, folder, evaluation = time.perf_counter(), _folder(directory), config.evaluation
    rollout = config.rollout.model_copy(update={"engine": evaluation.engine or config.rollout.engine})
    spec = SampleSpec.of(
        evaluation,
        model=config.model,
        ref=model,
        prompts=data.eval,
        rollout=rollout,
        resources=config.resources,
        seed=config.seed,
        interaction=config.interaction,
        completion=config.completion,
    )
    run_sampling(spec, folder)
    rows = chosen_rows(data.eval, evaluation.max_prompts)
    scoring, scores = _scoring(config, rewards or {}, folder), None
    if scoring is not None:
        samples, per_prompt = pl.read_parquet(folder / SAMPLES), evaluation.num_samples
        scores = reward_columns(samples, rows, scoring, completion=config.completion, per_prompt=per_prompt)
    report = evaluate_samples(
        folder,
        key=_key(spec),
        label=label,
        model=model,
        prompts=rows,
        completion=config.completion,
        evaluation=evaluation,
        rewards=scores,
    )
    return report.model_copy(update={"seconds": time.perf_counter() - began})


def _scoring(config: RunConfig, rewards: Mapping[str, Reward], folder: Path) -> ScoringInputs | None:
    """The reward functions of an evaluation; those that the caller adds are reported and have no weight."""
    scoring = config.scoring()
    if not rewards:
        return scoring
    section = scoring.rewards if scoring is not None else config.rewards
    weighted, reported = (scoring.weighted, scoring.reported) if scoring is not None else ([], [])
    reported = [*reported, *rewards]
    section = add_rewards(section, rewards, folder)
    return ScoringInputs(rewards=section, weighted=weighted, reported=reported, tasks=config.task_rewards(reported))


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


def _offering(config: RunConfig) -> RolloutConfig:
    """The section `rollout` whose chat template shows the tools of the config."""
    if not config.interaction.active:
        return config.rollout
    # Imports transformers, which a run without tools does not need here.
    from grpo_tasks.data.chat_tokens import load_counter

    return offering(config.interaction, config.rollout, load_counter(config.model).tokenizer.chat_template)


def _folder(directory: str | Path) -> Path:
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(inputs: Result | Section, *contents: str) -> str:
    """Name of what a result was made from; `contents` are hashes of what the inputs only name."""
    return hashlib.sha256("\n".join([inputs.model_dump_json(), *contents]).encode()).hexdigest()


def _model_sha256(model: ModelRef) -> list[str]:
    """Hashes of the folders of a model; empty for a base model that comes from the hub."""
    folders = [Path(resolve(model.path)), *([model.adapter] if model.adapter else [])]
    return [folder_sha256(folder) for folder in folders if folder.is_dir()]
