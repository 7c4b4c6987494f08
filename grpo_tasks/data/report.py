"""What the verdict looks like to people: `report.md`, and the `DataReport` that the next steps read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.content.markdown import code, table
from grpo_tasks.data.judge import EXACT_ROWS, Verdict
from grpo_tasks.data.quarantine import write_tables
from schemas.config.rollout import RolloutConfig
from schemas.results import DataReport, SourceFile

REPORT = "report.md"
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """What a report is about: the step's key and folder, its time so far, and the sources."""

    key: str
    directory: Path
    seconds: float
    sources: Sequence[SourceFile]


def report_data(verdict: Verdict, origin: Origin, warnings: Sequence[str] = ()) -> DataReport:
    """Write tables and report.md into the origin's folder; the folder exists. `quarantine.enforce` comes after."""
    digest = write_tables(verdict, origin.directory)
    (origin.directory / REPORT).write_text(render_report(verdict, origin, warnings, digest=digest), encoding="utf-8")
    return DataReport(
        key=origin.key,
        directory=origin.directory,
        seconds=origin.seconds,
        rows=verdict.rows,
        quarantined=verdict.quarantined,
        train_rows=verdict.side("train").height,
        eval_rows=verdict.side("eval").height,
        rules=[count for count in verdict.rules if count.rows],
        prompt_tokens=verdict.prompt_tokens,
        digest=digest,
        sources=origin.sources,
    )


def stop_warnings(verdict: Verdict, rollout: RolloutConfig) -> list[str]:
    """What to say of stop strings that stand in prompts: here only the completion is searched for them, elsewhere maybe not."""
    found = [(stop, verdict.prompts_with(stop)) for stop in rollout.stop]
    return [
        f"{count:,} prompts hold the stop string {stop!r}; a completion that repeats its prompt ends there"
        for stop, count in found
        if count
    ]


def render_report(verdict: Verdict, origin: Origin, warnings: Sequence[str], *, digest: str) -> str:
    """The validation report as Markdown."""
    parts = [
        _summary(verdict, digest),
        *(f"**Warning**: {warning}" for warning in warnings),
        _sources(origin.sources),
        _broken(verdict),
        _lengths(verdict),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(verdict: Verdict, digest: str) -> str:
    share = verdict.quarantined / max(verdict.rows, 1)
    lines = [
        "# Data",
        "",
        f"{verdict.rows:,} rows read, **{verdict.quarantined:,} refused** ({share:.2%}), "
        f"{verdict.side('train').height:,} for training, {verdict.side('eval').height:,} held out.",
        "",
        f"Digest of the accepted rows: `{digest}`",
    ]
    if verdict.ignored:
        lines += ["", f"Rules not applied (validation.ignore_rules): {', '.join(sorted(verdict.ignored))}"]
    return "\n".join(lines)


def _sources(sources: Sequence[SourceFile]) -> str:
    rows = [[code(source.path), source.side, f"{source.rows:,}", code(source.sha256[:16])] for source in sources]
    return "## Sources\n\n" + table(["source", "side", "rows", "SHA-256"], rows, right=["rows"])


def _broken(verdict: Verdict) -> str:
    broken = [count for count in verdict.rules if count.rows]
    if not broken:
        return "## Rules\n\nEvery row keeps every rule."
    counts = table(
        ["rule", "rows", "meaning"], [[count.rule, f"{count.rows:,}", count.meaning] for count in broken], right=["rows"]
    )
    examples = [
        [code(f"{row['source']}:{row['line']}"), row["rule"], code(row["value"])]
        for count in broken
        for row in verdict.refused.filter(rule=count.rule).head(_EXAMPLES).iter_rows(named=True)
    ]
    return "\n\n".join(["## Rules broken", counts, "First rows of each:", table(["row", "rule", "found"], examples)])


def _lengths(verdict: Verdict) -> str:
    tokens = verdict.prompt_tokens
    note = ""
    if verdict.rows > EXACT_ROWS:
        note = "\n\nPrompts that are provably within the limit were not counted; upper bounds stand for them."
    lengths = {
        "mean": f"{tokens.mean:.1f}",
        "median": str(tokens.p50),
        "95 %": str(tokens.p95),
        "longest": str(tokens.max),
        "limit": str(tokens.limit),
    }
    columns = list(lengths)
    return (
        f"## Prompt lengths in tokens, after the chat template\n\n{table(columns, [list(lengths.values())], right=columns)}{note}"
    )
