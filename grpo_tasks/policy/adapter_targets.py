"""Which layers of a model get an adapter, and which rows of its embeddings are trained.

peft drops a name that matches nothing as long as another one matches, unties tied embeddings only when they are merged, adapts
layers whose weights a model reads without calling the layer, and renames some layers when it loads what it saved. All of these
are found here, before the first update.

peft keeps the trained rows of added tokens by themselves (`trainable_token_indices`): the base stays as it is, and the adapter
stays small. Where the output layer is tied to the embeddings, both read the same trained rows.
"""

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.policy.folded_adapter import CausalLM
from schemas.config.model import LoraConfig as LoraSettings
from schemas.errors import ConfigError, ModelError

PLACE = "model.lora.target_modules"
_CALLED = "in_proj"
"""The one linear layer of a Mamba mixer that is always called."""
_ROW = 16
"""Tokens of the row that shows which layers a model calls."""
NOISE = 0.02
"""Standard deviation of the noise on new rows, as a share of that of the other rows."""


def add_adapter(base: PreTrainedModel, settings: LoraSettings, rows: dict[str, list[int]] | None = None) -> PeftModel:
    """The base with a new adapter, and with trained rows as peft takes them. ConfigError for wrong `target_modules`."""
    unfit = unfit_layers(base)
    policy = _added(base, settings, rows, unfit)
    lost = set[str]()
    if policy.device.type != "meta":
        # peft applies transformers' renamings of checkpoints to the names of an adapter, and some match twice (Laguna): it then
        # does not find again what it saved.
        result = set_peft_model_state_dict(policy, get_peft_model_state_dict(policy, save_embedding_layers=False))
        lost = {name.partition(".lora_")[0] for name in result.missing_keys if ".lora_" in name}
    if lost:
        reason = "peft loses what it saved for it"
        unfit |= {name.removeprefix("base_model.model."): reason for name in sorted(lost)}
        policy = _added(policy.unload(), settings, rows, unfit)
    # Adapters on layers that share one weight are trained alone, and the merge would add both to it.
    by_weight: dict[int, list[str]] = {}
    for name, module in policy.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
            by_weight.setdefault(id(module.get_base_layer().weight), []).append(name)
    shared = next((names for names in by_weight.values() if len(names) > 1), None)
    if shared is not None:
        alone = sorted({names[0].rpartition(".")[2] for names in by_weight.values() if len(names) == 1})
        raise ConfigError(
            f"{' and '.join(shared)} share one weight, and merging would add the adapters of both to it",
            place=PLACE,
            fix=f"name layers with weights of their own: {', '.join(alone)}" if alone else "model.lora: null, or another model",
        )
    return policy


def _added(base: PreTrainedModel, settings: LoraSettings, rows: dict[str, list[int]] | None, unfit: dict[str, str]) -> PeftModel:
    names = [] if settings.target_modules == "all-linear" else settings.target_modules
    modules = dict(base.named_modules())
    for name in names:
        _check_name(base, name, unfit)
    unmatched = [name for name in names if not any(_matches(full, name) for full in modules)]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
        exclude_modules=list(unfit) or None,
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
        full = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head]
        known = sorted({name.rpartition(".")[2] for name in full})
        # For several reasons: experts of which one tensor holds two layers, dropout on experts.
        message = f"{', '.join(missing)}: no layer of the model has this name"
        if refused is not None and "not found" not in refused:
            message = f"peft refuses the adapter: {refused}"
        near = [match for name in missing for match in difflib.get_close_matches(name.rpartition(".")[2], known, n=1)]
        meant = f"did you mean {', '.join(near)}? " if near else ""
        fix = f"{meant}the layers are {', '.join(known)}; or target_modules: all-linear"
        raise ConfigError(message, place=PLACE, fix=fix)
    assert isinstance(policy, PeftModel)
    return policy


def unfit_layers(model: PreTrainedModel) -> dict[str, str]:
    """Full names of linear layers and convolutions on which an adapter would not do what it says, and why."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    called = _called_layers(model, layers)
    unfit = {name: "the model does not call it for text" for name in layers if called is not None and name not in called}
    unfit |= {name: "it computes more than W x + b" for name, plain in (called or {}).items() if not plain}
    # A of the state space and D of its shortcut (arXiv:2312.00752); delta rules have no D. The fused kernels of a GPU read the
    # weights of layers that a CPU calls.
    mixers = [(name, mixer) for name, mixer in model.named_modules() if hasattr(mixer, "A_log") and hasattr(mixer, "D")]
    return unfit | {
        f"{name}.{child}": "Mamba reads its weight without calling the layer"
        for name, mixer in mixers
        for child, layer in mixer.named_children()
        if isinstance(layer, nn.Linear | nn.Conv1d) and child != _CALLED
    }


@torch.no_grad()
def _called_layers(model: PreTrainedModel, layers: dict[str, nn.Module]) -> dict[str, bool] | None:
    """The layers that a training pass over text calls, and whether each computes W x + b; None where the pass fails.

    It calls none of a vision tower, and the router of a mixture of experts may return more (PhiMoE, Llama 4).
    """
    found: dict[str, bool] = {}

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            found[name] = found.get(name, True) and _is_plain(module, given, out)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in layers.items()]
    was_training = model.training
    try:
        model.train()
        words = len(model.get_input_embeddings().weight)
        model(input_ids=torch.arange(_ROW, device=model.device)[None] % words, use_cache=False)
    except Exception as error:  # on the meta device, or where training wants more than text: the forward check says it better
        if is_out_of_memory(error):
            raise
        return None
    finally:
        model.train(was_training)
        for handle in hooks:
            handle.remove()
    return found


def _is_plain(module: Any, given: tuple[Any, ...], out: Any) -> bool:
    """True if a linear layer returned W x + b; of weights that are packed or have no values, the shape alone is compared."""
    if not isinstance(out, Tensor) or not given:
        return False
    transposed = isinstance(module, Conv1D)
    wide = module.nf if transposed else module.out_features
    if out.shape != (*given[0].shape[:-1], wide):
        return False
    weight = module.weight.T if transposed else module.weight
    if weight.device.type == "meta" or weight.shape != (wide, given[0].shape[-1]) or not weight.is_floating_point():
        return True
    wanted = linear(given[0], weight, module.bias).float()
    return bool((out.float() - wanted).abs().mean() <= 0.05 * wanted.abs().mean())


def uncovered(policy: CausalLM, settings: LoraSettings | None) -> str:
    """A sentence on linear layers and experts that have no adapter although `target_modules` may mean them, or nothing."""
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


def _check_name(model: PreTrainedModel, name: str, unfit: dict[str, str]) -> None:
    """Refuse a name whose layers cannot have an adapter."""
    found = {full: module for full, module in model.named_modules() if _matches(full, name)}
    if found and all(full in unfit for full in found):
        raise ConfigError(f"{name} cannot have an adapter: {unfit[next(iter(found))]}", place=PLACE, fix=f"remove {name}")
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


def _matches(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _endings(names: Iterable[str]) -> str:
    # One of a layer stands for those of all layers.
    return ", ".join(sorted({".".join(name.split(".")[-2:]) for name in names}))


@torch.no_grad()
def widen(
    model: PreTrainedModel, vocab_size: int, new_ids: Sequence[int], *, seed: int, like: Mapping[int, Sequence[int]] | None = None
) -> None:
    """Make room for `vocab_size` tokens and give the rows of `new_ids` their initial values, in place.

    A new row is the mean of the known ones, or of those that `like` names for it, plus a little noise, so that new tokens differ.
    """
    if not new_ids:
        return
    known = min(new_ids)
    embedding: Any = model.get_input_embeddings()
    if vocab_size > len(embedding.weight):
        # Without transformers' own initial values: they come from a random generator whose state we do not control.
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    layers: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    # There may be no output layer, or one that is tied.
    for weight in {id(layer.weight): layer.weight for layer in layers if layer is not None}.values():
        # float32: a sum over 150,000 rows in bfloat16 would be far off.
        rows = weight[:known].float()
        noise = torch.randn(len(new_ids), rows.shape[1], generator=torch.Generator().manual_seed(seed))
        average, starts = rows.mean(0), like or {}
        means = [rows[list(starts[number])].mean(0) if number in starts else average for number in new_ids]
        values = torch.stack(means) + NOISE * rows.std(0) * noise.to(rows.device)
        weight[torch.tensor(new_ids, device=weight.device)] = values.to(weight.dtype)


def row_targets(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """The rows to train by the name of their layer, for peft. ModelError where the output layer has a bias."""
    if not ids:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            "the rows of added tokens cannot be trained next to a bias of the output layer",
            place="model.added_tokens",
            fix="model.lora: null",
        )
    names = {id(module): name for name, module in model.named_modules()}
    # With tied weights peft lets the output layer read the rows of the embeddings.
    layers = [embedding] if model.config.tie_word_embeddings or head is None else [embedding, head]
    return {names[id(layer)]: sorted(ids) for layer in layers}
