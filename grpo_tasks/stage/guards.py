"""Guards: what a person would want to know while a stage trains, and what to do about it (schemas/config/guards.py).

A guard is a pure function of the journal, so a resumed stage makes the same decisions. Guards compare medians of ten updates:
the k3 estimate of the KL has a heavy tail, and one unlikely token lifts a mean.

A stage that skips dead groups measures the KL of the others alone, and each of those has a completion that earned less. Where the
policy has all but unlearnt what the reference does, one such completion lifts their k3 to many times the KL of all. So the guard
takes the mean over all groups, with 0 for dead ones: k3 is never negative, and the KL is at least that high.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, pvariance
from typing import Literal

from grpo_tasks.stage.journal import Journal
from schemas import metrics
from schemas.config.guards import GuardAction, GuardConfig, GuardsConfig
from schemas.config.stage import StageConfig

WINDOW = 10
"""Updates a guard judges."""
LONG_WINDOW = 50
"""Updates within which a reward has to rise: its second half is compared with the first half of the stage's first updates."""
SILENCE = 50
"""Updates without a firing after which a guard reports again."""
MEASUREMENTS = 3
"""Measurements that fit in the window of a metric that not every update measures."""
LEARNT = 0.9
"""Success rate from which a reward function needs no further rise."""
CHANCE = 2.0
"""Standard errors by which a difference of means has to exceed 0 to count as more than chance."""


@dataclass(frozen=True, slots=True)
class Firing:
    """What a guard has found after an update."""

    event: str
    action: GuardAction
    detail: str


@dataclass(frozen=True, slots=True)
class View:
    """The journal of the updates after `since`, up to `step`."""

    journal: Journal
    since: int
    step: int
    kl_every: int
    skips_dead: bool

    def last(self, metric: str, size: int = WINDOW) -> list[float]:
        """Values of the last `size` updates; empty while there are fewer."""
        return self._complete(metric, self.step, size)

    def window(self, metric: str) -> int:
        """Updates that are judged; more where only some measure the metric."""
        return max(WINDOW, MEASUREMENTS * self.kl_every) if metric == metrics.KL else WINDOW

    def first(self, metric: str, size: int = WINDOW) -> list[float]:
        """Values of the first `size` updates; empty as long as they overlap with the last ones."""
        return self._complete(metric, self.since + size, size) if self.step >= self.since + 2 * size else []

    def family(self, family: str, *, ending: str = "") -> list[str]:
        """Metrics of the last update, of reward functions whose name has this ending."""
        prefix, suffix = family.split("*")
        names = self.journal.steps[self.step]
        return [name for name in names if name.startswith(prefix) and name.endswith(ending + suffix)]

    def rising(self) -> bool:
        """The reward is above that of the first updates by more than chance, or it is too early to tell."""
        early, late = self.first(metrics.REWARD), self.last(metrics.REWARD)
        return not early or fmean(late) - fmean(early) > CHANCE * _error(early, late)

    def learnt(self) -> bool:
        """Every reward function nearly always succeeds: ties and a constant reward are then no trouble."""
        success = [fmean(values) for name in self.family(metrics.REWARD_SUCCESS) if (values := self.last(name))]
        return bool(success) and min(success) >= LEARNT

    def _complete(self, metric: str, last: int, size: int) -> list[float]:
        if last - size < self.since:
            return []
        updates = [self.journal.steps.get(step, {}) for step in range(last - size + 1, last + 1)]
        values = [found[metric] * self._share(metric, found) for found in updates if metric in found]
        # An update whose groups are all dead has no KL and no entropy; half of the expected values are enough.
        return values if 2 * len(values) * (self.kl_every if metric == metrics.KL else 1) >= size else []

    def _share(self, metric: str, found: Mapping[str, float]) -> float:
        """The share of groups that a mean of an update is taken over."""
        return 1.0 - found.get(metrics.DEAD_GROUPS, 0.0) if metric == metrics.KL and self.skips_dead else 1.0


def _error(early: Sequence[float], late: Sequence[float]) -> float:
    """Standard error of the difference of two means."""
    return sqrt(pvariance(early) / len(early) + pvariance(late) / len(late))


Fault = Callable[[View, float], str | None]
"""What is wrong given the threshold, as a sentence with numbers; None when nothing is."""


def _beyond(metric: str, side: Literal["above", "below"] = "above") -> Fault:
    def fault(view: View, threshold: float) -> str | None:
        size = view.window(metric)
        values = view.last(metric, size)
        if not values or (median(values) <= threshold if side == "above" else median(values) >= threshold):
            return None
        return f"{metric} is {median(values):.3g}, {side} {threshold:g} over the last {size} updates"

    return fault


def _unless_learnt(fault: Fault) -> Fault:
    return lambda view, threshold: None if view.learnt() else fault(view, threshold)


def _against_the_start(metric: str, *, falls: bool) -> Fault:
    """The threshold is a factor of the first ten updates' median."""

    def fault(view: View, threshold: float) -> str | None:
        early, late = view.first(metric), view.last(metric)
        # A policy that learns becomes more certain and may write more.
        if not early or not late or view.rising():
            return None
        was, now = median(early), median(late)
        if now < threshold * was if falls else now > threshold * was:
            return f"{metric} went from {was:.3g} to {now:.3g} while the reward did not rise"
        return None

    return fault


def _flat_reward(view: View, threshold: float) -> str | None:
    half = LONG_WINDOW // 2
    early, late = view.first(metrics.REWARD, half), view.last(metrics.REWARD, half)
    if not early or fmean(late) - fmean(early) > max(threshold, CHANCE * _error(early, late)):
        return None
    return f"reward is {fmean(late):.3g} over the last {half} updates, no better than {fmean(early):.3g} over the first {half}"


def _format_regression(view: View, threshold: float) -> str | None:
    for name in view.family(metrics.REWARD_SUCCESS, ending="format"):
        values = view.journal.window(name, last=view.step, size=view.step - view.since)
        if len(values) < 2 * WINDOW:
            continue
        best = max(median(values[start : start + WINDOW]) for start in range(len(values) - 2 * WINDOW + 1))
        now = median(values[-WINDOW:])
        if now < best - threshold:
            return f"{name} fell from {best:.3g} to {now:.3g}"
    return None


@dataclass(frozen=True, slots=True)
class Guard:
    """One kind of trouble; its event is the name of its setting."""

    event: str
    fault: Fault
    advice: str


GUARDS = (
    Guard(
        "reward_std_collapse",
        _unless_learnt(_beyond(metrics.REWARD_STD, "below")),
        "the completions of a group earn the same reward; raise temperature or num_generations, or use a reward with more steps",
    ),
    Guard("kl_blow_up", _beyond(metrics.KL), "the policy is far from the reference; lower the learning rate or raise beta"),
    Guard(
        "flat_reward",
        _unless_learnt(_flat_reward),
        "the policy does not learn; read some completions and their rewards, or raise the learning rate",
    ),
    Guard(
        "dead_groups",
        _unless_learnt(_beyond(metrics.DEAD_GROUPS)),
        "hardly any group carries a signal; the prompts are too easy or too hard, or the completions are all alike",
    ),
    Guard("truncation", _beyond(metrics.CLIPPED_RATIO), "most completions are cut off; raise max_completion_length"),
    Guard(
        "entropy_collapse",
        _against_the_start(metrics.ENTROPY, falls=True),
        "the policy repeats itself without earning more; raise the temperature, add entropy_coef, or lower the learning rate",
    ),
    Guard(
        "length_explosion",
        _against_the_start(metrics.MEAN_LENGTH, falls=False),
        "completions grow without earning more; add a length or repetition reward, or use loss_type: dr_grpo",
    ),
    Guard(
        "format_regression",
        _format_regression,
        "another reward pays more than the format does; keep a format reward in this stage",
    ),
    Guard(
        "sampler_mismatch",
        _beyond(metrics.SAMPLER_DIFFERENCE_MEAN),
        "the sampler's probabilities differ from the policy's; give both the same dtype, lower rollout.max_staleness, or set "
        "importance_sampling_correction",
    ),
)


@dataclass(slots=True)
class Guards:
    """The guards of a stage, and what a checkpoint keeps of them."""

    config: GuardsConfig
    since: int = 0
    """The update of the last roll back; the updates before it belong to another policy."""
    rollbacks: int = 0
    kl_every: int = 1
    """Updates between two measurements of the KL."""
    skips_dead: bool = False
    """Whether the KL is measured without dead groups."""

    def check(self, journal: Journal, step: int) -> list[Firing]:
        """Guards that fire after update `step`. One that wavers around its threshold fires once."""
        # Computed again from the journal rather than remembered: a resumed stage gives the same answer.
        before, found = range(max(step - SILENCE, self.since + 1), step), []
        for guard in GUARDS:
            rule: GuardConfig = getattr(self.config, guard.event)
            detail = None if rule.action == "off" else self._fault(guard, journal, step)
            if detail is not None and not any(self._fault(guard, journal, earlier) for earlier in before):
                found.append(Firing(guard.event, rule.action, f"{detail}: {guard.advice}"))
        return found

    def _fault(self, guard: Guard, journal: Journal, step: int) -> str | None:
        view = View(journal, self.since, step, self.kl_every, self.skips_dead)
        return guard.fault(view, getattr(self.config, guard.event).threshold)


def kl_guard_off(stage: StageConfig, *, measurable: bool) -> str | None:
    """Why the guard `kl_blow_up` has nothing to judge in this stage; None when it has, or is switched off."""
    # Cross entropy has no reference policy, so nobody expects the guard there.
    if stage.kind != "grpo" or stage.guards.kl_blow_up.action == "off" or stage.has_kl_term:
        return None
    why = "there is no reference policy" if not measurable else "kl_every_steps is 0" if not stage.kl_every_steps else ""
    return f"KL is not measured, because beta is 0 and {why}: the guard kl_blow_up cannot fire" if why else None
