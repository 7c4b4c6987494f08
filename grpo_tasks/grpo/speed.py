"""`python -m grpo_tasks.grpo.speed DIRECTORY`: a trial of a few seconds that finds how fast this machine samples and trains.

It loads the model of DIRECTORY/spec.json (a StageSpec) as a stage would, samples a few completions with the stage's engine, and
makes a few updates with its learner: same layout, adapter, precision, group size and prompts, in batches that grow towards those
of the stage while time allows. Two linear fits turn the durations into the rates of result.json (schemas/results/speed.py):

    sampling = prompt_s x prompt tokens + decode_s x steps + row_s x rows of all steps        update = update_s + train_s x tokens

Nothing of it reaches the run: a process of its own, which the run starts before its steps and outlives.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from scipy.optimize import nnls

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.demonstrations import read_demonstrations
from grpo_tasks.data.table import read_prompts
from grpo_tasks.grpo.advantages import Advantages, advantages
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.microbatches import Microbatches, make_microbatches
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Rollout, ScoredRollout, rewards_of
from grpo_tasks.policy import change
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.processes.child import LOG, RESULT, SPEC, run_child
from grpo_tasks.rewards.contract import batch_of
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rewards import JUDGE
from schemas.config.stage import DemonstrationsConfig
from schemas.errors import UserError
from schemas.results.speed import DEMONSTRATIONS, Speed

PART_S = 2.0
"""Time for batches that grow, and for updates that grow. A call that would exceed it is left out, so the trial of a slow machine
takes a few times as long as its first calls."""
LENGTH_S = 8.0
"""Time for completions of full length, where they take longer than PART_S: how long they are is what an estimate knows least."""
FEW_TOKENS = 8
"""Length of the completions that only measure a batch."""
MOST_PROMPTS = 64
"""Rows of the data that the trial knows."""
GENERATED = (2, 1, 5)
"""Prompts for transformers' generate, and the lengths of two calls."""


@dataclass
class Trial:
    """What a trial works with, and what it has found."""

    spec: StageSpec
    clock: Callable[[], float] = time.perf_counter
    sampled: list[tuple[float, ...]] = field(default_factory=list)
    """Of each call: prompt tokens, steps, rows of all steps, seconds."""
    updated: list[tuple[float, ...]] = field(default_factory=list)
    """Of each update: 1, tokens, seconds."""
    longest: list[Completion] = field(default_factory=list)
    """The last completions, which were given most time."""
    each: int = 1
    """How many of them a prompt has."""

    def __post_init__(self) -> None:
        spec = self.spec
        self.rows = sorted(read_prompts(spec.train), key=lambda row: row.prompt_id)[:MOST_PROMPTS]
        self.ranks = Ranks.of(spec, pick_device(spec.resources))
        self.tokenizer = load_tokenizer(spec.start, spec.model, spec.rollout.chat_template_kwargs)
        self.prompts = [prompt_ids(self.tokenizer, row.messages) for row in self.rows]
        device = self.ranks.accelerator.device
        self.model = trainable_policy(spec.start, spec.model, device=device, seed=spec.seed, token_seed=spec.seed)
        self.learner = Learner(Policies(self.model, spec, self.ranks), spec.stage, self.ranks, updates=1)
        self.engine = LocalEngine.of(self.model, self.tokenizer, spec.resources, kept_bytes=0.0)
        # The first call finds the way of decoding that fits the model.
        self.sample(1, 1, 1)
        self.sampled.clear()

    def sample(self, prompts: int, each: int, tokens: int) -> float:
        """Sample `each` completions of so many prompts; returns the seconds."""
        # A trial may want more prompts than there are rows: the requests of a prompt are neighbours all the same.
        chosen = [self.prompts[index % len(self.prompts)] for index in range(prompts)]
        requests = [Request(ids, 1_000 * index + own) for index, ids in enumerate(chosen) for own in range(each)]
        sampling = replace(Sampling.of(self.spec.rollout), max_completion_length=tokens)
        began = self.clock()
        done = self.engine.generate(requests, sampling)
        seconds, lengths = self.clock() - began, [len(one.token_ids) for one in done]
        read = sum(map(len, chosen)) * (1 if self.spec.resources.share_prompts else each)
        self.sampled.append((read, max(lengths), sum(lengths), seconds))
        self.longest, self.each = done, each
        return seconds

    def sample_all(self) -> None:
        """Batches that grow to those of a round, then completions that are as long as time allows."""
        stage, rollout = self.spec.stage, self.spec.rollout
        group = max(stage.group_size, min(8, rollout.max_batch_size))
        most = max(1, min(stage.completions_per_update, rollout.max_batch_size) // group)
        few, prompts, left = min(FEW_TOKENS, rollout.max_completion_length), 1, PART_S
        while True:
            left -= 2 * self.sample(prompts, group, few)
            if prompts == most or left < 0:
                break
            prompts = min(most, 2 * prompts)
        # Groups of full length where time allows, else half a group of two prompts each, as far as it goes.
        whole, (prompt_s, decode_s, row_s) = rollout.max_completion_length, fitted(self.sampled)
        token_s, read = decode_s + group * row_s, len(self.prompts[0])
        for count in (min(prompts, most), min(4, most), min(2, most), 1):
            if count * prompt_s * read + whole * (decode_s + count * group * row_s) < PART_S:
                self.sample(count, group, whole)
                return
        self.sample(2, max(1, group // 2), max(few, min(whole, int((LENGTH_S - 2 * prompt_s * read) / token_s))))

    def update_all(self) -> float:
        """Updates that grow to one of the stage; returns the seconds per token of a pass that goes forwards only."""
        stage = self.spec.stage
        most, few = max(1, stage.completions_per_update // stage.group_size), FEW_TOKENS
        self.engine.sleep()
        self._update(1, few)  # finds the layout
        self.updated.clear()
        microbatches = self._update(1, few)
        # As long as they were sampled, if a group of them fits into the time.
        tokens, groups, left = max(len(one.token_ids) for one in self.longest), 1, PART_S
        while tokens > few and self.updated[0][-1] * tokens / few > PART_S:
            tokens //= 2
        while tokens > few:
            microbatches = self._update(groups, tokens)
            left -= 2 * self.updated[-1][-1]
            if groups == most or left < 0:
                break
            groups = min(most, 2 * groups)
        began = self.clock()
        for each in microbatches:
            # Reading a number waits for the device.
            self.learner.old_logps(each).sum().item()
        return (self.clock() - began) / self.updated[-1][1]

    def _update(self, groups: int, tokens: int) -> Microbatches:
        stage, size = self.spec.stage, self.spec.stage.group_size
        count = groups * size
        given = [self.longest[index % len(self.longest)] for index in range(count)]
        texts = [replace(one, token_ids=one.token_ids[:tokens], logprobs=one.logprobs[:tokens]) for one in given]
        texts = [replace(one, policy_logprobs=None) for one in texts]
        prompts = [self.prompts[index % len(self.prompts)] for index in range(groups)]
        rollout = Rollout(self.rows[:1] * groups, prompts, texts, size, 0.0)
        # Alternating: no group is dead.
        values = torch.tensor([[1.0], [-1.0]]).repeat(count, 1)[:count]
        gained = Advantages(values, torch.ones(groups), torch.zeros(groups, dtype=torch.bool))
        limits = {"max_completion_length": self.spec.max_completion_tokens, "device": self.ranks.accelerator.device}
        began = self.clock()
        padded = self.learner.policies.pads
        microbatches = make_microbatches(rollout, gained, range(count), stage, ranks=self.ranks, padded=padded, **limits)
        self.learner.update(microbatches, None).means()
        seconds = self.clock() - began
        total = sum(map(len, prompts)) + sum(len(one.token_ids) for one in texts)
        self.updated.append((1.0, total, seconds))
        return microbatches

    def score_all(self, log: Path | None) -> tuple[float | None, float]:
        """Seconds in which the rewards of the stage score a completion, and the share of groups whose rewards differ.

        None where nothing may be called: judges cost money, environments have not answered, and a fault is the lab's to tell.
        """
        spec, stage, group = self.spec, self.spec.stage, self.spec.stage.group_size
        settings = [spec.rewards.resolve(name) for name in stage.rewards]
        if not settings or any(one is None or one.function in (JUDGE, "environment") for one in settings):
            return None, 1.0
        count = len(self.longest)
        rows = [self.rows[index // self.each % len(self.rows)] for index in range(count)]
        texts, tokens = [one.text for one in self.longest], [one.token_ids for one in self.longest]
        batch = batch_of(rows, texts, tokens, step=1)
        suite = RewardSuite(spec.rewards, stage.rewards, completion=spec.completion, tasks=spec.task_rewards, log=log)
        try:
            with suite:
                suite.score(batch)
                began = self.clock()
                scores = suite.score(batch)
                seconds = self.clock() - began
        except UserError:
            return None, 1.0
        # Completions that the trial stopped cannot tell what they would have earned.
        whole = all(
            one.finish_reason == "stop" or len(one.token_ids) == spec.rollout.max_completion_length for one in self.longest
        )
        if not whole or self.each != group or stage.kind != "grpo":
            return seconds / count, 1.0
        rollout = Rollout(self.rows[:1] * (count // group), [], self.longest, group, 0.0)
        dead = advantages(rewards_of(ScoredRollout(rollout, scores, seconds)), stage).dead
        return seconds / count, 1.0 - float(dead.float().mean())

    def generate_s(self) -> float:
        """Seconds of a step of transformers' generate."""
        count, few, more = GENERATED
        durations = []
        self.model.eval()
        for tokens in (few, few, more):
            began = self.clock()
            change.complete(self.model, self.tokenizer, self.prompts[:count], tokens, greedy=True)
            durations.append(self.clock() - began)
        return max(0.0, durations[2] - durations[1]) / (more - few)


def fitted(calls: Sequence[Sequence[float]]) -> list[float]:
    """Non-negative rates whose sums come closest to the durations (the last column), each by the share that it is off."""
    table = np.array(calls, dtype=float)
    return [float(rate) for rate in nnls(table[:, :-1] / table[:, -1:], np.ones(len(table)))[0]]


def demonstration_tokens(trial: Trial, settings: DemonstrationsConfig | None) -> float:
    """Mean length of the demonstrations of some rows; 0 where no stage trains on any."""
    if settings is None:
        return 0.0
    most = trial.spec.max_completion_tokens
    found = read_demonstrations(trial.rows, settings, trial.tokenizer, max_tokens=most).tokens
    return sum(len(one.token_ids) for one in found) / max(1, len(found))


def measure(
    spec: StageSpec,
    demonstrations: DemonstrationsConfig | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    began: float | None = None,
    log: Path | None = None,
) -> Speed:
    """The rates of a stage, and the length of the demonstrations of perhaps another one.

    `began` is when its process started, by the clock. `log` gets what reward functions print.
    """
    start = clock()
    began = start if began is None else began
    trial = Trial(spec, clock)
    load_s = clock() - began
    trial.sample_all()
    score_s = trial.update_all()
    reward_s, live = trial.score_all(log)
    prompt_s, decode_s, row_s = fitted(trial.sampled)
    update_s, train_s = fitted(trial.updated)
    return Speed(
        device=trial.model.device.type,
        load_s=load_s,
        prompt_s=prompt_s,
        decode_s=decode_s,
        row_s=row_s,
        update_s=update_s,
        train_s=train_s,
        score_s=score_s,
        reward_s=reward_s,
        live=live,
        generate_s=trial.generate_s(),
        lengths=[len(one.token_ids) for one in trial.longest],
        ended=[one.finish_reason == "stop" for one in trial.longest],
        demonstration_tokens=demonstration_tokens(trial, demonstrations),
        measured_s=clock() - began,
    )


def main(directory: Path) -> None:
    """Measure, and write the rates."""
    # Imports of this process count as loading: every step has them.
    began = time.perf_counter() - (time.time() - psutil.Process().create_time())
    given = directory / DEMONSTRATIONS
    taught = DemonstrationsConfig.model_validate_json(given.read_bytes()) if given.exists() else None
    measure(StageSpec.load(directory / SPEC), taught, began=began, log=directory / LOG).save(directory / RESULT)


if __name__ == "__main__":
    run_child(main)
