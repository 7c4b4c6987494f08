"""Learning from the same base with the same budget of completions: ours and TRL's.

python -m tests.benchmarks.learning SIDE SEED UPDATES      prints one line of JSON: mean reward of the last ten updates
"""

import json
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import polars as pl
import torch

from grpo_tasks.data.table import prompt_id
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.builtin import format, incremental_format
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.completion import CompletionConfig
from schemas.config.load import load_config
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.paths import resolve
from schemas.results.model import ModelRef

LAST = 10


def chats() -> list[tuple[list[dict[str, str]], str]]:
    """The demo's training prompts with their answers."""
    config = load_config("demo")
    rows = [json.loads(line) for line in Path(resolve(config.data.train[0].path)).read_text().splitlines()]
    system = {"role": "system", "content": config.data.system_prompt}
    return [([system, {"role": "user", "content": row["question"]}], row["answer"]) for row in rows]


def ours(seed: int, updates: int) -> list[float]:
    """Rewards of the demo's format stage, update by update."""
    with tempfile.TemporaryDirectory() as folder:
        root, rows = Path(folder), []
        for line, (chat, answer) in enumerate(chats()):
            row = {"prompt_id": prompt_id(chat, answer), "source": "demo", "line": line, "prompt": chat, "answer": answer}
            rows.append(row | {"prompt_tokens": 90, "extra": "{}", "answers": None, "task": ""})
        pl.DataFrame(rows).write_parquet(root / "train.parquet")
        directory = StageDir(root / "stage")
        directory.root.mkdir()
        settings = load_config("demo").stages[0].model_dump() | {"max_steps": updates, "save_steps": 10_000}
        StageSpec(
            key="bench",
            stage=StageConfig(**settings),
            seed=seed,
            model=ModelConfig(),
            start=ModelRef(path="embedded:base"),
            rewards=RewardsConfig(),
            rollout=RolloutConfig(max_completion_length=64),
            resources=ResourcesConfig(device="cpu", num_threads=torch.get_num_threads()),
            train=root / "train.parquet",
        ).save(directory.spec)
        spec = StageSpec.load(directory.spec)
        with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
            trainer = Trainer(directory, suite)
            trainer.train()
            return [trainer.journal.steps[step]["reward"] for step in range(1, updates + 1)]


def strict(prompts, completions, **columns):
    """Our `format` as TRL calls it."""
    return format(prompts, completions, completion=CompletionConfig())


def incremental(prompts, completions, **columns):
    """Our `incremental_format` as TRL calls it."""
    return incremental_format(prompts, completions, completion=CompletionConfig())


def theirs(seed: int, updates: int) -> list[float]:
    """The same by TRL's trainer with the same settings."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    stage = load_config("demo").stages[0]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=str(resolve("embedded:base")),
            reward_funcs=[incremental, strict],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                seed=seed,
                bf16=False,
                max_steps=updates,
                num_generations=stage.num_generations,
                per_device_train_batch_size=stage.per_device_train_batch_size,
                max_completion_length=64,
                temperature=1.0,
                beta=stage.beta,
                loss_type=stage.loss_type,
                learning_rate=stage.learning_rate,
                lr_scheduler_type=stage.lr_scheduler_type,
                warmup_steps=stage.warmup_steps,
                save_strategy="no",
                report_to="none",
                logging_steps=1,
                disable_tqdm=True,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list([{"prompt": chat, "answer": answer} for chat, answer in chats()]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        return [line["reward"] for line in trainer.state.log_history if "reward" in line]


if __name__ == "__main__":
    torch.set_num_threads(2)
    rewards = {"ours": ours, "theirs": theirs}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
    print("\n" + json.dumps({"reward": statistics.mean(rewards[-LAST:]), "updates": len(rewards)}))
