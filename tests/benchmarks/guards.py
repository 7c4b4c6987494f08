"""`python -m tests.benchmarks.guards`: what the guards find, and how often they cry for nothing (15 minutes).

Healthy runs are both stages of the demo, five seeds, on the real engine. Faults are planted into the journals of those runs from
update 60 of the second stage on: from then a metric reads what it would read in trouble, with the noise it had before.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import prompt_id
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.guards import GUARDS, Guards
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.guards import GuardsConfig
from schemas.config.load import load_config
from schemas.config.operations import ResourcesConfig
from schemas.results.model import ModelRef
from tests.benchmarks.learning import chats

SEEDS = range(1, 6)
SINCE = 60
DEAD = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "rewards/correctness/success": 0.0}
PLANTED: dict[str, dict[str, float]] = {
    "kl_blow_up": {"kl": 0.8, "frac_reward_zero_std": 0.2},
    "reward_std_collapse": DEAD,
    "dead_groups": DEAD,
    "truncation": {"completions/clipped_ratio": 0.7},
    "entropy_collapse": {"entropy": 0.01, "reward": 1.5},
    "length_explosion": {"completions/mean_length": 61.0, "reward": 1.5},
    "format_regression": {"rewards/format/success": 0.7},
    "flat_reward": {"reward": 1.5, "rewards/correctness/success": 0.5},
    "sampler_mismatch": {"sampling/sampling_logp_difference/mean": 0.3},
}


def main() -> None:
    """Train, plant, count, print."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.guards", folder]
        with ThreadPoolExecutor(2) as pool:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            list(pool.map(lambda seed: subprocess.run([*command, str(seed)], check=True, env=environment), SEEDS))
        healthy = {path: Journal(path, writes=False) for path in sorted(Path(folder).glob("*/*/metrics.jsonl"))}
        alarms = {guard.event: 0 for guard in GUARDS}
        updates = 0
        for journal in healthy.values():
            updates += journal.last_step
            for event, _ in _fired(journal):
                alarms[event] += 1
        print(f"{len(healthy)} healthy stages, {updates} updates\n")
        print("| guard | planted | found | updates until found (median, longest) | false alarms |\n|---|---:|---:|---:|---:|")
        seconds = [journal for path, journal in healthy.items() if path.parent.name == "correctness"]
        for event, values in PLANTED.items():
            delays = [delay for journal in seconds if (delay := _delay(journal, event, values, Path(folder))) is not None]
            delay = f"{statistics.median(delays):.0f}, {max(delays)}" if delays else ""
            print(f"| {event} | {len(seconds)} | {len(delays)} | {delay} | {alarms[event]} |")


def _fired(journal: Journal) -> list[tuple[str, int]]:
    guards = Guards(GuardsConfig(), skips_dead=True)
    return [(firing.event, step) for step in sorted(journal.steps) for firing in guards.check(journal, step)]


def _delay(journal: Journal, event: str, values: dict[str, float], folder: Path) -> int | None:
    planted = Journal(folder / "planted.jsonl", writes=False)
    for step, metrics in journal.steps.items():
        planted.append(step, metrics | (_noisy(journal, step, values) if step > SINCE else {}))
    found = [step for name, step in _fired(planted) if name == event and step > SINCE]
    return found[0] - SINCE if found else None


def _noisy(journal: Journal, step: int, values: dict[str, float]) -> dict[str, float]:
    """The planted values, with the relative deviations the metric had as many updates before."""
    made = {}
    for name, value in values.items():
        before = [metrics[name] for at, metrics in journal.steps.items() if at <= SINCE and name in metrics] or [0.0]
        mean = statistics.fmean(before)
        at = before[step % len(before)]
        made[name] = value * (1 + 0.2 * max(-1.0, min(1.0, (at - mean) / mean))) if mean else value
    return made


def _train(folder: Path, seed: int) -> None:
    """Both stages of the demo."""
    config, root, rows = load_config("demo"), folder / f"seed-{seed}", []
    root.mkdir()
    for line, (chat, answer) in enumerate(chats()):
        row = {"prompt_id": prompt_id(chat, answer), "source": "demo", "line": line, "prompt": chat, "answer": answer}
        rows.append(row | {"prompt_tokens": 90, "extra": "{}", "answers": None, "task": ""})
    pl.DataFrame(rows).write_parquet(root / "train.parquet")
    start = ModelRef(path=config.model.path)
    for stage in config.stages:
        directory = StageDir(root / stage.name)
        directory.root.mkdir()
        spec = StageSpec(
            key="bench",
            stage=stage,
            seed=seed,
            model=config.model,
            start=start,
            rewards=config.rewards,
            rollout=config.rollout,
            resources=ResourcesConfig(device="cpu", num_threads=1),
            train=root / "train.parquet",
        )
        spec.save(directory.spec)
        with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
            start = Trainer(directory, suite).train().model


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
