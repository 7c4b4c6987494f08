"""Two sides on the same work: each in a process of its own, in turns; ratios on the screen and in .bench/."""

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.sides import Work

OUT = Path(".bench")
TURNS = 2
"""Each side of a step is run so many times, in turns; the better one counts, for noise only ever adds."""


@dataclass
class Line:
    """One comparison."""

    name: str
    what: str
    unit: str
    ours: float
    theirs: float
    higher_is_better: bool = False
    promised: float | None = None

    @property
    def ratio(self) -> float:
        """How many times better ours is."""
        return self.ours / self.theirs if self.higher_is_better else self.theirs / self.ours


def child(module: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark process prints last."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def step(side: str, work: Work) -> dict[str, float]:
    """Timing of one side's update."""
    return child("sides", side, json.dumps(asdict(work)))


def best(sides: list[tuple[str, Work]]) -> list[dict[str, float]]:
    """Timings of several sides, run in turns; for each the turn with the shortest step."""
    turns = [[step(side, work) for side, work in sides] for _ in range(TURNS)]
    return [min((turn[index] for turn in turns), key=lambda timing: timing["step_s"]) for index in range(len(sides))]


def report(name: str, lines: list[Line], seconds: float) -> None:
    """Print the comparisons, and write them to `.bench/<name>.json`."""
    table = Table("what", "ours", "theirs", "ratio", "promised", title=f"ours and theirs, {seconds:.0f} s")
    for line in lines:
        promised = "" if line.promised is None else f"{line.promised:g}"
        table.add_row(line.what, f"{line.ours:.4g} {line.unit}", f"{line.theirs:.4g} {line.unit}", f"{line.ratio:.2f}", promised)
    Console(width=130).print(table)
    OUT.mkdir(exist_ok=True)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft")}
    content = {line.name: {"ours": line.ours, "theirs": line.theirs, "ratio": line.ratio, "unit": line.unit} for line in lines}
    content["machine"] = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()} | versions
    content["date"] = datetime.now(UTC).date().isoformat()
    (OUT / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
