"""A sweep in MLflow: the parent of its runs, with a description, the table of all runs, and a link that compares them.

The table is there for people (Markdown) and for spreadsheets (CSV).
"""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from statistics import mean
from urllib.parse import quote

import polars as pl

from grpo_tasks.content.markdown import code, table
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.runs import KEY_TAG, find_or_create
from grpo_tasks.tracking.store import open_store
from grpo_tasks.tracking.texts import AT_A_GLANCE, NOTE, NOTE_CHARS, merged_figures, origin_tags, run_title
from schemas.config.grid import Grid
from schemas.metrics import figure_text
from schemas.results.sweep import SweepLine, SweepResult

_TAG_CHARS = 5_000
TABLE = "sweep/runs.csv"
REPORT = "sweep/runs.md"
ENDED = "grpo.ended"
"""Tag of a run of a sweep: `finished`, or why it ended before."""
VERDICT = "grpo.sweep_verdict"
"""Tag of the sweep: its headline. Tag of its runs: `best`, `tie`, or nothing."""


class SweepRun:
    """The MLflow run of a sweep. Opening it finds the one with this key, or creates it."""

    def __init__(self, grid: Grid, *, key: str, flow: dict[str, str]) -> None:
        config = grid.base
        title = run_title(f"sweep {config.name}", None, datetime.now())
        tags = {"grpo.name": config.name, "grpo.sweep": "yes"} | origin_tags(config, None)
        store = open_store(config.tracking)
        run, self.is_new = find_or_create(store, config, title, by={KEY_TAG: key}, tags=tags)
        self.handle = RunHandle(store, run)
        self._flow = flow
        self._tags: dict[tuple[str, str], str] = {}
        self._figures = dict(run.data.metrics)
        self._figures_ms = self.handle.started_ms
        params = {f"over.{axis.path}": ", ".join(axis.values) for axis in grid.axes}
        self.handle.once("grid", lambda: self.handle.params(params | {"seeds": str(grid.seeds), "source": grid.source}))

    def show(self, result: SweepResult) -> None:
        """Replace the table, the description, the verdicts and the figures of the highest run."""
        self.handle.text(_csv(result), TABLE)
        self.handle.text(markdown(result), REPORT)
        self.handle.tags({NOTE: self._note(result), VERDICT: result.headline()[:_TAG_CHARS]} | self._flow)
        verdicts = result.verdicts()
        for line in result.lines:
            if line.end is not None and line.end.run_id:
                self._tag(line.end.run_id, VERDICT, verdicts.get(line.number, ""))
        highest = result.highest
        figures = merged_figures(highest.end.figures) if highest is not None and highest.end is not None else {}
        changed = {name: value for name, value in figures.items() if self._figures.get(name) != value}
        if changed:
            # MLflow shows the value with the latest time, and the largest of several with the same time.
            self._figures_ms = max(round(time.time() * 1000), self._figures_ms + 1)
            self.handle.metrics(changed, timestamp_ms=self._figures_ms)
            self._figures |= changed

    def mark(self, line: SweepLine) -> None:
        """Let a run of the sweep say how it ended, also where it was pruned."""
        end = line.end
        if end is None or not end.run_id:
            return
        text = end.state if end.state == "finished" else f"{end.state}: {end.reason}"
        self._tag(end.run_id, ENDED, text[:_TAG_CHARS])

    def _tag(self, run_id: str, name: str, text: str) -> None:
        # Each only when it changes: a sweep of hundreds of runs is shown again after each of them.
        if self._tags.get((run_id, name)) != text:
            self.handle.store.call(lambda client: client.set_tag(run_id, name, text))
            self._tags[run_id, name] = text

    def _note(self, result: SweepResult) -> str:
        highest = result.highest
        parts = [f"**{result.headline()}**"]
        if highest is not None and highest.end is not None:
            what = "Highest of the tie" if result.ties else "Best run"
            parts.append(f"{what}: [{highest.label}](#/experiments/{self.handle.experiment_id}/runs/{highest.end.run_id})")
        link = compare_link([line.end.run_id for line in result.lines if line.end and line.end.run_id], self.handle.experiment_id)
        links = [f"[Compare the runs]({link}): parallel coordinates, scatter plots, and the settings that differ"] if link else []
        if result.publish:
            parts.append(f"No run of a sweep is promoted. To offer the highest one: {code(result.publish)}")
        whole = "\n\n".join([*parts, *links, markdown(result)])
        if len(whole) <= NOTE_CHARS:
            return whole
        # The link names every run, so that of a large sweep does not fit either.
        parts.append(f"The table of all runs is the artifact `{REPORT}`.")
        shorter = "\n\n".join([*parts, *links])
        return shorter if len(shorter) <= NOTE_CHARS else "\n\n".join(parts)[:NOTE_CHARS]


def compare_link(run_ids: list[str], experiment_id: str) -> str:
    """The page of MLflow that compares these runs, relative to its address; empty for fewer than two."""
    if len(run_ids) < 2:
        return ""
    return f"#/compare-runs?runs={quote(json.dumps(run_ids))}&experiments={quote(json.dumps([experiment_id]))}"


def cells(result: SweepResult, *, gap: str = " ") -> list[dict[str, str]]:
    """The runs as texts by column: what differs, whether it is the best, what came out (intervals behind `gap`), how it ended."""
    verdicts, names = result.verdicts(), _shown(result)
    return [_cells(line, verdicts.get(line.number, ""), names, gap) for line in result.lines]


def _shown(result: SweepResult) -> list[str]:
    """The metrics of the table: those that decide come first."""
    decide = [line.end.metric for line in result.lines if line.end is not None and line.end.metric]
    return list(dict.fromkeys([*decide, *AT_A_GLANCE]))


def _cells(line: SweepLine, verdict: str, names: Sequence[str], gap: str) -> dict[str, str]:
    row, end = {"run": str(line.number), **line.settings, "seed": str(line.seed), "verdict": verdict}, line.end
    for name in names:
        found = end.figures.get(name) if end is not None else None
        row[name.replace("_", " ")] = found.text(name, gap=gap) if found is not None else ""
    row["time"] = f"{end.seconds:.0f} s" if end is not None else ""
    row["ended"] = "" if end is None else end.state if end.state == "finished" else f"{end.state}: {end.reason}"
    return row


def markdown(result: SweepResult) -> str:
    """All runs, and the means of each combination where there are several seeds."""
    rows = cells(result)
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    varied = list(result.lines[0].settings)
    for row in rows:
        row |= {name: code(row[name]) for name in varied}
        if row["verdict"]:
            row["verdict"] = f"**{row['verdict']}**"
    parts = [table(columns, [[row[name] for name in columns] for row in rows], right=["run", "time"])]
    groups: dict[tuple[str, ...], list[SweepLine]] = {}
    for line in result.lines:
        groups.setdefault(tuple(line.settings.values()), []).append(line)
    if len(groups) < len(result.lines):
        parts += ["Mean over the seeds that finished:", _means(groups, varied, _shown(result))]
    return "\n\n".join(parts) + "\n"


def _means(groups: dict[tuple[str, ...], list[SweepLine]], paths: Sequence[str], shown: Sequence[str]) -> str:
    """A line for each combination: how many of its seeds finished, and the means of their figures."""

    def values_of(lines: Sequence[SweepLine], name: str) -> list[float]:
        return [line.end.figures[name].value for line in lines if line.end is not None and name in line.end.figures]

    names = [name for name in shown if any(values_of(lines, name) for lines in groups.values())]
    rows = []
    for values, lines in groups.items():
        figures = [values_of(lines, name) for name in names]
        finished = sum(line.end is not None and line.end.state == "finished" for line in lines)
        means = [figure_text(name, mean(found)) if found else "" for name, found in zip(names, figures, strict=True)]
        rows.append([*map(code, values), f"{finished} of {len(lines)}", *means])
    return table([*paths, "finished", *(name.replace("_", " ") for name in names)], rows)


def _csv(result: SweepResult) -> str:
    """All runs with plain numbers: a column for each setting, figure, bound, time and ending."""
    rows, verdicts, names = [], result.verdicts(), _shown(result)
    for line in result.lines:
        end = line.end
        row: dict[str, object] = {"run": line.number, **line.settings, "seed": line.seed}
        for name in names:
            found = end.figures.get(name) if end is not None else None
            for part in ("value", "low", "high"):
                row[name if part == "value" else f"{name} {part}"] = getattr(found, part) if found is not None else None
        row["seconds"] = round(end.seconds, 1) if end is not None else None
        row |= {
            "verdict": verdicts.get(line.number, ""),
            "ended": end.state if end is not None else "",
            "reason": end.reason if end is not None else "",
        }
        row["mlflow run"] = end.run_id if end is not None else ""
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None).write_csv()
