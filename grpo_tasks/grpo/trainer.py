"""One stage, from its first update (or its last checkpoint) to its result.

    rollout -> score -> advantages -> microbatches -> update -> journal -> verdict -> checkpoint

Trainer.train is that loop. What each word means is in a module of its own: rounds (the first three), microbatches, learner
(update), measure (journal), stage/watch (verdict), stage/save_restore (checkpoint).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from grpo_tasks.data.table import read_prompts
from grpo_tasks.grpo.launch import rollout_engine
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.measure import GpuMeter, Stopwatch, completions_table, held_out_metrics, rollout_metrics
from grpo_tasks.grpo.microbatches import Microbatch, make_microbatches
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Collector, Round, Rounds
from grpo_tasks.grpo.schedule import Mixture, PromptSchedule, num_updates, prompts_per_rollout
from grpo_tasks.grpo.token_budget import with_measured_budget, with_token_budget
from grpo_tasks.policy.adapter_targets import uncovered
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rewards.totals import stage_weights
from grpo_tasks.rollout.conversations.play import Player
from grpo_tasks.rollout.engine import EngineReport, RolloutEngine, completion_seed
from grpo_tasks.rollout.vllm_server import VllmServer
from grpo_tasks.stage.checkpoint import Checkpoints, Counters, TrainingState
from grpo_tasks.stage.finish import Ending, best_step, finished, restore_best, save_best, save_final, write_completions
from grpo_tasks.stage.guards import Guards, kl_guard_off
from grpo_tasks.stage.journal import Events, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.stage.watch import Fail, RollBack, Stop, Verdict, Watch
from schemas.config.stage import StageConfig
from schemas.errors import JudgeUnavailableError, NotFiniteError
from schemas.metrics import DROPPED_GROUPS, EPOCH, KL, NUM_TOKENS, STEP_TIME, TOKENS_PER_S
from schemas.prompts import PromptRow
from schemas.results.model import StageResult


@dataclass(frozen=True, slots=True)
class Batch:
    """The updates that train on a round."""

    updates: list[list[Microbatch]]
    """The microbatches of each update; every iteration over the round goes through them again."""
    old_logps: list[list[torch.Tensor]] | None
    """For each microbatch the log-probabilities under the policy that sampled; None when the round feeds one update only."""


class Trainer:
    """Trains the stage of a stage directory."""

    def __init__(
        self, directory: StageDir, suite: RewardSuite, servers: Sequence[VllmServer] = (), player: Player | None = None
    ) -> None:
        self.dir, self.suite, self.spec = directory, suite, StageSpec.load(directory.spec).with_correction
        spec, stage = self.spec, self.spec.stage
        self.stage = stage
        self.ranks = Ranks.of(spec, pick_device(spec.resources))
        self.device, writes = self.ranks.accelerator.device, self.ranks.writes
        self.seed = completion_seed(spec.seed, stage.name)
        torch.manual_seed(self.seed)
        self.tokenizer = load_tokenizer(spec.start, spec.model, spec.rollout.chat_template_kwargs)
        if player is not None:
            # It knows the tools.
            self.tokenizer = player.tokenizer
        self.rows = self._training_rows()
        self.held_out = _held_out_rows(spec)
        mixture = Mixture.of([row.task for row in self.rows], spec.tasks)
        self.schedule = PromptSchedule(len(self.rows), prompts_per_rollout(stage), self.seed, mixture)
        self.updates = suite.worker.max_steps = num_updates(stage, len(self.rows))
        model = trainable_policy(spec.start, spec.model, device=self.device, seed=self.seed, token_seed=spec.seed)
        longest = spec.interaction.longest_prompt(max(row.prompt_tokens for row in self.rows))
        stage = with_token_budget(spec, model, longest)
        policies = Policies(model, spec, self.ranks, sharded=spec.resources.fsdp and self.ranks.count > 1)
        self.learner = self._learner(policies, stage)
        self.journal = Journal(directory.journal, writes=writes)
        self.events = Events(directory.events, writes=writes)
        if note := uncovered(model, spec.model.lora):
            self.events.report(0, "adapter_layers", note)
        self.guards = Guards(stage.guards, kl_every=self._kl_every)
        self.counters, self.meter = Counters(), GpuMeter(self.device)
        state = TrainingState(model, self.tokenizer, self.learner.optimizer, self.learner.scheduler, self.learner.scaler)
        self.checkpoints = Checkpoints(
            directory,
            state,
            self.counters,
            self.guards,
            suite,
            self.events,
            stage.save_total_limit,
            self.ranks.keeps_checkpoints,
        )
        self.checkpoints.restore()
        # After the restore: an engine may copy the weights.
        engine = self._engine(servers)
        self.stage = with_measured_budget(stage, policies, directory, self.events, longest, engine)
        staleness = spec.rollout.max_staleness if servers else 0
        ranks = self.ranks.in_other_thread() if staleness else self.ranks
        self.collector = Collector(engine, suite, self.tokenizer, self.rows, self.schedule, spec, self.seed, ranks, player)
        self.rounds = Rounds(
            self.collector, updates=stage.updates_per_rollout, max_staleness=staleness, may_start=self._may_start_ahead
        )

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self.counters.step

    def train(self) -> StageResult:
        """Run the updates that are left: GRPO as in arXiv:2402.03300, algorithm 1.

        Raises:
            TrainingError: a guard or the time limit stops the stage, or the completions come from another policy.
        """
        watch, clock = self._begin(), Stopwatch(self.counters.seconds)
        # A stage killed between its last update and its result is complete already.
        verdict: Verdict = watch.goal(self.step)
        try:
            while not isinstance(verdict, Stop | Fail):
                clock.start_update()
                if self.step % self.stage.updates_per_rollout == 0:
                    current = self._collect()  # rollout, score, advantages
                    batch = self._microbatches(current)
                metrics, fault = self._update(batch)
                metrics |= self._evaluate_held_out()
                self._record(current, metrics, clock)  # journal
                verdict = self._judge(watch, fault)
                self._checkpoint(verdict)
        finally:
            self.rounds.close()
        return self._finish(verdict)

    def _training_rows(self) -> list[PromptRow]:
        """The rows that the stage trains on, in reading order."""
        return read_prompts(self.spec.train)

    def _learner(self, policies: Policies, stage: StageConfig) -> Learner:
        """What makes an update of microbatches."""
        return Learner(policies, stage, self.ranks, self.updates)

    def _engine(self, servers: Sequence[VllmServer]) -> RolloutEngine:
        """What samples from the policy."""
        model, ranks = self.learner.model, self.ranks
        return rollout_engine(
            self.spec, self.dir, model, self.tokenizer, servers, device=self.device, ranks=ranks.count, rank=ranks.rank
        )

    def _begin(self) -> Watch:
        if self.step == 0 and self.stage.guards.rolls_back:
            # The first trouble may come before the first checkpoint is due.
            self.checkpoints.save()
        off = kl_guard_off(self.stage, measurable=self.learner.policies.measures_kl)
        if off is not None:
            self.events.report(0, "guard_off", off)
        return Watch(
            self.spec, self.updates, self.journal, self.events, self.guards, agree=lambda late: self.ranks.gather(late)[0]
        )

    def _collect(self) -> Round:
        """The next round: rollout, score, advantages (rounds.py)."""
        try:
            current = self.rounds.take(self.step // self.stage.updates_per_rollout)
        except JudgeUnavailableError:
            # Nothing is half done here. Rounds ahead were sampled by older weights, which a resumed stage could not repeat.
            # Several ranks save together, and the others wait elsewhere.
            if not self.rounds.ahead and self.ranks.count == 1:
                self.checkpoints.save()
            raise
        # Only one rank writes, and each has its own queue to the servers.
        current = replace(current, report=EngineReport.of_ranks(self.ranks.gather(current.report)))
        self.counters.tokens += current.tokens
        for note in current.scored.scores.notes:
            self.events.report(self.step + 1, "reward_error", str(note))
        for event in current.report.events:
            self.events.report(self.step + 1, "rollout_server", event)
        return current

    def _may_start_ahead(self, step: int) -> bool:
        """Whether the round that begins after update `step` may be sampled by an older policy."""
        # Checkpoints hold no round in flight, and a held-out evaluation needs the engine for itself.
        return step < self.updates and not self._checkpoint_due(step) and not self._evaluation_due(step)

    def _microbatches(self, current: Round) -> Batch:
        """Split a round into updates, and those into microbatches; several updates need the log-probabilities of now."""
        rollout, size = current.scored.rollout, self.stage.completions_per_update
        updates = [
            make_microbatches(
                rollout,
                current.advantages,
                range(start, start + size),
                self.stage,
                max_completion_length=self.spec.max_completion_tokens,
                device=self.device,
                ranks=self.ranks,
                same_count=self.learner.policies.sharded,
            )
            for start in range(0, len(rollout.completions), size)
        ]
        self._seed_dropout("score")
        if self.stage.updates_per_rollout == 1:
            return Batch(updates, None)
        old = [[self.learner.old_logps(microbatch) for microbatch in microbatches] for microbatches in updates]
        return Batch(updates, old)

    def _update(self, batch: Batch) -> tuple[dict[str, float], NotFiniteError | None]:
        """One optimizer step, counted: its figures, or the fault because of which no weight was moved."""
        index = self.step % self.stage.updates_per_rollout % len(batch.updates)
        old = batch.old_logps[index] if batch.old_logps is not None else None
        self._seed_dropout("update")
        metrics: dict[str, float] = {}
        fault = None
        try:
            metrics = self.learner.update(batch.updates[index], old, measure_kl=self._kl_due()).means()
        except NotFiniteError as error:
            fault = error
        self.counters.step += 1
        return metrics, fault

    @property
    def _kl_every(self) -> int:
        """Updates between two measurements of the KL."""
        return 1 if self.stage.has_kl_term else max(1, self.stage.kl_every_steps)

    def _kl_due(self) -> bool:
        """Whether this update measures the KL although beta is 0; an update without a live group leaves it to the next one."""
        if self.stage.has_kl_term or self.stage.kl_every_steps == 0 or not self.learner.policies.measures_kl:
            return False
        return not self.journal.window(KL, last=self.step, size=self._kl_every - 1)

    def _seed_dropout(self, purpose: str) -> None:
        """Dropout draws differently on every rank, and the same again after a resume."""
        torch.manual_seed(completion_seed(self.seed, purpose, self.step, self.ranks.rank))

    def _evaluate_held_out(self) -> dict[str, float]:
        """Rewards of the present policy on held-out prompts; empty where no evaluation is due."""
        if not self._evaluation_due(self.step):
            return {}
        # An outage of a judge here leaves no checkpoint: the update is not in the journal yet, and a stage that resumed behind it
        # would never evaluate it.
        scored = self.collector.evaluate_held_out(self.held_out, step=self.step)
        return held_out_metrics(scored, stage_weights(self.stage, self.spec.rewards))

    def _record(self, current: Round, metrics: dict[str, float], clock: Stopwatch) -> None:
        """Append the update to the journal; write its completions where they are due, and its weights if they are the best."""
        seconds, self.counters.seconds = clock.update_s, clock.total_s
        sampled = sum(completion.num_written for completion in current.scored.rollout.completions)
        metrics |= self._rollout_metrics(current) | current.report.figures
        if self.stage.max_refills:
            metrics[DROPPED_GROUPS] = float(current.dropped)
        metrics |= self.meter.read()
        metrics[NUM_TOKENS] = float(self.counters.tokens)
        metrics[STEP_TIME], metrics[TOKENS_PER_S] = seconds, sampled / seconds
        metrics[EPOCH] = self.step / self.stage.updates_per_rollout * self.schedule.per_rollout / len(self.rows)
        self.journal.append(self.step, metrics)
        due = self.step % self.stage.log_completions_steps == 0 or self.step in (1, self.updates)
        if due and self.ranks.writes:
            table = completions_table(
                current.scored,
                current.advantages.values,
                stage=self.stage.name,
                step=self.step,
                policy_version=current.version,
            )
            write_completions(self.dir, self.step, table)
        # Before any roll back: the evaluation is that of these weights.
        if self._evaluation_due(self.step) and best_step(self.journal, self.step) == self.step:
            save_best(self.dir, self.learner.model, self.tokenizer, writes=self.ranks.writes)

    def _rollout_metrics(self, current: Round) -> dict[str, float]:
        return rollout_metrics(current.scored, current.advantages)

    def _judge(self, watch: Watch, fault: NotFiniteError | None) -> Verdict:
        """The watch's verdict; a roll back is carried out, after which the stage may still be complete."""
        resumable = self._checkpoint_due(self.step) or (not self.rounds.ahead and self.step % self.stage.updates_per_rollout == 0)
        verdict = watch.decide(self.step, fault, resumable=resumable)
        if not isinstance(verdict, RollBack):
            return verdict
        self.rounds.drop()
        good, factor = self.checkpoints.roll_back(verdict), self.stage.guards.rollback_learning_rate
        self.learner.slow_down(factor)
        detail = f"to the weights of update {good}, because of {verdict.why}; learning rate times {factor:g}"
        self.events.report(self.step, "rolled_back", detail)
        return watch.ending(self.step, resumable=resumable)

    def _checkpoint(self, verdict: Verdict) -> None:
        """Save where it is due. A failed stage keeps the checkpoint before the trouble; `_finish` saves a complete one."""
        if not isinstance(verdict, Stop | Fail) and self._checkpoint_due(self.step):
            self.checkpoints.save()

    def _checkpoint_due(self, step: int) -> bool:
        return self._due(self.stage.save_steps, step)

    def _evaluation_due(self, step: int) -> bool:
        every = self.stage.eval_steps
        return bool(self.held_out) and every is not None and (step == self.updates or self._due(every, step))

    def _due(self, every: int, step: int) -> bool:
        # Between two rounds only, so that a checkpoint never has to hold half-used completions.
        per_rollout = self.stage.updates_per_rollout
        return step % (max(1, round(every / per_rollout)) * per_rollout) == 0

    def _finish(self, verdict: Verdict) -> StageResult:
        """Write the last checkpoint, the trained weights and the result.

        Raises:
            TrainingError: the stage failed.
        """
        if isinstance(verdict, Fail):
            if verdict.save:
                self.checkpoints.save()
            raise verdict.error
        assert isinstance(verdict, Stop)
        self.checkpoints.save()
        self.collector.engine.close()
        best = best_step(self.journal, self.step)
        # A stage that reached its target ends where it should, whatever its evaluations say.
        if best == self.step or verdict.why == "target" or not self.stage.load_best_model_at_end:
            best = None
        if best is None:
            save_final(self.dir, self.learner.model, self.tokenizer, writes=self.ranks.writes)
        elif self.ranks.writes:
            restore_best(self.dir)
        self.ranks.wait()
        ending = Ending(self.step, verdict.why, self.counters.resumed, self.counters.seconds, best)
        # Only the rank that wrote the weights can hash them: ranks on other nodes may have disks of their own.
        result = self.ranks.gather(finished(self.dir, self.spec, self.journal, ending) if self.ranks.writes else None)[0]
        assert result is not None
        if self.ranks.writes:
            result.save(self.dir.result)
        return result


def _held_out_rows(spec: StageSpec) -> list[PromptRow]:
    """Rows for held-out evaluations while training: the last ones by id, where the evaluation after training takes the first."""
    if spec.stage.eval_steps is None or spec.eval is None:
        return []
    return sorted(read_prompts(spec.eval), key=lambda row: row.prompt_id)[-spec.stage.num_eval_prompts :]
