"""noisy256: what it brings to leave out prompts that cannot teach, before training.

    demo, stage format --adapter--> start --2 completions of 256 prompts, 8 where one is solved--> pass rates --keep--> prompts
                                      |                                                                            |
                                      +--------------------- 100 rounds on all prompts, or on those --------------+
                                                                 |
                                    held-out accuracy, 512 x 2 samples, the same random numbers at every look

Of the 256 prompts, 64 are the demo's, 96 are the demo's with a wrong label (the answer of another row), and 96 are sums of three
digits, which the model has never seen. Data and held-out draws do not depend on the seed. The training of the start does, and the
one that is compared: a single start misleads, because starts that differ by rounding alone end several points apart. All pieces
are the product's: `load_data`, the sampler, the rewards, `choose_prompts` and the trainer.

    python -m tests.benchmarks.noisy SEED all|kept [FOLDER [SETTINGS]]      prints one line of JSON; SETTINGS of the stage as JSON
"""

import json
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.table import read_prompts
from grpo_tasks.evaluation.pass_rates import measured_rates
from grpo_tasks.evaluation.report import score_samples
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.kit.lock import file_lock
from grpo_tasks.library import base_model, load_data, train_stage
from grpo_tasks.rewards.held_out import solved_samples
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Request, Sampling, completion_seed
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from grpo_tasks.stage.kept_prompts import choose_prompts
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.paths import resolve
from schemas.results.data import DataReport
from schemas.results.model import ModelRef
from tests.demo.arithmetic import NUM_EVAL

FOLDER = Path(".bench/noisy256")
GOAL = 0.88
ROUNDS = 100
MOST_COMPLETIONS = 6_400
"""Completions of all rounds: 8 prompts with 8 completions each."""
EVALUATE_EVERY = 2
HELD_OUT_SAMPLES = 2
MEASURED_SAMPLES = 8
SCREEN = 2
"""Completions after which a prompt that none of them solves gets no more."""
KEEP = [0.1, 0.9]
"""Leaves out the prompts that no completion solves, and those that all solve."""
CLEAN, WRONG, HARD = 64, 96, 96


@dataclass(frozen=True)
class Outcome:
    """Of one training."""

    prompts: int
    """Prompts that were trained on."""
    measured: int
    """Completions that were sampled to measure pass rates."""
    reached: int | None
    """Completions trained on at the first look with the goal reached; None: never."""
    final: float
    """Held-out accuracy after all rounds."""


def write_rows(path: Path, *, near: bool = False) -> None:
    """The 256 training rows, always the same.

    A wrong label is the answer of another row. With `near` it misses the right one by 1, 2, 3 or 10, as the model's errors do.
    """
    rows = [json.loads(line) for line in Path(resolve("embedded:arithmetic_train.jsonl")).read_text().splitlines()]
    draw = random.Random(256)
    chosen = draw.sample(rows, CLEAN + WRONG)
    for row in chosen[CLEAN:]:
        right = int(row["answer"])
        others = [int(other["answer"]) for other in rows if int(other["answer"]) != right]
        row["answer"] = str(right + draw.choice([-10, -3, -2, -1, 1, 2, 3, 10]) if near else draw.choice(others))
    pairs = set()
    while len(pairs) < HARD:
        pairs.add((draw.randint(100, 999), draw.randint(100, 999)))
    hard = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sorted(pairs)]
    path.write_text("\n".join(json.dumps(row) for row in [*chosen, *hard]) + "\n", encoding="utf-8")


def config_of(folder: Path) -> RunConfig:
    """The demo on these rows, with one stage after its stage format."""
    threads = torch.get_num_threads()
    return load_config(
        "demo",
        [
            f"data.train=[{{path: {folder / 'train.jsonl'}}}]",
            "stages.1.lr_scheduler_type=constant_with_warmup",
            f"difficulty.samples={MEASURED_SAMPLES}",
            f"difficulty.screen={SCREEN}",
            f"stages.1.max_steps={ROUNDS}",
            "stages.1.save_steps=1000",
            f"stages.1.log_completions_steps={ROUNDS}",
            f"resources={{device: cpu, num_threads: {threads}}}",
        ],
    )


def prepared(folder: Path, seed: int) -> tuple[RunConfig, DataReport, ModelRef]:
    """The data, and the model after the demo's stage format with that seed; trained by the first process that needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock"):
        if not (folder / "train.jsonl").exists():
            write_rows(folder / "train.jsonl")
        config = config_of(folder)
        demo = load_config("demo", [f"seed={seed}", f"resources={{device: cpu, num_threads: {torch.get_num_threads()}}}"])
        rows, where = load_data(demo, folder / f"demo-{seed}"), folder / f"format-{seed}"
        start = train_stage(demo, "format", rows, where, start=base_model(demo)).model
        return config, load_data(config, folder / "data"), start


def kept_rows(config: RunConfig, stage: StageConfig, data: DataReport, start: ModelRef, folder: Path) -> tuple[Path, int]:
    """Measure the pass rates and write the rows that are kept, as the step measure_difficulty and train_stage do.

    Returns the file, and the completions of the measurement.
    """
    inputs = config.difficulty_of([stage], adapter=start.adapter is not None)
    spec = SampleSpec.of(inputs, start, data.train, config.resources, num_samples=MEASURED_SAMPLES)
    samples = solved_samples(
        lambda only, numbers: sample_table(spec.part(only, numbers), folder), chosen_rows(data.train, None), inputs
    )
    choice = choose_prompts(data.train, measured_rates(samples, inputs), stage)
    print(choice.counts.summary(), file=sys.stderr)
    return choice.write(StageDir(folder)), samples.height


class WatchedTrainer(Trainer):
    """The trainer, with held-out evaluations whose random numbers do not depend on the seed of the stage."""

    looks: dict[int, float]
    """Held-out accuracy by update."""

    def _evaluate_held_out(self) -> dict[str, float]:
        due = self.step % EVALUATE_EVERY == 0 and max(self.looks.values(), default=0.0) < GOAL
        if due or self.step == self.updates:
            self.looks[self.step] = self.accuracy()
        return {}

    def accuracy(self) -> float:
        """Strict accuracy of the present policy."""
        rows = chosen_rows(self.spec.eval, NUM_EVAL)
        numbers = [(row, sample) for row in rows for sample in range(HELD_OUT_SAMPLES)]
        requests = [
            Request(prompt_ids(self.tokenizer, row.messages), completion_seed("noisy256", row.prompt_id) + sample)
            for row, sample in numbers
        ]
        self.collector.engine.sync()
        drawn = self.collector.engine.generate(requests, Sampling.of(self.spec.rollout, temperature=1.0))
        table = pl.DataFrame(
            {
                "prompt_id": [row.prompt_id for row, _ in numbers],
                "sample": [sample for _, sample in numbers],
                "completion": [one.text for one in drawn],
                "finish_reason": [one.finish_reason for one in drawn],
            }
        )
        return float(score_samples(table, rows, self.spec.completion)["correct"].mean())


def measure(seed: int, *, keep: bool, folder: Path = FOLDER, **settings: Any) -> Outcome:
    """Train with this seed on all prompts, or on those that are kept; further arguments are settings of the stage."""
    folder = folder.resolve()
    config, data, start = prepared(folder, seed)
    stage = StageConfig(**config.stage("correctness").model_dump() | settings)
    variant = "".join(f"-{name}-{value}" for name, value in sorted(settings.items()))
    directory = StageDir(folder / f"{'kept' if keep else 'all'}-{seed}{variant}")
    # An earlier run would be resumed.
    shutil.rmtree(directory.root, ignore_errors=True)
    directory.root.mkdir()
    train, measured = data.train, 0
    if keep:
        stage = stage.model_copy(update={"keep_pass_rate": KEEP})
        train, measured = kept_rows(config, stage, data, start, directory.root)
    StageSpec(
        key="bench", stage=stage, seed=seed, model=config.model, start=start, completion=config.completion,
        rewards=config.rewards, rollout=config.rollout, resources=config.resources, train=train, eval=data.eval,
    ).save(directory.spec)  # fmt: skip
    with RewardSuite(config.rewards, stage.rewards, completion=config.completion) as suite:
        trainer = WatchedTrainer(directory, suite)
        trainer.looks = {}
        trainer.train()
    print(json.dumps(trainer.looks), file=sys.stderr)
    over = [step for step, accuracy in trainer.looks.items() if accuracy >= GOAL]
    reached = min(over) * stage.completions_per_update if over else None
    return Outcome(len(read_prompts(train)), measured, reached, trainer.looks[ROUNDS])


if __name__ == "__main__":
    where = Path(sys.argv[3]) if len(sys.argv) > 3 else FOLDER
    changed = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    keep = {"all": False, "kept": True}[sys.argv[2]]
    print("\n" + json.dumps(asdict(measure(int(sys.argv[1]), keep=keep, folder=where, **changed))))
