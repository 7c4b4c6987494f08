"""Sections `rewards` and `lab`: tags, answer equality, reward functions with weights, and how they are probed."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import LONGEST_S, MOST_ROWS, MOST_UPDATES, Fraction, FreeSettings, Name, TagName

BUILTIN_REWARDS: dict[str, float] = {
    "format": 1.0,
    "incremental_format": 1.0,
    "correctness": 2.0,
    "length": 0.2,
    "repetition": 0.5,
    "style": 0.5,
    "soft_overlong": 1.0,
}
"""Built-in reward functions and their default weights; a test holds it equal to `grpo_tasks.rewards.builtin`."""


class TagsConfig(Section):
    """Names of the two blocks a completion should consist of."""

    reasoning: TagName = "reasoning"
    """Tag around the working: <reasoning>...</reasoning>."""
    answer: TagName = "answer"
    """Tag around the final answer: <answer>...</answer>."""


class AdaptiveWeightConfig(Section):
    """Moves a reward's weight by its success rate, bounded."""

    low: Fraction = 0.3
    """Below this success rate the weight grows."""
    high: Fraction = 0.8
    """Above this success rate the weight shrinks."""
    grow: float = Field(1.2, ge=1.0)
    """Factor applied when the success rate is low."""
    shrink: float = Field(0.9, gt=0.0, le=1.0)
    """Factor applied when the success rate is high."""
    min_scale: float = Field(0.25, gt=0.0, le=1.0)
    """Smallest weight, as a multiple of the configured one."""
    max_scale: float = Field(4.0, ge=1.0)
    """Largest weight, as a multiple of the configured one."""
    every_steps: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two adjustments; the success rate is taken over them."""


class RewardConfig(Section):
    """One reward function."""

    GROUPS: ClassVar = {
        "limits": (
            "time_limit_s",
            "on_error",
            "full_score",
            "adaptive",
        ),
    }

    function: str | None = None
    """Built-in name or package.module:function; empty: the entry's own name."""
    weight: float | None = None
    """Factor of its score in the sum; empty: the built-in's default, or 1."""
    params: FreeSettings = Field(default_factory=dict)
    """Extra keyword arguments of the function."""
    time_limit_s: float = Field(30.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds for one call with a whole batch of completions."""
    on_error: Literal["raise", "zero", "skip"] = "raise"
    """After an exception, a hang or a broken result: raise stops the run, zero scores the batch 0, skip leaves the
    function out of that batch. zero and skip are logged each time."""
    full_score: float | None = None
    """Score from which a completion counts as a success of this function (adaptive weight, success rate); empty: 1, and 0 for
    repetition and soft_overlong."""
    adaptive: AdaptiveWeightConfig | None = None
    """Adaptive weight; none keeps the weight fixed."""


class RewardsConfig(Section):
    """How completions are scored. Also tells the evaluation what an answer is; the evaluation uses no reward."""

    tags: TagsConfig = Field(default_factory=TagsConfig)
    """Names of the two blocks."""
    equality: Literal["exact", "numeric", "math", "choice"] = "numeric"
    """When an answer equals the ground truth: exact text, numeric value, mathematical expression (math-verify), or the
    letter of a multiple choice."""
    functions: dict[Name, RewardConfig] = Field(default_factory=dict)
    """Reward functions by name. Built-in ones need no entry unless a setting is changed."""
    memory_limit_gb: float = Field(8.0, gt=0.0, allow_inf_nan=False)
    """Most memory in GB (1e9 bytes) that the process of the reward functions and all it starts may use together; a model that a
    function loads counts. Measured every 0.05 s as resident memory, shared pages once. Never more than 80 % of the machine's."""
    module_dir: Path | None = None
    """Folder with the modules of your own functions, searched after the installed packages and the working directory; relative
    to the working directory. Empty: the config file's folder, when such a module lies there."""

    def module_dirs(self) -> list[Path]:
        """Folders in which the modules of own functions are looked for, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]

    def resolve(self, name: str) -> RewardConfig | None:
        """The full settings of one reward, function and weight filled in; None when nothing is known by that name."""
        given = self.functions.get(name)
        if given is None and name not in BUILTIN_REWARDS:
            return None
        given = given or RewardConfig()
        function = given.function or name
        weight = given.weight if given.weight is not None else BUILTIN_REWARDS.get(function, 1.0)
        return given.model_copy(update={"function": function, "weight": weight})


class LabConfig(Section):
    """The reward lab: what is tried before any training."""

    num_rows: int = Field(32, ge=1, le=MOST_ROWS)
    """Training rows from which probe completions are made."""
    num_prompts: int = Field(16, ge=1, le=MOST_ROWS)
    """Training prompts for which the base model samples a group."""
    max_seconds_per_completion: float = Field(0.1, gt=0.0, le=LONGEST_S)
    """Longest time in seconds a built-in or own reward may take for one completion; ten times that for one of 1 MB."""
    min_signal: Fraction = 0.05
    """Smallest share of groups whose completions earn different rewards, on samples of the base model, first stage."""
    ignore_checks: list[str] = Field(default_factory=list)
    """Checks that only warn instead of stopping the run, as check or function/check, for example style/order."""
