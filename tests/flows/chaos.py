"""kill -9 at random points of the pipeline, start it again, compare with a run that nobody touched.

    python -m tests.flows.chaos --kills 200 --seed 1      (make chaos, with --engine vllm besides)

Victims are the flow's process, everything it has started (trainer, sampler, reward worker, fork server, vLLM) and the MLflow
server. A pipeline that got to its end is compared, and the next one begins in a folder of its own, until all kills are done.
"""

import argparse
import json
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import psutil
import yaml
from mlflow import MlflowClient

from grpo_tasks.stage.stage_dir import StageDir
from schemas.results import StageResult
from tests.flows.place import SMALL, Place, end_group, prefect_server, started_mlflow
from tests.ports import free_ports

STAGE = SMALL["stages"][0]
CONFIG = SMALL | {
    "stages": [STAGE | {"max_steps": 12, "beta": 0.01}, STAGE | {"name": "correctness", "rewards": ["format", "correctness"]}]
}
TIMES = {"step_time", "rollout_time", "reward_time", "tokens_per_s", "merge/seconds"}
"""Metrics that no two runs share."""
GRACE_S = 15.0
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"


@dataclass
class Outcome:
    """What was done and seen."""

    kills: int = 0
    victims: Counter = field(default_factory=Counter)
    pipelines: int = 0
    left_over: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.kills + other.kills,
            self.victims + other.victims,
            self.pipelines + other.pipelines,
            self.left_over + other.left_over,
            self.differences + other.differences,
        )


class Shop(Place):
    """A working directory with an MLflow server of its own, which can be killed too."""

    def __init__(self, root: Path, api: str, config: dict) -> None:
        super().__init__(root, api)
        root.mkdir()
        self.config = config
        self.write("small.yaml", yaml.safe_dump(config))
        [self.port] = free_ports(1)
        self.server = started_mlflow(root, self.port)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.port}"}

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"http://127.0.0.1:{self.port}")

    def kill_server(self) -> None:
        end_group(self.server, signal.SIGKILL)
        self.server = started_mlflow(self.root, self.port)


def undisturbed(root: Path, api: str, config: dict = CONFIG) -> tuple[dict, float]:
    """The contents of a run that nobody touches, and how long it took in seconds."""
    shop = Shop(root / "whole", api, config)
    try:
        began = time.monotonic()
        shop.grpo("run", "small.yaml")
        return contents(shop), time.monotonic() - began
    finally:
        end_group(shop.server)


def rampage(root: Path, api: str, *, kills: int, seed: int, wanted: dict, seconds: float, config: dict = CONFIG) -> Outcome:
    """Kill and start again until so many kills are done and the last pipeline is at its end."""
    draw, outcome = random.Random(seed), Outcome()
    while outcome.kills < kills:
        shop = Shop(root / f"chaos-{outcome.pipelines}", api, config)
        try:
            _until_done(shop, draw, kills, seconds, outcome)
            differences = _differences(contents(shop), wanted, f"pipeline {outcome.pipelines}")
            outcome.differences += differences
        finally:
            end_group(shop.server)
        outcome.pipelines += 1
        told = "; ".join(differences) or "no difference"
        print(f"pipeline {outcome.pipelines} at its end after {outcome.kills} kills in all: {told}", flush=True)
    return outcome


def _until_done(shop: Shop, draw: random.Random, kills: int, seconds: float, outcome: Outcome) -> None:
    """The same command again and again, until it comes to its end."""
    first = outcome.kills
    while True:
        process, before = shop.start("run", "small.yaml"), outcome.kills
        # A little more time after every kill: a step that takes longer than the time between two would never be done.
        while outcome.kills < kills and _survives(process, draw.uniform(0.03, 0.15) * seconds * 1.1 ** (outcome.kills - first)):
            _kill(shop, process, draw, outcome)
        output, _ = process.communicate(timeout=900)
        if process.returncode == 0:
            return
        # What fails although nobody touched it would fail for ever.
        assert outcome.kills > before, f"failed by itself:\n{output[-3000:]}"


def _survives(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _kill(shop: Shop, process: subprocess.Popen, draw: random.Random, outcome: Outcome) -> None:
    """The flow, something it has started, or the MLflow server."""
    flow = psutil.Process(process.pid)
    family = flow.children(recursive=True)
    kind = draw.choice(["flow", "child", "child", "MLflow server"])
    victim = draw.choice(family) if kind == "child" and family else flow
    outcome.kills += 1
    if kind == "MLflow server":
        shop.kill_server()
    else:
        kind = "flow" if victim == flow else _kind(victim)
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    outcome.victims[kind] += 1
    if victim == flow and kind == "flow":
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=GRACE_S)
        outcome.left_over += [f"{_kind(one)} after the flow was killed" for one in alive]


def _kind(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    named = (word for word in words if word.startswith(("grpo_tasks.", "vllm.", "VLLM::")))
    return next(named, " ".join(words[:3]))


def contents(place: Place) -> dict:
    """What a finished pipeline left that has to be the same every time."""
    runs = place.runs("small")
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["grpo.stage"]: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(children) == len(runs) - 1
    stages = [StageResult.load(path) for path in sorted(place.root.glob("runs/small/train_stage/*/result.json"))]
    return {
        "status": [parent.info.status, *(run.info.status for run in children.values())],
        "events": {stage.stage: _events(StageDir(stage.directory).events) for stage in stages},
        "adapters": {stage.stage: (stage.sha256, stage.steps) for stage in stages},
        "merged": [json.loads(path.read_text())["sha256"] for path in place.root.glob("runs/small/merge_adapter/*/result.json")],
        "samples": {
            path.parent.name.rpartition("-")[0]: pl.read_parquet(path).write_json()
            for path in place.root.glob("runs/small/evaluate_model/*/samples.parquet")
        },
        "params": {name: dict(run.data.params) for name, run in {"parent": parent, **children}.items()},
        "metrics": {name: _history(place, run) for name, run in {"parent": parent, **children}.items()},
        "artifacts": {name: sorted(_artifacts(place, run.info.run_id)) for name, run in {"parent": parent, **children}.items()},
        "versions": [
            (version.version, version.tags["grpo.sha256"]) for version in place.client.search_model_versions("name='small'")
        ],
        "aliases": dict(place.client.get_registered_model("small").aliases),
    }


def _history(place: Place, run) -> dict:
    names = sorted(set(run.data.metrics) - TIMES - {f"final/{name}" for name in TIMES})
    return {
        name: [(point.step, point.value) for point in place.client.get_metric_history(run.info.run_id, name)] for name in names
    }


def _artifacts(place: Place, run_id: str, folder: str | None = None) -> list[str]:
    found = []
    for entry in place.client.list_artifacts(run_id, folder):
        found += _artifacts(place, run_id, entry.path) if entry.is_dir else [entry.path]
    # What a step whose process was killed has left is kept, and is no part of the result; an event says that a stage went on.
    return [path for path in found if not path.startswith("failed/") and path != "events.jsonl"]


def _events(path: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["event"]) for line in lines if line["event"] != "resumed"]


def _differences(found: dict, wanted: dict, where: str) -> list[str]:
    return [f"{where}: {name}: {_say(found[name], wanted[name])}" for name in wanted if found[name] != wanted[name]]


def _say(found: object, wanted: object) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return "; ".join(
            f"{key}: {_say(found.get(key), wanted.get(key))}"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        )
    return f"{str(found)[:300]} instead of {str(wanted)[:300]}"


def main() -> None:
    """Run, and print one line a figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="pipelines at once, each with its share of the kills")
    parser.add_argument("--engine", choices=["local", "vllm"], default="local")
    given = parser.parse_args()
    config = CONFIG | {"rollout": CONFIG["rollout"] | {"engine": given.engine, "vllm": {"python": str(VLLM_PYTHON)}}}
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api, ThreadPoolExecutor() as pool:
        wanted, seconds = undisturbed(Path(folder), api, config)

        def lane(number: int) -> Outcome:
            (root := Path(folder) / f"lane-{number}").mkdir()
            kills, seed = given.kills // given.lanes, given.seed + number
            return rampage(root, api, kills=kills, seed=seed, wanted=wanted, seconds=seconds, config=config)

        outcome = sum(pool.map(lane, range(given.lanes)), Outcome())
    print(
        f"{given.engine} engine: {outcome.kills} kills over {outcome.pipelines} pipelines of {seconds:.0f} s, seed {given.seed}"
    )
    print("victims: " + ", ".join(f"{kind} {count}" for kind, count in outcome.victims.most_common()))
    print("processes left over: " + ("none" if not outcome.left_over else "; ".join(outcome.left_over)))
    print("differences: " + ("none" if not outcome.differences else "\n".join(outcome.differences)))
    raise SystemExit(bool(outcome.left_over or outcome.differences))


if __name__ == "__main__":
    main()
