"""The checks of a judge: agreement with people, order bias, length bias and cost, measured on gold pairs before any training.

A judge costs money, so it scores fewer probes than a function of code, and neither its determinism nor its speed is checked: its
verdicts are cached, and its time is the endpoint's.
"""

from collections.abc import Iterator

from grpo_tasks.judging.trial import Trial, read_gold, try_judge
from grpo_tasks.lab.probe_set import passed
from schemas.config.rewards import JudgeConfig, RewardsConfig
from schemas.results.data import LabCheck

JUDGED_ROWS = 4
"""Rows whose probes a judge scores."""


def check_judges(names: list[str], rewards: RewardsConfig) -> tuple[list[LabCheck], list[str]]:
    """The checks of every judge among the reward functions, and what could not be measured."""
    checks: list[LabCheck] = []
    left_out: list[str] = []
    for name in names:
        settings = rewards.resolve(name)
        judge = settings.judge if settings is not None else None
        if judge is None:
            continue
        if judge.gold is None:
            left_out.append(
                f"agreement, order_bias, length_bias and cost of {name}: name pairs that people judged with judge.gold"
            )
            continue
        trial = try_judge(judge, read_gold(judge.gold))
        if trial.left_out:
            left_out.append(f"{trial.left_out:,} more gold pairs of {name}: the judge is asked about the first {trial.pairs:,}")
        checks += _checks(name, judge, trial)
    return checks, left_out


def _checks(name: str, judge: JudgeConfig, trial: Trial) -> Iterator[LabCheck]:
    detail = f"prefers what people prefer in {trial.agreement:.0%} of {trial.pairs} gold pairs"
    yield _judged(name, "agreement", detail, trial.agreement >= judge.min_agreement, f"min_agreement {judge.min_agreement:g}")
    if trial.order_bias is not None:
        detail = f"changes its verdict with the order in {trial.order_bias:.0%} of {trial.pairs} gold pairs"
        limit = f"max_order_bias {judge.max_order_bias:g}"
        yield _judged(name, "order_bias", detail, trial.order_bias <= judge.max_order_bias, limit)
    detail = f"prefers the same completion with empty talk behind it in {trial.length_bias:.0%} of {trial.pairs} gold pairs"
    limit = f"max_length_bias {judge.max_length_bias:g}"
    yield _judged(name, "length_bias", detail, trial.length_bias <= judge.max_length_bias, limit)
    if trial.unjudged:
        detail = f"{trial.unjudged} questions have no sound verdict"
        yield LabCheck(function=name, check="verdicts", outcome="failed", detail=detail)
    # A comparison without a reference is one of two completions.
    questions = 1 if judge.mode == "absolute" else 2 * (judge.opponents if judge.reference_column is None else 1)
    requests = 1_000 * questions * judge.votes
    cost = "; every verdict of the trial was cached"
    if trial.requests:
        cost = f" and cost about {requests * trial.cost / trial.requests:.2f}"
    yield passed(name, "cost", f"1,000 completions take about {requests:,} requests{cost}")


def _judged(name: str, check: str, detail: str, good: bool, limit: str) -> LabCheck:
    if good:
        return passed(name, check, detail)
    return LabCheck(function=name, check=check, outcome="failed", detail=f"{detail}; {limit}")
