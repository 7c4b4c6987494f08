"""The report of the lab as Markdown: the first failure with its completion, one table of checks per function, the forecasts."""

from collections.abc import Iterable, Sequence

from grpo_tasks.content.markdown import table
from schemas.results.lab import LabCheck, SignalForecast

_MARKS = {"passed": "passed", "warned": "**warned**", "failed": "**FAILED**"}
FIXES = {
    "columns": "rename the column, or remove it if no reward function needs it",
    "contract": "return one finite number, or None, for each completion",
    "determinism": "compute a score from its own completion alone: no random numbers, nothing from other completions or calls",
    "speed": "scan each text once and without backtracking, or raise lab.max_seconds_per_completion",
    "gaming": "pay only for one answer, outside the reasoning, and for each tag once (the built-in format and correctness do)",
    "gold": "set completion.equality to the kind of your answers, or correct the row",
    "order": "raise the weights of functions that only the perfect completion satisfies (format, correctness), lower the others",
    "empty": "return 0 for a completion without an answer",
    "signal": "add an incremental reward, or raise num_generations or rollout.temperature",
}
"""What to do about a failed check or a warning."""


def report_markdown(checks: Sequence[LabCheck], forecasts: Sequence[SignalForecast]) -> str:
    """The complete report."""
    failed = [check for check in checks if check.outcome == "failed"]
    warned = [check for check in checks if check.outcome == "warned"]
    parts = [
        "# Reward lab",
        f"{len(checks)} checks: {len(failed)} failed, {len(warned)} warned.",
        *(_example(failed[0]) if failed else []),
        *(line for name in dict.fromkeys(check.function for check in checks) for line in _function(name, checks)),
        *_forecasts(forecasts),
        *_fixes(checks),
    ]
    return "\n\n".join(parts) + "\n"


def _example(check: LabCheck) -> Iterable[str]:
    yield f"## First failure: {check.function} / {check.check}"
    yield " ".join(check.detail.replace("<", "&lt;").split())
    if check.probe:
        yield f"Row {check.place} (prompt_id {check.prompt_id}), probe `{check.probe}`:"
    if check.completion:
        # Indented by four spaces: unlike a fence, no text inside can end such a code block.
        yield "\n".join(f"    {line}" for line in check.completion.splitlines())


def _function(name: str, checks: Sequence[LabCheck]) -> Iterable[str]:
    yield f"## {name}"
    rows = [
        [check.check, _MARKS[check.outcome], check.detail, check.probe, check.place] for check in checks if check.function == name
    ]
    yield table(["check", "outcome", "found", "probe", "row"], rows)


def _fixes(checks: Sequence[LabCheck]) -> Iterable[str]:
    names = dict.fromkeys(check.check for check in checks if check.outcome != "passed")
    if names:
        yield "## How to fix"
        yield "\n".join(f"- {name}: {FIXES[name]}" for name in names)


def _forecasts(forecasts: Sequence[SignalForecast]) -> Iterable[str]:
    yield "## Signal in the samples of the base model"
    if not forecasts:
        yield "No samples of the base model were scored."
        return
    rows = [
        [one.stage, str(one.groups), f"{one.share_with_signal:.0%}", f"{one.mean_reward:.3f}", f"{one.mean_reward_std:.3f}"]
        for one in forecasts
    ]
    columns = ["stage", "groups", "groups with signal", "mean reward", "mean std in a group"]
    yield table(columns, rows, right=columns[1:])
