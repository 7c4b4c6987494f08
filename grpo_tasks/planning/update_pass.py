"""One forward and backward pass of an update, counted on the meta device: the real model, the real code, no numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from grpo_tasks.planning.live_memory import MASKED, LiveMemory, cuda_kernels
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.load import new_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from schemas.config.model import ModelConfig

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Groups:
    """Prompts of so many tokens, each with completions of so many tokens."""

    prompts: Sequence[int]
    completions: Sequence[Sequence[int]]
    """Lengths of the completions, prompt by prompt."""

    @classmethod
    def equal(cls, prompts: int, prompt_length: int, group_size: int, completion_length: int) -> "Groups":
        """Groups of one shape."""
        return cls([prompt_length] * prompts, [[completion_length] * group_size] * prompts)

    @property
    def tokens(self) -> int:
        """Tokens that count: the prompts once, and each completion without its last token, which predicts nothing."""
        return sum(self.prompts) + sum(length - 1 for group in self.completions for length in group)


@dataclass(frozen=True, slots=True)
class PassCounts:
    """What one pass needs on CUDA, beyond the weights."""

    tokens: int
    """Tokens that went through the model, padding included."""
    saved: int
    """Bytes kept for the backward pass, gradient of the head included."""
    peak: int
    """The most bytes that lived at once, in the forward or in the backward pass, besides the gradients."""
    kernels: int
    """Operations that are no views, forward and backward."""
    attention: Mapping[str, int]
    """Attention calls of the forward passes by the kernel asked for, those with a dense mask apart (`AttentionCalls`)."""

    @property
    def masks(self) -> int:
        """Attention calls with a dense mask."""
        return sum(count for kernel, count in self.attention.items() if kernel.endswith(MASKED))


def meta_policy(architecture: PreTrainedConfig, config: ModelConfig) -> CausalLM:
    """A policy of that architecture in training mode, without numbers.

    Args:
        architecture: transformers' config of the model.
        config: precision, adapter and checkpointing; quantization is ignored.
    """
    with META:
        dtype = getattr(torch, config.dtype)
        base = AutoModelForCausalLM.from_config(architecture, dtype=dtype, attn_implementation=config.attn_implementation)
        return new_policy(base.requires_grad_(False), config).train()


def count_pass(policy: CausalLM, groups: Groups, *, temperature: float = 1.0) -> PassCounts:
    """Run a pass over the groups on the meta device, with the kernels of CUDA.

    Raises:
        RuntimeError: the code waits for a number, which a GPU would have to be asked for.
    """
    lengths = [length for group in groups.completions for length in group]
    # Different from the first token on: completions that begin alike would have less to compute.
    completions = [[index] * length for index, length in enumerate(lengths)]
    prompt_of = [prompt for prompt, group in enumerate(groups.completions) for _ in group]
    batch = token_batch([[0] * length for length in groups.prompts], completions, prompt_of, device=META)
    for parameter in policy.parameters():
        # As in every pass after the first one of an update: gradients are there, and each new one is added to them.
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    through: list[int] = []
    embeddings = causal_model(policy).get_input_embeddings()
    watch = embeddings.register_forward_pre_hook(lambda _, given: through.append(given[0].numel()))
    try:
        with cuda_kernels() as calls, LiveMemory() as memory:
            logps = completion_logprobs(policy, batch, temperature=temperature).logps
            saved = memory.now
            logps.sum().backward()
    finally:
        watch.remove()
    return PassCounts(sum(through), saved, memory.peak, memory.kernels, calls.found)
