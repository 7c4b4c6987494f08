"""`python -m tests.grpo.on_card`, for each line `FOLDER [sharded | half]` that it reads: on the pretend card, train the stage in
a folder, or merge and sample as its merge.json and sample.json say. The answer is a line with the exit code.

The lines that wait go to waits.json, and in their order, with the microbatches that are built and computed, to log.json. With
`sharded` FSDP2 shards the weights, over one process. With `half` this is the first of two processes, of which the other is only
said to be there: it loads the policy and copies it for a server, and half.json has the bytes on the card. Each line has a process
of its own, a fork of this one, which has imported everything: that takes longer than most of the work.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from tests.grpo.pretend_card import CARD, LOG, MEMORY, WAITS, card  # first: it names the device

# isort: split
import torch
from accelerate import Accelerator
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo import microbatches, trainer
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.policies import load_policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.folded_adapter import causal_model
from grpo_tasks.policy.merge import merge
from grpo_tasks.policy.sharded import sampling_copy
from grpo_tasks.rollout import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.results.model import MergeSpec
from tests.attention.reference_kernel import REFERENCE
from tests.in_process import suite_of


def shard_over_one_process() -> None:
    """Let the trainer shard, which it does from two processes on."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    trainer.load_policies = lambda spec, ranks, *, seed, **_: load_policies(spec, ranks, seed=seed, sharded=True)


def load_half(root: Path) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    Accelerator.device = property(lambda _: CARD)
    MEMORY.watch()
    with card():
        policy = load_policies(StageSpec.load(StageDir(root).spec), Ranks(Accelerator(cpu=True)), seed=1, sharded=True).model
        found = {"loading": MEMORY.peak, "loaded": MEMORY.now}
        MEMORY.watch()
        copy = sampling_copy(policy, fold=True).model
        found |= {"copying": MEMORY.peak, "copied": MEMORY.now}
        whole, *layers = (
            sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
            for module in (policy, *causal_model(policy).model.layers)
        )
    found |= {"whole": whole, "layer": max(layers), "copy is on": copy.device.type}
    (root / "half.json").write_text(json.dumps(found))


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
    if options == ("half",):
        load_half(folder)
        return
    if options == ("sharded",):
        shard_over_one_process()
    (merge_and_sample if (folder / "merge.json").exists() else train)(folder)


def _move(weights: list[torch.Tensor], buffers: list[torch.Tensor], device: torch.device) -> None:
    # As FSDP2 does it with tensors that are wrapped: a tensor of the host cannot point to the memory of the card.
    for tensor in (*weights, *buffers):
        if tensor.device != device:
            with torch.no_grad():
                there = tensor.to(device)
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(there, requires_grad=tensor.requires_grad))


_fsdp_init._move_states_to_device = _move


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
