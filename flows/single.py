"""The functions of one_step.py as flows, and an adapter from anywhere to a registered model."""

from flows import one_step
from flows.approval import SuspendedRun, decide, load_pending_decision, was_suspended
from flows.flow_run import FlowRun, open_flow_run
from flows.model_names import adapter_model, with_local_model
from flows.steps import base_model, evaluation_of, published, validate_guards, validated_data
from flows.temporary_server import locked_flow
from grpo_tasks.steps.merge_adapter import merge_adapter
from schemas.config.run import RunConfig
from schemas.results.publication import Publication, Trained

validate_flow = locked_flow(name="grpo-validate", description="Read the data and check every row.")(one_step.validate)
rewards_flow = locked_flow(name="grpo-rewards", description="Run the reward lab, without any training.")(one_step.rewards)
difficulty_flow = locked_flow(
    name="grpo-difficulty", description="Measure how often the base model solves each training prompt."
)(one_step.difficulty)
evaluate_flow = locked_flow(name="grpo-evaluate", description="Evaluate a model on the held-out prompts.")(one_step.evaluate)
merge_flow = locked_flow(name="grpo-merge", description="Merge an adapter into the base model and prove the merge.")(
    one_step.merge
)
train_flow = locked_flow(name="grpo-train", description="Train one stage of a config, from its base model or from an adapter.")(
    one_step.train
)
step_flow = locked_flow(name="grpo-step", description="Run any step, with the steps that it needs.")(one_step.step)


@locked_flow(name="grpo-publish", description="Merge an adapter, compare it with base and champion, register it, decide.")
def publish_flow(adapter: str, config: RunConfig, fresh: bool = False) -> Publication:
    """Merge an adapter, compare it with base and champion, register it, decide.

    Args:
        adapter: as for a merge, trained from the base model of the config.
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    asked, made = load_pending_decision(), None
    if asked is None:
        config = with_local_model(config)
        ref = adapter_model(adapter, config)
        with open_flow_run(config, flow="publish", fresh=fresh and not was_suspended()) as run:
            data, guards = validated_data(run), validate_guards(run)
            base = evaluation_of(run, "base", base_model(run.config), data)
            policy = evaluation_of(run, "adapter", ref, data)
            merged = merge_adapter(run, run.config, ref, data)
            final = evaluation_of(run, "merged", merged.model, data)
            trained = Trained(data=data, merged=merged, evaluations=[base, policy, final], guards=guards)
            asked = SuspendedRun.of(run, config, trained)
            made = _published(run, asked)
    return decide(asked, made, _published, flow="publish")


def _published(run: FlowRun, asked: SuspendedRun) -> Publication:
    made = published(run, asked.trained, asked.tags)
    run.show_links(made)
    return made
