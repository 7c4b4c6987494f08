"""The pipeline: data in, champion out. Read `train_and_evaluate`, then `_published`.

The calls are steps, or what flows/steps.py wraps around one. Each is a label in the UI.
"""

from collections.abc import Mapping
from pathlib import Path

from flows.approval import SuspendedRun, decide, load_pending_decision, was_suspended
from flows.estimate import tell_cost
from flows.flow_run import FlowRun, open_flow_run, warn
from flows.model_names import with_local_model
from flows.preflight import check_learning_rates, check_start, check_structure, check_working_directory
from flows.steps import (
    base_model,
    evaluate_guards,
    evaluation_of,
    measured_difficulty,
    num_steps,
    published,
    trained_stage,
    validate_guards,
    validated_data,
)
from flows.temporary_server import locked_flow
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.probe_rewards import probe_rewards
from grpo_tasks.steps.write_report import write_report
from grpo_tasks.tracking.models import check_champion
from grpo_tasks.tracking.publishing import prepare_publishing
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.results.publication import PipelineResult, PublishedFacts, Trained


@locked_flow(name="grpo-pipeline", description="Validate, probe rewards, train in stages with GRPO, merge, evaluate, publish.")
def grpo_pipeline(config: RunConfig, fresh: bool = False) -> PipelineResult:
    """Run every step. A step whose inputs have not changed is skipped, unless `fresh`.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    return run_pipeline(config, fresh)


@locked_flow(name="grpo-preset", description="Run the pipeline from a preset or a YAML file, with a few settings changed.")
def preset_flow(source: str = "demo", overrides: list[str] | None = None, fresh: bool = False) -> PipelineResult:
    """The whole pipeline from a preset or a YAML file, with a few settings changed.

    Args:
        source: name of a preset, or a YAML file in the folder where `grpo up` was called.
        overrides: settings to change, each as key.path=value, for example stages.0.learning_rate=1e-5.
        fresh: run every step again, even if its inputs have not changed.
    """
    check_working_directory()
    asked = load_pending_decision()
    return run_pipeline(asked.config if asked else load_config(source, overrides), fresh)


def run_pipeline(
    config: RunConfig, fresh: bool = False, *, tags: Mapping[str, str] | None = None, copies: Path | None = None
) -> PipelineResult:
    """Every step of the pipeline in the flow run of the caller: a person sees one run, the one that was started.

    A run that was suspended continues with its config, and `fresh` runs no step twice. `tags` are further ones of the registered
    version, `copies` the user's own modules where they were copied before.
    """
    asked, made = load_pending_decision(), None
    if asked is None:
        config = with_local_model(config)
        fresh, steps = fresh and not was_suspended(), num_steps(config)
        with open_flow_run(config, flow="pipeline", fresh=fresh, copies=copies, steps=steps) as run:
            # Now, because the fork server is idle while the data is read.
            prepare_publishing()
            if config.promotion.against_champion:
                check_champion(config.registered_model, config.tracking)
            asked = SuspendedRun.of(run, config, train_and_evaluate(run), tags)
            made = _published(run, asked)
    return decide(asked, made, _published, flow="pipeline")


def train_and_evaluate(run: FlowRun) -> Trained:
    """Every step before the decision, in order."""
    config = run.config
    for note in [*check_start(run.inputs.given), *check_structure(config, hub=True), *check_learning_rates(config)]:
        warn(note)
    data = validated_data(run)
    guards = validate_guards(run)
    tell_cost(run, data, guards)
    model = base_model(config)
    lab = probe_rewards(run, config, model, data)
    difficulty = measured_difficulty(run, model, data)
    evaluations = [evaluation_of(run, "base", model, data)]
    # Before any training: an evaluator that fails is found now.
    evaluate_guards(run, "base", model, guards)
    stages = []
    for stage in config.stages:
        stages.append(trained_stage(run, stage, model, data, difficulty))
        model = stages[-1].model
        # The last one always: the merged model is held against it.
        if config.evaluation.stages or stage is config.stages[-1]:
            evaluations.append(evaluation_of(run, stage.name, model, data))
    merged = merge_adapter(run, config, model, data)
    evaluations.append(evaluation_of(run, "merged", merged.model, data))
    return Trained(
        data=data,
        lab=lab,
        difficulty=difficulty,
        stages=stages,
        evaluations=evaluations,
        merged=merged,
        guards=guards,
        sections=run.sections,
    )


def _published(run: FlowRun, asked: SuspendedRun) -> PipelineResult:
    trained = asked.trained
    assert trained.lab is not None, "the pipeline has probed its rewards"
    publication = published(run, trained, asked.tags)
    report = write_report(
        run,
        run.config,
        trained.data,
        trained.lab,
        trained.difficulty,
        evaluations=trained.evaluations,
        stages=trained.stages,
        proof=trained.merged,
        decision=PublishedFacts.of(publication),
        sections=trained.sections,
    )
    run.show_links(publication, report=True)
    evaluations, saved = trained.evaluations, trained.merged.saved_as()
    return PipelineResult(publication=publication, evaluations=evaluations, merged_as=saved, report=report.html)
