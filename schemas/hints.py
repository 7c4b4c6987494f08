"""What to say about an unknown key: the field that was meant, wherever in the tree it belongs, or why there is none."""

import difflib
from collections.abc import Sequence
from functools import cache
from typing import Any

from schemas.config.run import RunConfig
from schemas.config.section import Section, fields_below, section_in

_MOST_PLACES = 3


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """Each of the names, which are separated by spaces -> the text that they share."""
    return {name: text for text, given in names.items() for name in given.split()}


OURS = _by_name(
    {
        "model.path": "model_name model_name_or_path model_id base",
        "section model: dtype, revision, attn_implementation, quantization": "model_init_kwargs",
        "start_from (the adapter of another trainer; the same command resumes a run of ours)": "resume_from_checkpoint",
        "model.dtype": "torch_dtype",
        "model.dtype: bfloat16": "bf16 tf32",
        "model.dtype: float16": "fp16",
        "model.quantization: nf4": "load_in_4bit",
        "model.lora: {r: 16, lora_alpha: 32}": "peft_config",
        "model.lora (null trains every weight)": "use_peft",
        "model.lora.r": "lora_r lora_rank rank",
        "model.lora.target_modules": "lora_target_modules",
        "data.train: [{path: FILE}]": "train_dataset dataset",
        "data.eval: [{path: FILE}]": "eval_dataset",
        "data.train: [{path: OWNER/NAME}]": "dataset_name",
        "name of an item of data.train": "dataset_config",
        "data.answer_column": "answer",
        "stages[].rewards": "reward_funcs",
        "rewards.functions, and their names in stages[].rewards": "reward_functions",
        "rewards.functions.NAME.weight": "reward_weights",
        "validation.max_prompt_length and rollout.max_completion_length": "max_seq_length",
        "rollout.max_completion_length": "max_new_tokens",
        "section rollout: temperature, top_p, top_k, stop": "generation_kwargs",
        "rollout.engine: vllm": "use_vllm",
        "rollout.max_staleness: 1": "overlap",
        "rollout.engine: vllm (we start its server; rollout.vllm.base_urls names running ones)": "vllm_mode",
        "rollout.vllm.sleep": "vllm_enable_sleep_mode",
        "rollout.vllm.base_urls: [URL]": "vllm_server_base_url",
        "rollout.vllm.base_urls: [http://HOST:PORT]": "vllm_server_host vllm_server_port",
        "rollout.vllm.start_timeout_s": "vllm_server_timeout",
        "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "rollout.vllm.max_model_len": "vllm_max_model_length",
        "rollout.vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
        "stages[].importance_sampling_correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "stages[].importance_sampling_clip_max": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "stages[].importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
        "stages[].per_device_train_batch_size x gradient_accumulation_steps x steps_per_generation": "generation_batch_size",
        "stages[].num_train_epochs": "max_epochs epochs",
        "stages[].learning_rate": "lr",
        "stages[].beta": "kl_coef",
        "resources.device: cpu": "use_cpu no_cuda",
        "resources.compile": "torch_compile",
        "resources.fuse_kernels (our own kernels; on by default)": "use_liger_kernel",
        "resources.deterministic": "full_determinism",
        "seed": "data_seed",
        "resources.fsdp: true": "fsdp_config",
        "resources.distributed_timeout_minutes": "ddp_timeout",
        "interaction.max_turns": "max_tool_calling_iterations",
        "evaluation.num_samples": "num_generations_eval",
        "stages[].eval_steps (held-out evaluation of the base and the merged model is always made)": "do_eval",
        "stages[].eval_steps": "eval_strategy evaluation_strategy",
        "stages[].load_best_model_at_end (it goes by the held-out reward)": "metric_for_best_model",
        "stages[].save_steps": "save_strategy",
        "stages[].logging_steps": "logging_strategy",
        "tracking.tracking_uri": "logging_dir",
        "name": "run_name",
        "tracking.experiment": "project",
        "stages[].log_completions_steps (completions are always kept)": "log_completions",
        "tracking.registered_model (models go to the MLflow registry; grpo download fetches one)": "push_to_hub",
        "tracking.registered_model": "hub_model_id",
        "stages[].early_stop or stages[].early_stopping_patience": "early_stopping",
    }
)
"""Foreign name -> our field, with the value where that says more."""
NOTHING = _by_name(
    {
        "4-bit is the only quantization: model.quantization: nf4": "load_in_8bit",
        "code of a model repository is never executed": "trust_remote_code",
        "only the second engine can: stages[].engine: trl, and this name under stages[].trl": (
            "router_aux_loss_coef vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg use_adaptive_entropy "
            "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
        ),
        "dropout of the base model is always off; model.lora.lora_dropout is the adapter's": "disable_dropout",
        "log-probabilities are always computed in float32": "cast_lm_head_to_fp32",
        "reward functions get every column": "remove_unused_columns",
        "resources.num_processes and resources.fsdp describe the machine; other distributed settings do not exist": (
            "ds3_gather_for_generation accelerator_config parallelism_config deepspeed local_rank ddp_find_unused_parameters "
            "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend"
        ),
        "prompts are always shuffled, by seed": "shuffle_dataset",
        "the engine chooses this itself": (
            "pad_to_multiple_of cache_implementation use_transformers_continuous_batching "
            "transformers_continuous_batching_config use_transformers_paged torch_empty_cache_steps liger_kernel_config "
            "use_cache"
        ),
        "rollout.vllm.extra_args passes options to vLLM": "vllm_model_impl",
        "constrained sampling would hide from the reward what the policy does": "vllm_structured_outputs_regex",
        "weights reach vLLM as adapters or files, not over a port": "vllm_group_port",
        "stages[].reference chooses between the base model and the model at the start of a stage": (
            "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
        ),
        "prompts are text": "log_multimodal",
        "grpo completions shows them": "num_completions_to_print",
        "metrics, completions and figures are recorded in full in MLflow": (
            "log_unique_prompts log_on_each_node include_num_input_tokens_seen skip_memory_metrics"
        ),
        "models are published to the MLflow registry, not to the hub": (
            "log_completions_hub_repo hub_private_repo hub_strategy hub_always_push hub_revision"
        ),
        "the schedules have no further settings": "lr_scheduler_kwargs",
        "adam_beta1, adam_beta2, adam_epsilon and weight_decay are the optimizer's settings": "optim_args",
        "model.lora.target_modules chooses what is trained": "optim_target_modules",
        "stages[].loss_type says how the loss is averaged": "average_tokens_across_devices",
        "GRPO has no labels": "label_smoothing_factor label_names",
        "evaluation has the precision of model.dtype": "bf16_full_eval fp16_full_eval",
        "model.gradient_checkpointing is on or off": "gradient_checkpointing_kwargs",
        "resources.compile is on or off": "torch_compile_backend torch_compile_mode",
        "noise on the embeddings is not supported": "neftune_noise_alpha",
        "stages[].max_tokens_per_microbatch bounds the memory of a pass": "auto_find_batch_size",
        "the journal has every update": "logging_first_step",
        "guards.not_finite decides what follows a value that is not finite": "logging_nan_inf_filter",
        "GRPO logs the same lines always": "log_level log_level_replica",
        "the progress bar shows itself in a terminal only": "disable_tqdm",
        "tracking.report_to knows tensorboard and wandb": "trackio_space_id trackio_bucket_id trackio_static_space_id",
        "the sections evaluation and stages[].eval_steps describe held-out evaluation completely": (
            "eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
            "eval_accumulation_steps include_for_metrics batch_eval_metrics"
        ),
        "rollout.max_batch_size bounds a sampling batch": "per_device_eval_batch_size",
        "a checkpoint always holds what an exact resume needs": "save_only_model",
        "all processes share one stage folder": "save_on_each_node",
        "resources.max_hours ends a stage with a checkpoint": "enable_jit_checkpoint",
        "a config is recorded, so it holds no secret; export HF_TOKEN": "hub_token",
        "the held-out reward decides, and more is better": "greater_is_better",
        "the same command resumes a run by itself": ("ignore_data_skip restore_callback_states_from_checkpoint"),
        "rows are read once into memory, so there is no data loader to tune": (
            "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
            "length_column_name"
        ),
        "grpo trace follows one row through a run": "debug",
        "grpo run trains; grpo validate, rewards and evaluate do not": "do_train",
        "grpo evaluate evaluates a model": "do_predict",
    }
)
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
        return "it belongs at the top of the config, in no section" if places == [key] else f"it belongs to {_shown(places)}"
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
    """The fields of the section at `location`; empty where there is none."""
    model: type[Section] | None = RunConfig
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = section_in(model.model_fields[part].annotation)[0]
    return list(model.model_fields) if model is not None else []


def places_of(field: str) -> list[str]:
    """Where a field or section of this name stands, for example stages[].learning_rate."""
    # Sections near the root first: a setting of the run is meant more often than one deep inside a reward.
    return sorted(all_fields().get(field, []), key=lambda place: place.count("."))


@cache
def all_fields() -> dict[str, list[str]]:
    """Every field and section of the config -> its dotted places."""
    found: dict[str, list[str]] = {}
    for place, _ in fields_below(RunConfig):
        found.setdefault(place.rpartition(".")[2].removesuffix("[]"), []).append(place)
    return found


def _shown(places: list[str]) -> str:
    more = f" (and {len(places) - _MOST_PLACES} more)" if len(places) > _MOST_PLACES else ""
    return " or ".join(places[:_MOST_PLACES]) + more


def why_gone(location: Sequence[Any]) -> str:
    """What to do instead of the setting at `location`; empty if there was none."""
    for gone, advice in GONE.items():
        place = gone.split(".")
        if len(place) == len(location) and all(part in (str(given), "NAME") for given, part in zip(location, place, strict=True)):
            return f"it is no setting any more: {advice}"
    return ""


def without_gone(tree: dict[str, Any]) -> dict[str, Any]:
    """A recorded config without the settings that are gone. It is read to repeat or show what was done, not to be corrected."""

    def kept(node: Any, place: tuple[Any, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {key: kept(value, (*place, key)) for key, value in node.items() if not why_gone((*place, key))}

    return dict(kept(tree, ()))
