"""`python -m tests.benchmarks.gpu [--budget SECONDS] [--out FILE]`: ours beside TRL on a GPU, the shapes of Qwen2.5.

The cheap and telling comparisons come first. Each result is appended to FILE as one line of JSON as soon as it is known, so what
was measured survives the end of the lease. Running out of memory is a result. Where the budget ends, the rest is left out.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.shapes import SHAPES, random_model
from tests.benchmarks.sides import Work

SHORT = Work("", prompt_tokens=512, completion_tokens=256, prompts=4, group=8, updates=2, dtype="bfloat16", beta=0.0, threads=8)
LEAST_S = 20.0
"""Seconds that a side needs at least; with less left it is not started."""


def works(device: str) -> Iterator[tuple[str, Work]]:
    """Name and work, in the order of what they tell for their time."""
    for length, group in ((256, 8), (1024, 8), (1024, 16)):
        work = replace(SHORT, completion_tokens=length, group=group, batch=group, device=device)
        yield f"4 x {group} completions of {length}", work
    whole = replace(work, batch=4 * group)
    yield f"4 x {group} completions of {length} in one pass", whole
    yield "the same with checkpointing", replace(whole, gradient_checkpointing=True)


def side(name: str, work: Work, seconds: float) -> dict[str, Any]:
    """What one side measured, or why it did not."""
    command = [sys.executable, "-m", "tests.benchmarks.sides", name, json.dumps(asdict(work))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    if done.returncode:
        memory = "OutOfMemoryError" in done.stderr
        return {"error": "out of memory" if memory else done.stderr.strip()[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def machine() -> dict[str, Any]:
    """Where and with what it ran."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = {}
    for name in ("torch", "transformers", "peft", "trl"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"machine": card, "date": datetime.now(UTC).isoformat(timespec="seconds")} | versions


def main() -> None:
    """Measure until the budget ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="seconds for all of it")
    parser.add_argument(
        "--out", type=Path, default=Path(".bench/results-gpu.jsonl"), metavar="FILE", help="where lines are appended"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the benchmark itself")
    given = parser.parse_args()
    ends = time.monotonic() + given.budget
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def write(line: dict[str, Any]) -> None:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    write(machine())
    for shape in SHAPES:
        if ends - time.monotonic() < LEAST_S:
            return write({"error": f"the budget has ended before {shape}"})
        with random_model(shape) as folder:
            for name, work in works(given.device):
                for one in ("ours", "theirs"):
                    left = ends - time.monotonic()
                    if left < LEAST_S:
                        return write({"error": f"the budget has ended before {shape}, {name}, {one}"})
                    write({"work": f"{shape}, {name}", "side": one} | side(one, replace(work, model=folder), left))
    return None


if __name__ == "__main__":
    main()
