"""Commands that run the pipeline or one step of it. Each loads the config, calls a flow and shows the result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.cli.environment import checked_config, named_config, prepare_environment, prepare_flow, prepare_step, report_errors
from flows.cli.options import ADAPTER_HELP, MODEL_HELP, Config, Fresh, OptionalConfig, Set, Wide
from flows.cli.progress import shown_progress
from flows.cli.show import say, show, tell
from grpo_tasks.lab.report import advice, fixes, opinions
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.metrics import REWARD
from schemas.paths import EMBEDDED
from schemas.results.base import Section
from schemas.results.evaluation import evaluation_section

if TYPE_CHECKING:
    from schemas.results.data import DataReport, LabReport
    from schemas.results.evaluation import DifficultyReport, EvalReport
    from schemas.results.model import MergeProof, StageResult
    from schemas.results.publication import PipelineResult


def run(
    config: OptionalConfig = None,
    override: Set = None,
    fresh: Fresh = False,
    no_champion: Annotated[
        bool, typer.Option("--no-champion", help="Decide by the base alone: the champion cannot be compared with any more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config and show the plan, but run nothing.")] = False,
    wide: Wide = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: try this machine for a few seconds, and estimate the run.")
    ] = False,
) -> None:
    """Run the whole pipeline: validate, probe rewards, train every stage, merge, evaluate, publish."""
    with report_errors() as command:
        alone = ["promotion.against_champion=false"] if no_champion else []
        settings = checked_config(named_config(config), [*(override or []), *alone])
        if measure and not dry_run:
            raise ConfigError("a run estimates itself when it starts", place="--measure", fix="add --dry-run, or leave it out")
        if dry_run:
            from flows.preflight import check_learning_rates, check_start, check_structure

            show_plan(settings, [*check_start(settings), *check_structure(settings, hub=False), *check_learning_rates(settings)])
            if measure:
                prepare_environment()
                from flows.estimate import estimate_of

                with shown_progress("trying the machine"):
                    found = estimate_of(settings, fresh=fresh)
                show(*found.sections(), wide=wide)
            return
        command.folder = settings.resources.output_dir / settings.name
        with _started(settings, "starting Prefect and MLflow"):
            from flows.pipeline import grpo_pipeline

            result = grpo_pipeline(settings, fresh)
        show_pipeline(settings, result, wide=wide)


def retrain(
    config: Config,
    start_from: Annotated[
        Literal["base", "champion"], typer.Option("--from", help="Where training starts: the base model or the current champion.")
    ] = "base",
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Train a registered model again if its data, code or config have changed since its last version, then decide."""
    with report_errors() as command:
        settings = checked_config(config, override)
        command.folder = settings.resources.output_dir / settings.name
        with _started(settings, "comparing with the last version"):
            from flows.retrain import retrain_flow

            result = retrain_flow(config, override, start_from, fresh)
        say(result.reason)
        if (made := result.publication) is not None:
            say(f"{made.model_name} version {made.model_version}: grpo chat {made.model_name}/{made.model_version}")


def show_plan(config: RunConfig, notes: Sequence[str] = ()) -> None:
    """Print what a run would do, and what is worth saying about its model."""
    rewards = ", ".join(sorted({name for stage in config.stages for name in stage.rewards}))
    rows = [
        ("prepare_data", ", ".join(source.path for source in [*config.data.train, *config.data.eval])),
        ("validate_data", f"prompts up to {config.validation.max_prompt_length} tokens"),
        ("probe_rewards", rewards),
    ]
    if described := describe_difficulty(config):
        rows.append(("measure_difficulty", described))
    start = "" if config.start_from is None else f" with the adapter {config.start_from}"
    rows.append(("evaluate_model", f"base: {config.model.path}{start}"))
    rows += [(f"train_stage {stage.name}", describe_stage(stage)) for stage in config.stages]
    asked = config.model.merged_dtype
    precision = "the shortest precision that keeps 95 % of what training changed" if asked == "auto" else asked
    rows.append(("merge_adapter", f"saved in {precision}"))
    prompts = config.evaluation.max_prompts or "all"
    rows.append(("evaluate_model", f"{config.evaluation.num_samples} samples for each of {prompts} prompts"))
    for guard in config.promotion.guards:
        limits = {"drop": guard.max_drop, "rise": guard.max_rise}
        largest = " and ".join(f"{what} {limit:g}" for what, limit in limits.items() if limit is not None)
        paths = ", ".join(source.path for source in guard.data)
        rows.append((f"guard {guard.name}", f"{guard.metric} on {paths}, largest {largest}"))
    person = ", then by a person" if config.promotion.approval == "manual" else ""
    decides = config.promotion.metric or "accuracy; by the reward if the rows have no ground truths"
    rows.append(("publish_model", f"{config.registered_model}, decided by {decides}{person}"))
    show(Section(title=f"Plan of {config.name} (nothing was run)", columns=("step", "details"), rows=rows))
    tell(*(f"note: {note}" for note in notes))


def describe_difficulty(config: RunConfig) -> str:
    """Where pass rates come from, in one line; empty where no stage has any."""
    difficulty = config.difficulty
    measured = f"{difficulty.samples} completions of every training prompt" if difficulty.samples else ""
    if difficulty.screen:
        measured += f", {difficulty.screen} where none of the first {difficulty.screen} is solved"
    if difficulty.pass_rate_column is None or all(stage.measure_difficulty for stage in config.stages):
        return measured
    return f"column {difficulty.pass_rate_column} of the data"


def describe_stage(stage: StageConfig) -> str:
    """A stage in one line."""
    length = f"{stage.max_steps} updates" if stage.max_steps else f"{stage.num_train_epochs:g} epochs"
    if stage.kind == "sft":
        return f"sft: {length} of {stage.completions_per_update} demonstrations; learning rate {stage.learning_rate:g}"
    prompts = stage.completions_per_update // stage.num_generations
    sizes = f"{prompts} prompts x {stage.num_generations} completions"
    if stage.kind == "rejection":
        length = f"rejection sampling: {length}"
    band = "" if stage.keep_pass_rate is None else f"; pass rates {stage.keep_pass_rate[0]:g} to {stage.keep_pass_rate[1]:g}"
    return f"{length} of {sizes}{band}; rewards {', '.join(stage.rewards)}; learning rate {stage.learning_rate:g}"


def show_pipeline(config: RunConfig, result: "PipelineResult", *, wide: bool = False) -> None:
    """Print the end of a pipeline run: evaluations, decision, where everything is."""
    show(evaluation_section(result.evaluations, first=config.figures, merged_as=result.merged_as), wide=wide)
    publication = result.publication
    alias = f"models:/{publication.model_name}@champion" if publication.champion else "the champion has not changed"
    version = f"{publication.model_name}/{publication.model_version}"
    say(f"{publication.model_name} version {publication.model_version}: {publication.reason} ({alias})")
    if publication.awaits_approval:
        say(f"decide:       grpo promote {version}, or grpo promote {version} --reject")
    say(
        *(f"merged model: {evaluation.model.path}" for evaluation in result.evaluations if evaluation.label == "merged"),
        f"registered as {version}",
        f"try it:       grpo chat {version}",
        f"fetch it:     grpo download {version} DIR",
        f"report: {result.report}",
        f"MLflow run {publication.run_id}; files in {config.resources.output_dir / config.name}; open both UIs with: grpo ui",
    )


def _begin(config: RunConfig, doing: str) -> None:
    """Say on stderr what begins, before the imports that take seconds."""
    typer.echo(f"{config.name}: {doing} ({config.resources.output_dir / config.name})", err=True)


@contextmanager
def _started(config: RunConfig, doing: str) -> Iterator[None]:
    """Prefect and MLflow for a whole flow; what is missing is refused before a temporary server starts, which takes longer."""
    _begin(config, doing)
    with shown_progress("starting Prefect and MLflow"):
        prepare_flow()
        from flows.preflight import check_installed, check_tracking

        check_installed(config)
        check_tracking(config)
        yield


def _one_step(function: str, doing: str, config: RunConfig, /, *, device: bool = True, **inputs: Any) -> Any:
    """What one step makes: in a flow where a Prefect server or a GPU slot is involved, by a plain function otherwise."""
    _begin(config, doing)
    with shown_progress(doing):
        if prepare_step(config, device=device):
            from flows import single

            return getattr(single, f"{function}_flow")(config=config, **inputs)
        from flows import one_step

        return getattr(one_step, function)(config=config, **inputs)


def validate(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Read the data and check every row."""
    with report_errors():
        settings = checked_config(config, override)
        report: DataReport = _one_step("validate", "reading the data", settings, device=False, fresh=fresh)
        tell(
            f"{report.rows:,} rows read: {report.train_rows:,} to train on, {report.eval_rows:,} held out, "
            f"{report.quarantined:,} quarantined"
            + (f", {report.duplicates:,} left out as duplicates" if report.duplicates else ""),
            *(f"  {rule.rule}: {rule.rows:,} rows ({rule.meaning})" for rule in report.rules if rule.rows),
        )
        lengths = report.prompt_tokens
        tell(f"prompts: median {lengths.p50} tokens, longest {lengths.max}, limit {lengths.limit}")
        say(f"report: {report.directory / 'report.md'}")


def rewards(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Run the reward lab: test every reward function of every stage before any training."""
    with report_errors():
        settings = checked_config(config, override)
        report: LabReport = _one_step("rewards", "testing the rewards", settings, fresh=fresh)
        counts = {outcome: sum(check.outcome == outcome for check in report.checks) for outcome in ("passed", "warned", "failed")}
        say("reward lab: " + ", ".join(f"{count} checks {outcome}" for outcome, count in counts.items()))
        tell(*(f"  not checked: {line}" for line in report.left_out))
        found, what_to_do = opinions(report.checks)
        if found:
            rows = [(where, check, f"{what} ({probe})" if probe else what) for where, check, what, probe in found]
            show(Section(columns=("where", "check", "found"), rows=rows))
            tell(*(f"  fix {line}" for line in fixes(report.checks)), what_to_do)
        for forecast in report.forecasts:
            tell(
                f"  stage {forecast.stage}: {forecast.share_with_signal:.0%} of the base model's groups have different rewards, "
                f"mean reward {forecast.mean_reward:.2f}"
            )
        tell(*advice(report.forecasts))
        if settings.model.path.startswith(EMBEDDED) and report.forecasts and not report.forecasts[0].share_with_signal:
            tell(f"{settings.model.path} is a tiny model that knows small sums only. fix: set model.path to your base model")
        say(f"report: {report.directory / 'report.md'}")


def difficulty(config: Config, override: Set = None, fresh: Fresh = False, wide: Wide = False) -> None:
    """Measure how often the base model solves each training prompt, before you choose keep_pass_rate of a stage."""
    with report_errors():
        settings = checked_config(config, override)
        report: DifficultyReport = _one_step("difficulty", "measuring the training prompts", settings, fresh=fresh)
        show(*report.sections(), wide=wide)
        say(f"report: {report.directory / 'report.md'}")


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
    wide: Wide = False,
) -> None:
    """Evaluate a model on the held-out prompts of a config."""
    with report_errors():
        settings = checked_config(config, override)
        report: EvalReport = _one_step("evaluate", "evaluating the model", settings, model=model, fresh=fresh)
        show(evaluation_section([report], first=settings.figures), wide=wide)


def train(
    config: Config,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Stage to train. Default: the first one.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help=f"Where training starts: {MODEL_HELP} Default: as the config says."),
    ] = None,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Train one stage of a config, and publish nothing."""
    with report_errors() as command:
        settings = checked_config(config, override)
        command.folder = settings.resources.output_dir / settings.name
        name = stage or settings.stages[0].name
        doing = f"training the stage {name}"
        result: StageResult = _one_step("train", doing, settings, stage=name, start=start, fresh=fresh)
        best = "" if result.best_step is None else f", weights of update {result.best_step}"
        say(f"stage {result.stage}: {result.steps} updates, stopped by {result.stopped}{best}")
        if REWARD in result.metrics:
            say(f"mean reward of the last updates: {result.metrics[REWARD]:.3f}")
        weights = result.model.adapter or result.model.path
        say(f"weights: {weights}", f"evaluate them: grpo evaluate {weights} {config}")
        if result.model.adapter is not None:
            say(f"merge them:    grpo merge {weights} {config} --into DIR")


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help=ADAPTER_HELP)],
    config: Config,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Copy the merged model to this folder.")] = None,
    override: Set = None,
) -> None:
    """Merge an adapter into the base model of a config and prove that the result is the same policy."""
    with report_errors():
        settings = checked_config(config, override)
        proof: MergeProof = _one_step("merge", "merging the adapter", settings, adapter=adapter, into=into)
        say(
            f"merged model: {proof.model.path}",
            f"saved in {proof.choice()}",
            f"from base + adapter: {proof.mean_logprob_difference:.2g} nats per token "
            f"(base {proof.base_logprob_difference:.2g}); {proof.greedy_agreement:.1%} of greedy tokens agree "
            f"(base {proof.base_greedy_agreement:.1%})",
        )


def step(
    name: Annotated[str, typer.Argument(metavar="STEP", help="Name of a step, such as validate_data.")],
    config: Config,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help=f"For a step that takes a model: {MODEL_HELP}")
    ] = None,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Run any step, with the steps that it needs: also one that you have added."""
    with report_errors():
        settings = checked_config(config, override)
        result = _one_step("step", f"running {name}", settings, name=name, model=model, fresh=fresh)
        say(result.section() or result.headline() or f"{name} is finished", f"files: {result.directory}")
