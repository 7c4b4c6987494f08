"""What a real language model learns in examples/real-model, and what the obvious ways learn from the same start in the same time.

    base --GRPO----------------------------------------------------------------------> share of held-out replies with all rules
      |----rejection sampling, update by update: the best completion of each group----> share
      |----its own best completions, drawn once, by cross entropy---------------------> share
      `----TRL, as many updates-------------------------------------------------------> share

    python -m tests.benchmarks.real_learning [MODEL] [--seeds 1,2] [--ways grpo,own] [--rates 1e-4,3e-4] [--set KEY=VALUE]

prints a line for each training as it ends, appends it to .bench/real-learning.jsonl, and draws the curves of all. Each way
takes the rewards of the example, with credit for each rule: no reply of the base keeps all of them, so right ones alone would
teach nothing. Completions are drawn at temperature 1 (`--set rollout.temperature=0.7`: as the example does): what is drawn below
1 and learnt by cross entropy sharpens the policy at each update. Started again with the same settings, it goes on.
"""

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_tasks.kit.cards import fastest_dtype
from grpo_tasks.library import base_model, evaluate, load_data, train_stage
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.results.data import DataReport
from schemas.results.model import ModelRef
from tests.benchmarks.comparison import OUT
from tests.real_model import real_model_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "real-model"
FOLDER = OUT.resolve() / "real-learning"
SHOWN = ("rewards/complete/mean", "reward")
EPOCHS = 3
TRIED = 10
"""Updates that show how long one takes."""
SHORTER = 1.15
"""They get shorter, as the replies do: so many times as many updates take at least as long as GRPO took."""


def main() -> None:
    """Train and evaluate in every way that was asked for."""
    asked = argparse.ArgumentParser()
    asked.add_argument("model", nargs="?")
    asked.add_argument("--seeds", default="1,2,3")
    asked.add_argument("--ways", default="grpo,rejection,own,trl")
    asked.add_argument("--rates", default="")
    asked.add_argument("--set", action="append", default=["rollout.temperature=1"])
    given = asked.parse_args()
    # The last value of a setting counts.
    settings = dict(one.split("=", 1) for one in given.set)
    folder = FOLDER / "+".join(f"{key}={value}" for key, value in settings.items()).replace("/", "_")
    try:
        model = real_model_folder(given.model)
    except FileNotFoundError as absent:
        print(f"skipped: {absent}; fix: MODEL=DIR")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in EXAMPLE.iterdir():
        shutil.copy(file, folder)
    os.chdir(folder)
    for seed in map(int, given.seeds.split(",")):
        config = load_config("config.yaml", [f"model.path={model}", f"seed={seed}", *given.set])
        data = load_data(config, f"{seed}-data")
        measure(config, data, f"{seed}-base", base_model(config))
        for rate in [float(one) for one in given.rates.split(",") if one] or [config.stages[-1].learning_rate]:
            stages = [stage.model_copy(update={"learning_rate": rate}) for stage in config.stages]
            for way in given.ways.split(","):
                name, trained = f"{seed}-{way}-{rate:g}", base_model(config)
                for number, stage in enumerate(WAYS[way](config, stages, data, seed)):
                    trained = train_stage(config, stage, data, f"{name}-{number}", start=trained).model
                updates = sum(len(lines(folder)) for folder in Path().glob(f"{name}-[0-9]"))
                measure(config, data, name, trained, seconds=seconds_of(name), updates=updates)
        draw()


def measure(config: RunConfig, data: DataReport, name: str, model: ModelRef, **facts: Any) -> None:
    """Evaluate a model, print its figures and append them to the file."""
    done = Path(f"{name}-evaluation").exists()
    metrics = evaluate(config, model, data, f"{name}-evaluation").metrics
    shown = {key: [metrics[key].value, metrics[key].low, metrics[key].high] for key in SHOWN}
    dtype = fastest_dtype("cpu") if config.model.dtype == "auto" else config.model.dtype
    conditions = {"temperature": config.rollout.temperature, "dtype": dtype, "threads": config.resources.num_threads}
    conditions |= {"machine": platform.processor() or platform.machine(), "load": round(os.getloadavg()[0], 1)}
    conditions["date"] = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    line = json.dumps({"name": name, **facts, **shown, **conditions})
    print(line, flush=True)
    if not done:
        with FOLDER.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def lines(folder: str | Path) -> list[dict[str, float]]:
    """The metrics of each update of a stage."""
    return [json.loads(line)["metrics"] for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def draw() -> None:
    """The reward of each update's completions: a curve for each training so far, a colour for each way."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    # The completions of the fourth way are drawn once, so they have one reward.
    for number, way in enumerate(("grpo", "trl", "rejection")):
        for drawn, folder in enumerate(sorted(Path().glob(f"*-{way}-*-[0-9]"))):
            rewards = [update["reward"] for update in lines(folder)]
            axes.plot(range(1, len(rewards) + 1), rewards, color=f"C{number}", alpha=0.8, label=None if drawn else way)
    axes.set(xlabel="update", ylabel="reward of the update's completions (7 rules)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig("curves.png", dpi=110)


def seconds_of(name: str) -> float:
    """What all updates of a training took, by the journals of its stages."""
    return sum(update["step_time"] for folder in Path().glob(f"{name}-[0-9]") for update in lines(folder))


def grpo(config: RunConfig, stages: list[StageConfig], data: DataReport, seed: int) -> list[StageConfig]:
    """The stages as they are."""
    return stages


def trl(config: RunConfig, stages: list[StageConfig], data: DataReport, seed: int) -> list[StageConfig]:
    """The same settings for TRL's trainer. A quarter of an update at a time: all at once took more than 14 GiB."""
    parts = {"per_device_train_batch_size": stages[-1].per_device_train_batch_size // 4, "gradient_accumulation_steps": 4}
    return [changed(stage, engine="trl", **parts) for stage in stages]


def rejection(config: RunConfig, stages: list[StageConfig], data: DataReport, seed: int) -> list[StageConfig]:
    """Rejection sampling update by update: the best completion of each group, for at least as long as GRPO took.

    It draws at the temperature of the rollout, and learns at 1: below 1 each update sharpens the policy.
    """
    kind = changed(stages[-1], kind="rejection", keep_completions=1)
    train_stage(config, changed(kind, max_steps=TRIED), data, f"{seed}-tried-0", start=base_model(config))
    return [changed(kind, max_steps=round(SHORTER * grpo_seconds(seed) / tried(seed, "step_time")))]


def own(config: RunConfig, stages: list[StageConfig], data: DataReport, seed: int) -> list[StageConfig]:
    """Completions drawn once by the base, then cross entropy on the best ones, several times, for as long as GRPO took."""
    rejection(config, stages, data, seed)  # its trial has the figures
    sampling = tried(seed, "rollout_time")
    training = tried(seed, "step_time") - sampling
    updates = max(1, round(grpo_seconds(seed) / (sampling + EPOCHS * training)))
    once = {"steps_per_generation": updates, "num_iterations": EPOCHS, "max_steps": EPOCHS * updates}
    return [changed(stages[-1], kind="rejection", keep_completions=1, **once)]


def tried(seed: int, metric: str) -> float:
    """Seconds of an update of the trial, without the first, which compiles and allocates."""
    usual = lines(f"{seed}-tried-0")[1:]
    return sum(update[metric] for update in usual) / len(usual)


def grpo_seconds(seed: int) -> float:
    """Of the slowest GRPO of this seed."""
    names = {folder.name.rpartition("-")[0] for folder in Path().glob(f"{seed}-grpo-*-[0-9]")}
    return max(seconds_of(name) for name in names)


def changed(stage: StageConfig, **settings: Any) -> StageConfig:
    """A stage with other settings, without those that its kind has no use for."""
    return StageConfig.model_validate(stage.model_dump(exclude_unset=True) | settings)


WAYS: dict[str, Callable[[RunConfig, list[StageConfig], DataReport, int], list[StageConfig]]] = {
    "grpo": grpo, "trl": trl, "rejection": rejection, "own": own,
}  # fmt: skip

if __name__ == "__main__":
    main()
