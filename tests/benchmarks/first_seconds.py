"""`python -m tests.benchmarks.first_seconds [RUNS]`: what a user waits for, from pressing Enter on.

Each command runs RUNS times (3), every time in an empty folder without any server, in turns with the others. Wall time depends on
what else the machine does, so the load average stands beside it. Computing time (user and system, of the command and of every
process that it has started) hardly does.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from grpo_tasks.processes.lifetime import adopt_orphans

BIN = Path(sys.executable).parent
ROWS = 300
CONFIG = """
name: mine
data:
  train: [{path: rows.jsonl}]
  system_prompt: Reply with <reasoning>...</reasoning><answer>...</answer>.
rollout: {max_completion_length: 64}
stages: [{name: format, rewards: [incremental_format, format, correctness], max_steps: 1}]
"""


@dataclass
class Command:
    """A command, and what was measured."""

    arguments: list[str]
    what: str
    exit_code: int = 0
    ends_at_first_line: bool = False
    """Interrupted when it has printed something: only its first line is measured."""
    first_line_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def commands() -> list[Command]:
    """The commands of somebody's first minutes."""
    return [
        Command(["--help"], "help"),
        Command(["run", "mine.yaml", "--set", "data.train.0.path=rowz.jsonl"], "a missing file is refused", exit_code=2),
        Command(["run", "mine.yaml", "--set", "data.question_column=Question"], "a missing column is refused", exit_code=1),
        Command(["validate", "mine.yaml"], f"{ROWS} rows are validated"),
        Command(["rewards", "mine.yaml"], f"{ROWS} rows are validated, the rewards are probed"),
        Command(["run", "demo"], "as `make demo`: begins to report", ends_at_first_line=True),
    ]


def measure(command: Command, folder: Path) -> None:
    """Run the command once in a folder of its own."""
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "mine.yaml").write_text(CONFIG, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    began = time.perf_counter()
    process = subprocess.Popen(
        [BIN / "grpo", *command.arguments],
        cwd=folder,
        env=kept | {"PREFECT_HOME": str(folder / "prefect")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    command.first_line_s.append(time.perf_counter() - began)
    if command.ends_at_first_line:
        os.killpg(process.pid, signal.SIGKILL)
    output = process.stdout.read().decode(errors="replace")
    code, cpu_s = waited(process.pid)
    if command.ends_at_first_line:
        return
    if code != command.exit_code:
        raise SystemExit(f"grpo {' '.join(command.arguments)} ended with {code}\n{output[-3000:]}")
    command.wall_s.append(time.perf_counter() - began)
    command.cpu_s.append(cpu_s)


def waited(pid: int) -> tuple[int, float]:
    """Exit code of the command, and the computing time of all its processes, which became ours when their parents had ended."""
    code, cpu_s = 0, 0.0
    with suppress(ChildProcessError):
        while True:
            ended, status, usage = os.wait4(-1, 0)
            cpu_s += usage.ru_utime + usage.ru_stime
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
    return code, cpu_s


def main(runs: int) -> None:
    """Measure all commands in turns, and print a table."""
    adopt_orphans()
    measured, loads = commands(), [os.getloadavg()[0]]
    for _ in range(runs):
        for command in measured:
            with tempfile.TemporaryDirectory(prefix="first-") as folder:
                measure(command, Path(folder))
            loads.append(os.getloadavg()[0])
    print(f"{runs} runs each, medians; load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores\n")
    print("| command | what | first line, s | end, s | computing time, s |\n|---|---|---:|---:|---:|")
    for command in measured:
        figures = [f"{statistics.median(values):.1f}" if values else "-" for values in (command.wall_s, command.cpu_s)]
        cells = [
            f"`grpo {' '.join(command.arguments)}`",
            command.what,
            f"{statistics.median(command.first_line_s):.1f}",
            *figures,
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
