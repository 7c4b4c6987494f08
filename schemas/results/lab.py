"""Results of the reward lab."""

from typing import Literal

from pydantic import Field

from schemas.results.base import Result, StepResult


class LabCheck(Result):
    """One check of one reward function."""

    function: str
    check: str
    """contract, determinism, speed, order, empty, gaming, signal ..."""
    outcome: Literal["passed", "ignored", "warned", "failed"]
    """ignored: it found something, and lab.ignore_checks names it."""
    detail: str = ""
    prompt_id: str = ""
    place: str = ""
    probe: str = ""
    """Kind of completion: perfect, empty, tag_stuffed ..."""
    completion: str = ""
    """The completion, shortened to 200 characters."""
    source: str = ""
    """File, line and function of the user's code that an exception came from."""
    arguments: str = ""
    """Types and sizes of the arguments of the call that raised."""
    fix: str = ""
    """What to do, where the finding says more than its check does."""


class SignalForecast(Result):
    """Share of groups with a learning signal, estimated from samples of the base model."""

    stage: str
    groups: int
    share_with_signal: float
    """Share of groups whose completions earn different total rewards."""
    mean_reward: float
    mean_reward_std: float
    pass_rates: list[int] = Field(default_factory=list)
    """Sampled prompts by the share of their completions that are solved, in the bins of difficulty.py BINS."""

    @property
    def never_or_always(self) -> float:
        """Share of the sampled prompts that are never solved, or always."""
        known = sum(self.pass_rates)
        return (self.pass_rates[0] + self.pass_rates[-1]) / known if known else 0.0


class LabReport(StepResult):
    """Result of the reward lab. Files: probes.parquet (each probe with each score), report.md."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]
    left_out: list[str] = Field(default_factory=list)
    """Checks that could not be made, each with its reason."""

    def headline(self) -> str:
        """How many checks were made, and how many found something."""
        return f"{len(self.checks)} checks: {len(self.failures)} failed, {len(self.warnings)} warned"

    @property
    def failures(self) -> list[LabCheck]:
        """The checks that stop the run."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def warnings(self) -> list[LabCheck]:
        """The checks that found something, and do not stop the run."""
        return [check for check in self.checks if check.outcome == "warned"]
