"""`max_tokens_per_microbatch: auto`: the size of a pass from the memory of the GPU."""

import torch

from grpo_tasks.planning.memory_plan import StagePlan, tokens_that_fit
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.stage import StageConfig


def with_token_budget(spec: StageSpec, policy: CausalLM, prompt_length: int, memory: float | None = None) -> StageConfig:
    """The stage with a number in the place of `auto`.

    The number depends on the card and on the config only, not on what else is in its memory now: a stage that is resumed on the
    same kind of card splits its updates in the same way.

    Args:
        spec: the stage.
        policy: the policy that is trained; only its architecture and its device are read.
        prompt_length: longest prompt in tokens.
        memory: bytes of the card; None asks the device. On a CPU nothing is limited.

    Raises:
        ModelError: not even one completion of full length fits.
    """
    if spec.stage.max_tokens_per_microbatch != "auto":
        return spec.stage
    model = causal_model(policy)
    if memory is None and model.device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(model.device).total_memory)
    tokens = None
    if memory is not None:
        plan = StagePlan(spec.model, spec.rollout, spec.stage, spec.resources, model.config, prompt_length, memory)
        tokens = tokens_that_fit(plan)
    return spec.stage.model_copy(update={"max_tokens_per_microbatch": tokens})
