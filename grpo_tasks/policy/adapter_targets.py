"""Which layers of a model get an adapter, and which do not.

    model.lora --add_adapter--> PeftModel, or an error that names what `target_modules` cannot mean
                PeftModel --uncovered--> a sentence about the weights without an adapter, where somebody may expect one

peft drops a name that matches nothing as long as another one matches, unties tied embeddings only when they are merged, and
adapts layers whose weights Mamba reads without calling the layer. All of these are found here, before the first update.
"""

import difflib
import warnings
from collections.abc import Iterable

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_tasks.policy.folded_adapter import CausalLM
from schemas.config.model import LoraConfig as LoraSettings
from schemas.errors import ConfigError

PLACE = "model.lora.target_modules"
_CALLED = "in_proj"
"""The one linear layer of a Mamba mixer that is always called."""


def add_adapter(base: PreTrainedModel, settings: LoraSettings, rows: dict[str, list[int]] | None = None) -> PeftModel:
    """The base with a new adapter.

    Args:
        base: the base model; it becomes part of the result.
        settings: shape and targets of the adapter.
        rows: trained rows of added tokens, as peft takes them.

    Raises:
        ConfigError: a name in `target_modules` matches no layer, or layers that cannot have an adapter.
    """
    names = [] if settings.target_modules == "all-linear" else settings.target_modules
    modules, bypassed = dict(base.named_modules()), bypassed_layers(base)
    for name in names:
        _check_name(base, name, bypassed)
    unmatched = [name for name in names if not any(_matches(full, name) for full in modules)]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
        exclude_modules=bypassed or None,
        use_rslora=settings.use_rslora,
        trainable_token_indices=rows,
        # GPT-2's layers keep their weights transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
    )
    refused = None
    try:
        with warnings.catch_warnings():
            # peft writes a pattern for the fused experts of a model, and then misses a layer of that name.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            policy = get_peft_model(base, config)
    except ValueError as error:
        refused = str(error).splitlines()[0]
    # What peft has taken out of the names stands for experts, which transformers keeps in one tensor.
    missing = [name for name in unmatched if name in (config.target_modules or ())]
    if missing or refused is not None:
        head = base.get_output_embeddings()
        known = {full for full, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head}
        # For several reasons: experts of which one tensor holds two layers, dropout on experts.
        message = f"{', '.join(missing)}: no layer of the model has this name"
        if refused is not None and "not found" not in refused:
            message = f"peft refuses the adapter: {refused}"
        raise ConfigError(message, place=PLACE, fix=_nearest(missing, sorted({name.rpartition(".")[2] for name in known})))
    assert isinstance(policy, PeftModel)
    return policy


def bypassed_layers(model: nn.Module) -> list[str]:
    """Full names of linear layers and convolutions in Mamba mixers whose weights are read without calling the layer.

    An adapter on one of them would change nothing in one implementation (the fused kernels of a GPU, or x @ dt_proj.weight) and
    something in another, the merged model included.
    """
    # A of the state space and D of its shortcut (arXiv:2312.00752); delta rules have no D.
    mixers = [(name, mixer) for name, mixer in model.named_modules() if hasattr(mixer, "A_log") and hasattr(mixer, "D")]
    return [
        f"{name}.{child}"
        for name, mixer in mixers
        for child, layer in mixer.named_children()
        if isinstance(layer, nn.Linear | nn.Conv1d) and child != _CALLED
    ]


def uncovered(policy: CausalLM, settings: LoraSettings | None) -> str:
    """Which linear layers and experts have no adapter although `target_modules` may mean them; empty when there are none."""
    if settings is None or not isinstance(policy, PeftModel):
        return ""
    base = policy.get_base_model()
    modules, head = dict(base.named_modules()), base.get_output_embeddings()
    layers = {name for name, module in modules.items() if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)}
    # A wrapper holds the adapter of one tensor; several around one module are nested.
    wrapped = {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        for name, module in modules.items()
        if isinstance(module, ParamWrapper)
    }
    plain = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head}
    # Without the parts of adapters.
    plain = {name for name in plain if ".lora_" not in name and name.removesuffix(".base_layer") not in layers}
    if settings.target_modules != "all-linear":
        plain = {name for name in plain if any(_matches(name, target) for target in settings.target_modules)}
    else:
        tensors = {name.replace(".base_layer", "") for name, tensor in base.named_parameters() if tensor.ndim == 3}
        plain |= {name for name in tensors - wrapped if ".experts." in name}
    if not plain:
        return ""
    return f"the adapter is on {_endings(layers | wrapped)}; {_endings(plain)} have none and stay as they are"


def _check_name(model: PreTrainedModel, name: str, bypassed: list[str]) -> None:
    """Refuse a name whose layers cannot have an adapter."""
    found = {full: module for full, module in model.named_modules() if _matches(full, name)}
    if found and all(full in bypassed for full in found):
        raise ConfigError(
            f"{name} cannot have an adapter: Mamba reads its weight without calling the layer", place=PLACE, fix=f"remove {name}"
        )
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[1] is not None and ends[0].weight is ends[1].weight
    if tied and any(module is end for module in found.values() for end in ends):
        raise ConfigError(
            f"{name} cannot have an adapter: the output layer and the embeddings of this model are one weight, and merging the "
            "adapter would change both",
            place=PLACE,
            fix=f"remove {name}; model.lora: null trains all weights, model.added_tokens the rows of new tokens",
        )
    for module in found.values():
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            raise ConfigError(
                f"{name} is no linear layer but {type(module).__name__}, which cannot have an adapter",
                place=PLACE,
                fix=f"remove {name}, or name the linear layers in it",
            )


def _nearest(wanted: Iterable[str], known: list[str]) -> str:
    """The names nearest to the wanted ones, and all names that layers have."""
    near = [match for name in wanted for match in difflib.get_close_matches(name.rpartition(".")[2], known, n=1)]
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}the layers are {', '.join(known)}; or target_modules: all-linear"


def _matches(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _endings(names: Iterable[str]) -> str:
    """The last two parts of names, each once: one of a layer stands for those of all layers."""
    return ", ".join(sorted({".".join(name.split(".")[-2:]) for name in names}))
