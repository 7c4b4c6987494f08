"""`python -m tests.grpo.train_on_card STAGE_DIR [TOTAL [LIMIT] | sharded]`: train a stage on the pretend card.

The lines that wait go to waits.json. With TOTAL the card reports its memory, of TOTAL bytes; a pass that takes more than LIMIT
bytes runs out of memory. What passes took goes to taken.json. With `sharded` FSDP2 shards the weights, over this one process.
"""

import json
import sys
from pathlib import Path

from tests.grpo.pretend_card import CARD, MEMORY, WAITS, card  # first: it names the device

# isort: split
import torch
from accelerate import Accelerator

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo import token_budget, trainer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from tests.attention.reference_kernel import REFERENCE


def shard_over_one_process() -> None:
    """Let the trainer shard, which it does from two processes on."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    make = trainer.Policies
    trainer.Policies = lambda model, spec, ranks, **_: make(model, spec, ranks, sharded=True)


def main(root: Path, total: float | None = None, limit: float | None = None) -> None:
    directory = StageDir(root)
    spec = StageSpec.load(directory.spec)
    Accelerator.device = property(lambda _: CARD)
    trainer.pick_device = lambda _: CARD
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda like, _window: REFERENCE if like.device.type == "card" else None
    if total is not None:
        MEMORY.total, MEMORY.limit = total, limit
        token_budget.device_memory = lambda _: MEMORY
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite, card():
        work = trainer.Trainer(directory, suite)
        WAITS.clear()
        work.train()
    waits = sorted(((count, *where) for where, count in WAITS.items()), reverse=True)
    (root / "taken.json").write_text(json.dumps(MEMORY.taken))
    (root / "waits.json").write_text(json.dumps(waits, indent=1))


if __name__ == "__main__":
    if sys.argv[2:] == ["sharded"]:
        shard_over_one_process()
        del sys.argv[2:]
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
