"""Alarms: what a person would want to be told while a stage trains. They warn; a loss that is not finite stops the stage.

The thresholds are those of schemas/metrics.py's `alarm` texts.
"""

from dataclasses import dataclass
from statistics import median

from grpo_tasks.stage.journal import Journal

WINDOW = 10
"""Updates an alarm looks back over."""
SILENCE = 50
"""Updates an alarm has to be silent before it is told again."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One kind of trouble."""

    event: str
    metric: str
    below: float | None
    above: float | None
    advice: str

    def fires(self, journal: Journal, step: int) -> str | None:
        """A sentence with the numbers and the advice, or None when all is well or too little is known."""
        values = journal.window(self.metric, last=step, size=WINDOW)
        if len(values) < WINDOW:
            return None
        # The median: the k3 estimate of KL has a heavy tail, one unlikely token lifts the mean of ten updates.
        middle = median(values)
        if self.below is not None and middle < self.below:
            return f"{self.metric} is {middle:.3g}, below {self.below} over the last {WINDOW} updates: {self.advice}"
        if self.above is not None and middle > self.above:
            return f"{self.metric} is {middle:.3g}, above {self.above} over the last {WINDOW} updates: {self.advice}"
        return None


ALARMS = (
    Alarm(
        "reward_std_collapse",
        "reward_std",
        0.01,
        None,
        "the completions of a group earn the same; raise the temperature or num_generations, or make a reward incremental",
    ),
    Alarm("kl_blow_up", "kl", None, 0.5, "the policy is far from the reference; lower the learning rate or raise beta"),
    Alarm("dead_groups", "frac_reward_zero_std", None, 0.9, "hardly any group teaches anything; the stage may be over"),
    Alarm("truncation", "completions/clipped_ratio", None, 0.5, "most completions are cut off; raise max_completion_length"),
)


def alarms(journal: Journal, step: int) -> dict[str, str]:
    """The alarms that ring after this update; one that wavers around its threshold is told once."""
    before = range(max(step - SILENCE, 1), step)
    ringing = {alarm.event: detail for alarm in ALARMS if (detail := alarm.fires(journal, step))}
    return {
        alarm.event: ringing[alarm.event]
        for alarm in ALARMS
        if alarm.event in ringing and not any(alarm.fires(journal, earlier) for earlier in before)
    }
