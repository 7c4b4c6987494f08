"""What to say about an unknown key: the field that was meant, wherever in the tree it belongs, or why there is none."""

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from schemas.config.run import RunConfig

_MOST_PLACES = 3

OURS: dict[str, str] = {
    # the model
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "model_id": "model.path",
    "base": "model.path",
    "start_from": "model.path",
    "model_init_kwargs": "section model: dtype, revision, attn_implementation, quantization",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: float16",
    "load_in_4bit": "model.quantization: nf4",
    "peft_config": "model.lora: {r: 16, lora_alpha: 32}",
    "use_peft": "model.lora (null trains every weight)",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "rank": "model.lora.r",
    "lora_target_modules": "model.lora.target_modules",
    # data and rewards
    "train_dataset": "data.train: [{path: FILE}]",
    "eval_dataset": "data.eval: [{path: FILE}]",
    "dataset_name": "data.train: [{path: OWNER/NAME}]",
    "dataset": "data.train: [{path: FILE}]",
    "dataset_config": "name of an item of data.train",
    "answer": "data.answer_column",
    "reward_funcs": "stages[].rewards",
    "reward_functions": "rewards.functions, and their names in stages[].rewards",
    "reward_weights": "rewards.functions.NAME.weight",
    "max_seq_length": "validation.max_prompt_length and rollout.max_completion_length",
    # sampling
    "max_new_tokens": "rollout.max_completion_length",
    "generation_kwargs": "section rollout: temperature, top_p, top_k, stop",
    "use_vllm": "rollout.engine: vllm",
    "overlap": "rollout.max_staleness: 1",
    "vllm_mode": "rollout.engine: vllm (we start its server; rollout.vllm.base_urls names running ones)",
    "vllm_enable_sleep_mode": "rollout.vllm.sleep",
    "vllm_server_base_url": "rollout.vllm.base_urls: [URL]",
    "vllm_server_host": "rollout.vllm.base_urls: [http://HOST:PORT]",
    "vllm_server_port": "rollout.vllm.base_urls: [http://HOST:PORT]",
    "vllm_server_timeout": "rollout.vllm.start_timeout_s",
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_max_model_length": "rollout.vllm.max_model_len",
    "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "vllm_importance_sampling_correction": "stages[].importance_sampling_correction",
    "vllm_importance_sampling_mode": "stages[].importance_sampling_correction",
    "vllm_importance_sampling_clip_max": "stages[].importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "stages[].importance_sampling_clip_min",
    "vllm_importance_sampling_cap": "stages[].importance_sampling_clip_max",
    # training
    "generation_batch_size": "stages[].per_device_train_batch_size x gradient_accumulation_steps x steps_per_generation",
    "max_epochs": "stages[].num_train_epochs",
    "epochs": "stages[].num_train_epochs",
    "lr": "stages[].learning_rate",
    "kl_coef": "stages[].beta",
    "tf32": "model.dtype: bfloat16",
    "use_cpu": "resources.device: cpu",
    "no_cuda": "resources.device: cpu",
    "torch_compile": "resources.compile",
    "use_liger_kernel": "resources.fuse_kernels (our own kernels; on by default)",
    "full_determinism": "resources.deterministic",
    "data_seed": "seed",
    "fsdp_config": "resources.fsdp: true",
    "ddp_timeout": "resources.distributed_timeout_minutes",
    # evaluation and records
    "num_generations_eval": "evaluation.num_samples",
    "do_eval": "stages[].eval_steps (held-out evaluation of the base and the merged model is always made)",
    "eval_strategy": "stages[].eval_steps",
    "evaluation_strategy": "stages[].eval_steps",
    "metric_for_best_model": "stages[].load_best_model_at_end (it goes by the held-out reward)",
    "save_strategy": "stages[].save_steps",
    "logging_strategy": "stages[].logging_steps",
    "logging_dir": "tracking.tracking_uri",
    "report_to": "tracking.tracking_uri (MLflow is the only tracker)",
    "run_name": "name",
    "project": "tracking.experiment",
    "log_completions": "stages[].log_completions_steps (completions are always kept)",
    "push_to_hub": "tracking.registered_model (models go to the MLflow registry; grpo download fetches one)",
    "hub_model_id": "tracking.registered_model",
    "early_stopping": "stages[].early_stop or stages[].early_stopping_patience",
}
"""Foreign name -> our field, with the value where that says more."""
_SPEED = "the engine chooses this itself"
_MAPPED = "only the second engine can: stages[].engine: trl, and this name under stages[].trl"
_NO_LOADER = "rows are read once into memory, so there is no data loader to tune"
_NO_HUB = "models are published to the MLflow registry, not to the hub"
_REPORT = "metrics, completions and figures are recorded in full in MLflow"
_ONE_LOSS = "GRPO has no labels"
_LAUNCH = "resources.num_processes and resources.fsdp describe the machine; other distributed settings do not exist"
_TRACKIO = "MLflow is the only tracker"
_HELD_OUT = "the sections evaluation and stages[].eval_steps describe held-out evaluation completely"
_RESUME = "the same command resumes a run by itself"
_REFERENCE = "stages[].reference chooses between the base model and the model at the start of a stage"
NOTHING: dict[str, str] = {
    "load_in_8bit": "4-bit is the only quantization: model.quantization: nf4",
    "trust_remote_code": "code of a model repository is never executed",
    "router_aux_loss_coef": _MAPPED,
    "disable_dropout": "dropout of the base model is always off; model.lora.lora_dropout is the adapter's",
    "cast_lm_head_to_fp32": "log-probabilities are always computed in float32",
    "remove_unused_columns": "reward functions get every column",
    "ds3_gather_for_generation": _LAUNCH,
    "shuffle_dataset": "prompts are always shuffled, by seed",
    "pad_to_multiple_of": _SPEED,
    "cache_implementation": _SPEED,
    "use_transformers_continuous_batching": _SPEED,
    "transformers_continuous_batching_config": _SPEED,
    "use_transformers_paged": _SPEED,
    "vllm_model_impl": "rollout.vllm.extra_args passes options to vLLM",
    "vllm_structured_outputs_regex": "constrained sampling would hide from the reward what the policy does",
    "vllm_group_port": "weights reach vLLM as adapters or files, not over a port",
    "vespo_k_pos": _MAPPED,
    "vespo_lambda_pos": _MAPPED,
    "vespo_k_neg": _MAPPED,
    "vespo_lambda_neg": _MAPPED,
    "sync_ref_model": _REFERENCE,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "use_adaptive_entropy": _MAPPED,
    "entropy_coef_min": _MAPPED,
    "entropy_coef_max": _MAPPED,
    "entropy_coef_delta": _MAPPED,
    "entropy_target": _MAPPED,
    "max_tool_calling_iterations": "there is no tool calling; rollout.stop ends a completion at a tool's tag",
    "log_multimodal": "prompts are text",
    "num_completions_to_print": "grpo completions shows them",
    "log_unique_prompts": _REPORT,
    "log_completions_hub_repo": _NO_HUB,
    "lr_scheduler_kwargs": "the schedules have no further settings",
    "torch_empty_cache_steps": _SPEED,
    "optim_args": "adam_beta1, adam_beta2, adam_epsilon and weight_decay are the optimizer's settings",
    "optim_target_modules": "model.lora.target_modules chooses what is trained",
    "average_tokens_across_devices": "stages[].loss_type says how the loss is averaged",
    "label_smoothing_factor": _ONE_LOSS,
    "label_names": _ONE_LOSS,
    "bf16_full_eval": "evaluation has the precision of model.dtype",
    "fp16_full_eval": "evaluation has the precision of model.dtype",
    "gradient_checkpointing_kwargs": "model.gradient_checkpointing is on or off",
    "torch_compile_backend": "resources.compile is on or off",
    "torch_compile_mode": "resources.compile is on or off",
    "liger_kernel_config": _SPEED,
    "use_cache": _SPEED,
    "neftune_noise_alpha": "noise on the embeddings is not supported",
    "auto_find_batch_size": "stages[].max_tokens_per_microbatch bounds the memory of a pass",
    "logging_first_step": "the journal has every update",
    "log_on_each_node": _REPORT,
    "logging_nan_inf_filter": "guards.not_finite decides what follows a value that is not finite",
    "include_num_input_tokens_seen": _REPORT,
    "log_level": "GRPO logs the same lines always",
    "log_level_replica": "GRPO logs the same lines always",
    "disable_tqdm": "the progress bar shows itself in a terminal only",
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "eval_delay": _HELD_OUT,
    "per_device_eval_batch_size": "rollout.max_batch_size bounds a sampling batch",
    "prediction_loss_only": _HELD_OUT,
    "eval_on_start": _HELD_OUT,
    "eval_do_concat_batches": _HELD_OUT,
    "eval_use_gather_object": _HELD_OUT,
    "eval_accumulation_steps": _HELD_OUT,
    "include_for_metrics": _HELD_OUT,
    "batch_eval_metrics": _HELD_OUT,
    "save_only_model": "a checkpoint always holds what an exact resume needs",
    "save_on_each_node": "all processes share one stage folder",
    "enable_jit_checkpoint": "resources.max_hours ends a stage with a checkpoint",
    "hub_token": "a config is recorded, so it holds no secret; export HF_TOKEN",
    "hub_private_repo": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "hub_always_push": _NO_HUB,
    "hub_revision": _NO_HUB,
    "greater_is_better": "the held-out reward decides, and more is better",
    "ignore_data_skip": _RESUME,
    "restore_callback_states_from_checkpoint": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "accelerator_config": _LAUNCH,
    "parallelism_config": _LAUNCH,
    "deepspeed": _LAUNCH,
    "local_rank": _LAUNCH,
    "ddp_find_unused_parameters": _LAUNCH,
    "ddp_bucket_cap_mb": _LAUNCH,
    "ddp_broadcast_buffers": _LAUNCH,
    "ddp_static_graph": _LAUNCH,
    "ddp_backend": _LAUNCH,
    "dataloader_drop_last": _NO_LOADER,
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "train_sampling_strategy": _NO_LOADER,
    "length_column_name": _NO_LOADER,
    "debug": "grpo trace follows one row through a run",
    "skip_memory_metrics": _REPORT,
    "do_train": "grpo run trains; grpo validate, rewards and evaluate do not",
    "do_predict": "grpo evaluate evaluates a model",
}
"""Foreign name -> why there is no such setting, and what comes closest."""

GONE: dict[str, str] = {
    "tracking.webhook": "MLflow's server sends signed webhooks itself; examples/webhook registers one",
    "tracking.flush_interval_s": "a stage's journal is sent every 5 seconds",
    "rewards.functions.NAME.adaptive.shrink": "a weight shrinks by a tenth where success is common",
    "rewards.functions.NAME.adaptive.min_scale": "a weight stays at a quarter of the configured one or more",
    "rewards.functions.NAME.adaptive.max_scale": "a weight stays at four times the configured one or less",
    "rewards.functions.NAME.judge.max_call_s": "a judge has two hours for a batch; max_outage_s limits the wait for its endpoint",
}
"""Place of the setting -> what to do instead."""


def hint_for(location: Sequence[Any]) -> str:
    """The hint for the unknown key at the end of `location`, a path such as ("stages", 0, "bf16")."""
    key, here = str(location[-1]), keys_at(location[:-1])
    if key in OURS:
        return f"here it is {OURS[key]}"
    # In model.lora, alpha is lora_alpha and not promotion.alpha.
    if longer := [name for name in here if name.endswith(f"_{key}")]:
        return f"did you mean {longer[0]}?"
    if places := places_of(key):
        return f"it belongs to {_shown(places)}"
    if key in NOTHING:
        return f"it has no equivalent: {NOTHING[key]}"
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.5)
    elsewhere = difflib.get_close_matches(key, all_fields(), n=1, cutoff=0.8)
    if elsewhere and (not near or _alike(key, elsewhere[0]) > _alike(key, near[0])):
        return f"did you mean {_shown(places_of(elsewhere[0]))}?"
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(here)}"


def _alike(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def hint_for_value(location: Sequence[Any], value: object) -> str:
    """What to write instead of a value that TRL accepts for the field at `location` and we do not; empty for any other value."""
    field = str(location[-1]) if location else ""
    if field == "max_steps" and isinstance(value, int) and value <= 0:
        return "leave max_steps out: num_train_epochs then decides"
    if field == "scale_rewards" and isinstance(value, bool):
        return "scale_rewards: group" if value else "scale_rewards: none"
    if field == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"warmup_ratio: {value}"
    if field == "top_k" and value in (-1, None):
        return "top_k: 0"
    return ""


def keys_at(location: Sequence[Any]) -> list[str]:
    """The fields of the section at `location`; empty when it is no section."""
    model: type[BaseModel] | None = RunConfig
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = section_in(model.model_fields[part].annotation)[0]
    return list(model.model_fields) if model is not None else []


def places_of(field: str) -> list[str]:
    """Where in the tree a field or a section of this name stands, for example stages[].learning_rate."""
    # Sections near the root first: a setting of the run is meant more often than one deep inside a reward.
    return sorted(all_fields().get(field, []), key=lambda place: place.count("."))


@cache
def all_fields() -> dict[str, list[str]]:
    """Every field and section of the config -> its dotted places."""
    found: dict[str, list[str]] = {}
    for place in _walk(RunConfig, ""):
        found.setdefault(place.rpartition(".")[2].removesuffix("[]"), []).append(place)
    return found


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner, marker = section_in(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}{marker}.")


def section_in(annotation: Any, marker: str = "") -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and how a place names one of several: [] in a list, .NAME in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, marker
    marker = {"list": "[]", "dict": ".NAME"}.get(getattr(get_origin(annotation), "__name__", ""), marker)
    for argument in get_args(annotation):
        inner, found = section_in(argument, marker)
        if inner is not None:
            return inner, found
    return None, marker


def _shown(places: list[str]) -> str:
    more = f" (and {len(places) - _MOST_PLACES} more)" if len(places) > _MOST_PLACES else ""
    return " or ".join(places[:_MOST_PLACES]) + more


def why_gone(location: Sequence[Any]) -> str:
    """What to do instead of the setting at `location`, a path such as ("tracking", "webhook"); empty if there was none."""
    place = [str(part) for part in location]
    found = [advice for gone, advice in GONE.items() if _fits(place, gone.split("."))]
    return f"it is no setting any more: {found[0]}" if found else ""


def without_gone(tree: dict[str, Any]) -> dict[str, Any]:
    """A recorded config without the settings that are gone. It is read to repeat or show what was done, not to be corrected."""

    def kept(node: Any, place: tuple[Any, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {key: kept(value, (*place, key)) for key, value in node.items() if not why_gone((*place, key))}

    return dict(kept(tree, ()))


def _fits(place: list[str], gone: list[str]) -> bool:
    return len(place) == len(gone) and all(there in (here, "NAME") for here, there in zip(place, gone, strict=True))
