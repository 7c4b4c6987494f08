"""The report of the lab as Markdown: the first failure with its completion, one table of checks per function, the forecasts."""

from collections.abc import Iterable, Sequence

from grpo_tasks.content.markdown import table
from grpo_tasks.rewards.contract import shorten
from schemas.results.data import LabCheck, PromptsUsed, SignalForecast
from schemas.results.evaluation import BINS

_MARKS = {"passed": "passed", "ignored": "ignored", "warned": "**warned**", "failed": "**FAILED**"}
FIXES = {
    "columns": "rename the column, or remove it if no reward function needs it",
    "date": "choose it with rollout.chat_template_kwargs: {strftime_now: '2026-11-26'}, or accept it: lab.ignore_checks: [date]",
    "contract": "return one finite number, or None, for each completion",
    "applies": "return a score for the completions that the function is about, or leave it out",
    "same_score": "compare what the function looks for (tags, columns, the form of completions) with what it gets",
    "determinism": "compute a score from its own completion alone: no random numbers, nothing from other completions or calls",
    "speed": "scan each text once and without backtracking, or raise lab.max_seconds_per_completion",
    "gaming": "pay only for one answer, outside the reasoning, and for each tag once (the built-in format and correctness do); "
    "where the answer is an expression, check in a function of your own what it is made of",
    "gold": "set completion.equality to the kind of your answers, or correct the row",
    "order": "raise the weights of functions that only the perfect completion satisfies (format, correctness), lower the others",
    "empty": "return 0 for a completion without an answer",
    "agreement": "make the criteria more precise, take a stronger model, or add votes",
    "order_bias": "take a stronger model, or add votes; scores use both orders, so the bias costs signal only",
    "length_bias": "say in a criterion that empty talk earns nothing, or add a length reward",
    "verdicts": "take a model or a server that keeps to a JSON schema, or raise judge.max_tokens",
    "begins": "correct the environment's reset, or the row",
    "faults": "correct the environment's step, or make it answer what it cannot understand",
    "leak": "keep what belongs to a conversation in self, not in the class or the module",
    "ranking": "reward what the task asks for, and nothing else",
    "length": "let step say done, or raise interaction.max_turns",
    "perfect": "let perfect(row) return the turns of a good player as a list of texts",
    "signal": "add an incremental reward, or raise num_generations or rollout.temperature",
}
STRICT_LINE = "These opinions do not stop the run. lab.strict: true lets them; lab.ignore_checks: [{names}] silences them."
MANY = 0.5
"""Share of the sampled prompts that are never solved, or always, from which the report advises to measure all prompts."""
DETAIL_CHARS = 200
MAX_OPINIONS = 12
"""Opinions in the table; the tables of the functions have all of them."""


def opinions(checks: Sequence[LabCheck]) -> tuple[list[list[str]], str]:
    """The findings that only warn: one row each (where, check, finding, probe), and the line that says what may be done."""
    warned = [check for check in checks if check.outcome == "warned"]
    rows = [[one.function, one.check, shorten(one.detail, DETAIL_CHARS), one.probe] for one in warned[:MAX_OPINIONS]]
    if len(warned) > MAX_OPINIONS:
        rows.append(["...", "", f"{len(warned) - MAX_OPINIONS} more in report.md", ""])
    names = dict.fromkeys(one.check for one in warned)
    return rows, STRICT_LINE.format(names=", ".join(names)) if rows else ""


def fixes(checks: Sequence[LabCheck]) -> list[str]:
    """What to do about each finding: the functions and checks, and the fix. Findings with the same fix share a line."""
    found: dict[str, list[str]] = {}
    for check in checks:
        if check.outcome in ("warned", "failed"):
            found.setdefault(check.fix or FIXES[check.check], []).append(f"{check.function}/{check.check}")
    return [f"{', '.join(names)}: {fix}" for fix, names in found.items()]


def advice(forecasts: Sequence[SignalForecast]) -> list[str]:
    """What to do about prompts that are never solved, or always, by the first stage; nothing where few are, or where they teach
    although none counts as solved.

    Later stages start from a better model than the one that was sampled.
    """
    first = forecasts[0] if forecasts else None
    if first is None or first.never_or_always < MANY:
        return []
    never, always, known = first.pass_rates[0], first.pass_rates[-1], sum(first.pass_rates)
    counted = f"{never} of {known} sampled prompts are never solved by the rewards of stage {first.stage} and {always} always"
    if first.share_with_signal >= MANY:
        fixes = "; ".join(f"rewards.functions.{name}.full_score: {score:g}" for name, score in first.full_scores.items())
        teach = f"They teach all the same: the completions of {first.share_with_signal:.0%} of the groups differ in reward."
        before = "Before you use pass rates (difficulty, keep_pass_rate) set"
        return [f"{counted}: the full scores do not fit the rewards. {teach} {before} {fixes}"] if fixes else []
    if never + always == known:
        way_out = (
            "add a reward that also pays for a part of the task, or easier rows"
            if never > always
            else "take harder rows, or rewards that tell good completions from better ones"
        )
        return [f"{counted}, and their groups teach nothing. keep_pass_rate would leave no prompt: {way_out}."]
    return [
        f"{counted}. Such prompts teach nothing, or have a wrong ground truth. difficulty.samples: 8 measures all prompts before "
        "training, and keep_pass_rate: [0.1, 0.9] of a stage leaves such prompts out."
    ]


def report_markdown(
    checks: Sequence[LabCheck],
    forecasts: Sequence[SignalForecast],
    left_out: Sequence[str] = (),
    used: PromptsUsed | None = None,
) -> str:
    """The complete report."""
    failed = [check for check in checks if check.outcome == "failed"]
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in ("failed", "warned", "ignored")}
    parts = [
        "# Reward lab",
        f"{len(checks)} checks: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}.",
        *(f"Not checked: {line}." for line in left_out),
        *(_example(failed[0]) if failed else []),
    ]
    rows, line = opinions(checks)
    if rows:
        parts += ["## Opinions", table(["where", "check", "found", "probe"], rows), line]
    for name in dict.fromkeys(check.function for check in checks):
        of_one = [check for check in checks if check.function == name]
        rows = [[check.check, _MARKS[check.outcome], check.detail, check.probe, check.place] for check in of_one]
        parts += [f"## {name}", table(["check", "outcome", "found", "probe", "row"], rows)]
    parts += _forecasts(forecasts)
    parts += [f"{used.text()}."] if used is not None and forecasts else []
    if lines := fixes(checks):
        parts += ["## How to fix", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts) + "\n"


def prompt_markdown(text: str, variables: Sequence[str]) -> str:
    """A prompt as the model reads it, special tokens included, and the variables of the chat template with their values."""
    code = "\n".join(f"    {line}" for line in text.splitlines())
    said = f"rollout.chat_template_kwargs: {', '.join(variables)}.\n\n" if variables else ""
    return f"\n## The first prompt as the model reads it\n\n{said}{code}\n"


def _example(check: LabCheck) -> Iterable[str]:
    yield f"## First failure: {check.function} / {check.check}"
    yield " ".join(check.detail.replace("<", "&lt;").split())
    for label, text in (("Line", check.source), ("Called with", check.arguments), ("Fix", check.fix)):
        if text:
            yield f"{label}: {' '.join(text.replace('<', '&lt;').split())}"
    if check.probe:
        yield f"Row {check.place} (prompt_id {check.prompt_id}), probe `{check.probe}`:"
    if check.completion:
        # Indented by four spaces: unlike a fence, no text inside can end such a code block.
        yield "\n".join(f"    {line}" for line in check.completion.splitlines())


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
    known = [[one.stage, *map(str, one.pass_rates)] for one in forecasts if one.pass_rates]
    if known:
        yield "Prompts by their pass rate, the share of their completions that are solved:"
        yield table(["stage", *BINS], known, right=BINS)
    yield from advice(forecasts)
