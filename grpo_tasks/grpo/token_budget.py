"""`max_tokens_per_microbatch: auto`: the size of a pass from the memory of the GPU, calculated first and then measured.

The trial is the largest pass that the stage can have, with made-up tokens, before anything is sampled. Its size is calculated
with what is free then: other processes, a server that sleeps and the CUDA context hold memory of the card too. Where it does not
fit, it is repeated with half of the tokens, and below one completion of full length with gradient checkpointing.
"""

import json
import math
from dataclasses import asdict, dataclass, replace

import torch
from transformers import PreTrainedConfig

from grpo_tasks.grpo.policies import Policies
from grpo_tasks.kit.files import replacing
from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.planning.memory_plan import GIB, SERVER, StagePlan, does_not_fit, tokens_that_fit
from grpo_tasks.policy.batch import TokenBatch, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.load import checkpoint_layers
from grpo_tasks.rollout.engine import RolloutEngine
from grpo_tasks.stage.journal import Events
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.stage import StageConfig


class CudaMemory:
    """Memory of a CUDA device in bytes, as torch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = float(torch.cuda.get_device_properties(device).total_memory)

    def begin(self) -> float:
        """Forget the peak so far; returns what is allocated."""
        # A failed trial leaves nothing behind.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return float(torch.cuda.memory_allocated(self._device))

    def peak(self) -> float:
        """The most that was allocated since `begin`."""
        return float(torch.cuda.max_memory_allocated(self._device))

    def usable(self) -> float:
        """What is free, and what this process has allocated."""
        # What the allocator only caches becomes free. What it cannot give back, such as the pools of graphs, is neither.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return float(free + torch.cuda.memory_allocated(self._device))


def device_memory(device: torch.device) -> CudaMemory | None:
    """The memory of a device; None where it does not report it."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Budget:
    """How large the passes of a stage are."""

    calculated: int
    """Tokens of a pass on a card that nothing else uses; another card or another config has another number, and needs another
    trial. What was free is no part of it: a stage that is resumed splits its updates as before."""
    measured: int
    checkpointing: bool
    """The stage needs gradient checkpointing, which its config did not ask for."""


def with_token_budget(spec: StageSpec, policy: CausalLM, prompt_length: int, memory: float | None = None) -> StageConfig:
    """The stage with the number calculated for its longest prompt (tokens) in the place of `auto`.

    Nothing is limited where the device reports no memory (bytes). ModelError where not even one completion fits.
    """
    if spec.stage.max_tokens_per_microbatch != "auto":
        return spec.stage
    found = device_memory(causal_model(policy).device)
    if memory is None and found is not None:
        memory = found.total
    tokens = None if memory is None else tokens_that_fit(_plan(spec, policy, prompt_length, memory))
    return spec.stage.model_copy(update={"max_tokens_per_microbatch": tokens})


def kept_bytes(spec: StageSpec, policy: CausalLM, prompt_length: int) -> float:
    """Bytes of keys and values that the local engine may keep during an update, by the plan; no limit where the device reports
    no memory."""
    memory = device_memory(causal_model(policy).device)
    return math.inf if memory is None else _plan(spec, policy, prompt_length, memory.total).kept_values


def with_measured_budget(
    stage: StageConfig, policies: Policies, directory: StageDir, events: Events, prompt_length: int, engine: RolloutEngine
) -> StageConfig:
    """The stage with the measured number of tokens, where the config says `auto` and the device reports its memory.

    Measured once for a stage, so that one that is resumed splits its updates in the same way. With sharded weights it is
    calculated with what is free, because a rank that runs out of memory would leave the others waiting. ModelError where not even
    one completion of full length fits with gradient checkpointing.
    """
    spec, ranks, memory = policies.spec, policies.ranks, device_memory(policies.ranks.accelerator.device)
    calculated = stage.max_tokens_per_microbatch
    if spec.stage.max_tokens_per_microbatch != "auto" or memory is None or not isinstance(calculated, int):
        return stage
    try:
        known = Budget(**json.loads(directory.token_budget.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = None
    # What one rank has read holds for all: a disk on the network may show the file late.
    budget = ranks.gather(known if known is not None and known.calculated == calculated else None)[0]
    if budget is None:
        # A server on the same card sleeps during an update. It was started awake; it sleeps after it was given weights.
        engine.sync()
        engine.sleep()
        plan, usable = _plan(spec, policies.model, prompt_length, memory.total), memory.usable()
        # A server that stays awake is in the plan already.
        planned = next((item.bytes for item in plan.standing if item.what == SERVER), 0.0)
        plan = replace(plan, taken=max(0.0, memory.total - usable - planned))
        if policies.sharded:
            budget = Budget(calculated, tokens_that_fit(plan), checkpointing=False)
        else:
            budget = _measured(plan, calculated, policies, memory)
        every = ranks.gather(budget)
        if None in every:
            raise does_not_fit(plan)
        tokens, checkpointing = min(one.measured for one in every if one), any(one.checkpointing for one in every if one)
        budget = Budget(calculated, tokens, checkpointing)
        if ranks.writes:
            with replacing(directory.token_budget) as unfinished:
                unfinished.write_text(json.dumps(asdict(budget)), encoding="utf-8")
        added = ", with gradient checkpointing" if checkpointing else ""
        how = "by calculation" if policies.sharded else "by measurement"
        room = f"{(memory.total - plan.taken) / GIB:.1f} of {memory.total / GIB:.1f} GiB are free or in use by this stage"
        detail = f"{tokens} tokens a pass {how}{added}: {room}; {calculated} by calculation for all of it"
        events.report(0, "token_budget", detail)
    if budget.checkpointing:
        checkpoint_layers(policies.model)
    return stage.model_copy(update={"max_tokens_per_microbatch": budget.measured})


def _measured(plan: StagePlan, calculated: int, policies: Policies, memory: CudaMemory) -> Budget | None:
    """None where not even one completion fits, which all ranks have to know."""
    completion = plan.prompt_length + plan.rollout.max_completion_length
    # The layout is chosen before the first pass, and the libraries allocate their buffers in it: with few tokens, which fit.
    try:
        with torch.no_grad():
            policies.scores(_batch(plan, completion, policies))
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    plans = [plan] if plan.model.gradient_checkpointing else [plan, plan.with_checkpointing()]
    for chosen in plans:
        added = chosen is not plan
        if added:
            checkpoint_layers(policies.model)
        tokens = most = chosen.pass_tokens
        while tokens >= completion:
            batch = _batch(plan, tokens, policies)
            taken = _trial(policies, batch, memory)
            if taken is not None:
                fitting = chosen.tokens_within(taken / chosen.update(batch.packed.ids.numel()))
                # What has run fits; what has not run is not trusted above a size that did not fit.
                return Budget(calculated, max(completion, fitting if tokens == most else min(fitting, tokens)), added)
            tokens //= 2
    return None


def _trial(policies: Policies, batch: TokenBatch, memory: CudaMemory) -> float | None:
    """Bytes that a pass takes beyond what stands; None if it does not fit."""
    trained = [parameter for parameter in policies.model.parameters() if parameter.requires_grad]
    try:
        # As in every pass after the first one of an update: gradients are there, and each new one is added to them.
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        standing = memory.begin()
        entropies = policies.spec.stage.entropy_coef > 0
        scores = policies.scores(batch, entropy_gradients=entropies)
        # With gradients, the entropies have to be in the loss: the head computes its chunks again, and what no gradient passes
        # through would be kept up to the end.
        policies.ranks.accelerator.backward((scores.logps + scores.entropies if entropies else scores.logps).sum())
        return memory.peak() - standing
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    finally:
        for parameter in trained:
            parameter.grad = None


def _batch(plan: StagePlan, tokens: int, policies: Policies) -> TokenBatch:
    """Made-up groups of full length with at most so many tokens, and at least one completion."""
    length, size = plan.rollout.max_completion_length, plan.stage.num_generations
    groups, rest = divmod(tokens, plan.prompt_length + size * length)
    count = max(1, groups * size + max(0, rest - plan.prompt_length) // length)
    words = causal_model(policies.model).get_input_embeddings().weight.shape[0]
    prompts = [[place % words for place in range(plan.prompt_length)]] * -(-count // size)
    completions = [[(row + place) % words for place in range(length)] for row in range(count)]
    device = policies.ranks.accelerator.device
    return token_batch(prompts, completions, [row // size for row in range(count)], device=device)


def _plan(spec: StageSpec, policy: CausalLM, prompt_length: int, memory: float) -> StagePlan:
    return plan_of(spec, causal_model(policy).config, prompt_length, memory)


def plan_of(spec: StageSpec, architecture: PreTrainedConfig, prompt_length: int, memory: float) -> StagePlan:
    """The plan of a stage with prompts of so many tokens, on a card of so many bytes."""
    rollout = spec.rollout.model_copy(update={"max_completion_length": spec.max_completion_tokens})
    turn = spec.rollout.max_completion_length if spec.interaction.active else None
    return StagePlan(spec.model, rollout, spec.stage, spec.resources, architecture, prompt_length, memory, turn_length=turn)
