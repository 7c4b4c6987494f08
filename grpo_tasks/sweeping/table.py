"""The table of a sweep: for people (Markdown), for spreadsheets (CSV), and the means of each combination over its seeds."""

from collections.abc import Sequence
from statistics import mean

import polars as pl

from grpo_tasks.content.markdown import code, table
from schemas.metrics import ACCURACY, FORMAT_RATE, REWARD, figure_text
from schemas.results.evaluation import Interval
from schemas.results.sweep import SweepLine, SweepResult

FIGURES = (ACCURACY, FORMAT_RATE, REWARD)
"""Held-out figures of the merged model that the table shows, with their intervals."""


def cells(line: SweepLine) -> dict[str, str]:
    """One run as texts by column: what differs, what came out, how long it took, how it ended."""
    row = {"run": str(line.number), **line.settings, "seed": str(line.seed)}
    end = line.end
    for name in FIGURES:
        found = end.figures.get(name) if end is not None else None
        row[name.replace("_", " ")] = interval_text(name, found) if found is not None else ""
    row["time"] = f"{end.seconds:.0f} s" if end is not None else ""
    row["ended"] = "" if end is None else end.state if end.state == "finished" else f"{end.state}: {end.reason}"
    return row


def interval_text(name: str, figure: Interval) -> str:
    """A figure with its interval: `71.9 % [66.0, 77.5]`."""
    low, high = (figure_text(name, bound).removesuffix(" %") for bound in (figure.low, figure.high))
    return f"{figure_text(name, figure.value)} [{low}, {high}]"


def markdown(result: SweepResult) -> str:
    """All runs, and the means of each combination where there are several seeds."""
    rows = [cells(line) for line in result.lines]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    varied, best = list(result.lines[0].settings), result.best
    for row in rows:
        row |= {name: code(row[name]) for name in varied}
        if best is not None and row["run"] == str(best.number):
            row["run"] = f"**{row['run']}**"
    parts = [table(columns, [[row[name] for name in columns] for row in rows], right=["run", "time"])]
    means = by_combination(result.lines)
    if len(means) < len(result.lines):
        parts += ["Mean over the seeds that finished:", means_table(means, varied)]
    return "\n\n".join(parts) + "\n"


def by_combination(lines: Sequence[SweepLine]) -> dict[tuple[str, ...], list[SweepLine]]:
    """The runs of each combination of values, over the seeds."""
    groups: dict[tuple[str, ...], list[SweepLine]] = {}
    for line in lines:
        groups.setdefault(tuple(line.settings.values()), []).append(line)
    return groups


def means_table(groups: dict[tuple[str, ...], list[SweepLine]], paths: Sequence[str]) -> str:
    """A line for each combination: how many of its seeds finished, and the means of their figures."""
    names = [name for name in FIGURES if any(values_of(lines, name) for lines in groups.values())]
    rows = []
    for values, lines in groups.items():
        figures = [values_of(lines, name) for name in names]
        finished = sum(line.end is not None and line.end.state == "finished" for line in lines)
        shown = [figure_text(name, mean(found)) if found else "" for name, found in zip(names, figures, strict=True)]
        rows.append([*map(code, values), f"{finished} of {len(lines)}", *shown])
    return table([*paths, "finished", *(name.replace("_", " ") for name in names)], rows)


def values_of(lines: Sequence[SweepLine], name: str) -> list[float]:
    """A figure of the runs that finished."""
    return [line.end.figures[name].value for line in lines if line.end is not None and name in line.end.figures]


def csv(result: SweepResult) -> str:
    """All runs with plain numbers: a column for each setting, figure, bound, time and ending."""
    rows = []
    for line in result.lines:
        end = line.end
        row: dict[str, object] = {"run": line.number, **line.settings, "seed": line.seed}
        for name in FIGURES:
            found = end.figures.get(name) if end is not None else None
            for part in ("value", "low", "high"):
                row[name if part == "value" else f"{name} {part}"] = getattr(found, part) if found is not None else None
        row["seconds"] = round(end.seconds, 1) if end is not None else None
        row |= {"ended": end.state if end is not None else "", "reason": end.reason if end is not None else ""}
        row["mlflow run"] = end.run_id if end is not None else ""
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None).write_csv()
