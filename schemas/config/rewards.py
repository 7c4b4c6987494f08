"""Sections `rewards` (functions with weights, and a judge: a language model behind an OpenAI-compatible endpoint) and `lab`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.section import Folded, Section, T
from schemas.config.types import LONGEST_S, MOST_ROWS, MOST_TIMES, MOST_UPDATES, Address, Fraction, FreeSettings, Name, Url

Limits = Annotated[T, Folded("limits")]

Trial = Annotated[T, Folded("trial")]

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
MOST_CHARS = 1_000_000
"""Longest completion in characters that a judge is shown."""
MOST_COST = 1e9


JUDGES_BY = (
    "model mode rubric max_points reference_column opponents votes temperature max_tokens max_malformed max_completion_chars "
    "min_agreement max_order_bias max_length_bias"
)
"""Settings on which a verdict, or what the lab says about it, depends. The others say where a judge is and what it may cost."""


class CriterionConfig(Section):
    """One criterion of a rubric."""

    name: Name
    """Name in the verdict."""
    description: Address
    """What earns all points and what earns none, as you would tell a person."""
    weight: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """Weight in the mean of the criteria."""


class JudgeConfig(Section):
    """A judge: where it answers, what it judges by, and what it may cost."""

    base_urls: list[Url] = Field(min_length=1, max_length=MOST_TIMES)
    """Addresses of the endpoint, up to and including /v1: a service, or vLLM servers of your own. The least loaded one gets the
    next request, and one that fails is left out while others answer."""
    model: Address
    """Name of the model at that endpoint."""
    api_key_variable: VariableName | None = None
    """Environment variable with the key. A key never stands in a config. Empty: the endpoint needs none."""
    mode: Literal["absolute", "pairwise"] = "absolute"
    """absolute: points for each criterion. pairwise: which of two completions is better, asked in both orders; the score is the
    share of comparisons won, a tie counts half."""
    rubric: list[CriterionConfig] = Field(min_length=1, max_length=20)
    """Criteria that the judge answers one by one."""
    max_points: int = Field(4, ge=1, le=100)
    """Points that a criterion can earn in mode absolute."""
    reference_column: Address | None = None
    """Column with a reference reply, for example answer: in mode absolute the judge sees it, in mode pairwise it is the opponent
    of every completion. Empty: none; mode pairwise compares the completions of a prompt with each other."""
    opponents: int = Field(2, ge=1, le=MOST_TIMES)
    """mode pairwise without a reference: completions of the same prompt that each completion is compared with."""
    votes: int = Field(1, ge=1, le=99)
    """Verdicts for each question. The median of the points counts, or the majority of the comparisons."""
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    """Temperature of the judge. With several votes it should be above 0: equal votes add nothing."""
    max_tokens: int = Field(1_000, ge=16, le=100_000)
    """Longest verdict in tokens."""
    cache: Path = Path("judge-cache")
    """Folder with every verdict and its prompt (verdicts.sqlite), relative to the working directory. A question that was answered
    before is not asked again, in a resumed or later run either."""
    max_requests_per_minute: Limits[float | None] = Field(None, gt=0.0, le=1e6)
    """Requests per minute, of all processes that use the cache folder together. Empty: no limit."""
    max_concurrency: Limits[int] = Field(8, ge=1, le=1_000)
    """Requests at the same time, over all addresses and all processes that use the cache folder."""
    request_timeout_s: Limits[float] = Field(120.0, gt=0.0, le=LONGEST_S)
    """Time limit in seconds of one request, up to its complete reply."""
    max_outage_s: Limits[float] = Field(600.0, ge=0.0, le=LONGEST_S)
    """How long the run waits when no address answers, in seconds. Then the stage stops, with a checkpoint unless it has several
    ranks, rollout.max_staleness above 0 or is in a held-out evaluation; the same command resumes it."""
    max_malformed: Limits[int] = Field(2, ge=0, le=100)
    """How often a question is asked again when the verdict is malformed. A completion without any sound verdict scores 0."""
    max_completion_chars: Limits[int] = Field(20_000, ge=100, le=MOST_CHARS)
    """Characters of a completion or conversation that the judge sees. A longer one loses its middle, and a note says so. Each
    character outside ASCII is sent as an escape of 6 or 12, so leave room in the judge's context."""
    max_cost: Limits[float | None] = Field(None, ge=0.0, le=MOST_COST)
    """Largest sum spent, in the currency of the prices, over everything in the cache folder. A stage whose next request could
    exceed it stops as max_outage_s says. Tokens are estimated where the endpoint does not count them. Empty: no limit."""
    input_price: Limits[float] = Field(0.0, ge=0.0, le=MOST_COST)
    """Price of a million input tokens."""
    output_price: Limits[float] = Field(0.0, ge=0.0, le=MOST_COST)
    """Price of a million output tokens."""
    gold: Trial[Path | None] = None
    """JSONL file with pairs that people judged: question, better, worse, and reference if you use one. The lab asks the judge
    about each before any training. Empty: agreement, order bias and length bias are not measured."""
    min_agreement: Trial[Fraction] = 0.7
    """Share of these pairs on which the judge should agree with the label."""
    max_order_bias: Trial[Fraction] = 0.2
    """Share of these pairs on which the order of the two completions may change the verdict (mode pairwise)."""
    max_length_bias: Trial[Fraction] = 0.2
    """Share of these pairs on which padding the worse completion with empty talk may earn it a higher score."""

    def _faults(self) -> Iterator[str]:
        names = [criterion.name for criterion in self.rubric]
        if len(set(names)) < len(names):
            yield "two criteria of the rubric have the same name; fix: give each a name of its own"
        if self.max_cost is not None and self.input_price == self.output_price == 0.0:
            yield "max_cost needs prices; fix: input_price and output_price, per million tokens"


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
    """Built-in name, or package.module:function (or a class or factory). Empty: the built-in function of the entry's own name."""
    weight: float | None = None
    """Factor of its score in the sum. Empty: the default of the built-in function, or 1."""
    judge: JudgeConfig | None = None
    """function judge: the language model that scores, its rubric and its limits."""
    params: FreeSettings = Field(default_factory=dict)
    """Additional keyword arguments of the function; for a class or a factory, the arguments that it is called with once."""
    as_text: Limits[bool] = False
    """Pass prompts (the content of the last message) and completions as strings for chats too."""
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
        """What the function of this entry cannot do without, with the fix; None when nothing is missing."""
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
    """Memory limit in GB (1e9 bytes) of the reward process and everything it starts or loads, at most 80 % of the machine's
    memory. Resident memory is measured every 0.05 s; shared pages count once."""
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
    max_half_width: float | None = Field(None, gt=0.0, lt=0.5)
    """Stop sampling when the share of groups with a signal in the first stage that samples is known this well: half the width of
    its Wilson interval (0.15: 15 points). It is looked at after an eighth, a quarter and a half of the prompts, and of no fewer
    than 8. Empty: all num_prompts are used."""
    max_minutes: float | None = Field(None, gt=0.0, le=LONGEST_S / 60)
    """Longest time in minutes to sample for the lab. What still fits is estimated from the first prompts, an eighth of them and
    at least 8, which are always used. Empty: no limit."""
    gold: str | None = None
    """Where good completions of your own come from, which the lab takes for perfect ones: a column of the data, or
    package.module:function, which receives the chosen rows (dicts with prompt, answer and every column) and returns one
    completion for each, None where it has none. Empty: the lab makes them from the ground truths."""
    strict: bool = False
    """Whether opinions stop the run too. Faults (an exception, a hang, a wrong result) always do. Opinions (order, empty answers,
    gaming, speed, little signal, ...) only warn unless this is set."""
    max_seconds_per_completion: float = Field(0.1, gt=0.0, le=LONGEST_S)
    """Computing time in seconds that a reward function may take for one completion; waiting does not count. The lab also tries
    four times the text of rollout.max_completion_length tokens, which may take four times as long."""
    min_signal: Fraction = 0.05
    """Smallest share of the base model's groups whose completions earn different rewards by the first stage's rewards."""
    ignore_checks: list[str] = Field(default_factory=list)
    """Checks that are not reported: CHECK, or FUNCTION/CHECK such as style/speed or stage:format/order. A fault still warns."""
