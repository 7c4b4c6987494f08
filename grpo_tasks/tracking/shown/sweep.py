"""A sweep in MLflow: the parent of its runs, with a description, the table of all runs, and a link that compares them.

    sweep demo 2026-11-23 05:53      best: learning_rate 1e-5 ...     accuracy 0.976
      learning_rate 1e-5, seed 42    (a run of the pipeline, with its stages as children)
      learning_rate 5e-6, seed 42

MLflow's page that compares runs draws parallel coordinates. The description links to it with the runs that have figures.
"""

import json
import time
from datetime import datetime
from urllib.parse import quote

from grpo_tasks.content.markdown import code
from grpo_tasks.sweeping.grid import Grid
from grpo_tasks.sweeping.table import csv, markdown
from grpo_tasks.tracking.handle import EndStatus, RunHandle
from grpo_tasks.tracking.runs import KEY_TAG, find_or_create
from grpo_tasks.tracking.shown.headline import NOTE, NOTE_CHARS, merged_figures, origin_tags, run_title
from grpo_tasks.tracking.store import open_store
from schemas.results.sweep import SweepLine, SweepResult

TABLE = "sweep/runs.csv"
REPORT = "sweep/runs.md"
ENDED = "grpo.ended"
"""Tag of a run of a sweep: `finished`, or why it ended before."""


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
        self._figures = dict(run.data.metrics)
        self._figures_ms = self.handle.started_ms
        params = {f"over.{axis.path}": ", ".join(axis.values) for axis in grid.axes}
        self.handle.once("grid", lambda: self.handle.params(params | {"seeds": str(grid.seeds), "source": grid.source}))

    def show(self, result: SweepResult) -> None:
        """Replace the table, the description and the figures of the best run."""
        self.handle.text(csv(result), TABLE)
        self.handle.text(markdown(result), REPORT)
        self.handle.tags({NOTE: self._note(result)} | self._flow)
        best = result.best
        figures = merged_figures(best.end.figures) if best is not None and best.end is not None else {}
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
        self.handle.store.ask(lambda client: client.set_tag(end.run_id, ENDED, text[:5_000]))

    def end(self, status: EndStatus) -> None:
        """Set the final status."""
        self.handle.end(status)

    def _note(self, result: SweepResult) -> str:
        best = result.best
        parts = [f"**{result.headline()}**"]
        if best is not None and best.end is not None:
            parts.append(f"Best run: [{best.label}](#/experiments/{self.handle.experiment_id}/runs/{best.end.run_id})")
        link = compare_link([line.end.run_id for line in result.lines if line.end and line.end.run_id], self.handle.experiment_id)
        links = [f"[Compare the runs]({link}): parallel coordinates, scatter plots, and the settings that differ"] if link else []
        if result.publish:
            parts.append(f"No run of a sweep is promoted. To offer the best one: {code(result.publish)}")
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
