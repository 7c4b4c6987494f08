"""Sharding of weights, gradients and optimizer state over the training processes (FSDP2, torch's fully_shard).

Each decoder layer is a unit that is gathered for its own passes; the rest is one more unit. No card ever holds all of them:

    load      files -> memory of the host -> card, one unit after the other, of which each process keeps its shard
    save      shard -> complete tensor on the card, one after the other -> memory of the host
    vLLM      the same, unit by unit, into a copy of the policy in the memory of the host, where merged weights are wanted
    sample    the exception: the local engine decodes from a complete copy on each card. grpo/sampler.py refuses one too large

All functions here but `shard` are collective: every process has to call them equally often and in the same order. On a model
that is not sharded they change nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_tasks.policy.folded_adapter import CausalLM, FoldedPolicy, LowRankLinear, causal_model, folded_weight, stays_apart

Output = TypeVar("Output")
_METHOD = "pass_through"


def every_process(device: torch.device) -> DeviceMesh:
    """The devices of all processes, which are of one kind."""
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def shard(model: CausalLM, mesh: DeviceMesh) -> None:
    """Distribute the weights of a model (with or without a PEFT adapter) over the devices of all processes, in place.

    From a model in the memory of the host a device gets its shards, and at most one complete unit at a time.
    """
    causal: Any = causal_model(model)
    layers = [module for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
    for unit in [*layers, causal]:
        # It moves the unit's weights to the device, and frees them when it has cut them.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        # The loss is a sum over the completions of all processes, so their gradients are summed; FSDP would average them.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(enable=True)
    # FSDP gathers a unit only around its registered methods. `forward_pass` calls layers and head directly and not through
    # `forward`, so this method gives it a registered entry.
    setattr(causal, _METHOD, lambda work: work())
    register_fsdp_forward_method(causal, _METHOD)


def is_sharded(model: CausalLM) -> bool:
    """True after `shard(model)`."""
    return isinstance(causal_model(model), FSDPModule)


def forward_pass(model: CausalLM, work: Callable[[], Output]) -> Output:
    """Run `work` as one forward pass of the model."""
    if not is_sharded(model):
        return work()
    output: Output = getattr(causal_model(model), _METHOD)(work)
    return output


def gather_shards(tensor: Tensor) -> Tensor:
    """The complete tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, sharded: Tensor) -> Tensor:
    """This process's shard of a complete tensor that every process holds, cut as `sharded` is."""
    if not isinstance(sharded, DTensor):
        return tensor
    # src_data_rank=None: each process takes its shard of its own copy, nothing is sent.
    return distribute_tensor(tensor.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


def sampling_copy(policy: CausalLM, *, fold: bool = False) -> "FoldedPolicy | GatheredPolicy":
    """A copy of the policy to sample from; with `fold`, one whose weights others can load (folded_adapter.py).

    Of a sharded policy it is a complete one: to sample from on the device, for others in the memory of the host.
    """
    if not is_sharded(policy):
        return FoldedPolicy(policy, fold=fold)
    return GatheredPolicy(policy, fold=fold, device=torch.device("cpu") if fold else causal_model(policy).device)


class GatheredPolicy:
    """Holds `model`, a complete plain copy on `device` of the sharded policy as of the last `sync`.

    From the shards decoding would gather every layer for each token: 14 GB for a model of 7 billion weights.
    """

    def __init__(self, policy: CausalLM, *, device: torch.device, fold: bool = False) -> None:
        base: Any = causal_model(policy)
        with torch.device("meta"):
            settings = {"dtype": base.dtype, "attn_implementation": base.config._attn_implementation}
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(base.config, **settings)
        self.model.eval().requires_grad_(False)
        self.model.generation_config = base.generation_config
        for name, source in base.named_modules():
            if isinstance(source, LoraLinear) and not fold and stays_apart(source):
                plain = self.model.get_submodule(name)
                self.model.set_submodule(name, LowRankLinear(source, plain.weight, plain.bias))
        _allocate(self.model, device)
        self._pairs: dict[Any, list[tuple[nn.Module, nn.Module]]] = {}
        for unit, source, twin in _paired(base, self.model, base):
            self._pairs.setdefault(unit, []).append((source, twin))
            # Such as the frequencies of rotary positions. Nothing trains or shards them.
            for name, buffer in source.named_buffers(recurse=False):
                if name in twin._buffers:
                    twin._buffers[name] = buffer.detach().to(device, copy=True)
        self._has_frozen = False
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the trained weights, and the first time the frozen ones."""
        for unit, pairs in self._pairs.items():
            # One unit at a time, so that at most one layer is gathered at a time.
            unit.unshard()
            for source, twin in pairs:
                others = dict(source.named_parameters(recurse=False))
                if isinstance(source, LoraLinear):
                    # The copy has a layer of another kind where the policy has an adapted one.
                    others = {"bias": source.base_layer.bias}
                    if isinstance(twin, LowRankLinear):
                        twin.follow(source)
                        others["weight"] = source.base_layer.weight
                    else:
                        twin.get_parameter("weight").copy_(folded_weight(source))
                for name, parameter in others.items():
                    if parameter is not None and (parameter.requires_grad or not self._has_frozen):
                        getattr(twin, name).copy_(parameter)
            unit.reshard()
        self._has_frozen = True


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give the weights of a model that was made on the meta device memory, tied ones once."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            module._parameters[name] = None if parameter is None else made[id(parameter)]


def _paired(source: nn.Module, twin: nn.Module, unit: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """Yield (FSDP unit that holds the weights, module, its counterpart in the copy), module by module."""
    unit = source if isinstance(source, FSDPModule) else unit
    yield unit, source, twin
    # Below an adapted layer the module trees differ: the copy has no base_layer, lora_A and lora_B.
    if not isinstance(source, LoraLinear):
        for name, child in source.named_children():
            yield from _paired(child, twin.get_submodule(name), unit)
