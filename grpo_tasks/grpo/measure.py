"""The figures of an update (names: schemas/metrics.py): of its loss, of its completions and rewards, and of the GPU."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from grpo_tasks.data.table import pass_rate_columns
from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.losses import LossInputs, LossOutputs, k3
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import ScoredRollout
from grpo_tasks.rewards.suite import Scores, mean_total, total_scores
from grpo_tasks.rollout.engine import Completion, conversation_column
from schemas import metrics as metric

Built = TypeVar("Built")

MAX_LOG_RATIO = 50.0
"""Larger log-ratios are reported as this one: e^50 says enough, and e^1000 is infinite."""
SUMMED = (
    "loss", "tokens", "completions", "entropy", "kl", "clipped_low", "clipped_high", "mismatch", "mismatch_kl", "correction",
    "correction_squared", "off_policy", "hits",
)  # fmt: skip
"""Figures that add up over microbatches and ranks."""
LARGEST = ("mismatch_max", "mismatch_worst", "halvings", "out_of_memory")
"""Figures of which the largest counts."""


@dataclass(slots=True)
class UpdateFigures:
    """Sums over the tokens that an update trained on; `means` divides them."""

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    completions: float = 0.0
    entropy: float = 0.0
    kl: float | None = None
    """Here and below None is what was not measured, or does not exist in this stage."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    mismatch: float | None = 0.0
    """|log p(sampler) - log p(trainer)|."""
    mismatch_kl: float = 0.0
    mismatch_max: float = 0.0
    mismatch_worst: float = 0.0
    """|mean over a completion's tokens|, of the completion where it is largest."""
    correction: float | None = None
    correction_squared: float | None = None
    off_policy: float | None = None
    """Completions without a policy term."""
    loss_scale: float | None = None
    """Factor of the loss in float16."""
    hits: float | None = None
    """Trained tokens that the policy ranks first, in a supervised update."""
    skipped: bool = False
    """The scaled gradient overflowed and no step was made."""
    halvings: int = 0
    """How often this update halved its microbatches, because they did not fit into memory."""
    out_of_memory: str = ""
    """What torch says where not even single completions fit."""
    _unread: list[tuple[tuple[str, ...], Float[Tensor, " _"]]] = field(default_factory=list, repr=False)
    """Names and values of the microbatches that were added."""

    def add(
        self,
        inputs: LossInputs,
        out: LossOutputs,
        entropies: Float[Tensor, "N T"],
        sampler_policy_logps: Float[Tensor, "N T"] | None,
        ref_logps: Float[Tensor, "N T"] | None,
    ) -> None:
        """Add the tokens of a microbatch. `ref_logps` is given whenever the KL is measured, also at beta 0.

        The numbers stay on the device until `read` takes them all at once: each read makes the host wait for the device.
        """
        mask = inputs.mask
        found = {
            "loss": out.loss,
            "tokens": mask.sum(),
            "completions": mask.any(-1).sum(),
            "entropy": (entropies * mask).sum(),
            "clipped_low": out.clipped_low,
            "clipped_high": out.clipped_high,
        }
        if sampler_policy_logps is None or self.mismatch is None:
            self.mismatch = None
        else:
            difference = (inputs.old_logps - sampler_policy_logps).masked_fill(~mask, 0.0)  # [N, T]
            found |= {
                "mismatch": difference.abs().sum(),
                "mismatch_kl": _k3_sum(difference),
                "mismatch_max": difference.abs().max(),
                "mismatch_worst": (difference.sum(-1) / mask.sum(-1).clamp(min=1)).abs().max(),
            }
        if self.kl is not None and inputs.ref_logps is not None:
            found["kl"] = out.kl_sum
        elif self.kl is not None and ref_logps is not None:
            found["kl"] = _k3_sum((ref_logps - inputs.logps.detach()).masked_fill(~mask, 0.0))
        if inputs.correction is not None:
            found |= {
                "correction": (inputs.correction * mask).sum(),
                "correction_squared": (inputs.correction.square() * mask).sum(),
            }
        if inputs.on_policy is not None:
            found["off_policy"] = (~inputs.on_policy & mask).any(-1).sum()
        self._keep(found)

    def add_supervised(
        self, loss: Float[Tensor, ""], trained: Bool[Tensor, "N T"], entropies: Float[Tensor, "N T"], hits: Float[Tensor, "N T"]
    ) -> None:
        """Add the trained tokens of a microbatch, which were not weighted by advantages."""
        # Products, because a read by a mask makes the host wait for the number of its tokens.
        sums = {"entropy": (entropies * trained).sum(), "hits": (hits * trained).sum()}
        self._keep({"loss": loss, "tokens": trained.sum()} | sums)

    def _keep(self, found: Mapping[str, Tensor]) -> None:
        self._unread.append((tuple(found), torch.stack([value.detach().double() for value in found.values()])))

    def read(self) -> None:
        """Take from the device what `add` left there, microbatch by microbatch."""
        numbers = iter(torch.cat([values for _, values in self._unread]).tolist() if self._unread else ())
        for names, _ in self._unread:
            for name, value in zip(names, numbers, strict=False):
                if name in LARGEST:
                    setattr(self, name, max(getattr(self, name), value))
                elif name == "tokens":
                    self.tokens += int(value)
                elif name != "mismatch" or self.mismatch is not None:
                    setattr(self, name, (getattr(self, name) or 0.0) + value)
        self._unread.clear()

    def over(self, ranks: Ranks) -> "UpdateFigures":
        """The figures of all microbatches and ranks; what is not a sum or a maximum is equal on all ranks."""
        self.read()
        if ranks.count == 1:
            return self
        every_rank = ranks.gather(self)
        sums: dict[str, Any] = {}
        for name in SUMMED:
            values = [getattr(one, name) for one in every_rank]
            known = [value for value in values if value is not None]
            # A rank without microbatches has not met what the others measured. The mismatch counts only if every rank has it.
            missing = len(known) < len(values) if name == "mismatch" else not known
            sums[name] = None if missing else sum(known)
        return replace(self, **sums, **{name: max(getattr(one, name) for one in every_rank) for name in LARGEST})

    def means(self) -> dict[str, float]:
        """Metrics by name; an update that trained on no token has only those that need none."""
        known = {metric.LOSS: self.loss, metric.GRAD_NORM: self.grad_norm, metric.LEARNING_RATE: self.learning_rate}
        if self.loss_scale is not None:
            known |= {metric.LOSS_SCALE: self.loss_scale, metric.SKIPPED_STEP: float(self.skipped)}
        if self.skipped:
            del known[metric.GRAD_NORM]  # it is not finite
        if self.tokens == 0:
            return known
        if self.hits is not None:
            supervised = {metric.ENTROPY: self.entropy / self.tokens, metric.TOKEN_ACCURACY: self.hits / self.tokens}
            return known | supervised | {metric.TRAINED_TOKENS: float(self.tokens)}
        per_token = {
            metric.ENTROPY: self.entropy,
            metric.CLIP_LOW: self.clipped_low,
            metric.CLIP_HIGH: self.clipped_high,
            metric.CLIP_REGION: self.clipped_low + self.clipped_high,
        }
        if self.mismatch is not None:
            per_token |= {metric.SAMPLER_DIFFERENCE_MEAN: self.mismatch, metric.SAMPLER_KL: self.mismatch_kl}
            known |= {metric.SAMPLER_DIFFERENCE_MAX: self.mismatch_max, metric.SAMPLER_DIFFERENCE_WORST: self.mismatch_worst}
            known[metric.IMPORTANCE_RATIO_MAX] = math.exp(min(self.mismatch_max, MAX_LOG_RATIO))
        if self.kl is not None:
            per_token[metric.KL] = self.kl
        if self.correction is not None:
            per_token[metric.IMPORTANCE_RATIO_MEAN] = self.correction
            # 0 where every weight was masked.
            squares = max(self.correction_squared or 0.0, 1e-300)
            known[metric.EFFECTIVE_SAMPLE_SIZE] = self.correction**2 / (self.tokens * squares)
        if self.off_policy is not None:
            known[metric.OFF_POLICY_MASKED] = self.off_policy / self.completions
        return known | {name: value / self.tokens for name, value in per_token.items()}


def _k3_sum(log_ratio: Float[Tensor, "N T"]) -> Float[Tensor, ""]:
    """Sum of the k3 estimates of tokens, finite however far apart the two policies are; 0 adds nothing."""
    return k3(log_ratio.clamp(max=MAX_LOG_RATIO)).sum()


def rollout_metrics(scored: ScoredRollout, advantages: Advantages) -> dict[str, float]:
    """Rewards, groups and lengths of a rollout."""
    completions, scores = scored.rollout.completions, scored.scores
    metrics: dict[str, float | None] = {
        metric.REWARD: mean_total(scores.totals),
        metric.REWARD_STD: float(advantages.group_std.mean()),
        metric.DEAD_GROUPS: float(advantages.dead.float().mean()),
        **length_metrics([completion.num_written for completion in completions]),
        metric.CLIPPED_RATIO: float(np.mean([completion.truncated for completion in completions])),
        metric.ROLLOUT_TIME: scored.rollout.seconds,
        metric.REWARD_TIME: scored.seconds,
    }
    metrics |= (
        conversation_metrics(completions) | weight_metrics(scores) | score_metrics(scores, "rewards", "mean", "std", "success")
    )
    return _known(metrics | task_rewards(metric.TASK_REWARD, scored, scores.totals) | scores.metrics)


def score_metrics(scores: Scores, family: str, *figures: str) -> dict[str, float]:
    """`figures` of each reward function's scores, over the completions that it applies to."""
    found: dict[str, float] = {}
    for name, column, full in zip(scores.names, scores.raw.T, scores.full, strict=True):
        known = column[~np.isnan(column)]
        if len(known):
            every = {"mean": known.mean(), "std": known.std(), "success": (known >= full).mean()}
            found |= {f"{family}/{name}/{figure}": float(every[figure]) for figure in figures}
    return found


def weight_metrics(scores: Scores) -> dict[str, float]:
    """The present weight of each reward function."""
    weights = zip(scores.names, scores.weights, strict=True)
    return {metric.member(metric.REWARD_WEIGHT, name): float(weight) for name, weight in weights}


def length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """Figures of the tokens of texts."""
    return {
        metric.MEAN_LENGTH: float(np.mean(lengths)),
        metric.MIN_LENGTH: float(min(lengths)),
        metric.MAX_LENGTH: float(max(lengths)),
    }


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, float | None]:
    """Figures of conversations; empty when completions are one turn each."""
    played = [completion.conversation for completion in completions if completion.conversation is not None]
    if not played:
        return {}
    tokens = sum(len(completion.token_ids) for completion in completions)
    calls, errors = sum(one.calls for one in played), sum(one.errors for one in played)
    rewards = [one.reward for one in played if one.reward is not None]
    return {
        metric.TURNS: float(np.mean([len(one.turns) for one in played])),
        metric.ENVIRONMENT_TOKENS: 1.0 - sum(completion.num_written for completion in completions) / max(1, tokens),
        metric.ENVIRONMENT_REWARD: float(np.mean(rewards)) if rewards else None,
        metric.ENVIRONMENT_ERRORS: float(np.mean([one.error is not None for one in played])),
        metric.TOOL_CALLS: calls / len(played),
        metric.TOOL_ERRORS: errors / calls if calls else None,
    }


def task_rewards(family: str, scored: ScoredRollout, totals: NDArray[np.float64]) -> dict[str, float | None]:
    """Mean of the [N] totals of each task in the rollout; empty when the data has a single task."""
    tasks = np.array([scored.rollout.rows[index].task for index in scored.rollout.prompt_of])
    names = sorted(set(tasks.tolist()) - {""})
    return {metric.member(family, name): mean_total(totals[tasks == name]) for name in names}


def held_out_metrics(scored: ScoredRollout, weights: NDArray[np.float64]) -> dict[str, float]:
    """Rewards of held-out completions by the configured weights, not the present adaptive ones, so that they can be compared."""
    totals = total_scores(scored.scores.raw, weights)
    metrics = {metric.EVAL_REWARD: mean_total(totals)} | task_rewards(metric.EVAL_TASK_REWARD, scored, totals)
    return _known(metrics | score_metrics(scored.scores, "eval_rewards", "mean", "success"))


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Without the metrics that no completion has a value for."""
    return {name: value for name, value in metrics.items() if value is not None}


def completions_table(
    scored: ScoredRollout, advantages: torch.Tensor, *, stage: str, step: int, policy_version: int | None
) -> pa.Table:
    """Every completion with its rewards and advantages [N, T] or [N, 1]; (stage, step, prompt_id, sample) is unique."""
    rollout, scores = scored.rollout, scored.scores
    rows = [rollout.rows[index] for index in rollout.prompt_of]
    return pa.table(
        {
            "stage": [stage] * len(rows),
            "step": [step] * len(rows),
            **({} if policy_version is None else {"policy_version": [policy_version] * len(rows)}),
            "prompt_id": [row.prompt_id for row in rows],
            "sample": [index % rollout.group_size for index in range(len(rows))],
            "prompt": [row.messages[-1]["content"] for row in rows],
            "answer": [row.answer for row in rows],
            "completion": [completion.text for completion in rollout.completions],
            "completion_tokens": [completion.num_written for completion in rollout.completions],
            "finish_reason": [completion.finish_reason for completion in rollout.completions],
            # NaN, a completion without a score, becomes null.
            "reward": pa.array(scores.totals, from_pandas=True),
            "advantage": advantages.mean(-1).numpy(),
            **{f"reward_{name}": scores.raw[:, index] for index, name in enumerate(scores.names)},
            **scores.logged_columns(),
            **conversation_column(rollout.completions),
            **pass_rate_columns(rows),
        }
    )


class Waits:
    """How long host and GPU wait for each other in an update; on other devices nothing is measured.

    The host launches a pass, builds the next microbatch while the GPU computes, and launches that:

        host   | build 1 | launch 1 | build 2 | launch 2 |   read the figures
        GPU       idle   |       pass 1     |     pass 2         |

    A mark on the GPU's own clock stands before and behind each build. The time between the two is 0 while the GPU still computes
    the pass before, else the time that it is idle. Pauses between the kernels of a pass are not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = 0.0
        self._builds: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def as_built(self, microbatches: Iterable[Built]) -> Iterator[Built]:
        """The microbatches of an update, which are built as they are asked for."""
        self._builds = []
        if not self._cuda:
            yield from microbatches
            return
        before = _mark()
        for microbatch in microbatches:
            self._builds.append((before, _mark()))
            yield microbatch
            before = _mark()

    @contextmanager
    def for_numbers(self) -> Iterator[None]:
        """Around a read of numbers, for which the host waits."""
        began = time.perf_counter()
        yield
        self._host += time.perf_counter() - began

    def figures(self) -> dict[str, float]:
        """Of the update whose figures were read last; the next one begins at 0."""
        host, self._host, builds, self._builds = self._host, 0.0, self._builds, []
        if not self._cuda:
            return {}
        if builds:
            # A process without a live group has read nothing.
            builds[-1][1].synchronize()
        idle = sum(before.elapsed_time(behind) for before, behind in builds) / 1000
        return {metric.HOST_WAIT: host, metric.GPU_IDLE: idle}


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class GpuMeter:
    """Peak memory and, where NVML counts it, energy of a GPU between two readings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._energy: Callable[[], float] | None = None
        """The GPU's energy since the driver was loaded, in J; None where it is not counted."""
        if self._device is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: NVML does not know CUDA_VISIBLE_DEVICES.
            card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self._before = pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000
            self._energy = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000
        except Exception:  # driver, GPU or package may be too old in many ways; then the energy is not measured
            self._energy = None

    def read(self) -> dict[str, float]:
        """gpu_memory (GiB) and energy (J) since the last reading."""
        if self._device is None:
            return {}
        figures = {metric.GPU_MEMORY: torch.cuda.max_memory_allocated(self._device) / 2**30}
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._energy is not None:
            now = self._energy()
            figures[metric.ENERGY], self._before = now - self._before, now
        return figures
