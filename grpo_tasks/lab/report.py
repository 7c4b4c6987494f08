"""The lab's report as Markdown: one table of checks per function, the forecasts, the first failing example."""

from collections.abc import Iterable, Sequence

from grpo_tasks.content.markdown import table
from schemas.results import LabCheck, SignalForecast

_MARKS = {"passed": "passed", "warned": "**warned**", "failed": "**FAILED**"}


def report_markdown(checks: Sequence[LabCheck], forecasts: Sequence[SignalForecast]) -> str:
    """The whole report."""
    failed = [check for check in checks if check.outcome == "failed"]
    warned = [check for check in checks if check.outcome == "warned"]
    parts = [
        "# Reward lab",
        f"{len(checks)} checks: {len(failed)} failed, {len(warned)} warned.",
        *(_example(failed[0]) if failed else []),
        *(line for name in dict.fromkeys(check.function for check in checks) for line in _function(name, checks)),
        *_forecasts(forecasts),
    ]
    return "\n\n".join(parts) + "\n"


def _example(check: LabCheck) -> Iterable[str]:
    yield f"## First failure: {check.function} / {check.check}"
    yield " ".join(check.detail.replace("<", "&lt;").split())
    if check.probe:
        yield f"Row {check.place} (prompt_id {check.prompt_id}), probe `{check.probe}`:"
    if check.completion:
        # Four blanks make a code block that no text inside can end.
        yield "\n".join(f"    {line}" for line in check.completion.splitlines())


def _function(name: str, checks: Sequence[LabCheck]) -> Iterable[str]:
    yield f"## {name}"
    rows = [
        [check.check, _MARKS[check.outcome], check.detail, check.probe, check.place] for check in checks if check.function == name
    ]
    yield table(["check", "outcome", "found", "probe", "row"], rows)


def _forecasts(forecasts: Sequence[SignalForecast]) -> Iterable[str]:
    yield "## Signal on the base model's own samples"
    if not forecasts:
        yield "No samples of the base model were scored."
        return
    rows = [
        [one.stage, str(one.groups), f"{one.share_with_signal:.0%}", f"{one.mean_reward:.3f}", f"{one.mean_reward_std:.3f}"]
        for one in forecasts
    ]
    columns = ["stage", "groups", "groups with signal", "mean reward", "mean std in a group"]
    yield table(columns, rows, right=columns[1:])
