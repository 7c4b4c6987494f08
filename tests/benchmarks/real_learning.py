"""What a real language model learns in examples/real-model, and what the obvious ways learn from the same start in the same time.

    base --stage demonstrations--> start --stage correctness, GRPO----------------------> held-out accuracy
                                     |-----rejection sampling, as many seconds----------> held-out accuracy
                                     |-----its own right completions, as many seconds---> held-out accuracy
                                     `-----TRL, as many updates-------------------------> held-out accuracy

    python -m tests.benchmarks.real_learning MODEL SVAMP [MULTIARITH] [--seeds 1,2] [--ways grpo,own] [--rates 1e-4,3e-4]

prints a line for each training as it ends, and writes all of them to .bench/real-learning.jsonl. Started again, it goes on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_tasks.library import base_model, evaluate, load_data, train_stage
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport
from schemas.results.model import ModelRef
from tests.benchmarks.__main__ import OUT

EXAMPLE = Path(__file__).parents[2] / "examples" / "real-model"
FOLDER = OUT / "real-learning"
EPOCHS = 3
TRIED = 10
"""Updates that show how long one takes."""


def main() -> None:
    """Train and evaluate in every way that was asked for."""
    asked = argparse.ArgumentParser()
    asked.add_argument("model")
    asked.add_argument("data", nargs="+")
    asked.add_argument("--seeds", default="1,2,3")
    asked.add_argument("--ways", default="grpo,rejection,own,trl")
    asked.add_argument("--rates", default="")
    asked.add_argument("--set", action="append", default=[])
    given = asked.parse_args()
    data_files, model = [str(Path(file).resolve()) for file in given.data], str(Path(given.model).resolve())
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(FOLDER)
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", *data_files], check=True)
    shutil.copy(EXAMPLE / "config.yaml", "config.yaml")
    for seed in map(int, given.seeds.split(",")):
        config = load_config("config.yaml", [f"model.path={model}", f"seed={seed}", *given.set])
        data = load_data(config, "data")
        measure(config, data, f"{seed}-base", base_model(config))
        start = train_stage(config, "demonstrations", data, f"{seed}-start").model
        measure(config, data, f"{seed}-start", start)
        for rate in [float(one) for one in given.rates.split(",") if one] or [config.stages[-1].learning_rate]:
            stage = config.stages[-1].model_copy(update={"learning_rate": rate})
            for way in given.ways.split(","):
                name = f"{seed}-{way}-{rate:g}"
                chosen = WAYS[way](config, stage, data, start, seed)
                trained = train_stage(config, chosen, data, name, start=start)
                measure(config, data, name, trained.model, seconds=seconds_of(name), updates=trained.steps)


def measure(config: RunConfig, data: DataReport, name: str, model: ModelRef, **facts: Any) -> None:
    """Evaluate a model, print its figures and append them to the file."""
    metrics = evaluate(config, model, data, f"{name}-evaluation").metrics
    shown = {key: [metrics[key].value, metrics[key].low, metrics[key].high] for key in ("accuracy", "format_rate")}
    line = json.dumps({"name": name, **facts, **shown, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"})
    print(line, flush=True)
    with Path("../real-learning.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def seconds_of(folder: str, metric: str = "step_time") -> float:
    """What all updates of a stage took, by its journal."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["metrics"][metric] for line in lines)


def grpo(config: RunConfig, stage: StageConfig, data: DataReport, start: ModelRef, seed: int) -> StageConfig:
    """The stage as it is."""
    return stage


def trl(config: RunConfig, stage: StageConfig, data: DataReport, start: ModelRef, seed: int) -> StageConfig:
    """The same settings for TRL's trainer."""
    return changed(stage, engine="trl")


def rejection(config: RunConfig, stage: StageConfig, data: DataReport, start: ModelRef, seed: int) -> StageConfig:
    """Rejection sampling update by update: the right completions of each group, for as long as GRPO took."""
    kind = changed(stage, kind="rejection", keep_completions=None, keep_reward=1.0)
    tried = train_stage(config, changed(kind, max_steps=TRIED), data, f"{seed}-rejection-tried", start=start)
    each = seconds_of(f"{seed}-rejection-tried") / tried.steps
    return changed(kind, max_steps=round(grpo_seconds(seed) / each))


def own(config: RunConfig, stage: StageConfig, data: DataReport, start: ModelRef, seed: int) -> StageConfig:
    """Completions drawn once by the start, then cross entropy on the right ones, several times, for as long as GRPO took."""
    rejection(config, stage, data, start, seed)  # its trial has the figures
    sampling = seconds_of(f"{seed}-rejection-tried", "rollout_time") / TRIED
    training = seconds_of(f"{seed}-rejection-tried") / TRIED - sampling
    updates = max(1, round(grpo_seconds(seed) / (sampling + EPOCHS * training)))
    return changed(
        stage, kind="rejection", keep_completions=None, keep_reward=1.0,
        steps_per_generation=updates, num_iterations=EPOCHS, max_steps=EPOCHS * updates,
    )  # fmt: skip


def grpo_seconds(seed: int) -> float:
    """Of the slowest GRPO of this seed."""
    return max(seconds_of(str(folder)) for folder in Path().glob(f"{seed}-grpo-*") if (folder / "metrics.jsonl").is_file())


def changed(stage: StageConfig, **settings: Any) -> StageConfig:
    """A stage with other settings, without those that its kind has no use for."""
    return StageConfig.model_validate(stage.model_dump(exclude_unset=True) | settings)


WAYS: dict[str, Callable[[RunConfig, StageConfig, DataReport, ModelRef, int], StageConfig]] = {
    "grpo": grpo, "trl": trl, "rejection": rejection, "own": own,
}  # fmt: skip

if __name__ == "__main__":
    main()
