"""The verdict on disk and for people: tables, `report.md`, the `DataReport` for the next steps, the error that stops a run.

    RowVerdict --report_data--> train.parquet, eval.parquet, quarantine.parquet, report.md --> DataReport
            --enforce------> DataError when too many rows are bad or too few are left

The files are written before `enforce` is called: its error refers to them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.content.markdown import code, table
from grpo_tasks.content.places import place_in, row_place
from grpo_tasks.data.judge import EXACT_ROWS, RowVerdict
from grpo_tasks.data.rules import BY_NAME
from grpo_tasks.data.table import QUARANTINE
from schemas.config.data import ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import DataError
from schemas.results.data import DataReport, SourceFile

REPORT = "report.md"
_EXAMPLES = 5
_NEAR = 50
_DIGEST_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a report comes from: the key and folder of the step, its time so far, and the sources."""

    key: str
    directory: Path
    seconds: float
    sources: Sequence[SourceFile]


def report_data(verdict: RowVerdict, origin: Origin, warnings: Sequence[str] = ()) -> DataReport:
    """Write the tables and report.md into the origin's existing folder. Call `enforce` afterwards."""
    digest = write_tables(verdict, origin.directory)
    (origin.directory / REPORT).write_text(render_report(verdict, origin, warnings, digest=digest), encoding="utf-8")
    return DataReport(
        key=origin.key,
        directory=origin.directory,
        seconds=origin.seconds,
        rows=verdict.rows,
        quarantined=verdict.num_quarantined,
        duplicates=verdict.dropped.height,
        format=verdict.format,
        tasks=verdict.tasks,
        train_rows=verdict.split("train").height,
        eval_rows=verdict.split("eval").height,
        rules=[count for count in verdict.rules if count.rows],
        prompt_tokens=verdict.prompt_tokens,
        digest=digest,
        sources=origin.sources,
    )


def write_tables(verdict: RowVerdict, directory: Path) -> str:
    """Write train.parquet, eval.parquet and quarantine.parquet; returns the digest of the accepted rows.

    The digest is a SHA-256 over split, prompt_id and extra columns of every accepted row, in order.
    """
    verdict.quarantine.write_parquet(directory / QUARANTINE)
    digest = hashlib.sha256()
    for split in ("train", "eval"):
        rows = verdict.split(split)
        rows.write_parquet(directory / f"{split}.parquet")
        for chunk in rows.iter_slices(_DIGEST_ROWS):
            lines = chunk.select(pl.concat_str(pl.lit(f"{split} "), "prompt_id", pl.lit(" "), "extra", pl.lit("\n"))).to_series()
            digest.update("".join(lines).encode())
    return digest.hexdigest()


def enforce(verdict: RowVerdict, validation: ValidationConfig) -> None:
    """Raise `DataError` when more rows are quarantined than allowed, or too few are left; names rules and first rows."""
    share = verdict.num_quarantined / max(verdict.rows, 1)
    if share > validation.max_invalid_fraction:
        raise DataError(
            f"{verdict.num_quarantined:,} of {verdict.rows:,} rows are quarantined ({share:.1%}); "
            f"validation.max_invalid_fraction allows {validation.max_invalid_fraction:.1%}\n{_most_broken(verdict)}",
            place=row_place(*verdict.quarantine.select("source", "line").row(0)),
            fix=f"correct the rows ({QUARANTINE} and {REPORT} list all of them), or raise validation.max_invalid_fraction",
        )
    for split, minimum in (("train", validation.min_train_rows), ("eval", validation.min_eval_rows)):
        rows = verdict.split(split).height
        if rows < minimum:
            raise DataError(
                f"the {split} split has {rows} accepted rows; min_{split}_rows requires {minimum}",
                place=f"validation.min_{split}_rows",
                fix="add data, or change data.eval_fraction" if split == "eval" else "add data",
            )


def stop_warnings(verdict: RowVerdict, rollout: RolloutConfig) -> list[str]:
    """A warning for each stop string that occurs in prompts: a completion that repeats its prompt would end there."""
    effect = "a completion that repeats its prompt ends there"
    counts = [(stop, verdict.prompts_with(stop)) for stop in rollout.stop]
    return [f"{count:,} prompts contain the stop string {stop!r}; {effect}" for stop, count in counts if count]


def render_report(verdict: RowVerdict, origin: Origin, warnings: Sequence[str], *, digest: str) -> str:
    """The validation report as Markdown."""
    sections = [
        *_summary(verdict),
        f"Digest of the accepted rows: `{digest}`",
        *([f"Rules not applied (validation.ignore_rules): {', '.join(sorted(verdict.ignored))}"] if verdict.ignored else []),
        *(f"**Warning**: {warning}" for warning in warnings),
        *_sources(origin.sources),
        *_tasks(verdict),
        *_near(verdict),
        *_broken_rules(verdict, {source.path: source.unit for source in origin.sources}),
        *_lengths(verdict),
    ]
    return "\n\n".join(sections) + "\n"


def _summary(verdict: RowVerdict) -> Iterator[str]:
    yield "# Data"
    share = verdict.num_quarantined / max(verdict.rows, 1)
    yield (
        f"{verdict.rows:,} rows read: **{verdict.num_quarantined:,} quarantined** ({share:.2%}), "
        f"{verdict.split('train').height:,} for training, {verdict.split('eval').height:,} held out for evaluation."
    )
    if not verdict.dropped.is_empty():
        source, line, value = verdict.dropped.select("source", "line", "value").row(0)
        first = code(f"{row_place(source, line)} {value}")
        yield f"{verdict.dropped.height:,} rows repeat an earlier row and are left out (data.duplicates: drop); first {first}."
    if verdict.format == "standard":
        yield "The prompts are strings (TRL's standard format), which the model continues without a chat template."
    else:
        yield "The prompts are chat messages (TRL's conversational format)."


def _sources(sources: Sequence[SourceFile]) -> Iterator[str]:
    yield "## Sources"
    marks = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    rows = []
    for one in sources:
        delimiter = marks.get(one.delimiter, repr(one.delimiter)) if one.delimiter else ""
        text = ", ".join(filter(None, [one.encoding, delimiter])) or "-"
        rows.append([code(one.path), one.split, f"{one.rows:,}", one.unit, text, code(one.sha256[:16])])
    yield table(["source", "split", "rows", "numbered by", "text", "SHA-256"], rows, right=["rows"])
    for one in sources:
        if one.from_messages:
            reply = "without the assistant's last reply"
            yield f"{code(one.path)}: {one.from_messages:,} prompts are the column `messages`, {reply}."


def _tasks(verdict: RowVerdict) -> Iterator[str]:
    rows = [[task.task, f"{task.train_rows:,}", f"{task.eval_rows:,}"] for task in verdict.tasks]
    if rows:
        yield "## Tasks"
        yield table(["task", "for training", "held out"], rows, right=["for training", "held out"])


def _near(verdict: RowVerdict) -> Iterator[str]:
    shown = [[code(pair.train), code(pair.held_out), f"{pair.share:.0%}"] for pair in verdict.near.found[:_NEAR]]
    if not shown:
        return
    yield "## Nearly held out"
    yield table(["training row", "held-out row", "share of its text"], shown, right=["share of its text"])
    if rest := len(verdict.near.found) - len(shown):
        yield f"And {rest:,} more."


def _broken_rules(verdict: RowVerdict, units: Mapping[str, str]) -> Iterator[str]:
    broken = [count for count in verdict.rules if count.rows]
    if not broken:
        yield from ("## Rules", "No row breaks a rule.")
        return
    yield "## Broken rules"
    rows = [[count.rule, f"{count.rows:,}", count.meaning, BY_NAME[count.rule].fix] for count in broken]
    yield table(["rule", "rows", "meaning", "fix"], rows, right=["rows"])
    yield "First rows of each:"
    examples = [
        [code(place_in(row["source"], row["line"], units.get(row["source"], "line"))), row["rule"], code(row["value"])]
        for count in broken
        for row in verdict.quarantine.filter(rule=count.rule).head(_EXAMPLES).iter_rows(named=True)
    ]
    yield table(["row", "rule", "found"], examples)


def _lengths(verdict: RowVerdict) -> Iterator[str]:
    yield "## Prompt lengths in tokens, after the chat template"
    tokens, columns = verdict.prompt_tokens, ["mean", "median", "95 %", "longest", "limit"]
    yield table(columns, [[f"{tokens.mean:.1f}", *map(str, (tokens.p50, tokens.p95, tokens.max, tokens.limit))]], right=columns)
    if verdict.rows > EXACT_ROWS:
        yield "Prompts that are provably within the limit were not counted; the figures use upper bounds for them."


def _most_broken(verdict: RowVerdict, rules: int = 3, rows: int = 3) -> str:
    lines = []
    for count in sorted(verdict.rules, key=lambda count: -count.rows)[:rules]:
        if count.rows:
            lines.append(f"  {count.rows:,} x {count.rule}: {count.meaning}")
            first = verdict.quarantine.filter(rule=count.rule).head(rows)
            shown = first.select("source", "line", "value").iter_rows()
            lines += [f"    {row_place(source, line)}  {value[:160]!r}" for source, line, value in shown]
    return "\n".join(lines)
