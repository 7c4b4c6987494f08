"""`python -m tests.benchmarks.validation`: a million chat rows from file to verdict, in seconds and GiB.

Two messages a row, one in a thousand rows broken; the whole of prepare_data and validate_data but for the orchestrator.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

from grpo_tasks.data.chat_tokens import load_counter
from grpo_tasks.data.chunks import num_workers
from grpo_tasks.data.judge import judge
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.validation import Origin, report_data
from schemas.config.data import DataConfig, DataSource
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig

NUM_ROWS = int(os.environ.get("NUM_ROWS", "1_000_000"))


def main() -> None:
    """Write the file, measure in a process of its own, print."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        _write(path)
        print(f"{path.stat().st_size / 2**20:.0f} MiB")
        subprocess.run([sys.executable, "-m", "tests.benchmarks.validation", folder], check=True)


def _write(path: Path) -> None:
    draw = random.Random(3)
    system = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}
    with path.open("w", encoding="utf-8") as file:
        for number in range(NUM_ROWS):
            a, b, c = (draw.randint(10, 10**6) for _ in range(3))
            question = {"role": "user", "content": f"Row {number}: what is {a} + {b} - {c}? Think step by step."}
            row = {"prompt": [system, question], "answer": str(a + b - c)}
            if number % 1000 == 999:
                row["answer"] = ""
            file.write(json.dumps(row) + "\n")


def _measure(folder: Path) -> None:
    data = DataConfig(train=[DataSource(path=str(folder / "rows.jsonl"))])
    config = RunConfig(data=data, stages=[StageConfig(name="s", rewards=["format"])], seed=1)
    began = time.perf_counter()
    sources = load_sources(data, directory=folder)
    read = time.perf_counter()
    counter = load_counter(ModelConfig())
    rows = pl.read_parquet(folder / ROWS)
    verdict = judge(rows, config=config, counter=counter, markers=counter.special_tokens)
    judged = time.perf_counter()
    report = report_data(verdict, Origin("bench", folder, 0.0, sources), [])
    ended = time.perf_counter()
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    peak = (own + num_workers() * child) / 2**20
    print(f"read {read - began:.1f} s, judge {judged - read:.1f} s, report {ended - judged:.1f} s")
    print(f"together {ended - began:.1f} s, at most {peak:.1f} GiB with all processes")
    print(f"{report.rows} rows, {report.quarantined} quarantined")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _measure(Path(sys.argv[1]))
    else:
        main()
