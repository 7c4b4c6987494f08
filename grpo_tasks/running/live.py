"""The live page of a stage: curves and figures, rewritten while the journal grows.

    journal --StageProgress--> LivePage --> STAGE_DIR/live.html        always: a page that loads itself again
                                        --> GRPO_LIVE/KEY.html         `grpo up`: the same page, served below the Prefect UI
                                        --> progress, `live-STAGE`     in a flow: artifacts of the Prefect UI, updated in place

The page is one file without scripts. What this module does not do: read the journal, or serve a page (web/live_pages.py).
"""

import base64
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from uuid import UUID

from grpo_tasks.content.live_folder import live_address, live_folder, remove_old_pages
from grpo_tasks.content.markdown import table
from grpo_tasks.running.orchestrator import artifact_key, show_live, show_progress
from schemas.config.stage import StageConfig
from schemas.metrics import EPOCH, PROGRESS
from schemas.plots import PLOTS

EVERY_S = 2.0
"""Shortest time between two versions of the page."""
ARTIFACTS_EVERY_S = 10.0
"""Shortest time between two versions of the artifacts: each is some requests to the Prefect server."""
RELOAD_S = 5
WIDTH, HEIGHT, MARGIN = 340, 150, 24
MOST_POINTS = 300
"""Points of a curve; a longer journal is thinned out."""
_SHOWN = (*PROGRESS, EPOCH)
_RECENT = 20
"""Updates whose mean duration gives the time left."""


class LivePage:
    """Collects the updates of a stage and shows them."""

    def __init__(self, stage: StageConfig, path: Path, name: str) -> None:
        """`path`: where the page is written; `name`: what it is called among all live pages."""
        self._stage, self._path, self._name = stage, path, name
        self._lines: list[dict[str, Any]] = []
        self._written = self._shown = 0.0
        self._artifacts: dict[str, UUID] = {}

    def add(self, lines: Sequence[dict[str, Any]], *, final: bool = False) -> None:
        """Add updates, and write the page and the artifacts if it is time to; `final`: the stage has ended."""
        # Only what is shown: a long stage has tens of thousands of updates with a hundred figures each.
        self._lines += [line | {"metrics": {name: line["metrics"].get(name) for name in _SHOWN}} for line in lines]
        now = time.monotonic()
        if not self._lines or (not lines and not final):
            return
        if final or now - self._written >= EVERY_S:
            self._written = now
            self._write(final)
        if final or now - self._shown >= ARTIFACTS_EVERY_S:
            self._shown = now
            self._show(final)

    def percent(self) -> float:
        """How much of the stage is done, from 0 to 100."""
        last = self._lines[-1]
        if self._stage.max_steps:
            done = last["step"] / self._stage.max_steps
        else:
            done = (last["metrics"][EPOCH] or 0.0) / self._stage.num_train_epochs
        return round(min(100.0, 100 * done), 1)

    def left(self) -> str:
        """The time that is left, judged by the last updates; empty when it is not known."""
        recent = self._lines[-_RECENT:]
        percent = self.percent()
        if len(recent) < 2 or percent in (0.0, 100.0):
            return ""
        pace_s = (recent[-1]["timestamp_ms"] - recent[0]["timestamp_ms"]) / 1000 / (recent[-1]["step"] - recent[0]["step"])
        updates = recent[-1]["step"] * (100 - percent) / percent
        return f"{duration(pace_s * updates)} left"

    def summary(self) -> str:
        """Progress in one line: `update 40/120, reward 1.234, KL 0.010, 3 min left`."""
        last = self._lines[-1]
        total = f"/{self._stage.max_steps}" if self._stage.max_steps else ""
        figures = [f"{short} {value:.3f}" for short, value in self._latest().items()]
        return ", ".join(filter(None, [f"update {last['step']}{total}", *figures, self.left()]))

    def _write(self, final: bool) -> None:
        page = self.html(final)
        served = live_folder()
        if served and not (served / f"{self._name}.html").exists():
            remove_old_pages(served)
        for path in (self._path, *([served / f"{self._name}.html"] if served else [])):
            # A full disk is for the trainer to report; the page is only for people.
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(page, encoding="utf-8")
                part.replace(path)

    def _show(self, final: bool) -> None:
        key = artifact_key(self._stage.name)
        show_progress(f"progress-{key}", self.percent(), f"{self._stage.name}: {self.summary()}", self._artifacts)
        show_live(f"live-{key}", self.markdown(final), f"{self._stage.name}: {self.summary()}", self._artifacts)

    def html(self, final: bool) -> str:
        """The page."""
        reload = "" if final else f'<meta http-equiv="refresh" content="{RELOAD_S}">'
        title = escape(f"Stage {self._stage.name}: {self.percent():g} %")
        state = "The stage has ended." if final else f"The page loads itself again every {RELOAD_S} s."
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8">{reload}<title>{title}</title>'
            "<style>body{font:15px system-ui;margin:2em;max-width:60em}svg{margin:.5em}</style>"
            f'<h1>{title}</h1><p>{escape(self.summary())}</p><progress max="100" value="{self.percent()}"></progress>'
            f"<div>{''.join(self._charts())}</div><p>{state}</p></html>\n"
        )

    def markdown(self, final: bool) -> str:
        """The page for the Prefect UI, whose Markdown shows pictures, but no SVG of its own."""
        address = live_address(self._name)
        link = f"[Live page]({address}), which loads itself again" if address and not final else ""
        figures = [[short, f"{value:.4g}"] for short, value in self._latest().items()]
        pictures = [base64.b64encode(chart.encode()).decode() for chart in self._charts()]
        return "\n\n".join(
            [
                f"# Stage {self._stage.name}",
                self.summary(),
                *([link] if link else []),
                table(["metric", "last update"], figures, right=["last update"]),
                *(f"![curve](data:image/svg+xml;base64,{picture})" for picture in pictures),
            ]
        )

    def _latest(self) -> dict[str, float]:
        """By short name, the latest value of each metric: not every update measures the KL."""
        points = {short: self._points(name)[-1:] for name, short in PROGRESS.items()}
        return {short: last[0][1] for short, last in points.items() if last}

    def _charts(self) -> list[str]:
        names = [plot.name for plot in PLOTS if plot.name in PROGRESS]
        names = list(dict.fromkeys([*names, *PROGRESS]))
        return [draw_curve(PROGRESS[name], points) for name in names if len(points := self._points(name)) > 1]

    def _points(self, name: str) -> list[tuple[int, float]]:
        points = [(line["step"], float(line["metrics"][name])) for line in self._lines if _number(line, name)]
        every = len(points) // MOST_POINTS + 1
        return [*points[:-1:every], *points[-1:]]


def draw_curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """An SVG of one curve with the range of its values and updates; it needs two points."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(step: int, value: float) -> str:
        x = MARGIN + wide * (step - steps[0]) / max(1, steps[-1] - steps[0])
        y = HEIGHT - MARGIN - tall * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    texts = [
        (MARGIN, 16, f"{escape(title)} {values[-1]:.3g}", "600 13px"),
        (MARGIN, HEIGHT - 6, f"{low:.3g} to {high:.3g}, updates {steps[0]} to {steps[-1]}", "11px"),
    ]
    words = "".join(f'<text x="{x}" y="{y}" style="font:{font} system-ui">{text}</text>' for x, y, text, font in texts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#ddd"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>{words}</svg>'
    )


def duration(seconds: float) -> str:
    """45 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _number(line: Mapping[str, Any], name: str) -> bool:
    return line["metrics"].get(name) is not None


def page_name(stage_key: str) -> str:
    """Name of a stage's page: the beginning of its content key, which nobody guesses and no two stages share."""
    assert os.sep not in stage_key
    return stage_key[:32]
