"""`engine: trl`: the same stage handed to TRL's GRPOTrainer, and the reference of the parity tests.

Data, rewards, adapter, journal, tables and result are ours; rollouts, loss and checkpoints are TRL's. Imported only when a stage
chooses it.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from grpo_tasks.content.tokenizer import text_ids
from grpo_tasks.data.table import read_prompts
from grpo_tasks.grpo.measure import completions_table, score_metrics, weight_metrics
from grpo_tasks.grpo.rounds import Rollout, ScoredRollout
from grpo_tasks.policy.adapter_targets import uncovered
from grpo_tasks.policy.folded_adapter import causal_model
from grpo_tasks.policy.load import generation_of, load_tokenizer, pick_device, trainable_policy
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Completion, completion_seed
from grpo_tasks.stage.checkpoint import finished, save_weights, write_completions
from grpo_tasks.stage.guards import Guards, kl_guard_off
from grpo_tasks.stage.journal import Counters, Events, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.stage.watch import fail_of, target_reached
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.metrics import REWARD, describe
from schemas.prompts import PromptRow
from schemas.results.model import Sampling, StageResult

NATIVE_ONLY = {
    "baseline",
    "max_refills",
    "max_tokens_per_microbatch",
    "importance_sampling_correction",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
    "max_sampling_logp_difference",
    "skip_dead_groups",
}
"""Settings of the native engine that TRL has no equivalent for."""
HANDLED = {"name", "engine", "rewards", "trl", "reference", "early_stop", "log_completions_steps", "guards", "kl_every_steps"} | {
    "eval_steps",
    "num_eval_prompts",
    "load_best_model_at_end",
    "early_stopping_patience",
}
"""Settings that this module handles itself, and held-out evaluations, which the configuration refuses for this engine."""
QUIET = {"skip_dead_groups", "max_sampling_logp_difference"}
"""Settings of NATIVE_ONLY that are not refused at any value: TRL behaves as if they were off, which the documentation says."""


def train(directory: StageDir, spec: StageSpec, suite: RewardSuite) -> StageResult:
    """Train the stage from its last checkpoint, if there is one; ConfigError for settings that TRL does not support."""
    device = pick_device(spec.resources)
    tokenizer = load_tokenizer(spec.start, spec.model, spec.rollout.chat_template_kwargs)
    arguments = grpo_config(spec, directory.checkpoints, device)
    rows = read_prompts(spec.train)
    seed = completion_seed(spec.seed, spec.stage.name)
    model = trainable_policy(spec.start, spec.model, device=device, seed=seed, token_seed=spec.seed)
    # TRL reads there what ends a completion, and generate() every setting that TRL does not know.
    causal_model(model).generation_config = generation_of(model, tokenizer, Sampling.of(spec.rollout))
    last = get_last_checkpoint(str(directory.checkpoints)) if directory.checkpoints.is_dir() else None
    journal, events = Journal(directory.journal), Events(directory.events)
    trainer = _SuiteTrainer(
        model=model,
        reward_funcs=[_named(name) for name in suite.names],
        args=arguments,
        # TRL's standard format, or its conversational one.
        train_dataset=Dataset.from_list(
            [
                {"prompt": row.messages[0]["content"] if row.plain else [dict(message) for message in row.messages], "row": index}
                for index, row in enumerate(rows)
            ]
        ),
        processing_class=tokenizer,
    )
    trainer.suite, trainer.rows = suite, rows
    trainer.add_callback(_Recorder(trainer, directory, spec, journal, events))
    if note := uncovered(model, spec.model.lora):
        events.report(0, "adapter_layers", note)
    off = kl_guard_off(spec.stage, measurable=False)
    if off is not None:
        events.report(0, "guard_off", off)
    began = time.perf_counter()
    if last is not None:
        events.append(int(last.rpartition("-")[2]), "resumed", f"from {last}")
    trainer.train(resume_from_checkpoint=last)
    save_weights(directory.final, trainer.accelerator.unwrap_model(trainer.model), tokenizer)
    step = trainer.state.global_step
    stopped = "max_steps" if step == trainer.state.max_steps else "target"
    counters = Counters(step, resumed=int(last is not None), seconds=time.perf_counter() - began)
    result = finished(directory, spec, journal, counters, stopped=stopped)
    result.save(directory.result)
    return result


class _SuiteTrainer(GRPOTrainer):
    """Scores with our suite: its time limits and error policies apply here too."""

    suite: RewardSuite
    rows: list[PromptRow]
    scored: ScoredRollout
    """The last rollout, without the token ids of its prompts."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if isinstance(prompts[0], str):
            # TRL takes BOS twice where the text has one, and an EOS that the tokenizer writes behind any text.
            return text_ids(self.processing_class, prompts), None, {}
        return super()._tokenize_prompts(prompts)

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: Any,  # noqa: ARG002 - TRL's signature
        completions: Any,
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        rows = [self.rows[example["row"]] for example in inputs]
        texts = [given if isinstance(given, str) else given[0]["content"] for given in completions]
        self.suite.worker.max_steps = self.state.max_steps
        scores = self.suite.score(batch_of(rows, texts, completion_ids_list, step=self.state.global_step + 1))
        self.suite.adapt(scores)
        self.reward_weights = torch.from_numpy(scores.weights).float()
        limit, size = self.max_completion_length, self.num_generations
        assert limit is not None
        assert size is not None
        sampled = []
        for ids, text in zip(completion_ids_list, texts, strict=True):
            # TRL keeps no finish reason; a completion of full length that does not end in an end token was cut off.
            cut = len(ids) >= limit and ids[-1] not in self.eos_token_ids
            sampled.append(Completion(ids, [], text, "length" if cut else "stop"))
        # Complete groups; with torchrun a process may have a part of one.
        size = math.gcd(size, len(rows))
        self.scored = ScoredRollout(Rollout(rows[::size], [], sampled, size, 0.0), scores, 0.0)
        return torch.from_numpy(scores.raw).float().to(self.accelerator.device)


class _Recorder(TrainerCallback):
    """Writes what the native engine would have written."""

    def __init__(self, trainer: _SuiteTrainer, directory: StageDir, spec: StageSpec, journal: Journal, events: Events) -> None:
        self.trainer, self.directory, self.spec, self.journal, self.events = trainer, directory, spec, journal, events

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Write the line of an update, and do what its guards and its target ask for."""
        if not logs or REWARD not in logs:
            return
        step, stage, scored = state.global_step, self.spec.stage, self.trainer.scored
        metrics = {name: float(value) for name, value in logs.items() if describe(name) is not None}
        metrics |= weight_metrics(scored.scores) | score_metrics(scored.scores, "rewards", "success") | scored.scores.metrics
        self.journal.append(step, metrics)
        firings = Guards(stage.guards).check(self.journal, step)
        for firing in firings:
            self.events.report(step, firing.event, firing.detail)
        failed = fail_of(firings, stage.name, step)
        if failed is not None:
            raise failed.error
        for note in scored.scores.notes:
            self.events.report(step, "reward_error", str(note))
        if step % stage.log_completions_steps == 0 or step in (1, state.max_steps):
            advantages = torch.tensor([list(self.trainer._logs["advantages"])[-len(scored.rollout.completions) :]]).T
            table = completions_table(scored, advantages, stage=stage.name, step=step, policy_version=None)
            write_completions(self.directory, step, table)
        if target_reached(self.spec, self.journal, step):
            control.should_training_stop = True


def _named(name: str) -> Any:
    """A function for TRL to report, which is never called."""

    def reward(**_: Any) -> list[float]:
        raise AssertionError("rewards come from the suite")

    reward.__name__ = name
    return reward


def grpo_config(spec: StageSpec, output: Path, device: torch.device) -> GRPOConfig:
    """GRPOConfig of a stage; the options in `stage.trl` override everything else."""
    stage = spec.stage
    _refuse(spec)
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    shared = {name: value for name, value in stage.model_dump().items() if name in known and name not in HANDLED}
    unknown = sorted(set(stage.trl) - known)
    if unknown:
        raise ConfigError(
            f"GRPOConfig of TRL has no {unknown[0]}", place=f"stages {stage.name}: trl", fix="see TRL's documentation"
        )
    rollout = spec.rollout
    options: dict[str, Any] = {
        "output_dir": str(output),
        "seed": spec.seed,
        "use_cpu": device.type == "cpu",
        "bf16": spec.model.dtype == "bfloat16",
        "fp16": spec.model.dtype == "float16",
        "max_steps": stage.max_steps or -1,
        "warmup_steps": stage.warmup_steps or stage.warmup_ratio,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "repetition_penalty": rollout.repetition_penalty,
        "gradient_checkpointing": spec.model.gradient_checkpointing,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": round(60 * spec.resources.distributed_timeout_minutes),
        "save_strategy": "steps",
        "log_completions": False,
    }
    return GRPOConfig(**{name: value for name, value in (shared | options | stage.trl).items() if value is not None})


def _refuse(spec: StageSpec) -> None:
    stage = spec.stage
    defaults, by_default = StageConfig(name=stage.name, rewards=stage.rewards), "leave it out, or engine: native"
    refused = {name: by_default for name in sorted(NATIVE_ONLY - QUIET) if getattr(stage, name) != getattr(defaults, name)}
    if stage.has_kl_term and stage.reference == "base" and spec.start.adapter is not None:
        refused["reference: base for a stage that continues an adapter"] = "reference: stage_start, or engine: native"
    if spec.rollout.stop or spec.rollout.stop_token_ids:
        refused["rollout.stop"] = "trl: {generation_kwargs: ...}, or engine: native"
    if spec.resources.num_processes > 1:
        refused["resources.num_processes"] = "start it with torchrun, or engine: native"
    for what, fix in refused.items():
        raise ConfigError(f"engine trl does not support {what}", place=f"stages {stage.name}", fix=fix)
