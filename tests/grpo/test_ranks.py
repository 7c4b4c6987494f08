"""The ranks of one stage."""

import os
import subprocess
import sys

import pytest
from accelerate import Accelerator

from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.processes.serve import free_port

SHOW = """
import sys
from pathlib import Path
import torch
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.stage.stage_dir import StageSpec
ranks = Ranks.of(StageSpec.load(Path(sys.argv[1])), torch.device("cpu"))
group = torch.distributed.distributed_c10d._get_default_group()
print(torch.distributed.get_world_size(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
ranks.wait()
ranks.accelerator.end_training()
"""


@pytest.mark.long
def test_the_time_limit_of_the_config_is_that_of_the_process_group(stages):
    directory = stages.write("two", resources={"num_processes": 2, "distributed_timeout_minutes": 47.5})
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHOW, directory.spec],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [found for found, _ in outputs] == ["2 2850.0\n"] * 2, outputs[0][1][-2000:]


def over_both(mine, other):
    class Both(Ranks):
        count = 2

        def gather(self, item):
            return [item, other]

    return mine.over(Both(Accelerator(cpu=True)))


def test_a_rank_without_microbatches_erases_no_figures_of_the_others():
    idle, busy = UpdateFigures(), UpdateFigures(tokens=4, correction=3.0, hits=2.0, mismatch=1.0)
    for found in (over_both(idle, busy), over_both(busy, idle)):
        assert (found.tokens, found.correction, found.hits, found.mismatch) == (4, 3.0, 2.0, 1.0)
    assert over_both(idle, UpdateFigures()).correction is None
    # The difference to the sampler is only known if every rank knows it.
    assert over_both(busy, UpdateFigures(mismatch=None)).mismatch is None
