"""`python -m tests.grpo.train_on_card STAGE_DIR`: train a stage on the pretend card; its lines that wait go to waits.json."""

import json
import sys
from pathlib import Path

from tests.grpo.pretend_card import CARD, WAITS, card  # first: it names the device

# isort: split
from accelerate import Accelerator

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from tests.attention.reference_kernel import REFERENCE


def main(root: Path) -> None:
    directory = StageDir(root)
    spec = StageSpec.load(directory.spec)
    Accelerator.device = property(lambda _: CARD)
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda like, _window: REFERENCE if like.device.type == "card" else None
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite, card():
        trainer = Trainer(directory, suite)
        WAITS.clear()
        trainer.train()
    waits = sorted(((count, *where) for where, count in WAITS.items()), reverse=True)
    (root / "waits.json").write_text(json.dumps(waits, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
