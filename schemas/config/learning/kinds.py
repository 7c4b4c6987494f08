"""What a stage of each kind trains on, and which settings belong to which kind.

grpo        completions of the policy, weighted by their advantages
sft         demonstrations from the data: cross entropy of their tokens
rejection   completions of the policy, only the best ones: cross entropy of their tokens
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import MOST_TOKENS, Address, Fraction

Kind = Literal["grpo", "sft", "rejection"]

_DEMONSTRATIONS, _SELECTION = "demonstrations", "keep_completions keep_reward"
_POLICY_LOSS = (
    "engine trl loss_type scale_rewards baseline multi_objective_aggregation beta kl_every_steps reference epsilon "
    "epsilon_high delta sapo_temperature_pos sapo_temperature_neg use_bias_correction_kl importance_sampling_level "
    "skip_dead_groups top_entropy_quantile entropy_coef importance_sampling_correction importance_sampling_clip_max "
    "importance_sampling_clip_min off_policy_mask_threshold max_sampling_logp_difference max_refills"
)
_SAMPLING = (
    "keep_pass_rate measure_difficulty min_pass_at_group num_generations steps_per_generation num_iterations "
    "mask_truncated_completions"
)
FOREIGN: dict[Kind, list[str]] = {
    "grpo": f"{_DEMONSTRATIONS} {_SELECTION}".split(),
    "sft": f"{_POLICY_LOSS} {_SAMPLING} {_SELECTION}".split(),
    "rejection": f"{_POLICY_LOSS} {_DEMONSTRATIONS}".split(),
}
"""Settings that a kind of stage has no use for."""
SUPERVISED_LEARNING_RATE = 2e-5
"""Default of learning_rate for kind sft and rejection, that of TRL's SFTConfig."""


def kind_with(field: str) -> Kind:
    """The first kind of stage that has a use for a setting."""
    return next(kind for kind, foreign in FOREIGN.items() if field not in foreign)


class DemonstrationsConfig(Section):
    """Where the demonstrations of a stage of kind sft come from."""

    column: Address | None = None
    """Column of the data that holds them: the text of the assistant's turn, or chat messages that continue the prompt. Messages
    may begin with the prompt itself. `answer` is the ground truth, after extraction."""
    function: Address | None = None
    """package.module:function, which receives a row (a dict with prompt, answer and every column) and returns the text of the
    assistant's turn, or messages."""
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest demonstration in tokens. Longer ones are refused, never cut. Empty: rollout.max_completion_length; with tools or an
    environment interaction.max_tokens."""
    max_invalid_fraction: Fraction = 0.05
    """Share of the rows that may lack a usable demonstration. They are left out and listed in refused_demonstrations.jsonl. With
    more of them the stage stops before the model is loaded."""
    module_dir: Path | None = None
    """Folder with the module of your function, relative to the working directory. Empty: as for rewards.module_dir."""

    def _faults(self) -> Iterator[str]:
        if (self.column is None) == (self.function is None):
            yield "name either a column or a function, for example column: solution"
        if self.function is not None and ":" not in self.function:
            yield f"{self.function[:80]} does not name a function; fix: function: package.module:function"

    def module_dirs(self) -> list[Path]:
        """Folders that are searched for the module of the function, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]
