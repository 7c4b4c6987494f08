"""What runs beside a stage's trainer: other processes that train with it, each of them `python -m grpo_tasks.grpo` with a rank,
and a rollout server.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_tasks.policy.load import pick_device
from grpo_tasks.processes.entry import ERROR, PARENT
from grpo_tasks.processes.ports import HOST, free_port
from grpo_tasks.rollout.vllm_server import ServedModel, VllmServer, existing_servers, serving, swaps_merged_weights
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ChildDied, UserError
from schemas.paths import resolve

POLL_S = 0.1


@contextmanager
def rollout_servers(spec: StageSpec, directory: StageDir) -> Iterator[list[VllmServer]]:
    """Servers that sample for the stage: those of the config, or some started here; none for engine local."""
    config, cuda = spec.rollout.vllm, pick_device(spec.resources).type == "cuda"
    merged = swaps_merged_weights(config, spec.model, cuda=cuda)
    if spec.rollout.engine == "local":
        yield []
    elif config.base_urls:
        yield existing_servers(config, adapters=not merged)
    else:
        rank = None if merged or spec.model.lora is None else spec.model.lora.r
        served = ServedModel(Path(resolve(spec.start.path)), spec.model.dtype, rank, cuda)
        with serving(config, served, directory.root) as servers:
            yield servers


def launch(directory: Path, num_processes: int) -> None:
    """Start them and wait; when one fails the others are ended, for they would wait for it forever.

    Raises:
        UserError: one of them left one.
        ChildDied: one of them ended badly without saying why.
    """
    rendezvous = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    command = [sys.executable, "-m", "grpo_tasks.grpo", str(directory)]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())},
        )
        for rank in range(num_processes)
    ]
    try:
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        if (directory / ERROR).exists():
            raise UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
        raise ChildDied(
            f"process {rank} of {num_processes} ended with code {codes[rank]}; the others were ended too",
            place=str(directory),
            fix="see the end of the log; start the same command again: the stage goes on from its last checkpoint",
        )
