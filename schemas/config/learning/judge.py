"""Section `rewards.functions.NAME.judge`: a language model behind an OpenAI-compatible endpoint that scores completions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.section import Folded, Section, T
from schemas.config.types import LONGEST_S, MOST_TIMES, Address, Fraction, Name, Url

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
    """Column of the data with a reference reply, for example answer. In mode absolute the judge sees it. In mode pairwise it is
    the opponent of every completion. Empty: no reference; in mode pairwise the completions of a prompt are compared with each
    other."""
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
    """How long the run waits when no address answers, in seconds. Then the stage stops; the same command resumes it. It writes a
    checkpoint first, except with several ranks, with rollout.max_staleness above 0 and in a held-out evaluation: then it resumes
    from the last one."""
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
