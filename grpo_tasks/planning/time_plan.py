"""What a run costs in time, before it starts: the tokens of every step, by the rates of this machine (schemas/results/speed.py).

    completions in batches  ->  prompt tokens, steps, rows of all steps  -\
    updates                 ->  tokens forwards, tokens backwards        ---> x rates = seconds of each step, and of the whole
    merge and proof         ->  models to load, steps of generate        -/

How long completions are is known from those of the trial alone. Those that it stopped go on ending at the rate at which others
ended. `at_most` takes all of them at full length, and no group as dead. What nobody knows before is not counted: that a policy
learns to write more or less, which groups are dead then, and whether there is a champion to evaluate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from schemas.config.load import with_setting
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.metrics import duration_text
from schemas.results.base import Section
from schemas.results.model import PROOF_PROMPTS, PROOF_TOKENS
from schemas.results.speed import Speed

LONG_S, NAMED = 3600.0, 3
"""From which duration on an estimate names settings that shorten a run, and how many."""
FINISHED = -1
"""In place of a number of updates: the step has nothing left to do."""
NOTHING: Mapping[str, int] = MappingProxyType({})
LEAST_STEP_S, MOST_BYTES_S, MOST_FLOPS = 1e-3, 1e11, 1e12
"""Fewest seconds of a step on a CPU, the most bytes that it reads in a second, and the most that each of its cores computes."""
ANSWERS = 4
"""Prompts whose answers by the merged model are generated twice, and once more by the registered version."""
PROOF_PASSES, PROOF_LOADS, PUBLISHED_LOADS = 4, 3, 3
"""Passes over the texts of a proof, and how often a merge and a publication load or write the model."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known about the data."""

    train: int
    eval: int
    prompt_tokens: float
    """Mean length of a prompt."""
    guards: Sequence[tuple[str, int]] = ()
    """Name of each guard of the promotion, and its prompts."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes."""

    label: str
    """That of the step in Prefect."""
    seconds: float
    at_most: float
    """If every completion has the full length."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A setting, and how many seconds it saves."""

    setting: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left of a run, and what would shorten it."""

    steps: Sequence[StepTime]
    savings: Sequence[Saving] = ()
    """Of a long run: those that save most first."""
    not_counted: str = ""

    @property
    def seconds(self) -> float:
        """Of the whole."""
        return sum(step.seconds for step in self.steps)

    @property
    def at_most(self) -> float:
        """Of the whole, if every completion has the full length."""
        return sum(step.at_most for step in self.steps)

    def headline(self) -> str:
        """The whole, in a sentence."""
        most = "" if self.at_most <= self.seconds else f"; {duration_text(self.at_most)} if every completion has the full length"
        return f"about {duration_text(self.seconds)} on this machine, as busy as it is now{most}"

    def sections(self) -> list[Section]:
        """The steps with the whole, and the settings that shorten it."""
        columns, saves = ("step", "about", "at full length"), "saves about"
        rows = [[step.label, duration_text(step.seconds), duration_text(step.at_most)] for step in self.steps]
        rows.append(["in all", duration_text(self.seconds), duration_text(self.at_most)])
        found = [Section(columns=columns, rows=rows, right=columns[1:], text=f"This run takes {self.headline()}.")]
        if self.savings:
            shorter = [[f"--set {one.setting}", duration_text(one.seconds)] for one in self.savings]
            found.append(Section(text="What shortens it most:", columns=("setting", saves), rows=shorter, right=(saves,)))
        return [*found, *([Section(text=self.not_counted)] if self.not_counted else [])]


@dataclass(frozen=True)
class Lengths:
    """Of completions that were sampled, some of them stopped before their end."""

    tokens: Sequence[int]
    ended: Sequence[bool]

    def alive(self, limit: int) -> NDArray[np.float64]:
        """Share of completions that have a token at each place: an estimate by Kaplan and Meier (doi:10.2307/2281868)."""
        tokens, ended = np.array(self.tokens), np.array(self.ended)
        # A completion that ended is over behind its last token; one that was stopped says nothing about what follows.
        # Beyond all of them: at the rate at which completions have ended so far.
        hazards = np.full(limit, ended.sum() / tokens.sum())
        hazards[0] = 0.0
        for place in range(1, min(limit, tokens.max() + 1)):
            hazards[place] = (ended & (tokens == place)).sum() / (tokens >= place).sum()
        return np.cumprod(1.0 - hazards, dtype=np.float64)


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a run."""

    config: RunConfig
    speed: Speed
    rows: Rows
    full: bool = False
    """Every completion has the full length."""

    @cached_property
    def _alive(self) -> NDArray[np.float64]:
        limit = self.config.rollout.max_completion_length
        return np.ones(limit) if self.full else Lengths(self.speed.lengths, self.speed.ended).alive(limit)

    @property
    def completion_tokens(self) -> float:
        """Mean length of a completion."""
        return float(self._alive.sum())

    def sampling(self, prompts: int, each: int) -> float:
        """`each` completions of so many prompts, with their scores."""
        count, batch = prompts * each, self.config.rollout.max_batch_size
        full, rest = divmod(count, batch)
        read = prompts if self.config.resources.share_prompts else count
        seconds = self.speed.prompt_s * read * self.rows.prompt_tokens + self.speed.row_s * count * self.completion_tokens
        seconds += (self.speed.reward_s or 0.0) * count
        return seconds + self.speed.decode_s * sum(self.steps(rows) for rows in [batch] * full + [rest])

    def steps(self, rows: int, limit: int | None = None) -> float:
        """Expected steps until the last one of so many completions has ended."""
        return float((1.0 - (1.0 - self._alive[:limit]) ** rows).sum())

    def evaluation(self, prompts: int, *, guard: bool = False) -> float:
        """Of one model, on the held-out prompts or those of a guard."""
        evaluation = self.config.evaluation
        greedy = self.sampling(prompts, 1) if evaluation.greedy else 0.0
        seconds = self.speed.load_s + self.sampling(prompts, evaluation.num_samples) + greedy
        return self._capped(seconds, None if guard else evaluation.max_minutes)

    def lab(self, num_generations: int) -> float:
        """A group of each prompt of the forecast."""
        lab = self.config.lab
        return self._capped(
            self.speed.load_s + self.sampling(min(lab.num_prompts, self.rows.train), num_generations), lab.max_minutes
        )

    @staticmethod
    def _capped(seconds: float, minutes: float | None) -> float:
        return seconds if minutes is None else min(seconds, 60.0 * minutes)

    def difficulty(self) -> float:
        """Pass rates of the training prompts of one model; with a screening as if it solved all of them."""
        return self.speed.load_s + self.sampling(self.rows.train, self.config.difficulty.samples)

    def stage(self, stage: StageConfig, *, done: int = 0) -> float:
        """A stage that has made `done` updates."""
        updates, per_round = stage.num_updates(self.rows.train), stage.updates_per_rollout
        if updates <= done:
            return 0.0
        # A stage that stopped in the middle of a round samples it again.
        rounds = 0 if stage.kind == "sft" else math.ceil(updates / per_round) - done // per_round
        seconds = (updates - done) * self.update(stage) + rounds * self.sampling(stage.prompts_per_rollout, stage.num_generations)
        if stage.eval_steps is not None:
            evaluations = math.ceil(updates / stage.eval_steps) - done // stage.eval_steps
            seconds += evaluations * self.sampling(min(stage.num_eval_prompts, self.rows.eval), 1)
        return self.speed.load_s + seconds

    def update(self, stage: StageConfig) -> float:
        """One update, without sampling."""
        tokens, passes = self.trained_tokens(stage), 0.0
        if stage.kind == "grpo" and stage.skips_dead and not self.full:
            tokens *= self.speed.live
        if stage.kind == "grpo":
            passes += 1.0 if stage.has_kl_term else 1.0 / stage.kl_every_steps if stage.kl_every_steps else 0.0
            passes += (stage.updates_per_rollout > 1) + (stage.top_entropy_quantile < 1)
        return self.speed.update_s + tokens * (self.speed.train_s + passes * self.speed.score_s)

    def trained_tokens(self, stage: StageConfig) -> float:
        """Tokens of an update: each prompt once where its completions share it, and the completions that are trained on."""
        completions, length = stage.completions_per_update, self.completion_tokens
        if stage.kind == "sft":
            length = self.speed.demonstration_tokens
        if stage.kind == "rejection" and stage.keep_completions is not None:
            completions = completions * min(stage.keep_completions, stage.num_generations) // stage.num_generations
        groups = math.ceil(stage.completions_per_update / stage.group_size)
        prompts = min(groups, completions) if self.config.resources.share_prompts else completions
        return prompts * self.rows.prompt_tokens + completions * length

    def merge(self) -> float:
        """Merge, save, load again, and compare at every token of a greedy and a sampled completion of some prompts."""
        length = float(self._alive[:PROOF_TOKENS].sum())
        texts = 2 * min(PROOF_PROMPTS, self.rows.eval)
        compared = PROOF_PASSES * texts * (self.rows.prompt_tokens + length) * self.speed.score_s
        return PROOF_LOADS * self.speed.load_s + 2 * self._generated(texts // 2) + 2 * self._generated(ANSWERS) + compared

    def publication(self) -> float:
        """Copy the merged model to MLflow, load it again there, and let it repeat its answers."""
        return PUBLISHED_LOADS * self.speed.load_s + self._generated(ANSWERS)

    def _generated(self, rows: int) -> float:
        written = rows * float(self._alive[:PROOF_TOKENS].sum())
        return self.speed.generate_s * self.steps(rows, PROOF_TOKENS) + self.speed.row_s * written


def _steps(
    config: RunConfig, speed: Speed, rows: Rows, done: Mapping[str, int], *, full: bool = False
) -> Iterator[tuple[str, float]]:
    costs, stages = Costs(config, speed, rows, full), config.stages
    most = config.evaluation.max_prompts

    def evaluated(label: str) -> list[tuple[str, float]]:
        guards = [(f"guard-{name}-{label}", count) for name, count in rows.guards if label in ("base", "merged")]
        sizes = [(label, rows.eval), *guards]
        return [
            (f"evaluate_model-{name}", costs.evaluation(min(count, most or count), guard=name != label)) for name, count in sizes
        ]

    steps: list[tuple[str, float]] = []
    if scored := [stage for stage in stages if stage.rewards]:
        steps.append(("probe_rewards", costs.lab(scored[0].num_generations)))
    if config.difficulty.samples and config.difficulty.pass_rate_column is None:
        at_start = [one for one in stages if one.kind != "sft" and not one.measure_difficulty]
        steps += [("measure_difficulty-start", costs.difficulty())] if at_start else []
    steps += evaluated("base")
    for stage in stages:
        label = f"train_stage-{stage.name}"
        if stage.measure_difficulty:
            steps.append((f"measure_difficulty-{stage.name}", costs.difficulty()))
        steps.append((label, costs.stage(stage, done=max(0, done.get(label, 0)))))
        if config.evaluation.stages or stage is stages[-1]:
            steps += evaluated(stage.name)
    steps += [("merge_adapter", costs.merge()), *evaluated("merged"), ("publish_model", costs.publication())]
    yield from (step for step in steps if done.get(step[0]) != FINISHED)


def estimate(config: RunConfig, speed: Speed, rows: Rows, *, done: Mapping[str, int] = NOTHING) -> Estimate:
    """What every step of a run takes that samples, trains or loads a model; of a run of more than an hour what shortens it.

    `done` has, by label, the updates that an unfinished stage has made, and FINISHED for a step that has nothing left to do.
    """
    found = zip(_steps(config, speed, rows, done), _steps(config, speed, rows, done, full=True), strict=True)
    steps = [StepTime(label, seconds, max(seconds, most)) for (label, seconds), (_, most) in found]
    if sum(step.seconds for step in steps) <= LONG_S:
        return Estimate(steps, not_counted=_not_counted(config, speed))
    return Estimate(steps, savings(config, speed, rows, done=done)[:NAMED], _not_counted(config, speed))


def savings(config: RunConfig, speed: Speed, rows: Rows, *, done: Mapping[str, int] = NOTHING) -> list[Saving]:
    """Settings that shorten a run, those that save most first: each alone, a number to half of what it was, by the same costs."""

    def total(changed: RunConfig) -> float:
        return sum(seconds for _, seconds in _steps(changed, speed, rows, done))

    found, whole = [], total(config)
    for path, value in _candidates(config):
        setting = f"{path}={value}"
        try:
            changed = with_setting(config, setting)
        except ConfigError:
            # Half of it does not fit the other settings.
            continue
        found.append(Saving(setting, whole - total(changed)))
    return sorted((one for one in found if one.seconds > 0), key=lambda one: -one.seconds)


def least_seconds(config: RunConfig, rows: Rows, model_bytes: int, *, cores: int) -> float:
    """Less than a CPU takes at full length: a step reads all weights from memory, and starts some kernels; a token needs all."""
    step_s = max(LEAST_STEP_S, model_bytes / MOST_BYTES_S)
    token_s = 2 * (model_bytes / 4) / (cores * MOST_FLOPS)
    speed = Speed(
        load_s=0.0, decode_s=step_s, update_s=step_s, generate_s=0.0, prompt_s=token_s, row_s=token_s, score_s=token_s,
        # Forwards, and backwards once more: the weights below an adapter have no gradients.
        train_s=2 * token_s, lengths=[config.rollout.max_completion_length], ended=[False],
    )  # fmt: skip
    return sum(seconds for _, seconds in _steps(config, speed, rows, NOTHING))


def _not_counted(config: RunConfig, speed: Speed) -> str:
    names = ", ".join(sorted({name for stage in config.stages for name in stage.rewards}))
    by_trl = ", ".join(stage.name for stage in config.stages if stage.engine == "trl")
    parts = [
        f"the reward functions {names}" if speed.reward_s is None and names else "",
        f"how much longer TRL takes (stage {by_trl})" if by_trl else "",
        "how much longer the merge takes, which a CPU computes" if speed.device != "cpu" else "",
    ]
    return f"Not counted: {'; '.join(filter(None, parts))}." if any(parts) else ""


def _candidates(config: RunConfig) -> Iterator[tuple[str, object]]:
    evaluation, rollout = config.evaluation, config.rollout
    for index, stage in enumerate(config.stages):
        if stage.max_steps is not None:
            yield f"stages.{index}.max_steps", max(1, stage.max_steps // 2)
        else:
            yield f"stages.{index}.num_train_epochs", stage.num_train_epochs / 2
        if stage.gradient_accumulation_steps > 1:
            yield f"stages.{index}.gradient_accumulation_steps", stage.gradient_accumulation_steps // 2
        else:
            yield f"stages.{index}.per_device_train_batch_size", max(1, stage.per_device_train_batch_size // 2)
        if stage.eval_steps is not None:
            yield f"stages.{index}.eval_steps", 2 * stage.eval_steps
        if stage.measure_difficulty:
            yield f"stages.{index}.measure_difficulty", "false"
    yield "rollout.max_completion_length", max(1, rollout.max_completion_length // 2)
    if evaluation.max_prompts is not None:
        yield "evaluation.max_prompts", max(1, evaluation.max_prompts // 2)
    yield "evaluation.num_samples", max(1, evaluation.num_samples // 2)
    yield "evaluation.stages", "false"
    yield "lab.num_prompts", max(1, config.lab.num_prompts // 2)
    if config.difficulty.samples:
        yield "difficulty.samples", max(1, config.difficulty.samples // 2)
    if config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", "false"
    if not config.resources.share_prompts:
        yield "resources.share_prompts", "true"
