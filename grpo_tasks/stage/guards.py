"""Guards: what a person would want to be told while a stage trains, and what is done about it.

    look(journal, step) -> firings      off | warn | stop | rollback, one setting each (schemas/config.py GuardsConfig)

What a guard says is a pure function of the journal, so a stage that is taken up again comes to the same decisions. Medians of ten
updates: the k3 estimate of KL has a heavy tail, one unlikely token lifts a mean. Guards against a fall or a rise compare with the
stage's first ten updates and stay silent while the reward is rising: a policy that learns gets sure of itself and may get longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, pvariance

from grpo_tasks.stage.journal import Journal
from schemas.config import GuardAction, GuardsConfig

WINDOW = 10
"""Updates a guard looks back over."""
LONG_WINDOW = 50
"""Updates over which a reward has to have risen."""
SILENCE = 50
"""Updates a guard has to be silent before it is told again."""
LEARNT = 0.9
"""Success rate from which a reward function needs no further rise."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A guard that fired after an update."""

    event: str
    action: GuardAction
    detail: str
    """A sentence with the numbers and the advice."""


@dataclass(frozen=True, slots=True)
class View:
    """The journal of the updates after `since`, up to `step`."""

    journal: Journal
    since: int
    step: int

    def last(self, metric: str, size: int = WINDOW) -> list[float]:
        """Values of the last `size` updates; none at all while there are fewer."""
        return self._whole(metric, self.step, size)

    def first(self, metric: str, size: int = WINDOW) -> list[float]:
        """Those of the first ones, where the last ones do not reach into them."""
        return self._whole(metric, self.since + size, size) if self.step >= self.since + 2 * size else []

    def names(self, prefix: str, suffix: str) -> list[str]:
        """Metrics of the last update that are called so."""
        return [name for name in self.journal.steps[self.step] if name.startswith(prefix) and name.endswith(suffix)]

    def rising(self) -> bool:
        """Whether the reward is above that of the first updates by more than chance."""
        early, late = self.first("reward"), self.last("reward")
        if not early:
            return True
        return fmean(late) - fmean(early) > 2 * _error(early, late)

    def learnt(self) -> bool:
        """Whether every reward function succeeds nearly always: then groups that tie and a reward that stays are no trouble."""
        success = [fmean(values) for name in self.names("rewards/", "/success") if (values := self.last(name))]
        return bool(success) and min(success) >= LEARNT

    def _whole(self, metric: str, last: int, size: int) -> list[float]:
        if last - size < self.since:
            return []
        values = self.journal.window(metric, last=last, size=size)
        # An update whose groups are all dead has no KL and no entropy.
        return values if 2 * len(values) >= size else []


def _error(early: Sequence[float], late: Sequence[float]) -> float:
    """Standard error of the difference of two means."""
    return sqrt(pvariance(early) / len(early) + pvariance(late) / len(late))


def _bound(metric: str, *, below: float | None = None, above: float | None = None) -> Callable[[View], str | None]:
    def fault(view: View) -> str | None:
        values = view.last(metric)
        if not values:
            return None
        middle = median(values)
        if below is not None and middle < below:
            return f"{metric} is {middle:.3g}, below {below:g} over the last {WINDOW} updates"
        if above is not None and middle > above:
            return f"{metric} is {middle:.3g}, above {above:g} over the last {WINDOW} updates"
        return None

    return fault


def _unless_learnt(fault: Callable[[View], str | None]) -> Callable[[View], str | None]:
    return lambda view: None if view.learnt() else fault(view)


def _against_the_start(metric: str, *, below: float | None = None, above: float | None = None) -> Callable[[View], str | None]:
    """Bounds are factors of the first ten updates' median; the reward must not be rising meanwhile."""

    def fault(view: View) -> str | None:
        early, late = view.first(metric), view.last(metric)
        if not early or not late or view.rising():
            return None
        was, now = median(early), median(late)
        if (below is not None and now < below * was) or (above is not None and now > above * was):
            return f"{metric} went from {was:.3g} to {now:.3g} while the reward did not rise"
        return None

    return fault


def _flat_reward(view: View) -> str | None:
    half = LONG_WINDOW // 2
    early, late = view.first("reward", half), view.last("reward", half)
    if not early or fmean(late) - fmean(early) > 2 * _error(early, late):
        return None
    return f"reward is {fmean(late):.3g} over the last {half} updates, no better than the {fmean(early):.3g} it began with"


def _format_regression(view: View) -> str | None:
    for name in view.names("rewards/", "format/success"):
        values = view.journal.window(name, last=view.step, size=view.step - view.since)
        if len(values) < 2 * WINDOW:
            continue
        best = max(median(values[at : at + WINDOW]) for at in range(len(values) - 2 * WINDOW + 1))
        now = median(values[-WINDOW:])
        if now < best - 0.2:
            return f"{name} fell from {best:.3g} to {now:.3g}"
    return None


@dataclass(frozen=True, slots=True)
class Guard:
    """One kind of trouble."""

    event: str
    """Its name, and that of its setting."""
    fault: Callable[[View], str | None]
    advice: str


GUARDS = (
    Guard(
        "reward_std_collapse",
        _unless_learnt(_bound("reward_std", below=0.01)),
        "the completions of a group earn the same; raise the temperature or num_generations, or make a reward incremental",
    ),
    Guard("kl_blow_up", _bound("kl", above=0.5), "the policy is far from the reference; lower the learning rate or raise beta"),
    Guard(
        "flat_reward", _unless_learnt(_flat_reward), "nothing is learnt; look at completions and rewards, raise the learning rate"
    ),
    Guard(
        "dead_groups",
        _unless_learnt(_bound("frac_reward_zero_std", above=0.9)),
        "hardly any group teaches anything: too easy, too hard, or all alike",
    ),
    Guard(
        "truncation", _bound("completions/clipped_ratio", above=0.5), "most completions are cut off; raise max_completion_length"
    ),
    Guard(
        "entropy_collapse",
        _against_the_start("entropy", below=0.2),
        "the policy repeats itself without earning more; raise the temperature, add entropy_coef, lower the learning rate",
    ),
    Guard(
        "length_explosion",
        _against_the_start("completions/mean_length", above=2.0),
        "completions grow without earning more; add a length or repetition reward, or loss_type: dr_grpo",
    ),
    Guard(
        "format_regression", _format_regression, "a later reward pays more than the format; keep a format reward in this stage"
    ),
    Guard(
        "sampler_mismatch",
        _bound("sampling/sampling_logp_difference/mean", above=0.1),
        "the sampler is not the policy; give both one dtype, or set importance_sampling_correction",
    ),
)


@dataclass(slots=True)
class Guards:
    """The guards of a stage, with what a checkpoint has to keep of them."""

    config: GuardsConfig
    since: int = 0
    """The update of the last roll back; the ones before are another policy's."""
    rollbacks: int = 0

    def look(self, journal: Journal, step: int) -> list[Firing]:
        """What fires after this update; one that wavers around its threshold fires once."""
        found = []
        for guard in GUARDS:
            action: GuardAction = getattr(self.config, guard.event)
            detail = None if action == "off" else guard.fault(View(journal, self.since, step))
            if detail is not None and not self._told(guard, journal, step):
                found.append(Firing(guard.event, action, f"{detail}: {guard.advice}"))
        return found

    def _told(self, guard: Guard, journal: Journal, step: int) -> bool:
        before = range(max(step - SILENCE, self.since + 1), step)
        return any(guard.fault(View(journal, self.since, earlier)) for earlier in before)
