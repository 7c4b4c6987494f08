"""Several processes of one stage: what they are told about each other."""

import os
import subprocess
import sys

import torch

from grpo_tasks.processes.ports import free_port
from grpo_tasks.stage.stage_dir import StageSpec
from grpo_tasks.trl_engine.settings import grpo_config

SHOW = """
import sys
from pathlib import Path
import torch
from grpo_tasks.grpo.ranks import Processes
from grpo_tasks.stage.stage_dir import StageSpec
processes = Processes.of(StageSpec.load(Path(sys.argv[1])), torch.device("cpu"))
group = torch.distributed.distributed_c10d._get_default_group()
print(torch.distributed.get_world_size(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
processes.wait()
processes.accelerator.end_training()
"""


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


def test_trl_gets_the_time_limit_too(stages, tmp_path):
    directory = stages.write("trl", engine="trl", resources={"distributed_timeout_minutes": 47.5})
    arguments = grpo_config(StageSpec.load(directory.spec), tmp_path, torch.device("cpu"))
    assert arguments.ddp_timeout_delta.total_seconds() == 2850.0
