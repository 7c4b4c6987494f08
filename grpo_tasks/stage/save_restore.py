"""Saving and restoring a stage of the native engine: checkpoints of the model and of everything else an update depends on."""

from dataclasses import dataclass

from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.checkpoint import TrainingState, load_checkpoint, roll_back, save_checkpoint
from grpo_tasks.stage.guards import Guards
from grpo_tasks.stage.journal import Events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.watch import RollBack


@dataclass(slots=True)
class Counters:
    """How far a stage has come."""

    step: int = 0
    """Updates made."""
    tokens: int = 0
    """Tokens of all prompts and completions sampled."""
    resumed: int = 0
    """Times the stage resumed from a checkpoint."""
    seconds: float = 0.0
    """Time spent training, summed over all resumes."""


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
