"""One stage of any kind, from its first update (or its last checkpoint) to its result.

    kind        a round                               what an update trains on                its loss
    grpo        completions, scored, with advantages  all of them                             policy gradient (losses.py)
    rejection   the same                              the best of each group (microbatches)   cross entropy
    sft         demonstrations of the next prompts    all of them                             cross entropy

Trainer.train is the loop.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.data.demonstrations import REFUSED, Demonstrations, check_share, read_demonstrations
from grpo_tasks.data.table import read_prompts
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.measure import GpuMeter, completions_table, held_out_metrics, length_metrics, rollout_metrics
from grpo_tasks.grpo.microbatches import Microbatches, OldLogps, chosen_completions, make_microbatches
from grpo_tasks.grpo.policies import load_policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Collector, DemonstrationRounds, Mixture, PromptSchedule, Round, Rounds
from grpo_tasks.grpo.sampler import check_copy_fits, rollout_engine
from grpo_tasks.grpo.token_budget import with_measured_budget, with_token_budget
from grpo_tasks.kit.files import replacing
from grpo_tasks.policy.adapter_targets import uncovered
from grpo_tasks.policy.load import load_tokenizer, pick_device
from grpo_tasks.policy.recurrent_layers import mixer_kernels
from grpo_tasks.rewards.suite import RewardSuite, stage_weights
from grpo_tasks.rollout.conversations import Player
from grpo_tasks.rollout.engine import EngineReport, NoEngine, RolloutEngine, completion_seed
from grpo_tasks.rollout.vllm_server import VllmServer
from grpo_tasks.stage.checkpoint import Checkpoints, TrainingState, finished, save_weights, write_completions
from grpo_tasks.stage.guards import Guards, kl_guard_off
from grpo_tasks.stage.journal import Counters, Events, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.stage.watch import Fail, RollBack, Stop, Verdict, Watch
from schemas import metrics as metric
from schemas.errors import JudgeUnavailableError, NotFiniteError
from schemas.prompts import PromptRow
from schemas.results.model import StageResult

Update = tuple[Microbatches, OldLogps]
"""Without old log-probabilities where the round feeds no other update."""


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
        self._began = self._update_began = time.perf_counter()
        self.seed = completion_seed(spec.seed, stage.name)
        torch.manual_seed(self.seed)
        self.tokenizer = load_tokenizer(spec.start, spec.model, spec.rollout.chat_template_kwargs)
        if player is not None:
            # It knows the tools.
            self.tokenizer = player.tokenizer
        self.rows = read_prompts(spec.train)
        self.demonstrations = self._read_demonstrations() if stage.kind == "sft" else None
        self.held_out: list[PromptRow] = []
        if stage.eval_steps is not None and spec.eval is not None:
            # The last ones by id, where the evaluation after training takes the first.
            self.held_out = sorted(read_prompts(spec.eval), key=lambda row: row.prompt_id)[-stage.num_eval_prompts :]
        mixture = Mixture.of([row.task for row in self.rows], spec.tasks)
        self.schedule = PromptSchedule(len(self.rows), stage.prompts_per_rollout, self.seed, mixture)
        self.updates = suite.worker.max_steps = stage.num_updates(len(self.rows))
        longest = spec.interaction.longest_prompt(max(row.prompt_tokens for row in self.rows))
        # A stage that samples nothing needs no engine.
        sampled, sharded = self.demonstrations is None or bool(self.held_out), spec.resources.fsdp and self.ranks.count > 1
        if sampled and sharded and not servers:
            check_copy_fits(spec, longest, self.device)
        policies = load_policies(spec, self.ranks, seed=self.seed, sharded=sharded)
        stage = with_token_budget(spec, policies.model, longest)
        self.learner = Learner(policies, stage, self.ranks, self.updates)
        self.journal, self.events = Journal(directory.journal, writes=writes), Events(directory.events, writes=writes)
        if note := uncovered(policies.model, spec.model.lora):
            self.events.report(0, "adapter_layers", note)
        self.guards = Guards(stage.guards, kl_every=self._kl_every, skips_dead=stage.skips_dead)
        self.counters, self.meter = Counters(), GpuMeter(self.device)
        state = TrainingState(policies.model, self.tokenizer, self.learner.optimizer, self.learner.scheduler, self.learner.scaler)
        keeps, writes = stage.save_total_limit, self.ranks.keeps_checkpoints
        self.checkpoints = Checkpoints(directory, state, self.counters, self.guards, suite, self.events, keeps, writes)
        self.checkpoints.restore()
        self.learner.halvings = self.counters.halvings
        # After the restore: an engine may copy the weights.
        engine: RolloutEngine = NoEngine()
        if sampled:
            where = {"cuda": self.device.type == "cuda", "ranks": self.ranks.count, "rank": self.ranks.rank}
            engine = rollout_engine(spec, directory, policies.model, self.tokenizer, servers, longest=longest, **where)
        self.stage = with_measured_budget(stage, policies, directory, self.events, longest, engine)
        staleness = spec.rollout.max_staleness if servers else 0
        ranks = self.ranks.in_other_thread() if staleness else self.ranks
        self.collector = Collector(engine, suite, self.tokenizer, self.rows, self.schedule, spec, self.seed, ranks, player)
        self.source: Rounds | DemonstrationRounds
        if self.demonstrations is not None:
            self.source = DemonstrationRounds(self.demonstrations, self.schedule)
        else:
            settings = {"updates": stage.updates_per_rollout, "max_staleness": staleness}
            self.source = Rounds(self.collector, **settings, may_start=self._may_start_ahead)

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self.counters.step

    def train(self) -> StageResult:
        """Run the updates that are left: GRPO as in arXiv:2402.03300, algorithm 1. TrainingError where the stage fails."""
        watch = self._begin()
        # Without the time between a kill and the resume.
        self._began = time.perf_counter() - self.counters.seconds
        # A stage killed between its last update and its result is complete already.
        verdict: Verdict = watch.goal(self.step)
        try:
            while not isinstance(verdict, Stop | Fail):
                self._update_began = time.perf_counter()
                if self.step % self.stage.updates_per_rollout == 0:
                    current = self._collect()  # rollout, score, advantages
                    updates = self._microbatches(current)
                # Every iteration over the round goes through its updates again.
                metrics, fault = self._update(updates[self.step % self.stage.updates_per_rollout % len(updates)])
                metrics |= self._evaluate_held_out()
                self._record(current, metrics)  # journal
                verdict = self._judge(watch, fault)
                # A failed stage keeps the checkpoint before the trouble; `_finish` saves a complete one.
                if not isinstance(verdict, Stop | Fail) and self._checkpoint_due(self.step):
                    self.checkpoints.save()
        finally:
            self.source.close()
        return self._finish(verdict)

    def _read_demonstrations(self) -> Demonstrations:
        """The demonstrations of a stage of kind sft; the rows that have none are listed in the stage directory and left out."""
        settings, limit = self.stage.demonstrations, self.spec.max_completion_tokens
        assert settings is not None
        # The words of a demonstration reach the template here for the first time.
        with limited_templates(self.spec.model.path):
            found = read_demonstrations(self.rows, settings, self.tokenizer, max_tokens=limit)
        listed = self.dir.root / REFUSED
        if self.ranks.writes:
            found.write(listed)
        check_share(found, settings, stage=self.stage.name, listed=listed)
        self.rows = found.rows
        return found

    def _begin(self) -> Watch:
        if self.step == 0 and self.stage.guards.rolls_back:
            # The first trouble may come before the first checkpoint is due.
            self.checkpoints.save()
        off = kl_guard_off(self.stage, measurable=self.learner.policies.measures_kl)
        if off is not None:
            self.events.report(0, "guard_off", off)
        if kernels := mixer_kernels(self.learner.policies.model):
            self.events.report(0, "recurrent_kernels", kernels)
        found = self.demonstrations
        if found is not None and found.refused:
            self.events.report(0, "demonstrations_refused", f"{found.summary()}; {REFUSED} names them")
        given = (self.spec, self.updates, self.journal, self.events, self.guards)
        return Watch(*given, agree=lambda late: self.ranks.gather(late)[0])

    def _collect(self) -> Round:
        try:
            current = self.source.take(self.step // self.stage.updates_per_rollout)
        except JudgeUnavailableError:
            # Nothing is half done here. Rounds ahead were sampled by older weights, which a resumed stage could not repeat.
            # Several ranks save together, and the others wait elsewhere.
            if not self.source.ahead and self.ranks.count == 1:
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

    def _microbatches(self, current: Round) -> list[Update]:
        """Split a round into updates, and those into microbatches."""
        rollout, stage, size = current.scored.rollout, self.stage, self.stage.completions_per_update
        padded = isinstance(stage.max_tokens_per_microbatch, int) and self.learner.policies.pads
        chosen = chosen_completions(current.scored, stage) if stage.kind == "rejection" else range(len(rollout.completions))
        updates = [
            make_microbatches(
                rollout,
                current.advantages,
                [index for index in chosen if start <= index < start + size],
                stage,
                max_completion_length=self.spec.max_completion_tokens,
                device=self.device,
                ranks=self.ranks,
                padded=padded,
                same_count=self.learner.policies.sharded,
            )
            for start in range(0, len(rollout.completions), size)
        ]
        self._seed_dropout("score")
        # Several updates need the log-probabilities of now.
        if stage.kind != "grpo" or stage.updates_per_rollout == 1:
            return [(microbatches, None) for microbatches in updates]
        return [self.learner.with_old_logps(microbatches) for microbatches in updates]

    def _update(self, update: Update) -> tuple[dict[str, float], NotFiniteError | None]:
        """One optimizer step: its figures, or the fault because of which no weight was moved."""
        self._seed_dropout("update")
        try:
            figures = self.learner.update(*update, measure_kl=self._kl_due())
        except NotFiniteError as error:
            return {}, error
        finally:
            self.counters.step += 1
            self.counters.halvings = self.learner.halvings
        if figures.halvings:
            part = f"1/{2**figures.halvings} of their completions"
            detail = f"passes did not fit into memory; the update was computed again with {part}, and so are later ones"
            self.events.report(self.step, "out_of_memory", detail)
        return figures.means(), None

    @property
    def _kl_every(self) -> int:
        """Updates between two measurements of the KL."""
        return 1 if self.stage.has_kl_term else max(1, self.stage.kl_every_steps)

    def _kl_due(self) -> bool:
        """Whether this update measures the KL although beta is 0; an update without a live group leaves it to the next one."""
        stage = self.stage
        if stage.kind != "grpo" or stage.has_kl_term or not stage.kl_every_steps or not self.learner.policies.measures_kl:
            return False
        return not self.journal.window(metric.KL, last=self.step, size=self._kl_every - 1)

    def _seed_dropout(self, purpose: str) -> None:
        """Dropout draws differently on every rank, and the same again after a resume."""
        torch.manual_seed(completion_seed(self.seed, purpose, self.step, self.ranks.rank))

    def _evaluate_held_out(self) -> dict[str, float]:
        """Empty where no evaluation is due."""
        if not self._evaluation_due(self.step):
            return {}
        # An outage of a judge here leaves no checkpoint: the update is not in the journal yet, and a stage that resumed behind it
        # would never evaluate it.
        scored = self.collector.evaluate_held_out(self.held_out, step=self.step)
        return held_out_metrics(scored, stage_weights(self.stage, self.spec.rewards))

    def _record(self, current: Round, metrics: dict[str, float]) -> None:
        """Append the update to the journal; write its completions where they are due, and its weights if they are the best."""
        # Sampling, scoring and training count, writing checkpoints does not.
        seconds, self.counters.seconds = time.perf_counter() - self._update_began, time.perf_counter() - self._began
        sampled = sum(completion.num_written for completion in current.scored.rollout.completions)
        metrics |= self._rollout_metrics(current) | current.report.figures
        if self.stage.max_refills:
            metrics[metric.DROPPED_GROUPS] = float(current.dropped)
        metrics |= self.meter.read() | self.learner.waits.figures()
        metrics[metric.NUM_TOKENS] = float(self.counters.tokens)
        metrics[metric.STEP_TIME], metrics[metric.TOKENS_PER_S] = seconds, sampled / seconds
        metrics[metric.EPOCH] = self.step / self.stage.updates_per_rollout * self.schedule.per_rollout / len(self.rows)
        self.journal.append(self.step, metrics)
        due = self.step % self.stage.log_completions_steps == 0 or self.step in (1, self.updates)
        if due and self.ranks.writes:
            given, name = (current.scored, current.advantages.values), self.stage.name
            table = completions_table(*given, stage=name, step=self.step, policy_version=current.version)
            write_completions(self.dir, self.step, table)
        # Before any roll back: the evaluation is that of these weights.
        if self._evaluation_due(self.step) and self.journal.best_step(self.step) == self.step:
            save_weights(self.dir.best, self.learner.model, self.tokenizer, writes=self.ranks.writes)

    def _rollout_metrics(self, current: Round) -> dict[str, float]:
        scored = current.scored
        if self.demonstrations is not None:
            return length_metrics([len(completion.token_ids) for completion in scored.rollout.completions])
        metrics = rollout_metrics(scored, current.advantages)
        if self.stage.kind == "rejection":
            chosen, totals = chosen_completions(scored, self.stage), scored.scores.totals
            metrics[metric.KEPT_COMPLETIONS] = len(chosen) / len(totals)
            if chosen:
                metrics[metric.KEPT_REWARD] = float(totals[chosen].mean())
        return metrics

    def _judge(self, watch: Watch, fault: NotFiniteError | None) -> Verdict:
        """The verdict; a roll back is carried out, after which the stage may still be complete."""
        resumable = self._checkpoint_due(self.step) or (not self.source.ahead and self.step % self.stage.updates_per_rollout == 0)
        verdict = watch.decide(self.step, fault, resumable=resumable)
        if not isinstance(verdict, RollBack):
            return verdict
        self.source.drop()
        good, factor = self.checkpoints.roll_back(verdict.to), self.stage.guards.rollback_learning_rate
        self.learner.slow_down(factor)
        detail = f"to the weights of update {good}, because of {verdict.why}; learning rate times {factor:g}"
        self.events.report(self.step, "rolled_back", detail)
        return watch.ending(self.step, resumable=resumable)

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
        """The result, written last; raises the error of a stage that failed."""
        if isinstance(verdict, Fail):
            if verdict.save:
                self.checkpoints.save()
            raise verdict.error
        assert isinstance(verdict, Stop)
        self.checkpoints.save()
        self.collector.engine.close()
        best = self.journal.best_step(self.step)
        # A stage that reached its target ends where it should, whatever its evaluations say.
        if best == self.step or verdict.why == "target" or not self.stage.load_best_model_at_end:
            best = None
        if best is None:
            save_weights(self.dir.final, self.learner.model, self.tokenizer, writes=self.ranks.writes)
        elif self.ranks.writes:
            with replacing(self.dir.final) as unfinished:
                shutil.copytree(self.dir.best, unfinished)
        self.ranks.wait()
        mine = None
        if self.ranks.writes:
            # Only the rank that wrote the weights can hash them: ranks on other nodes may have disks of their own.
            mine = finished(self.dir, self.spec, self.journal, self.counters, stopped=verdict.why, best_step=best)
        result = self.ranks.gather(mine)[0]
        assert result is not None
        if self.ranks.writes:
            result.save(self.dir.result)
        return result
