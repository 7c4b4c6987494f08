"""What a stage writes besides its journal: checkpoints, tables of completions, trained weights, and last the result.

    checkpoints/step-000050/   weights/ (adapter or model)  optimizer.safetensors  state.json  manifest.json

A checkpoint is everything the next update depends on, in safetensors and JSON, never pickle. It holds no state of a random number
generator: every draw has a seed of its own, made from the seed of the run and the number of the update.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import file_sha256, folder_sha256
from grpo_tasks.kit.files import replacing
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_trained, save_trained, trained_weights
from grpo_tasks.policy.sharded import gather_shards, shard_like
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.guards import Guards
from grpo_tasks.stage.journal import Counters, Events, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import TrainingError
from schemas.results.model import StageResult

MANIFEST = "manifest.json"
RESULT_WINDOW = 10
"""The figures of a finished stage are means over so many updates."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything in a stage that an update changes."""

    model: CausalLM
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss in float16."""


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
    """Checkpoints kept, the newest ones."""
    writes: bool = True
    """False on all ranks but one."""

    def save(self) -> None:
        """Write a checkpoint of the present update; all ranks call this."""
        state, counters, guards = self.state, self.counters, self.guards
        # Shards are gathered before one rank writes, so a stage can resume with another number of ranks.
        weights = trained_weights(state.model, keep=self.writes)
        tensors, numbers = _flatten(state.optimizer.state_dict()["state"], keep=self.writes)
        if not self.writes:
            return
        extra = {
            "suite": self.suite.state(),
            "tokens": counters.tokens,
            "resumed": counters.resumed,
            "seconds": counters.seconds,
            "halvings": counters.halvings,
            "guards": {"since": guards.since, "rollbacks": guards.rollbacks},
        }
        content = {"step": counters.step, "optimizer": numbers, "scheduler": state.scheduler.state_dict(), "extra": extra}
        if state.scaler is not None:
            content["scaler"] = state.scaler.state_dict()
        with replacing(self.directory.checkpoints / f"step-{counters.step:06d}") as unfinished:
            unfinished.mkdir(parents=True)
            save_trained(state.model, state.tokenizer, unfinished / "weights", weights)
            save_file(tensors, unfinished / "optimizer.safetensors")
            # LambdaLR lists its functions; a resumed stage builds them from its config.
            text = json.dumps(content, default=lambda value: None if callable(value) else json.JSONEncoder().default(value))
            (unfinished / "state.json").write_text(text, encoding="utf-8")
            hashes = _hashes(unfinished)
            (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
            for name in [*hashes, MANIFEST]:
                with (unfinished / name).open("rb") as file:
                    os.fsync(file.fileno())
        for old in self._newest_first()[self.keep :]:
            shutil.rmtree(old)

    def restore(self) -> None:
        """Continue from the newest checkpoint that matches its manifest; does nothing when there is none."""
        checkpoint = next(filter(is_intact, self._newest_first()), None)
        if checkpoint is None:
            return
        content, state, counters = self._load(checkpoint), self.state, self.counters
        state.scheduler.load_state_dict(content["scheduler"])
        if state.scaler is not None and "scaler" in content:
            state.scaler.load_state_dict(content["scaler"])
        for group, rate in zip(state.optimizer.param_groups, state.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        step, extra = content["step"], content["extra"]
        self.suite.restore(extra["suite"])
        counters.step, counters.tokens, counters.seconds = step, extra["tokens"], extra["seconds"]
        counters.resumed = extra["resumed"] + 1
        # Checkpoints of earlier versions have none.
        counters.halvings = extra.get("halvings", 0)
        self.guards.since, self.guards.rollbacks = extra["guards"]["since"], extra["guards"]["rollbacks"]
        self.events.append(step, "resumed", f"from the checkpoint of update {step}")

    def roll_back(self, to: int) -> int:
        """Load weights and optimizer of the newest intact checkpoint up to update `to`, or of the oldest one; returns its update.

        The updates keep counting. TrainingError where no checkpoint is intact.
        """
        folder = self.directory.checkpoints
        every = {int(checkpoint.name.removeprefix("step-")): checkpoint for checkpoint in self._newest_first()}
        intact = [step for step, checkpoint in every.items() if is_intact(checkpoint)]
        if not intact:
            raise TrainingError(
                "there is no intact checkpoint to roll back to",
                place=str(folder),
                fix=f"remove {folder.parent} to train the stage again",
            )
        good = next((step for step in intact if step <= to), intact[-1])
        self._load(every[good])
        # Later checkpoints hold the weights that were in trouble: nothing may resume from them.
        for step, bad in every.items():
            if self.writes and step > good:
                shutil.rmtree(bad)
        # The journal up to here belongs to other weights: the guards judge later updates only.
        self.guards.since, self.guards.rollbacks = self.counters.step, self.guards.rollbacks + 1
        return good

    def _newest_first(self) -> list[Path]:
        return sorted(self.directory.checkpoints.glob("step-*"), reverse=True)

    @torch.no_grad()
    def _load(self, checkpoint: Path) -> dict[str, Any]:
        """Load weights and optimizer; returns the content of state.json."""
        content: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        optimizer = self.state.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        restored: dict[int, dict[str, Any]] = {}
        for name, value in {**load_file(checkpoint / "optimizer.safetensors"), **content["optimizer"]}.items():
            index, *path, last = name.split(".")
            entries = restored.setdefault(int(index), {})
            for key in path:
                entries = entries.setdefault(key, {})
            whole = not path and isinstance(value, torch.Tensor) and value.shape == parameters[int(index)].shape
            entries[last] = shard_like(value, parameters[int(index)]) if whole else value
        optimizer.load_state_dict(optimizer.state_dict() | {"state": restored})
        load_trained(self.state.model, checkpoint / "weights")
        return content


def is_intact(checkpoint: Path) -> bool:
    """True when every file is there with the hash in the manifest."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return manifest == _hashes(checkpoint)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(folder)): file_sha256(path) for path in files}


def _flatten(state: dict[Any, Any], prefix: str = "", *, keep: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, in the memory of the host, and numbers of an optimizer's state by dotted names; 8-bit ones have nested dicts.

    Without `keep` this process only helps others to gather the tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            deeper_tensors, deeper_numbers = _flatten(value, f"{name}.", keep=keep)
            tensors |= deeper_tensors
            numbers |= deeper_numbers
        elif isinstance(value, torch.Tensor):
            whole = gather_shards(value)
            if keep:
                # A copy: safetensors refuses entries that share memory, as the tables of 8-bit optimizers do.
                tensors[name] = whole.to("cpu", copy=True).contiguous()
        else:
            numbers[name] = value
    return tensors, numbers


def write_completions(directory: StageDir, step: int, table: pa.Table) -> None:
    """Write the table of an update's completions; readers never see an incomplete file."""
    path = directory.completions(step)
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished)


def save_weights(target: Path, model: CausalLM, tokenizer: PreTrainedTokenizerBase, *, writes: bool = True) -> None:
    """Write the present weights into a folder of the stage; all ranks call this and one writes."""
    weights = trained_weights(model, keep=writes)
    if writes:
        with replacing(target) as unfinished:
            save_trained(model, tokenizer, unfinished, weights)


def finished(
    directory: StageDir, spec: StageSpec, journal: Journal, counters: Counters, *, stopped: str, best_step: int | None = None
) -> StageResult:
    """The result of a stage whose trained weights are written; `best_step` is None where they are the last ones."""
    adapter, step = spec.model.lora is not None, counters.step
    weights = {"adapter": directory.final} if adapter else {"path": str(directory.final), "revision": None, "adapter": None}
    names = sorted({name for update in range(step - RESULT_WINDOW + 1, step + 1) for name in journal.steps.get(update, {})})
    windows = {name: journal.window(name, last=step, size=RESULT_WINDOW) for name in names}
    return StageResult(
        key=spec.key,
        directory=directory.root,
        seconds=counters.seconds,
        stage=spec.stage.name,
        model=spec.start.model_copy(update={**weights, "sha256": folder_sha256(directory.final)}),
        sha256=file_sha256(directory.final / ("adapter_model.safetensors" if adapter else "model.safetensors")),
        steps=step,
        stopped=stopped,
        best_step=best_step,
        resumed=counters.resumed,
        metrics={name: sum(values) / len(values) for name, values in windows.items()},
    )
