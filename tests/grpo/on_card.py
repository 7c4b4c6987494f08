"""`python -m tests.grpo.on_card FOLDER [sharded]`: on the pretend card, train the stage in a folder, or merge and
sample as its merge.json and sample.json say.

The lines that wait go to waits.json. With `sharded` FSDP2 shards the weights, over this one process.
"""

import json
import sys
from pathlib import Path

from tests.grpo.pretend_card import CARD, WAITS, card  # first: it names the device

# isort: split
import torch
from accelerate import Accelerator

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo import trainer
from grpo_tasks.policy.merge import merge
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.results.model import MergeSpec
from tests.attention.reference_kernel import REFERENCE


def shard_over_one_process() -> None:
    """Let the trainer shard, which it does from two processes on."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    make = trainer.Policies
    trainer.Policies = lambda model, spec, ranks, **_: make(model, spec, ranks, sharded=True)


def merge_and_sample(folder: Path) -> None:
    sample_table.pick_device = lambda _: CARD
    with card():
        merge(MergeSpec.load(folder / "merge.json"), folder / "merged", device=CARD).save(folder / "figures.json")
        spec = SampleSpec.load(folder / "sample.json")
        sample_table.sample_table(spec, folder).write_parquet(folder / "samples.parquet")


def train(root: Path) -> None:
    directory = StageDir(root)
    spec = StageSpec.load(directory.spec)
    Accelerator.device = property(lambda _: CARD)
    trainer.pick_device = lambda _: CARD
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda like, _window: REFERENCE if like.device.type == "card" else None
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite, card():
        work = trainer.Trainer(directory, suite)
        WAITS.clear()
        work.train()
    waits = sorted(((count, *where) for where, count in WAITS.items()), reverse=True)
    (root / "waits.json").write_text(json.dumps(waits, indent=1))


if __name__ == "__main__":
    if sys.argv[2:] == ["sharded"]:
        shard_over_one_process()
    work = merge_and_sample if (Path(sys.argv[1]) / "merge.json").exists() else train
    work(Path(sys.argv[1]))
