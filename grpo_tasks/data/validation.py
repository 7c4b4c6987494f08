"""Judges all rows of a table, writes the tables and the report, and stops when too many rows are bad.

The files are written before `enforce` is called: its error refers to them.
"""

import difflib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.markdown import code, table
from grpo_tasks.content.places import place_in, row_place
from grpo_tasks.content.shards import shards_of
from grpo_tasks.content.tokenizer import prepare
from grpo_tasks.data.chunks import missing_column
from grpo_tasks.data.judge import EXACT_ROWS, RowVerdict, is_held_out, judge
from grpo_tasks.data.normalise import prompt_format
from grpo_tasks.data.records import ALPACA
from grpo_tasks.data.rules import BY_NAME
from grpo_tasks.data.table import QUARANTINE
from schemas.config.data import ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.results.data import DataReport, SourceFile

REPORT = "report.md"
_EXAMPLES = 5
_NEAR = 50
_WORST = 3
_DIGEST_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a report comes from: the step, its time so far, and the sources."""

    key: str
    directory: Path
    seconds: float
    sources: Sequence[SourceFile]


def validate_rows(rows: Path, config: RunConfig, origin: Origin, *, warn: Callable[[str], None] = lambda _: None) -> DataReport:
    """Apply all rules to rows.parquet, and check that answers can equal the ground truths.

    `ConfigError` where the chat template refuses the system prompt. `DataError` where a source lacks the answers that it needs,
    or the prompts are not as configured; after the files are written also where too many rows are bad, too few are left, no row
    has a configured task, or no ground truth can be matched.
    """
    # Imports transformers, which a run that skips validation does not need.
    from grpo_tasks.data.chat_tokens import load_counter
    from grpo_tasks.data.tokenizer_notes import check_system_prompt, tokenizer_notes

    began, model, rollout = time.perf_counter(), config.model, config.rollout
    _check_answer_columns(origin.sources, config)
    raw = pl.read_parquet(rows)
    with limited_templates(model.path):
        counter = load_counter(model, chats=prompt_format(raw, config.data) == "conversational")
        # Before the added tokens: a prompt may well name those, it may not forge the markers of the template.
        markers = counter.special_tokens
        prepare(counter.tokenizer, model, rollout)
        counter.check_stops(rollout)
        check_system_prompt(counter.tokenizer, config.data.system_prompt)
        verdict = judge(raw, config=config, counter=counter, markers=markers)
        # Completions without an answer are compared with no ground truth, so any text will do.
        how = config.completion.equality if config.completion.has_answer else "exact"
        patterns = [config.data.answer_pattern, *(one.answer_pattern for one in (*config.data.train, *config.data.eval))]
        truths = find_unusable_truths(verdict.accepted, how, extracted=any(patterns))
        notes = tokenizer_notes(counter.tokenizer, verdict, model, rollout)
    commas = [str(one) for one in verdict.commas if config.data.number_format == "auto"]
    warnings = [*notes, *commas, *stop_warnings(verdict, rollout), *filter(None, [truths.warning, verdict.near.warning])]
    warnings += split_warnings(verdict, config)
    for warning in warnings:
        warn(warning)
    report = report_data(verdict, replace(origin, seconds=origin.seconds + time.perf_counter() - began), warnings)
    enforce(verdict, config.validation)
    found = [task.task for task in verdict.tasks if task.train_rows]
    for name in config.data.tasks:
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            fix = f"did you mean {near[0]}?" if near else f"the tasks of the data are: {', '.join(found) or 'none'}"
            raise DataError(f"no accepted training row has the task {name}", place=f"data.tasks.{name}", fix=fix)
    truths.enforce()
    return report


def _check_answer_columns(sources: Sequence[SourceFile], config: RunConfig) -> None:
    column, tasks = config.data.answer_column, config.data.tasks
    configured = [*config.data.train, *config.data.eval]
    without = [source for source in configured if source.task in tasks and tasks[source.task].answers == "optional"]
    optional = {shard.path for source in without for shard in shards_of(source)}
    by_row = config.data.task_column is not None and any(task.answers == "optional" for task in tasks.values())
    if column is None or by_row or config.completion.is_free_text:
        return
    for source in sources:
        if not source.with_answer and source.path not in optional:
            way_out = "; for a task without ground truth set data.answer_column: null, or completion.format: none"
            raise missing_column(source.path, source.columns, "answer_column", column, otherwise=way_out)


def report_data(verdict: RowVerdict, origin: Origin, warnings: Sequence[str] = ()) -> DataReport:
    """Write the tables and report.md into the origin's existing folder. Call `enforce` afterwards."""
    verdict.quarantine.write_parquet(origin.directory / QUARANTINE)
    rows_digest = hashlib.sha256()
    for split in ("train", "eval"):
        rows = verdict.split(split)
        rows.write_parquet(origin.directory / f"{split}.parquet")
        for chunk in rows.iter_slices(_DIGEST_ROWS):
            lines = chunk.select(pl.concat_str(pl.lit(f"{split} "), "prompt_id", pl.lit(" "), "extra", pl.lit("\n"))).to_series()
            rows_digest.update("".join(lines).encode())
    digest = rows_digest.hexdigest()
    (origin.directory / REPORT).write_text(_render_report(verdict, origin, warnings, digest=digest), encoding="utf-8")
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


def enforce(verdict: RowVerdict, validation: ValidationConfig) -> None:
    """Raise `DataError` when more rows are quarantined than allowed, or too few are left; names rules and first rows."""
    share = verdict.num_quarantined / max(verdict.rows, 1)
    if share > validation.max_invalid_fraction:
        most_broken = []
        for count in sorted(filter(lambda count: count.rows, verdict.rules), key=lambda count: -count.rows)[:_WORST]:
            most_broken.append(f"  {count.rows:,} x {count.rule}: {count.meaning}")
            first = verdict.quarantine.filter(rule=count.rule).head(_WORST).select("source", "line", "value").iter_rows()
            most_broken += [f"    {row_place(source, line)}  {value[:160]!r}" for source, line, value in first]
        listed = "\n".join(most_broken)
        raise DataError(
            f"{verdict.num_quarantined:,} of {verdict.rows:,} rows are quarantined ({share:.1%}); "
            f"validation.max_invalid_fraction allows {validation.max_invalid_fraction:.1%}\n{listed}",
            place=row_place(*verdict.quarantine.select("source", "line").row(0)),
            fix=f"correct the rows ({QUARANTINE} and {REPORT} list all of them), or raise validation.max_invalid_fraction",
        )
    for split, minimum in (("train", validation.min_train_rows), ("eval", validation.min_eval_rows)):
        rows = verdict.split(split).height
        if rows < minimum:
            left_out, fix = "", "add data, or change data.eval_fraction" if split == "eval" else "add data"
            if copies := verdict.dropped.height:
                repeat = "repeats an earlier one and is" if copies == 1 else "repeat an earlier one and are"
                left_out = f": {copies:,} of {verdict.rows:,} rows {repeat} left out (data.duplicates: drop)"
            if split == "eval" and copies and verdict.accepted.height == 1:
                left_out += ", which leaves a single prompt"
                same = f"data.eval: [{{path: {verdict.accepted['source'][0]}, max_rows: 1}}]"
                fix = (
                    "name other prompts in data.eval, or measure on the prompt that is trained on: "
                    f"{same} and validation.ignore_rules: [leak_exact, leak_normalised]"
                )
            message = f"the {split} split has {rows} accepted rows; min_{split}_rows requires {minimum}{left_out}"
            raise DataError(message, place=f"validation.min_{split}_rows", fix=fix)


def stop_warnings(verdict: RowVerdict, rollout: RolloutConfig) -> list[str]:
    """A warning for each stop string that occurs in prompts: a completion that repeats its prompt would end there."""
    warnings = []
    for stop in rollout.stop:
        found = pl.col("prompt").list.eval(pl.element().struct.field("content").str.contains(stop, literal=True)).list.any()
        if count := verdict.accepted.select(found.sum()).item():
            warnings.append(
                f"{count:,} prompts contain the stop string {stop!r}; a completion that repeats its prompt ends there"
            )
    return warnings


def split_warnings(verdict: RowVerdict, config: RunConfig) -> list[str]:
    """A warning where `data.eval_fraction` of these rows was fewer than `min_eval_rows`, or left fewer than `min_train_rows`."""
    held, least = verdict.split("eval").height, config.validation
    if config.data.eval or (held != least.min_eval_rows and verdict.accepted.height - held != least.min_train_rows):
        return []
    fraction = config.data.eval_fraction
    by_share = sum(is_held_out(one, fraction=fraction, seed=config.seed) for one in verdict.accepted["prompt_id"])
    if by_share == held:
        return []
    field = "min_eval_rows" if by_share < held else "min_train_rows"
    return [
        f"{held:,} of {verdict.accepted.height:,} rows are held out, because of validation.{field}: {getattr(least, field)}; "
        f"data.eval_fraction: {fraction:g} alone holds out {by_share:,}"
    ]


def _render_report(verdict: RowVerdict, origin: Origin, warnings: Sequence[str], *, digest: str) -> str:
    sections = [
        *_summary(verdict),
        f"Digest of the accepted rows: `{digest}`",
        *([f"Rules not applied (validation.ignore_rules): {', '.join(sorted(verdict.ignored))}"] if verdict.ignored else []),
        *(f"**Warning**: {warning}" for warning in warnings),
        *_sources(origin.sources),
        *_tables(verdict),
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
        if one.form == ALPACA:
            yield f"{code(one.path)}: {one.of_form:,} prompts are Alpaca's columns instruction and input."
        elif one.form:
            reply = "without the assistant's last reply"
            yield f"{code(one.path)}: {one.of_form:,} prompts are the column `{one.form}`, {reply}."


def _tables(verdict: RowVerdict) -> Iterator[str]:
    if tasks := [[task.task, f"{task.train_rows:,}", f"{task.eval_rows:,}"] for task in verdict.tasks]:
        yield "## Tasks"
        yield table(["task", "for training", "held out"], tasks, right=["for training", "held out"])
    near = verdict.near.found
    if shown := [[code(pair.train), code(pair.held_out), f"{pair.share:.0%}"] for pair in near[:_NEAR]]:
        yield "## Nearly held out"
        yield table(["training row", "held-out row", "share of its text"], shown, right=["share of its text"])
        if rest := len(near) - len(shown):
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
