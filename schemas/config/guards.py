"""Section `stages[].guards`: what is watched while a stage trains, and what happens when a guard fires."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from schemas.config.section import Details, Section
from schemas.config.types import MOST_TIMES

GuardAction = Literal["off", "warn", "stop", "rollback"]


class GuardConfig(Section):
    """A guard: the action alone (`kl_blow_up: stop`), or with the threshold (`kl_blow_up: {action: stop, threshold: 0.3}`)."""

    model_config = ConfigDict(title="Action and threshold")

    action: GuardAction = "warn"
    """off; warn: an event in the log, Prefect and MLflow; stop: end the stage; rollback: return to the last good checkpoint
    with a lower learning rate."""

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, given: Any) -> Any:
        given = {"action": given} if isinstance(given, str | bool) else given
        # YAML 1.1 reads a bare off as false.
        off = isinstance(given, Mapping) and given.get("action") is False
        return {**given, "action": "off"} if off else given


class _OrActionAlone:
    """Adds the bare action to the JSON schema of a field, because Prefect checks the parameters of a run against the schema."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # In the field and not in the definition of the guard, where Prefect's form would show a box for raw JSON.
        action = {"title": "Action alone", "type": "string", "enum": list(get_args(GuardAction))}
        return {"anyOf": [handler(core_schema), action]}


class KlBlowUp(GuardConfig):
    """The KL from the reference is too high."""

    threshold: float = Field(0.5, gt=0.0)
    """Highest KL in nats per token, as the median of 10 updates (of 3 measurements when kl_every_steps applies). Dead groups that
    are not computed (skip_dead_groups) count as 0."""


class RewardStdCollapse(GuardConfig):
    """Rewards hardly differ within a group."""

    threshold: float = Field(0.01, gt=0.0)
    """Lowest reward_std (in units of the reward), as the median of 10 updates."""


class FlatReward(GuardConfig):
    """The reward does not rise."""

    threshold: float = Field(0.0, ge=0.0)
    """Smallest rise of the mean reward (in units of the reward) from the first 25 updates to the last 25. The rise also has to
    exceed two standard errors."""


class DeadGroups(GuardConfig):
    """Too many groups are dead: their completions all earn the same."""

    threshold: float = Field(0.9, gt=0.0, lt=1.0)
    """Highest share of dead groups, as the median of 10 updates."""


class Truncation(GuardConfig):
    """Too many completions are cut off."""

    threshold: float = Field(0.5, gt=0.0, lt=1.0)
    """Highest share of completions that are cut off at the length limit, as the median of 10 updates."""


class EntropyCollapse(GuardConfig):
    """The policy loses its entropy."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Lowest entropy as a multiple of that of the first 10 updates. Both are medians of 10 updates."""


class LengthExplosion(GuardConfig):
    """Completions get too long."""

    threshold: float = Field(2.0, gt=1.0)
    """Highest mean length as a multiple of that of the first 10 updates. Both are medians of 10 updates."""


class FormatRegression(GuardConfig):
    """The policy unlearns the format."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Largest drop of a format reward's success rate (a share) below its best. Both are medians of 10 updates."""


class SamplerMismatch(GuardConfig):
    """The sampler's probabilities differ from the policy's."""

    threshold: float = Field(0.1, gt=0.0)
    """Highest mean difference of log-probabilities in nats per token, as the median of 10 updates."""


class GuardsConfig(Section):
    """What happens when the metrics of a stage go wrong. off; warn: an event in the log, Prefect and MLflow; stop: end the stage;
    rollback: return to the last good checkpoint with a lower learning rate."""

    not_finite: Literal["stop", "rollback"] = "stop"
    """A loss or gradient that is not finite. Such an update is never applied."""
    kl_blow_up: Annotated[KlBlowUp, _OrActionAlone()] = Field(default_factory=KlBlowUp, title="KL blow up")
    """The KL from the reference is above the threshold."""
    reward_std_collapse: Annotated[RewardStdCollapse, _OrActionAlone()] = Field(default_factory=RewardStdCollapse)
    """reward_std is below the threshold, and the success rate of some reward function is below 90 %."""
    flat_reward: Annotated[FlatReward, _OrActionAlone()] = Field(default_factory=FlatReward)
    """The reward of the last 25 updates is no higher than that of the first 25, and the success rate of some reward function is
    below 90 %."""
    dead_groups: Annotated[DeadGroups, _OrActionAlone()] = Field(default_factory=DeadGroups)
    """The share of dead groups is above the threshold, and the success rate of some reward function is below 90 %."""
    truncation: Annotated[Truncation, _OrActionAlone()] = Field(default_factory=Truncation)
    """The share of completions that are cut off is above the threshold."""
    entropy_collapse: Annotated[EntropyCollapse, _OrActionAlone()] = Field(default_factory=EntropyCollapse)
    """The entropy fell below the threshold times its initial value, and the reward did not rise."""
    length_explosion: Annotated[LengthExplosion, _OrActionAlone()] = Field(default_factory=LengthExplosion)
    """The mean completion length exceeds the threshold times its initial value, and the reward did not rise."""
    format_regression: Annotated[FormatRegression, _OrActionAlone()] = Field(default_factory=FormatRegression)
    """The success rate of a format reward dropped by more than the threshold below the best 10 updates of the stage."""
    sampler_mismatch: Annotated[SamplerMismatch, _OrActionAlone()] = Field(default_factory=SamplerMismatch)
    """The log-probabilities of sampler and trainer differ by more than the threshold. With max_staleness above 0 the age of the
    policy that samples is part of the difference."""
    max_rollbacks: Details[int] = Field(2, ge=0, le=MOST_TIMES)
    """Number of rollbacks after which the stage stops."""
    rollback_learning_rate: Details[float] = Field(0.5, gt=0.0, le=1.0)
    """Factor that each rollback applies to the learning rate."""

    @property
    def rolls_back(self) -> bool:
        """Whether any guard is set to roll back."""
        actions = [guard.action for _, guard in self if isinstance(guard, GuardConfig)]
        return "rollback" in [self.not_finite, *actions]
