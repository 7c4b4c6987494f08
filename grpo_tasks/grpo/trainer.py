"""One stage from its first update (or last checkpoint) to its result.

train():  round (sample, score, advantages) -> microbatches -> update -> journal -> checkpoint

Of several processes, the first writes the files.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_tasks.data.table import PromptRow, read_prompts
from grpo_tasks.grpo.device_meter import DeviceMeter
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.measure import completions_table, held_out_metrics, rollout_metrics
from grpo_tasks.grpo.microbatches import Microbatch, microbatches
from grpo_tasks.grpo.ranks import Processes
from grpo_tasks.grpo.rounds import Collector, OneAhead, Round
from grpo_tasks.grpo.schedule import PromptSchedule, num_updates, prompts_per_rollout
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rewards.totals import stage_weights
from grpo_tasks.rollout.engine import RolloutEngine, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import VllmServer, swaps_merged_weights
from grpo_tasks.stage.checkpoint import TrainingState, load_checkpoint, roll_back, save_checkpoint
from grpo_tasks.stage.finish import (
    Ending,
    best_step,
    finished,
    on_plateau,
    save_best,
    save_final,
    take_best,
    target_reached,
    write_completions,
)
from grpo_tasks.stage.guards import WINDOW, Firing, Guards, kl_guard_off
from grpo_tasks.stage.journal import Events, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import NotFiniteError, TrainingError
from schemas.results import StageResult

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class _Cut:
    """A round cut into updates, with the log-probabilities its first policy gave it (None: one update per round)."""

    round: Round
    updates: list[list[Microbatch]]
    old_logps: list[list[torch.Tensor]] | None


class Trainer:
    """Trains the stage of a stage directory."""

    def __init__(self, directory: StageDir, suite: RewardSuite, servers: Sequence[VllmServer] = ()) -> None:
        self.dir, self.suite = directory, suite
        self.spec = StageSpec.load(directory.spec)
        self.stage = self.spec.stage
        self.device = pick_device(self.spec.resources)
        self.processes = Processes.of(self.spec, self.device)
        self.device = self.processes.accelerator.device
        self.seed = completion_seed(self.spec.seed, self.stage.name)
        torch.manual_seed(self.seed)
        self.rows: list[PromptRow] = read_prompts(self.spec.train)
        self.held_out = self._held_out()
        self.tokenizer = load_tokenizer(self.spec.start)
        self.schedule = PromptSchedule(len(self.rows), prompts_per_rollout(self.stage), self.seed)
        self.updates = suite.worker.max_steps = num_updates(self.stage, len(self.rows))
        model = trainable_policy(self.spec.start, self.spec.model, device=self.device, seed=self.seed)
        temperature = self.spec.rollout.temperature
        resources = self.spec.resources
        self.sharded = resources.fsdp and self.processes.count > 1
        self.learner = Learner(
            model,
            self.stage,
            self.spec.model,
            self.spec.start,
            temperature,
            self.updates,
            self.processes,
            share_prompts=resources.share_prompts,
            sharded=self.sharded,
            compiled=resources.compile,
        )
        self.state = TrainingState(model, self.tokenizer, self.learner.optimizer, self.learner.scheduler, self.learner.scaler)
        self.journal = Journal(self.dir.journal, writes=self.processes.writes)
        self.events = Events(self.dir.events, writes=self.processes.writes)
        self.meter = DeviceMeter(self.device)
        self.guards = Guards(self.stage.guards, kl_every=self._kl_every)
        self.step, self.tokens, self.resumed, self.seconds = 0, 0, 0, 0.0
        self._resume()
        engine = self._engine(model, servers)
        self.collector = Collector(engine, suite, self.tokenizer, self.rows, self.schedule, self.spec, self.seed, self.processes)
        self.ahead = OneAhead(self.collector) if servers and self.spec.rollout.vllm.overlap else None

    def _engine(self, model: CausalLM, servers: Sequence[VllmServer]) -> RolloutEngine:
        if servers:
            config, cuda = self.spec.rollout.vllm, self.device.type == "cuda"
            return VllmEngine(
                model,
                self.tokenizer,
                config.model_copy(update={"sleep": config.sleep and cuda}),
                servers,
                weights=self.dir.root / "served",
                dtype=self.spec.model.dtype,
                merged=swaps_merged_weights(config, self.spec.model, cuda=cuda),
            )
        resources = self.spec.resources
        return LocalEngine(
            model,
            self.tokenizer,
            share_prompts=resources.share_prompts,
            fold_adapter=resources.fold_adapter,
            fuse_kernels=resources.fuse_kernels,
        )

    def train(self) -> StageResult:
        """Run all updates that are left."""
        try:
            stopped = self._updates()
        finally:
            if self.ahead is not None:
                self.ahead.close()
        self._save()
        self.collector.engine.close()
        return self._finish(stopped)

    def _updates(self) -> str:
        """Until the last update, or one that reaches the target; says which."""
        opened = time.perf_counter()
        began = opened - self.seconds
        if self.step == 0 and self.stage.guards.rolls_back:
            self._save()
        blind = kl_guard_off(self.stage, measurable=self.learner.measures_kl)
        if blind is not None:
            self.events.tell(0, "guard_off", blind)
        while self.step < self.updates:
            at = time.perf_counter()
            if self.step % self.stage.updates_per_rollout == 0:
                current = self._cut(self._collect(self.step // self.stage.updates_per_rollout))
            try:
                metrics, fault = self._update(current), None
            except NotFiniteError as error:
                metrics, fault = {}, error
            self.step += 1
            looks = self._look_due(self.step)
            if looks:
                metrics |= self._look()
            self.seconds = time.perf_counter() - began
            self._record(current.round, metrics, seconds=time.perf_counter() - at)
            if looks and best_step(self.journal, self.step) == self.step:
                save_best(self.dir, self.learner.model, self.tokenizer, writes=self.processes.writes)
            self._guard(fault)
            if target_reached(self.spec, self.journal, self.step):
                return "target"
            if looks and on_plateau(self.spec, self.journal, self.step):
                return "plateau"
            due = self._checkpoint_due(self.step)
            late = self._late(time.perf_counter() - opened) and (due or self._between_rounds())
            if due or late:
                self._save()
            if late and self.step < self.updates:
                raise TrainingError(
                    f"stopped at update {self.step} of {self.updates}, after resources.max_hours "
                    f"{self.spec.resources.max_hours:g}; a checkpoint is written",
                    place=f"stage {self.stage.name}",
                    fix="start the same command again: the stage goes on from there",
                )
        return "max_steps"

    def _late(self, seconds: float) -> bool:
        limit = self.spec.resources.max_hours
        # The first process's clock counts: the others have to stop at the same update.
        return limit is not None and self.processes.everyone(seconds > limit * SECONDS_PER_HOUR)[0]

    def _between_rounds(self) -> bool:
        """Whether nothing is sampled that a checkpoint would have to hold."""
        return self.ahead is None and self.step % self.stage.updates_per_rollout == 0

    def _collect(self, number: int) -> Round:
        if self.ahead is None:
            current = self.collector.collect(number, step=self.step + 1)
        else:
            after = self.step + self.stage.updates_per_rollout
            # What a checkpoint is written without, a stage taken up from it could not know.
            last = after >= self.updates or self._checkpoint_due(after) or self._look_due(after)
            current = self.ahead.take(number, step=self.step + 1, next_step=None if last else after + 1)
        self.tokens += current.tokens
        for note in current.scored.scores.notes:
            self.events.tell(self.step + 1, "reward_error", str(note))
        return current

    def _cut(self, current: Round) -> _Cut:
        """Into the updates it feeds; more than one need the log-probabilities of now."""
        rollout, size = current.scored.rollout, self.stage.completions_per_update
        updates = [
            microbatches(
                rollout,
                current.advantages,
                range(start, start + size),
                self.stage,
                max_completion_length=self.spec.rollout.max_completion_length,
                device=self.device,
                processes=self.processes,
                level=self.sharded,
            )
            for start in range(0, len(rollout.completions), size)
        ]
        on_policy = self.stage.updates_per_rollout == 1
        self._reseed("score")
        old = None if on_policy else [[self.learner.score(part) for part in parts] for parts in updates]
        return _Cut(current, updates, old)

    def _update(self, current: _Cut) -> dict[str, float]:
        share = self.step % self.stage.updates_per_rollout % len(current.updates)
        old = current.old_logps[share] if current.old_logps is not None else None
        self._reseed("update")
        return self.learner.update(current.updates[share], old, measure_kl=self._kl_due()).means()

    @property
    def _kl_every(self) -> int:
        """Updates between two measurements of the KL."""
        return 1 if self.stage.beta > 0 else max(1, self.stage.kl_every_steps)

    def _kl_due(self) -> bool:
        """Whether this update measures the KL although beta is 0; an update without a live group leaves it to the next one."""
        if self.stage.beta > 0 or self.stage.kl_every_steps == 0 or not self.learner.measures_kl:
            return False
        return not self.journal.window("kl", last=self.step, size=self._kl_every - 1)

    def _reseed(self, purpose: str) -> None:
        """Dropout draws differently on every process, and the same again after a resume."""
        torch.manual_seed(completion_seed(self.seed, purpose, self.step, self.processes.rank))

    def _record(self, current: Round, metrics: dict[str, float], *, seconds: float) -> None:
        sampled = sum(len(completion.token_ids) for completion in current.scored.rollout.completions)
        metrics |= rollout_metrics(current.scored, current.advantages)
        if self.stage.max_refills:
            metrics["dynamic_sampling/dropped_groups"] = float(current.dropped)
        metrics |= self.meter.read()
        metrics["num_tokens"] = float(self.tokens)
        metrics["step_time"], metrics["tokens_per_s"] = seconds, sampled / seconds
        metrics["epoch"] = self.step / self.stage.updates_per_rollout * self.schedule.per_rollout / len(self.rows)
        self.journal.append(self.step, metrics)
        due = self.step % self.stage.log_completions_steps == 0 or self.step in (1, self.updates)
        if due and self.processes.writes:
            table = completions_table(current.scored, current.advantages.values, stage=self.stage.name, step=self.step)
            write_completions(self.dir, self.step, table)

    def _guard(self, fault: NotFiniteError | None) -> None:
        """Tell what goes wrong, and stop or roll back where that is what the config says.

        Raises:
            TrainingError: a guard stops the stage.
        """
        firings = self.guards.look(self.journal, self.step)
        if fault is not None:
            if self.stage.guards.not_finite == "stop":
                raise fault
            firings.append(Firing("not_finite", "rollback", fault.message))
        for firing in firings:
            self.events.tell(self.step, firing.event, firing.detail)
        for firing in firings:
            if firing.action == "stop":
                raise TrainingError(
                    f"{firing.event}: {firing.detail}",
                    place=f"stage {self.stage.name}, update {self.step}",
                    fix=f"change what the advice says, or stages.N.guards.{firing.event}: warn",
                )
        back = [firing.event for firing in firings if firing.action == "rollback"]
        if back:
            self._roll_back(", ".join(back))

    def _roll_back(self, why: str) -> None:
        """Weights and optimizer as they were before the trouble; the updates count on, with new prompts."""
        guards = self.stage.guards
        if self.guards.rollbacks == guards.max_rollbacks:
            raise TrainingError(
                f"{why}, after {guards.max_rollbacks} roll backs",
                place=f"stage {self.stage.name}, update {self.step}",
                fix="lower learning_rate; the events before say what happened",
            )
        if self.ahead is not None:
            self.ahead.drop()
        good = roll_back(self.dir.checkpoints, self.state, before=self.step - WINDOW, writes=self.processes.writes)
        self.learner.slow_down(guards.rollback_learning_rate)
        self.guards.since, self.guards.rollbacks = self.step, self.guards.rollbacks + 1
        detail = f"to the weights of update {good}, because of {why}; learning rate times {guards.rollback_learning_rate:g}"
        self.events.tell(self.step, "rolled_back", detail)

    def _checkpoint_due(self, step: int) -> bool:
        return self._due(self.stage.save_steps, step)

    def _look_due(self, step: int) -> bool:
        every = self.stage.eval_steps
        return bool(self.held_out) and every is not None and (step == self.updates or self._due(every, step))

    def _due(self, every: int, step: int) -> bool:
        # Only between two rollouts, so that a checkpoint never has to hold half-used completions.
        per_rollout = self.stage.updates_per_rollout
        return step % (max(1, round(every / per_rollout)) * per_rollout) == 0

    def _held_out(self) -> list[PromptRow]:
        """Rows to look at, from the other end of the held-out rows than those of the evaluation."""
        if self.stage.eval_steps is None or self.spec.eval is None:
            return []
        return sorted(read_prompts(self.spec.eval), key=lambda row: row.prompt_id)[-self.stage.num_eval_prompts :]

    def _look(self) -> dict[str, float]:
        """The policy of now on held-out prompts."""
        scored = self.collector.look(self.held_out, step=self.step)
        return held_out_metrics(scored, stage_weights(self.stage, self.spec.rewards))

    def _save(self) -> None:
        extra = {
            "suite": self.suite.state(),
            "tokens": self.tokens,
            "resumed": self.resumed,
            "seconds": self.seconds,
            "guards": {"since": self.guards.since, "rollbacks": self.guards.rollbacks},
        }
        keep, writes = self.stage.save_total_limit, self.processes.writes
        save_checkpoint(self.dir.checkpoints, self.step, self.state, extra, keep=keep, writes=writes)

    def _resume(self) -> None:
        found = load_checkpoint(self.dir.checkpoints, self.state)
        if found is None:
            return
        self.step, extra = found
        self.suite.restore(extra["suite"])
        self.tokens, self.seconds, self.resumed = extra["tokens"], extra["seconds"], extra["resumed"] + 1
        self.guards = Guards(self.stage.guards, **extra["guards"], kl_every=self._kl_every)
        self.events.append(self.step, "resumed", f"from the checkpoint of update {self.step}")

    def _finish(self, stopped: str) -> StageResult:
        best = best_step(self.journal, self.step)
        # At its target a stage is where it was to come to, looked at or not.
        if best == self.step or stopped == "target" or not self.stage.load_best_model_at_end:
            best = None
        if best is None:
            save_final(self.dir, self.learner.model, self.tokenizer, writes=self.processes.writes)
        elif self.processes.writes:
            take_best(self.dir)
        self.processes.wait()
        ending = Ending(self.step, stopped, self.resumed, self.seconds, best)
        result = finished(self.dir, self.spec, self.journal, ending)
        if self.processes.writes:
            result.save(self.dir.result)
        return result
