"""Single steps as flows of their own, and the pipeline started from a preset."""

from pathlib import Path

from flows import one_step
from flows.approval import Asked, ask_for_approval, continued_flow_run, was_suspended, what_was_asked
from flows.flow_run import FlowRun, open_flow_run
from flows.model_names import adapter_model, with_local_model
from flows.pipeline import run_pipeline
from flows.preflight import check_working_directory
from flows.steps import base_model, checked_guards, evaluation_of, guard_checks, merged_model, rivals_of, validated_data
from flows.temporary_server import locked_flow
from grpo_tasks.steps.publish_model import publish_model
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.results.data import DataReport
from schemas.results.difficulty import DifficultyReport
from schemas.results.evaluation import EvalReport
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import PipelineResult, Publication, Trained


@locked_flow(name="grpo-validate", description="Read the data and check every row.")
def validate_flow(config: RunConfig, fresh: bool = False) -> DataReport:
    """Read the data and check every row.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    return one_step.validate(config, fresh)


@locked_flow(name="grpo-rewards", description="Run the reward lab, without any training.")
def rewards_flow(config: RunConfig, fresh: bool = False) -> LabReport:
    """Test every reward of every stage.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    return one_step.rewards(config, fresh)


@locked_flow(name="grpo-difficulty", description="Measure how often the base model solves each training prompt.")
def difficulty_flow(config: RunConfig, fresh: bool = False) -> DifficultyReport:
    """Measure how often the base model solves each training prompt.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    return one_step.difficulty(config, fresh)


@locked_flow(name="grpo-evaluate", description="Evaluate a model on the held-out prompts.")
def evaluate_flow(model: str, config: RunConfig, fresh: bool = False) -> EvalReport:
    """Evaluate a model on the held-out prompts.

    Args:
        model: a model folder, an adapter folder, a hub id, or a registered model: NAME, NAME@ALIAS or NAME/VERSION.
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    return one_step.evaluate(model, config, fresh)


@locked_flow(name="grpo-merge", description="Merge an adapter into the base model and prove the merge.")
def merge_flow(adapter: str, config: RunConfig, into: Path | None = None) -> MergeProof:
    """Merge an adapter into the base model and prove the merge.

    Args:
        adapter: a folder with adapter_config.json, a hub id, or a registered version.
        config: the configuration. Fields that are rarely changed are folded away.
        into: a new folder for a copy of the merged model. Empty: no copy.
    """
    return one_step.merge(adapter, config, into)


@locked_flow(name="grpo-train", description="Train one stage of a config, from its base model or from an adapter.")
def train_flow(config: RunConfig, stage: str, start: str | None = None, fresh: bool = False) -> StageResult:
    """Train one stage, and publish nothing.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        stage: name of a stage of the config.
        start: an adapter folder or a model to start from. Empty: the base model.
        fresh: run every step again, even if its inputs have not changed.
    """
    return one_step.train(config, stage, start, fresh)


@locked_flow(name="grpo-publish", description="Merge an adapter, compare it with base and champion, register it, decide.")
def publish_flow(adapter: str, config: RunConfig, fresh: bool = False) -> Publication:
    """Merge an adapter, compare it with base and champion, register it, decide.

    Args:
        adapter: as for a merge, trained from the base model of the config.
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    asked = what_was_asked()
    if asked is None:
        config = with_local_model(config)
        ref = adapter_model(adapter, config)
        with open_flow_run(config, flow="publish", fresh=fresh and not was_suspended()) as run:
            data, guards = validated_data(run), checked_guards(run)
            base = evaluation_of(run, "base", base_model(config), data)
            policy = evaluation_of(run, "adapter", ref, data)
            merged = merged_model(run, ref, data)
            final = evaluation_of(run, "merged", merged.model, data)
            trained = Trained(data=data, merged=merged, evaluations=[base, policy, final], guards=guards)
            asked = Asked.of(run, config, trained)
            made = _published(run, asked)
    else:
        made = _published_again(asked)
    while made.awaits_approval and ask_for_approval(asked, made, made.headline(), made.headline()):
        made = _published_again(asked)
    return made


def _published_again(asked: Asked) -> Publication:
    with continued_flow_run(asked, flow="publish") as run:
        return _published(run, asked)


def _published(run: FlowRun, asked: Asked) -> Publication:
    trained = asked.trained
    base, policy, final = trained.evaluations
    champion, rivals = rivals_of(run, trained.merged, base, trained.data)
    checks = guard_checks(run, final, rivals[-1], trained.guards)
    promotion = run.config.promotion
    made = publish_model(run, trained.merged, final, rivals, policy=policy, champion=champion, promotion=promotion, guards=checks)
    run.show_links(made)
    run.announce(made, champion)
    return made


@locked_flow(name="grpo-preset", description="Run the pipeline from a preset or a YAML file, with a few settings changed.")
def preset_flow(source: str = "demo", overrides: list[str] | None = None, fresh: bool = False) -> PipelineResult:
    """The whole pipeline from a preset or a YAML file, with a few settings changed.

    Args:
        source: name of a preset, or a YAML file in the folder where `grpo up` was called.
        overrides: settings to change, each as key.path=value, for example stages.0.learning_rate=1e-5.
        fresh: run every step again, even if its inputs have not changed.
    """
    check_working_directory()
    asked = what_was_asked()
    return run_pipeline(asked.config if asked else load_config(source, overrides), fresh)
