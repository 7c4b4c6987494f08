"""`python -m tests.grpo.on_card`, for each line `FOLDER [sharded]` that it reads: on the pretend card, train the stage in a
folder, or merge and sample as its merge.json and sample.json say. The answer is a line with the exit code.

The lines that wait go to waits.json, and in their order, with the microbatches that are built and computed, to log.json. With
`sharded` FSDP2 shards the weights, over one process. Each line has a process of its own, a fork of this one, which has imported
everything: that takes longer than most of the work.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from tests.grpo.pretend_card import CARD, LOG, WAITS, card  # first: it names the device

# isort: split
import torch
from accelerate import Accelerator

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo import microbatches, trainer
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.results.model import MergeSpec
from tests.attention.reference_kernel import REFERENCE
from tests.in_process import suite_of


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
    microbatches.token_batch = logged("build", microbatches.token_batch)
    Learner._accumulate = logged("pass", Learner._accumulate)
    with suite_of(spec) as suite, card():
        work = trainer.Trainer(directory, suite)
        WAITS.clear()
        LOG.clear()
        work.train()
    waits = sorted(((count, *where) for where, count in WAITS.items()), reverse=True)
    (root / "waits.json").write_text(json.dumps(waits, indent=1))
    (root / "log.json").write_text(json.dumps(LOG))


def logged(word, function):
    """The function, whose calls are logged."""

    def call(*arguments, **options):
        LOG.append(word)
        return function(*arguments, **options)

    return call


def do(folder: Path, *options: str) -> None:
    if options == ("sharded",):
        shard_over_one_process()
    (merge_and_sample if (folder / "merge.json").exists() else train)(folder)


def forked(folder: str, *options: str) -> int:
    """Do it in a fork; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            do(Path(folder), *options)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    # Whatever the work prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(forked(*line.split()), file=answers, flush=True)
