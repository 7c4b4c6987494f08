"""Load a model and its tokenizer from a `ModelRef`, with or without an adapter, and save what was trained.

Safetensors only and no remote code: downloaded weights are data and never run as programs.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.sharded import gather_shards, is_sharded
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import ModelRef

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's mallopt (malloc.h)."""


def pick_device(resources: ResourcesConfig) -> torch.device:
    """The device to compute on. Also sets torch's number of threads and its determinism.

    Raises:
        ModelError: resources.device is cuda and no CUDA device is available.
    """
    if resources.num_threads:
        torch.set_num_threads(resources.num_threads)
    if resources.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is available", place="resources.device", fix="resources.device: auto or cpu")
    torch.use_deterministic_algorithms(resources.deterministic, warn_only=True)
    _keep_freed_memory()
    wanted = "cuda" if resources.device == "auto" and torch.cuda.is_available() else resources.device
    return torch.device("cpu" if wanted == "auto" else wanted)


def _keep_freed_memory() -> None:
    """Tell the C library to keep freed memory instead of returning it to the kernel.

    An update allocates the same blocks again and again. Fetching them from the kernel page by page takes a fifth of its time on a
    CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


@contextmanager
def load_errors(what: str, place: str) -> Iterator[None]:
    """Turn whatever a library raises over missing, damaged or unsuitable files into a `ModelError`.

    Args:
        what: what is being loaded, for the message.
        place: the config field or folder, for the message.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, RuntimeError for shapes, ...
        raise ModelError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}", place=place, fix="check its files, or name another model"
        ) from error


def load_tokenizer(ref: ModelRef) -> PreTrainedTokenizerBase:
    """The tokenizer of the base weights: pads on the left, has a pad token and a chat template.

    Raises:
        ModelError: it cannot be loaded, or it has no chat template.
    """
    with load_errors("the tokenizer", f"model.path: {ref.path}"):
        tokenizer = AutoTokenizer.from_pretrained(resolve(ref.path), revision=ref.revision)
    if tokenizer.chat_template is None:
        raise ModelError("the tokenizer has no chat template", place=f"model.path: {ref.path}", fix="use an instruct model")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(
    ref: ModelRef, config: ModelConfig, *, device: torch.device, dtype: str | None = None, quantize: bool = False
) -> PreTrainedModel:
    """The base model in eval mode, without gradients.

    Args:
        ref: names the weights; its adapter is ignored.
        config: precision, attention and quantization.
        device: where the model is placed.
        dtype: overrides the config's dtype.
        quantize: apply the config's quantization.

    Raises:
        ModelError: the weights cannot be loaded.
    """
    with load_errors("the model", f"model.path: {ref.path}"):
        model = AutoModelForCausalLM.from_pretrained(
            resolve(ref.path),
            revision=ref.revision,
            dtype=getattr(torch, dtype or config.dtype),
            attn_implementation=config.attn_implementation,
            use_safetensors=True,
            **(_quantized(config, device) if quantize and config.quantization != "none" else {}),
        )
    if not getattr(model, "is_quantized", False):
        # A quantized model is loaded straight to its device and cannot be moved.
        model = model.to(device)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On a CPU, bitsandbytes repacks the weights in eval mode; no gradient can pass through them afterwards.
            module.support_avx512bf16_for_cpu = False
    return model.eval().requires_grad_(False)


def _quantized(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    kind = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=config.quantization, bnb_4bit_compute_dtype=getattr(torch, config.dtype)
    )
    return {"quantization_config": kind, "device_map": {"": device}}


def load_policy(ref: ModelRef, config: ModelConfig, *, device: torch.device, dtype: str | None = None) -> CausalLM:
    """The base model, with the reference's adapter on top if it has one; for sampling and comparing, not for training.

    Raises:
        ModelError: the weights or the adapter cannot be loaded.
    """
    base = load_base(ref, config, device=device, dtype=dtype)
    if ref.adapter is None:
        return base
    with load_errors("the adapter", str(ref.adapter)):
        return PeftModel.from_pretrained(base, str(ref.adapter)).eval()


def trainable_policy(ref: ModelRef, config: ModelConfig, *, device: torch.device, seed: int) -> CausalLM:
    """The policy that a stage trains. It continues the adapter of the previous stage; a first stage gets a new adapter.

    With `config.lora` null all weights are trained. Trainable weights are float32 whatever the base's precision: many updates are
    too small to change a bfloat16 weight.

    Args:
        ref: base weights, and the adapter of the previous stage.
        config: the adapter's shape, precision and checkpointing.
        device: where the model is placed.
        seed: of a new adapter's weights.

    Raises:
        ModelError: the weights or the adapter cannot be loaded.
    """
    base = load_base(ref, config, device=device, quantize=True)
    if config.lora is None:
        model = base.float().requires_grad_(True)
    elif ref.adapter is not None:
        with load_errors("the adapter", str(ref.adapter)):
            model = PeftModel.from_pretrained(base, str(ref.adapter), is_trainable=True)
    else:
        torch.manual_seed(seed)
        model = get_peft_model(base, _peft_config(config))
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # Below an adapter the embeddings are frozen; without this no input of a checkpointed layer would require gradients.
        model.enable_input_require_grads()
    return model


def compile_layers(model: CausalLM) -> None:
    """Compile the decoder layers with torch.compile, for any batch size and length; they are compiled when they first run."""
    for module in model.modules():
        if type(module).__name__ in (causal_model(model)._no_split_modules or ()):
            module.compile(dynamic=True)


def trained_weights(model: CausalLM) -> dict[str, Tensor] | None:
    """The trained weights by name, gathered from all processes; None where each process holds the complete model.

    Collective: with sharded weights every process has to call it.
    """
    if not is_sharded(model):
        return None
    return {name: gather_shards(parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_trained(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write the trained weights: the adapter alone, or after full fine-tuning the complete model with its tokenizer.

    Args:
        model: the trained model.
        tokenizer: saved with a complete model.
        directory: the folder to write to.
        weights: the weights from `trained_weights`; None takes those of the model.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(str(directory), selected_adapters=["default"], state_dict=weights)
        _order_modules(directory / "adapter_config.json")
    else:
        model.save_pretrained(str(directory), state_dict=weights)
        tokenizer.save_pretrained(str(directory))


def _order_modules(file: Path) -> None:
    """Sort the layer names in adapter_config.json.

    peft writes them in the order of a set, which differs between processes, so the same adapter would have different bytes.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _peft_config(config: ModelConfig) -> LoraConfig:
    lora = config.lora
    assert lora is not None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
    )
