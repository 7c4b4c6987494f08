"""Training steps of each side on the same work: ours and TRL's, same weights, prompts, group size, lengths and threads.

Lengths are forced (nothing ends a completion but the limit) and rewards are random, so that every group is alive: nothing is won
by skipping work.

    python -m tests.benchmarks.sides SIDE JSON      prints one line of JSON; a process of its own for each side
"""

import json
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.table import prompt_id
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.model import ModelRef


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    model: str
    """Directory of the base model."""
    prompt_tokens: int
    """About so many tokens a prompt, template included."""
    completion_tokens: int
    prompts: int
    """Prompts an update."""
    group: int
    updates: int
    """Updates measured, after one to warm up."""
    dtype: str = "float32"
    beta: float = 0.01
    batch: int | None = None
    """Completions that go through the model at once; all by default."""
    gradient_checkpointing: bool = False
    device: str = "cpu"
    threads: int = 2
    resources: dict[str, Any] = field(default_factory=dict)
    """Switches of ours."""
    stage: dict[str, Any] = field(default_factory=dict)
    """Settings of our stage."""
    tied: float = 0.0
    """Share of groups whose rewards tie."""

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def at_once(self) -> int:
        return self.batch or self.completions

    def chats(self) -> list[list[dict[str, str]]]:
        """Prompts of the wanted length, all different."""
        tokenizer, draw = load_tokenizer(ModelRef(path=self.model)), random.Random(3)
        chats = []
        for _ in range(self.prompts * (self.updates + 1)):
            words = ["What is"]
            while True:
                words.append(f"{draw.randint(10, 99)} +")
                chat = [{"role": "user", "content": " ".join(words) + " 1?"}]
                if len(prompt_ids(tokenizer, chat)) >= self.prompt_tokens:
                    break
            chats.append(chat)
        return chats


@dataclass(frozen=True)
class Timing:
    """Of one side."""

    step_s: float
    """Median duration of an update in seconds."""
    rollout_s: float
    peak_bytes: int = 0
    """The most bytes of tensors that lived at once on the card, weights included; on a CPU the most of the process."""
    reserved_bytes: int = 0
    """The most bytes that the allocator held."""


def noise(prompts, completions, *, tied=0.0, **columns):
    """A random number for each completion; those of the first groups tie."""
    tie = int(tied * len(completions))
    return [0.5 if index < tie else random.random() for index in range(len(completions))]


def ours(work: Work) -> Timing:
    """Updates of a real stage, as the journal times them."""
    device = work.device
    with tempfile.TemporaryDirectory() as folder:
        directory = write_stage(work, Path(folder))
        spec = StageSpec.load(directory.spec)
        with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
            trainer = Trainer(directory, suite)
            trainer.collector.engine._end_ids = frozenset()
            _reset_peak(device)
            trainer.train()
            steps = [trainer.journal.steps[step] for step in range(2, work.updates + 2)]
    return Timing(
        statistics.median(step["step_time"] for step in steps),
        statistics.median(step["rollout_time"] for step in steps),
        *_peak(device),
    )


def write_stage(work: Work, root: Path) -> StageDir:
    """A stage directory for this work below `root`."""
    rows = []
    for line, chat in enumerate(work.chats()):
        row = {"prompt_id": prompt_id(chat, "0"), "source": "bench", "line": line, "prompt": chat, "answer": "0"}
        rows.append(row | {"prompt_tokens": work.prompt_tokens, "extra": "{}", "answers": None, "task": ""})
    pq.write_table(pa.Table.from_pylist(rows), root / "train.parquet")
    directory = StageDir(root / "stage")
    directory.root.mkdir()
    StageSpec(
        key="bench",
        stage=StageConfig(
            name="bench",
            rewards=["noise"],
            max_steps=work.updates + 1,
            num_generations=work.group,
            per_device_train_batch_size=work.at_once,
            gradient_accumulation_steps=work.completions // work.at_once,
            learning_rate=1e-6,
            beta=work.beta,
            save_steps=10_000,
            log_completions_steps=10_000,
            **work.stage,
        ),
        seed=1,
        model=ModelConfig(path=work.model, dtype=work.dtype, gradient_checkpointing=work.gradient_checkpointing),
        start=ModelRef(path=work.model),
        rewards=RewardsConfig(functions={"noise": {"function": "tests.benchmarks.sides:noise", "params": {"tied": work.tied}}}),
        rollout=RolloutConfig(max_completion_length=work.completion_tokens),
        resources=ResourcesConfig(device=work.device, num_threads=work.threads, deterministic=False, **work.resources),
        train=root / "train.parquet",
    ).save(directory.spec)
    return directory


def theirs(work: Work) -> Timing:
    """Updates of TRL's GRPOTrainer, timed by a callback."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []
    rollouts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.began)

    class Timed(GRPOTrainer):
        def _generate(self, *arguments, **keywords):
            began = time.perf_counter()
            found = super()._generate(*arguments, **keywords)
            rollouts.append(time.perf_counter() - began)
            return found

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=work.device == "cpu",
            bf16=work.dtype == "bfloat16",
            max_steps=work.updates + 1,
            num_generations=work.group,
            per_device_train_batch_size=work.at_once,
            gradient_accumulation_steps=work.completions // work.at_once,
            max_completion_length=work.completion_tokens,
            generation_kwargs={"min_new_tokens": work.completion_tokens},
            beta=work.beta,
            learning_rate=1e-6,
            temperature=1.0,
            gradient_checkpointing=work.gradient_checkpointing,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            shuffle_dataset=False,
            model_init_kwargs={"dtype": work.dtype},
        )
        trainer = Timed(
            model=work.model,
            reward_funcs=noise,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": chat, "answer": "0"} for chat in work.chats()]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        _reset_peak(work.device)
        trainer.train()
    return Timing(statistics.median(times[1:]), statistics.median(rollouts[1:]), *_peak(work.device))


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # One definition for both sides: from here to the end. A trainer that meters itself would begin anew at each update.
        torch.cuda.reset_peak_memory_stats = lambda *_, **__: None


def _peak(device: str) -> tuple[int, int]:
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0


if __name__ == "__main__":
    chosen = Work(**json.loads(sys.argv[2]))
    torch.set_num_threads(chosen.threads)
    timing = {"ours": ours, "theirs": theirs}[sys.argv[1]](chosen)
    print("\n" + json.dumps(asdict(timing)))
