"""Weights, gradients and optimizer state spread over the processes that train together (FSDP2, torch's fully_shard).

    shard(model)         each decoder layer is gathered for its own passes; embeddings and head are one unit more
    forward_pass(...)    work that goes through the layers and the head by itself, with the shards of the unit around it gathered
    gather_shards(), shard_like()      a tensor out of its shards, for a checkpoint, and back
    GatheredPolicy       a whole copy to sample from, taken over unit by unit

All of it is collective: every process has to come here the same number of times. Without sharding everything is the identity.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_tasks.policy.folded_adapter import CausalLM, FoldedPolicy, causal_model, folded_weight

Made = TypeVar("Made")
_METHOD = "pass_through"


def shard(model: CausalLM) -> None:
    """Spread the weights of a model (with or without a PEFT adapter) over all processes, in place."""
    causal: Any = causal_model(model)
    mesh = init_device_mesh(causal.device.type, (torch.distributed.get_world_size(),))
    layers = [module for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
    for unit in [*layers, causal]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        # Losses are sums over all completions of an update, so gradients are added up and never averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(enable=True)
    setattr(causal, _METHOD, lambda work: work())
    register_fsdp_forward_method(causal, _METHOD)


def is_sharded(model: CausalLM) -> bool:
    """Whether `shard` was here."""
    return isinstance(causal_model(model), FSDPModule)


def forward_pass(model: CausalLM, work: Callable[[], Made]) -> Made:
    """`work()`, which returns tensors, as one forward pass of the model."""
    if not is_sharded(model):
        return work()
    made: Made = getattr(causal_model(model), _METHOD)(work)
    return made


def gather_shards(tensor: Tensor) -> Tensor:
    """The tensor itself, put together when it is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, spread: Tensor) -> Tensor:
    """A whole tensor, that every process has, spread as `spread` is."""
    if not isinstance(spread, DTensor):
        return tensor
    return distribute_tensor(tensor.to(spread.device), spread.device_mesh, spread.placements, src_data_rank=None)


def sampling_copy(policy: CausalLM) -> "FoldedPolicy | GatheredPolicy":
    """What completions are sampled from: the policy with its adapter folded in."""
    return GatheredPolicy(policy) if is_sharded(policy) else FoldedPolicy(policy)


class GatheredPolicy:
    """Holds `model`, a whole plain causal model equal to the spread policy (adapter folded in) as of the last `sync`."""

    def __init__(self, policy: CausalLM) -> None:
        base: Any = causal_model(policy)
        settings = {"dtype": base.dtype, "attn_implementation": base.config._attn_implementation}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(base.config, **settings).to(base.device)
        self.model.eval().requires_grad_(False)
        self.model.generation_config = base.generation_config
        self._pairs: dict[Any, list[tuple[nn.Module, nn.Module]]] = {}
        for unit, source, twin in _paired(base, self.model, base):
            self._pairs.setdefault(unit, []).append((source, twin))
        self._holds_frozen = False
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Take over what is trained; what is frozen only once."""
        for unit, pairs in self._pairs.items():
            unit.unshard()
            for source, twin in pairs:
                self._take_over(source, twin)
            unit.reshard()
        self._holds_frozen = True

    def _take_over(self, source: nn.Module, twin: Any) -> None:
        if isinstance(source, LoraLinear):
            twin.weight.copy_(folded_weight(source))
            left = {"bias": source.base_layer.bias}
        else:
            left = dict(source.named_parameters(recurse=False))
        for name, parameter in left.items():
            if parameter is not None and (parameter.requires_grad or not self._holds_frozen):
                getattr(twin, name).copy_(parameter)


def _paired(source: nn.Module, twin: nn.Module, unit: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """(unit that holds the weights, module, its like in the copy)."""
    unit = source if isinstance(source, FSDPModule) else unit
    yield unit, source, twin
    if not isinstance(source, LoraLinear):
        for name, child in source.named_children():
            yield from _paired(child, twin.get_submodule(name), unit)
