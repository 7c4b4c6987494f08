"""Section `stages[].guards`: what watches a stage, and what happens when a guard fires."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from schemas.config.section import Section
from schemas.config.types import MOST_TIMES

GuardAction = Literal["off", "warn", "stop", "rollback"]


class GuardConfig(Section):
    """A guard: the action alone (`kl_blow_up: stop`), or with the threshold (`kl_blow_up: {action: stop, threshold: 0.3}`)."""

    model_config = ConfigDict(title="Action and threshold")

    action: GuardAction = "warn"
    """off, warn (an event in log, Prefect and MLflow), stop, or rollback (to the last good checkpoint, with a smaller learning
    rate)."""

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, given: Any) -> Any:
        given = {"action": given} if isinstance(given, str | bool) else given
        # YAML 1.1 reads a bare off as false.
        off = isinstance(given, Mapping) and given.get("action") is False
        return {**given, "action": "off"} if off else given


class _OrActionAlone:
    """Says in the schema of a field that the action alone will do: what starts a deployment is checked against the schema."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # In the field, not in the guard's own definition: there Prefect's form would show a box for raw JSON.
        action = {"title": "Action alone", "type": "string", "enum": list(get_args(GuardAction))}
        return {"anyOf": [handler(core_schema), action]}


class KlBlowUp(GuardConfig):
    """KL from the reference too high."""

    threshold: float = Field(0.5, gt=0.0, allow_inf_nan=False)
    """Highest KL in nats a token, median of 10 updates (of 3 measurements where kl_every_steps measures it)."""


class RewardStdCollapse(GuardConfig):
    """Rewards that hardly differ inside a group."""

    threshold: float = Field(0.01, gt=0.0, allow_inf_nan=False)
    """Smallest reward_std (in units of the reward), median of 10 updates."""


class FlatReward(GuardConfig):
    """A reward that does not rise."""

    threshold: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Smallest rise of the mean reward (in units of the reward) from the first 25 updates to the last 25; chance, two standard
    errors, has to be exceeded as well."""


class DeadGroups(GuardConfig):
    """Too many groups whose completions earn the same."""

    threshold: float = Field(0.9, gt=0.0, lt=1.0)
    """Largest share of dead groups, median of 10 updates."""


class Truncation(GuardConfig):
    """Too many completions cut off."""

    threshold: float = Field(0.5, gt=0.0, lt=1.0)
    """Largest share of completions cut off at the length limit, median of 10 updates."""


class EntropyCollapse(GuardConfig):
    """A policy that gets too sure of itself."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Smallest entropy as a multiple of that of the first 10 updates, medians of 10 updates."""


class LengthExplosion(GuardConfig):
    """Completions that get too long."""

    threshold: float = Field(2.0, gt=1.0, allow_inf_nan=False)
    """Largest mean length as a multiple of that of the first 10 updates, medians of 10 updates."""


class FormatRegression(GuardConfig):
    """A format that is unlearnt."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Largest fall of a format reward's success (a share) below its best, medians of 10 updates."""


class SamplerMismatch(GuardConfig):
    """A sampler that is not the policy."""

    threshold: float = Field(0.1, gt=0.0, allow_inf_nan=False)
    """Largest mean difference of log-probabilities in nats a token, median of 10 updates."""


class GuardsConfig(Section):
    """What is done when the figures of a stage go wrong: off, warn (an event in log, Prefect and MLflow), stop, or rollback (to
    the last good checkpoint, with a smaller learning rate)."""

    GROUPS: ClassVar = {
        "details": (
            "max_rollbacks",
            "rollback_learning_rate",
        ),
    }

    not_finite: Literal["stop", "rollback"] = "stop"
    """A loss or a gradient that is not finite; the update is never made."""
    kl_blow_up: Annotated[KlBlowUp, _OrActionAlone()] = Field(default_factory=KlBlowUp, title="KL blow up")
    """KL from the reference above the threshold."""
    reward_std_collapse: Annotated[RewardStdCollapse, _OrActionAlone()] = Field(default_factory=RewardStdCollapse)
    """reward_std below the threshold, while some function succeeds less than 9 times in 10."""
    flat_reward: Annotated[FlatReward, _OrActionAlone()] = Field(default_factory=FlatReward)
    """The reward of the last 25 updates is no better than that of the first 25, while some function succeeds less than 9 times
    in 10."""
    dead_groups: Annotated[DeadGroups, _OrActionAlone()] = Field(default_factory=DeadGroups)
    """More dead groups than the threshold, while some function succeeds less than 9 times in 10."""
    truncation: Annotated[Truncation, _OrActionAlone()] = Field(default_factory=Truncation)
    """More completions cut off than the threshold."""
    entropy_collapse: Annotated[EntropyCollapse, _OrActionAlone()] = Field(default_factory=EntropyCollapse)
    """Entropy below the threshold times that of the first 10 updates, without more reward."""
    length_explosion: Annotated[LengthExplosion, _OrActionAlone()] = Field(default_factory=LengthExplosion)
    """Completions longer than the threshold times those of the first 10 updates, without more reward."""
    format_regression: Annotated[FormatRegression, _OrActionAlone()] = Field(default_factory=FormatRegression)
    """Success of a format reward further below the best 10 updates of the stage than the threshold."""
    sampler_mismatch: Annotated[SamplerMismatch, _OrActionAlone()] = Field(default_factory=SamplerMismatch)
    """Sampler and trainer differ by more than the threshold."""
    max_rollbacks: int = Field(2, ge=0, le=MOST_TIMES)
    """Times a stage is rolled back before it stops."""
    rollback_learning_rate: float = Field(0.5, gt=0.0, le=1.0)
    """Factor of the learning rate after each roll back."""

    @property
    def rolls_back(self) -> bool:
        """Whether any guard does."""
        actions = [guard.action for _, guard in self if isinstance(guard, GuardConfig)]
        return "rollback" in [self.not_finite, *actions]
