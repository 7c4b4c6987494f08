"""The functions of one_step.py as flows."""

from flows import one_step
from flows.temporary_server import locked_flow

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
