"""Load a model and its tokenizer, and save what was trained. Safetensors only and no remote code: weights are never run."""

import copy
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_tasks.content.model_files import rounds
from grpo_tasks.content.tokenizer import add_tokens, added_tokens, end_token_ids, set_template_defaults, starting_rows, token_id
from grpo_tasks.kit.cards import check_cards
from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.policy.adapter_targets import add_adapter, row_targets, widen
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.lean_layers import predict_only, use_lean_layers
from grpo_tasks.policy.sharded import gather_shards, is_sharded, shard_like
from grpo_tasks.policy.text_tower import PUBLISHED, publish_names, published_start, trained_names
from grpo_tasks.policy.torch_operators import check_operators
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import ModelRef, Sampling

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's mallopt (malloc.h)."""


def pick_device(resources: ResourcesConfig) -> torch.device:
    """The device to compute on; sets torch's threads, determinism and, for a GPU, sums of 16-bit products in float32, all of them
    for this process.

    ModelError where cuda is asked for and not there, where this machine has a GPU that torch cannot use (unless cpu is asked
    for), and for a torch whose operators the engine does not know.
    """
    check_operators()
    if resources.device != "cpu":
        check_cards()
    if resources.num_threads:
        torch.set_num_threads(resources.num_threads)
    if resources.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is available", place="resources.device", fix="resources.device: auto or cpu")
    torch.use_deterministic_algorithms(resources.deterministic, warn_only=True)
    # With deterministic kernels torch also fills new memory, a kernel for each tensor. Nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch sets its type at run time
    if resources.deterministic:
        # cuBLAS reads it when CUDA is first used: products then get the same workspace every time, and so the same algorithm.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if resources.device != "cpu":
        # cuBLAS may cut a sum over many tokens into parts for its processors; it adds them up in float32 then, not in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # The C library keeps freed memory: an update allocates the same blocks again and again, and fetching them from the kernel
    # page by page takes a fifth of its time on a CPU.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)
    if resources.device != "auto":
        return torch.device(resources.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def load_errors(what: str, place: str) -> Iterator[None]:
    """Turn whatever a library raises over missing, damaged or unsuitable files into a `ModelError` that names `what`."""
    try:
        yield
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, RuntimeError for shapes, ...
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}", place=place, fix="check its files, or name another model"
        ) from error


def load_tokenizer(
    ref: ModelRef, config: ModelConfig | None = None, template: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the base weights: pads on the left and has a pad token. ModelError where it cannot be loaded."""
    with load_errors("the tokenizer", f"model.path: {ref.path}"):
        tokenizer = AutoTokenizer.from_pretrained(resolve(ref.path), revision=ref.revision)
    if config is not None and adds_tokens(ref, config):
        add_tokens(tokenizer, added_tokens(config))
    set_template_defaults(tokenizer, template or {})
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def adds_tokens(ref: ModelRef, config: ModelConfig) -> bool:
    """True if `model.added_tokens` apply to these base weights: only to those of the config, not to a model made from them."""
    return bool(config.added_tokens) and ref.path == config.path


def loading_dtype(ref: ModelRef, config: ModelConfig) -> str:
    """The precision of the base weights: model.dtype, or as they were saved where that would round away what they learned."""
    learned = ref.sha256 is not None and ref.adapter is None
    return (rounds(config.dtype, Path(resolve(ref.path))) if learned else None) or config.dtype


def load_base(
    ref: ModelRef,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: str | None = None,
    quantize: bool = False,
    token_seed: int = 0,
) -> PreTrainedModel:
    """The base model in eval mode, without gradients; ModelError where it cannot be loaded. `dtype` overrides `loading_dtype`.

    `token_seed`, the seed of the run, decides the initial embeddings of added tokens; an adapter brings its own.
    """
    model = _from_files(ref, config, device, dtype=dtype or loading_dtype(ref, config), quantize=quantize)
    if adds_tokens(ref, config):
        tokenizer = load_tokenizer(ModelRef(path=ref.path, revision=ref.revision))
        new_ids = add_tokens(tokenizer, added_tokens(config))
        like = starting_rows(tokenizer, added_tokens(config), new_ids)
        widen(model, len(tokenizer), new_ids, seed=token_seed, like=like)
    if not getattr(model, "is_quantized", False):
        # A quantized model is loaded straight to its device and cannot be moved.
        model = model.to(device)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On a CPU, bitsandbytes repacks the weights in eval mode; no gradient can pass through them afterwards.
            module.support_avx512bf16_for_cpu = False
    return model.eval().requires_grad_(False)


def _from_files(ref: ModelRef, config: ModelConfig, device: torch.device, *, dtype: str, quantize: bool) -> PreTrainedModel:
    """The model as transformers loads it, with attention that computes what the model says, and without noise."""
    given: dict[str, Any] = {"revision": ref.revision, "dtype": getattr(torch, dtype), "use_safetensors": True}
    if quantize and config.quantization != "none":
        kind, computing = config.quantization, getattr(torch, config.dtype)
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=computing)
        given |= {"quantization_config": bits, "device_map": {"": device}}
    report(Progress("loading the model"))
    load = partial(AutoModelForCausalLM.from_pretrained, resolve(ref.path), **given)
    with load_errors("the model", f"model.path: {ref.path}"):
        try:
            model = load(attn_implementation=config.attn_implementation)
        except ValueError as error:
            # Some architectures have no code for torch's kernels, and say so before any weight is read.
            if config.attn_implementation != "sdpa" or "scaled_dot_product_attention" not in str(error):
                raise
            model = load(attn_implementation="eager")
    if type(model.config) not in AutoModelForCausalLM._model_mapping:
        # transformers takes the text model out of a wrapper, and cannot load it once it is saved alone (Emu 3, Mllama).
        raise ModelError(
            f"transformers loads {type(model).__name__} from this model and could not load it again after the merge",
            place=f"model.path: {ref.path}",
            fix="name another model",
        )
    with load_errors("the class of the model", f"model.path: {ref.path}"):
        vars(model)[PUBLISHED] = published_start(ref.path, ref.revision)
    # No noise in training but the dropout of the adapter (`lora_dropout`): the sampler has none, so ratios to it would be noise.
    # It is in modules of its own, or in attributes that a layer hands to its attention or to its loop over layers.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(kind in name for kind in ("dropout", "pdrop", "layerdrop")):
                setattr(module, name, 0.0)
    if config.attn_implementation == "sdpa" and getattr(model.config, "attn_logit_softcapping", None):
        # torch's kernels leave the caps out (Gemma 2), and so would compute other numbers without a word.
        model.set_attn_implementation("eager")
    return model


def load_policy(
    ref: ModelRef, config: ModelConfig, *, device: torch.device, dtype: str | None = None, token_seed: int = 0
) -> CausalLM:
    """The base model with the adapter of `ref`, if it has one, for sampling and comparing."""
    base = load_base(ref, config, device=device, dtype=dtype, token_seed=token_seed)
    return base if ref.adapter is None else _over(base, ref.adapter).eval()


def _over(base: PreTrainedModel, adapter: Path, *, is_trainable: bool = False) -> PeftModel:
    """The base with a saved adapter; ModelError where it cannot be loaded, or not all of it."""
    with load_errors("the adapter", str(adapter)):
        names = trained_names(vars(base).get(PUBLISHED))
        policy = PeftModel.from_pretrained(base, str(adapter), is_trainable=is_trainable, key_mapping=names)
        saved = load_peft_weights(str(adapter), device="cpu", key_mapping=names)
        loaded = get_peft_model_state_dict(policy, save_embedding_layers=False)
    # peft only warns of what it does not find again under transformers' renamings of checkpoints (Laguna's shared experts).
    # In addition to its own tensors a file may hold the base's embeddings.
    own = {name: tensor for name, tensor in saved.items() if ".lora_" in name or name in loaded}
    lost = [
        name
        for name, tensor in own.items()
        if name not in loaded or not torch.equal(loaded[name].cpu(), tensor.to(loaded[name].dtype))
    ]
    if lost:
        raise ModelError(
            f"{len(lost)} of the adapter's {len(own)} tensors do not reach the model: {', '.join(lost[:3])}",
            place=str(adapter),
            fix="check that the adapter belongs to this base model; if it does, train one without these layers",
        )
    return policy


def trainable_policy(ref: ModelRef, config: ModelConfig, *, device: torch.device, seed: int, token_seed: int = 0) -> CausalLM:
    """The policy that a stage trains: with the adapter of the previous stage, or a new one whose weights `seed` decides.

    Trained weights are float32 whatever the base's precision: many updates are too small to change a bfloat16 weight.
    """
    base = load_base(ref, config, device=device, quantize=True, token_seed=token_seed)
    if config.lora is not None and ref.adapter is not None:
        return _for_training(_over(base, ref.adapter, is_trainable=True), config)
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(ref, config) if config.added_tokens else None
    # Those that the tokenizer had before are trained as well: somebody named them.
    ids = [token_id(tokenizer, token.token) for token in added_tokens(config)] if tokenizer is not None else []
    return new_policy(base, config, ids)


def new_policy(base: PreTrainedModel, config: ModelConfig, trained_ids: Sequence[int] = ()) -> CausalLM:
    """The base with a new adapter and trained rows of added tokens, or with all weights to be trained."""
    lora = config.lora
    if lora is None:
        return _for_training(base.float().requires_grad_(True), config)
    rows = row_targets(base, list(trained_ids))
    taken = sorted(name for name in rows or () if name.rpartition(".")[2] in lora.target_modules)
    if taken:
        raise ModelError(
            f"{taken[0]} cannot have low-rank matrices and trained rows at once",
            place="model.lora.target_modules",
            fix="leave it out, or remove model.added_tokens",
        )
    return _for_training(add_adapter(base, lora, rows), config)


def _for_training(model: CausalLM, config: ModelConfig) -> CausalLM:
    use_lean_layers(model)
    predict_only(model)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    return model


def checkpoint_layers(model: CausalLM) -> None:
    """Let the layers compute their activations again in the backward pass; the results stay the same."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Below an adapter the embeddings are frozen; without this no input of a checkpointed layer would require gradients.
    model.enable_input_require_grads()


def compile_layers(model: CausalLM) -> None:
    """Compile the decoder layers for any batch size and length, when they first run."""
    for module in model.modules():
        if type(module).__name__ in (causal_model(model)._no_split_modules or ()):
            module.compile(dynamic=True)


def trained_weights(model: CausalLM, *, keep: bool = True) -> dict[str, Tensor] | None:
    """The trained weights in the memory of the host, gathered from all processes, which all call this.

    None where each holds the complete model. Without `keep` this process only helps the others, and gets none of them.
    """
    if not is_sharded(model):
        return None
    gathered = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # One after the other: all of them may not fit on the card.
            whole = gather_shards(parameter.detach())
            if keep:
                gathered[name] = whole.cpu()
    return gathered


def save_trained(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write the trained weights, from `trained_weights` or the model: the adapter, or the complete model with tokenizer."""
    if isinstance(model, PeftModel):
        # peft would add all embeddings of a model with more tokens than its files; the trained rows are in the adapter.
        embeddings = False if trains_rows(model) else "auto"
        model.save_pretrained(str(directory), selected_adapters=["default"], state_dict=weights, save_embedding_layers=embeddings)
        start = vars(model.get_base_model()).get(PUBLISHED)
        if start is not None:
            publish_names(directory, start)
        order_modules(directory / "adapter_config.json")
    else:
        model.save_pretrained(str(directory), state_dict=weights)
        tokenizer.save_pretrained(str(directory))


@torch.no_grad()
def load_trained(model: CausalLM, directory: Path) -> None:
    """Give a model the weights that `save_trained` wrote of it; all ranks call this. ModelError where one of them is not there.

    Their names in files may be others than in the model: those of the published class, or of experts that are saved one by one.
    """
    if isinstance(model, PeftModel):
        with load_errors("the adapter", str(directory)):
            names = trained_names(vars(model.get_base_model()).get(PUBLISHED))
            saved = load_peft_weights(str(directory), device="cpu", key_mapping=names)
        present = get_peft_model_state_dict(model, save_embedding_layers=False if trains_rows(model) else "auto")
    else:
        with load_errors("the model", str(directory)):
            saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, use_safetensors=True).state_dict()
        present = model.state_dict()
    missing = sorted(present.keys() - saved.keys())
    if missing:
        raise ModelError(
            f"{len(missing)} weights are missing: {', '.join(missing[:3])}",
            place=str(directory),
            fix="remove the folder of the stage to train it again",
        )
    for name, tensor in present.items():
        tensor.copy_(shard_like(saved[name], tensor))


def generation_of(model: CausalLM, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> GenerationConfig:
    """How transformers and vLLM generate by default with a model of this training: drawn as it was, ended where it did.

    Of the base's settings only tokens, lengths and the kind of cache are left. No engine of a training applies the others, such
    as a penalty, suppressed or forced tokens: they would change what the policy says.
    """
    given = model.generation_config
    named = given.eos_token_id
    ends = end_token_ids(tokenizer, named) | {
        token if isinstance(token, int) else token_id(tokenizer, token) for token in sampling.stop_token_ids
    }
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        bos_token_id=given.bos_token_id,
        # Every token that ends a turn, so that generate() stops where we do.
        eos_token_id=named if ends <= {*(named if isinstance(named, list) else [named])} else sorted(ends),
        pad_token_id=given.pad_token_id,
        max_length=given.max_length,
        max_new_tokens=given.max_new_tokens,
        cache_implementation=given.cache_implementation,
    )


def order_modules(file: Path) -> None:
    """Sort the layer names in adapter_config.json, whose order differs between processes: one adapter has one form in bytes."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for name in ("target_modules", "target_parameters", "exclude_modules"):
        if isinstance(config.get(name), list):
            config[name].sort()
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def trains_rows(model: PeftModel) -> bool:
    """True if the adapter has trained rows of added tokens."""
    config: Any = model.peft_config["default"]
    return config.trainable_token_indices is not None


def save_for_server(model: PreTrainedModel, directory: Path, *, untie: bool) -> None:
    """Write a model without an adapter for a rollout server; with `untie` the output layer apart from tied embeddings.

    vLLM on a CPU multiplies with a packed copy of the output layer, and reloads it only if the layer has a weight of its own in
    the files.
    """
    if not (untie and model.config.tie_word_embeddings):
        model.save_pretrained(str(directory))
        return
    directory.mkdir(parents=True, exist_ok=True)
    config, head = copy.deepcopy(model.config), model.get_output_embeddings()
    config.tie_word_embeddings, config.architectures, config.dtype = False, [type(model).__name__], model.dtype
    config.save_pretrained(str(directory))
    model.generation_config.save_pretrained(str(directory))
    # Of tied weights, state_dict lists both names; safetensors stores each of them only if they share no memory.
    names = {id(module): name for name, module in model.named_modules()}
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    weights[f"{names[id(head)]}.weight"] = head.weight.detach().clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def save_plain(
    ref: ModelRef,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    token_seed: int,
    untie: bool = False,
) -> None:
    """Write the model that a server starts with: complete with its added tokens and with its adapter merged."""
    policy = load_policy(ref, config, device=torch.device("cpu"), token_seed=token_seed)
    model = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    save_for_server(model, directory, untie=untie)
    tokenizer.save_pretrained(str(directory))
