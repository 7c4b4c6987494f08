"""One checkpoint on disk: everything the next update depends on, renamed into place when complete, with a manifest of hashes.

    checkpoints/step-000050/   weights/ (adapter or model)  optimizer.safetensors  state.json  manifest.json

It holds no state of a random number generator: every draw has a seed of its own, made from the seed of the run and the number
of the update. Safetensors and JSON only, never pickle. A checkpoint that does not match its manifest is skipped for the one
before.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.kit.files import replacing
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import save_trained, trained_weights, trains_rows
from grpo_tasks.policy.sharded import gather_shards, shard_like
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.guards import Guards
from grpo_tasks.stage.journal import Counters, Events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.watch import RollBack
from schemas.errors import TrainingError

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything in a stage that an update changes."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss in float16."""


def save_checkpoint(
    folder: Path, step: int, state: TrainingState, extra: dict[str, Any], *, keep: int, writes: bool = True
) -> None:
    """Write a checkpoint of update `step` under `folder` and delete all but the newest `keep`.

    `extra` is JSON of the caller. All ranks call this, and one writes: shards are gathered first, so a stage can resume with
    another number of ranks.
    """
    weights = trained_weights(state.model)
    tensors, numbers = _flatten(state.optimizer.state_dict()["state"])
    if not writes:
        return
    target = folder / f"step-{step:06d}"
    with replacing(target) as unfinished:
        unfinished.mkdir(parents=True)
        save_trained(state.model, state.tokenizer, unfinished / "weights", weights)
        save_file(tensors, unfinished / "optimizer.safetensors")
        content = {"step": step, "optimizer": numbers, "scheduler": state.scheduler.state_dict(), "extra": extra}
        if state.scaler is not None:
            content["scaler"] = state.scaler.state_dict()
        # LambdaLR lists its functions; a resumed stage builds them from its config.
        text = json.dumps(content, default=lambda value: None if callable(value) else json.JSONEncoder().default(value))
        (unfinished / "state.json").write_text(text, encoding="utf-8")
        (unfinished / MANIFEST).write_text(json.dumps(_hashes(unfinished), indent=1), encoding="utf-8")
        for path in [*_files(unfinished), unfinished / MANIFEST]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for old in _newest_first(folder)[keep:]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, state: TrainingState) -> tuple[int, dict[str, Any]] | None:
    """Load the newest intact checkpoint into `state`; its step and the caller's `extra`, or None when there is none."""
    checkpoint = next((one for one in _newest_first(folder) if is_intact(one)), None)
    if checkpoint is None:
        return None
    content = _load(checkpoint, state)
    state.scheduler.load_state_dict(content["scheduler"])
    if state.scaler is not None and "scaler" in content:
        state.scaler.load_state_dict(content["scaler"])
    for group, rate in zip(state.optimizer.param_groups, state.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return content["step"], content["extra"]


def roll_back(folder: Path, state: TrainingState, *, to: int, writes: bool = True) -> int:
    """Load weights and optimizer of the newest intact checkpoint up to update `to`, or of the oldest one; returns its update.

    Later checkpoints hold the weights that were in trouble. They are deleted, so that nothing resumes from them. TrainingError
    where none is intact.
    """
    intact = [checkpoint for checkpoint in _newest_first(folder) if is_intact(checkpoint)]
    if not intact:
        raise TrainingError(
            "there is no intact checkpoint to roll back to",
            place=str(folder),
            fix=f"remove {folder.parent} to train the stage again",
        )
    good = next((checkpoint for checkpoint in intact if _step_of(checkpoint) <= to), intact[-1])
    _load(good, state)
    for bad in _newest_first(folder) if writes else []:
        if _step_of(bad) > _step_of(good):
            shutil.rmtree(bad)
    return _step_of(good)


def is_intact(checkpoint: Path) -> bool:
    """True when every file is there with the hash in the manifest."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return manifest == _hashes(checkpoint)
    except (OSError, ValueError):
        return False


@torch.no_grad()
def _load(checkpoint: Path, state: TrainingState) -> dict[str, Any]:
    """Load weights and optimizer; returns the content of state.json."""
    content: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    optimizer = state.optimizer.state_dict()
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    restored: dict[int, dict[str, Any]] = {}
    for name, value in {**load_file(checkpoint / "optimizer.safetensors"), **content["optimizer"]}.items():
        index, *path, last = name.split(".")
        entries = restored.setdefault(int(index), {})
        for key in path:
            entries = entries.setdefault(key, {})
        whole = not path and isinstance(value, torch.Tensor) and value.shape == parameters[int(index)].shape
        entries[last] = shard_like(value, parameters[int(index)]) if whole else value
    state.optimizer.load_state_dict(optimizer | {"state": restored})
    model, weights = state.model, dict[str, torch.Tensor]()
    for file in sorted((checkpoint / "weights").glob("*.safetensors")):
        weights.update(load_file(file))
    if isinstance(model, PeftModel):
        present = get_peft_model_state_dict(model, save_embedding_layers=False if trains_rows(model) else "auto")
    else:
        present = model.state_dict()
    for name, tensor in present.items():
        # Tied weights have two names in the model and are stored under one.
        if name in weights:
            tensor.copy_(shard_like(weights[name], tensor))
    return content


def _flatten(state: dict[Any, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and numbers of an optimizer's state by dotted names; 8-bit optimizers have nested dicts."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            deeper_tensors, deeper_numbers = _flatten(value, f"{name}.")
            tensors |= deeper_tensors
            numbers |= deeper_numbers
        elif isinstance(value, torch.Tensor):
            # A copy: safetensors refuses entries that share memory, as the tables of 8-bit optimizers do.
            tensors[name] = gather_shards(value).contiguous().clone()
        else:
            numbers[name] = value
    return tensors, numbers


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _hashes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): file_sha256(path) for path in _files(folder)}


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Saves, restores and rolls back a stage; every change goes through the objects it was given."""

    directory: StageDir
    state: TrainingState
    counters: Counters
    guards: Guards
    suite: RewardSuite
    events: Events
    keep: int
    """Checkpoints kept."""
    writes: bool
    """False on all ranks but one."""

    def save(self) -> None:
        """Write a checkpoint of the present update; all ranks call this."""
        extra = {
            "suite": self.suite.state(),
            "tokens": self.counters.tokens,
            "resumed": self.counters.resumed,
            "seconds": self.counters.seconds,
            "guards": {"since": self.guards.since, "rollbacks": self.guards.rollbacks},
        }
        folder = self.directory.checkpoints
        save_checkpoint(folder, self.counters.step, self.state, extra, keep=self.keep, writes=self.writes)

    def restore(self) -> None:
        """Continue from the newest intact checkpoint; does nothing when there is none."""
        found = load_checkpoint(self.directory.checkpoints, self.state)
        if found is None:
            return
        step, extra = found
        self.suite.restore(extra["suite"])
        counters, guards = self.counters, self.guards
        counters.step, counters.tokens, counters.seconds = step, extra["tokens"], extra["seconds"]
        counters.resumed = extra["resumed"] + 1
        guards.since, guards.rollbacks = extra["guards"]["since"], extra["guards"]["rollbacks"]
        self.events.append(step, "resumed", f"from the checkpoint of update {step}")

    def roll_back(self, verdict: RollBack) -> int:
        """Load the weights and the optimizer of an earlier update; returns its number. The updates keep counting."""
        good = roll_back(self.directory.checkpoints, self.state, to=verdict.to, writes=self.writes)
        # The journal up to here belongs to other weights: the guards judge later updates only.
        self.guards.since, self.guards.rollbacks = self.counters.step, self.guards.rollbacks + 1
        return good
