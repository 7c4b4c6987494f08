"""Sections `rewards` and `lab`: reward functions with weights, and how they are probed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from schemas.config.learning.judge import JudgeConfig
from schemas.config.section import Folded, Section, T
from schemas.config.types import LONGEST_S, MOST_ROWS, MOST_UPDATES, Fraction, FreeSettings, Name

Limits = Annotated[T, Folded("limits")]

JUDGE_LIMIT_S = 7_200.0
"""Time limit of a judge for a whole batch, waits for its endpoint included."""

BUILTIN_REWARDS: dict[str, float] = {
    "format": 1.0,
    "incremental_format": 1.0,
    "correctness": 2.0,
    "length": 0.2,
    "repetition": 0.5,
    "style": 0.5,
    "soft_overlong": 1.0,
    "environment": 1.0,
}
"""Built-in reward functions and their default weights; a test keeps it equal to `grpo_tasks.rewards.builtin`."""


JUDGE = "judge"
"""The built-in function that asks a language model. It needs settings of its own, so it is not in that table."""


class AdaptiveWeightConfig(Section):
    """Adapts a reward's weight to its success rate, within bounds."""

    low: Fraction = 0.3
    """Below this success rate the weight grows."""
    high: Fraction = 0.8
    """Above this success rate the weight shrinks."""
    grow: float = Field(1.2, ge=1.0)
    """Factor applied when the success rate is low."""
    every_steps: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two adjustments. The success rate is measured over these updates."""


class RewardConfig(Section):
    """One reward function."""

    function: str | None = None
    """Built-in name, or package.module:function; a class or a factory may stand there too. Empty: the built-in function of the
    entry's own name."""
    weight: float | None = None
    """Factor of its score in the sum. Empty: the default of the built-in function, or 1."""
    judge: JudgeConfig | None = None
    """function judge: the language model that scores, its rubric and its limits."""
    params: FreeSettings = Field(default_factory=dict)
    """Additional keyword arguments of the function; for a class or a factory, the arguments that it is called with once."""
    as_text: Limits[bool] = False
    """Pass prompts and completions as strings for chats too, to a function that was written for strings. The prompt is then the
    content of the last message."""
    time_limit_s: Limits[float] = Field(30.0, gt=0.0, le=LONGEST_S)
    """Time limit in seconds of one call, which scores a whole batch of completions."""
    on_error: Limits[Literal["raise", "zero", "skip"]] = "raise"
    """What follows an exception, a timeout or an invalid result. raise: stop the run. zero: score the batch 0. skip: leave the
    function out of this batch. zero and skip are logged each time."""
    full_score: Limits[float | None] = None
    """Score from which a completion counts as a success of this function (success rate, adaptive weight). Empty: 1, and 0 for
    repetition and soft_overlong."""
    adaptive: Limits[AdaptiveWeightConfig | None] = None
    """Adaptive weight. Empty: the weight is fixed."""

    def missing(self, name: str, *, max_completion_length: int) -> str | None:
        """What the function cannot do without, with the fix; None when nothing is missing.

        Args:
            name: name of the entry.
            max_completion_length: that of the rollout, in tokens.
        """
        if self.function == JUDGE and self.judge is None:
            return f"{name} needs a judge; fix: rewards.functions.{name}.judge: {{base_urls: [...], model: ..., rubric: [...]}}"
        if self.function == "soft_overlong" and not {"max_completion_length", "soft_punish_cache"} <= self.params.keys():
            limit = max_completion_length
            return (
                f"{name} needs two params; fix: rewards.functions.{name}.params: "
                f"{{max_completion_length: {limit}, soft_punish_cache: {max(1, limit // 5)}}}"
            )
        return None

    @property
    def call_limit_s(self) -> float:
        """Time limit in seconds of one call; a judge waits for its endpoint and has a limit of its own."""
        return self.time_limit_s if self.judge is None else JUDGE_LIMIT_S


class RewardsConfig(Section):
    """How completions are scored."""

    functions: dict[Name, RewardConfig] = Field(default_factory=dict)
    """Reward functions by name. A built-in function needs an entry only when you change one of its settings."""
    memory_limit_gb: float = Field(8.0, gt=0.0, allow_inf_nan=False)
    """Memory limit in GB (1e9 bytes) of the reward process and everything it starts, including any model that a function
    loads. Resident memory is measured every 0.05 s and shared pages count once. The limit is never above 80 % of the
    machine's memory."""
    module_dir: Path | None = None
    """Folder with the modules of your own functions, relative to the working directory. It is searched after the installed
    packages and the working directory. Empty: the folder of the config file, if it holds such a module."""

    def _faults(self) -> Iterator[str]:
        for name, settings in self.functions.items():
            function = settings.function or name
            if (function == JUDGE) != (settings.judge is not None):
                what = "has no judge" if function == JUDGE else f"has a judge, and its function is {function}"
                fix = "judge: {base_urls: [...], model: ..., rubric: [...]}" if function == JUDGE else "function: judge"
                yield f"functions.{name} {what}; fix: {fix}"
            if ":" not in function and function not in BUILTIN_REWARDS and function != JUDGE:
                yield (
                    f"functions.{name}: {function} is not built in; fix: one of {', '.join(BUILTIN_REWARDS)}, "
                    "or function: package.module:function"
                )

    def module_dirs(self) -> list[Path]:
        """Folders that are searched for the modules of your own functions, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]

    @property
    def references(self) -> list[str]:
        """The function of each entry: the name of a built-in one, or module:function."""
        return [settings.function or name for name, settings in self.functions.items()]

    def resolve(self, name: str) -> RewardConfig | None:
        """The settings of one reward with function and weight filled in; None for an unknown name."""
        given = self.functions.get(name)
        if given is None and name not in BUILTIN_REWARDS and name != JUDGE:
            return None
        given = given or RewardConfig()
        function = given.function or name
        weight = given.weight if given.weight is not None else BUILTIN_REWARDS.get(function, 1.0)
        return given.model_copy(update={"function": function, "weight": weight})


class LabConfig(Section):
    """The reward lab, which probes every reward function before any training."""

    num_rows: int = Field(32, ge=1, le=MOST_ROWS)
    """Training rows from which probe completions are made."""
    num_prompts: int = Field(16, ge=1, le=MOST_ROWS)
    """Training prompts for which the base model samples a group."""
    gold: str | None = None
    """Where good completions of your own come from, which the lab takes for perfect ones: a column of the data, or
    package.module:function, which receives the chosen rows (dicts with prompt, answer and every column) and returns one
    completion for each, None where it has none. Empty: the lab makes them from the ground truths."""
    strict: bool = False
    """Whether opinions stop the run too. Faults (an exception, a hang, a wrong result) always do. Opinions (order, empty answers,
    gaming, speed, little signal, ...) only warn unless this is set."""
    max_seconds_per_completion: float = Field(0.1, gt=0.0, le=LONGEST_S)
    """Time in seconds that a reward function may take for one completion. A completion of 1 MB may take ten times as long."""
    min_signal: Fraction = 0.05
    """Smallest share of groups whose completions earn different rewards, sampled from the base model with the rewards of the
    first stage."""
    ignore_checks: list[str] = Field(default_factory=list)
    """Checks that are not reported: CHECK, or FUNCTION/CHECK such as style/speed or stage:format/order. A fault still warns."""
