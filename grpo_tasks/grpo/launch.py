"""What a trainer needs around it: the ranks of a stage, rollout servers, and the engine that samples."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from transformers import PreTrainedTokenizerBase

from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_tokenizer, pick_device, save_plain
from grpo_tasks.processes.entry import ERROR
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.processes.ports import HOST, free_port
from grpo_tasks.rollout.engine import RolloutEngine
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import ForeignServer, ServerModel, VllmServer, existing_servers, serving, swaps_merged_weights
from grpo_tasks.stage.journal import JsonLinesTail
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ChildDied, UserError
from schemas.paths import resolve

POLL_S, JOIN_POLL_S = 0.1, 1.0


def start_ranks(directory: Path, num_processes: int) -> None:
    """Start every rank of a stage as `python -m grpo_tasks.grpo directory` and wait for all of them.

    When one fails, the others are killed: they would wait for it forever.

    Raises:
        UserError: the one that a rank left.
        ChildDied: a rank ended badly without an error of its own.
    """
    rendezvous = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    command = [sys.executable, "-P", "-m", "grpo_tasks.grpo", str(directory)]
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())},
        )
        for rank in range(num_processes)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
        shutil.rmtree(_served_folder(directory), ignore_errors=True)
    if any(codes):
        failed = next(number for number, code in enumerate(codes) if code)
        if (directory / ERROR).exists():
            raise UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
        raise ChildDied(
            f"rank {failed} of {num_processes} ended with code {codes[failed]}; the other ranks were ended too",
            place=str(directory),
            fix="see the end of the log; start the same command again: the stage resumes from its last checkpoint",
        )


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
        max_lora_rank = None if merged or spec.model.lora is None else spec.model.lora.r
        served = ServerModel(Path(resolve(spec.start.path)), spec.model.dtype, max_lora_rank, cuda)
        if spec.model.added_tokens:
            # The files of the base have no rows for the added tokens.
            served = replace(served, model=_widened_base(spec, directory, untie=not cuda))
        try:
            with serving(config, served, directory.root) as servers:
                yield servers
        finally:
            shutil.rmtree(_widened_folder(directory), ignore_errors=True)


def _served_folder(directory: Path) -> Path:
    """Where the ranks of a stage write the weights that servers load."""
    return directory / "served"


def _widened_folder(directory: StageDir) -> Path:
    return directory.root / "served-base"


def _widened_base(spec: StageSpec, directory: StageDir, *, untie: bool) -> Path:
    """The base with its added tokens in a folder of the stage, for as long as the servers run."""
    folder = _widened_folder(directory)
    tokenizer = load_tokenizer(spec.start, spec.model)
    base = spec.start.model_copy(update={"adapter": None})
    save_plain(base, spec.model, tokenizer, folder, token_seed=spec.seed, untie=untie)
    return folder


def rollout_engine(
    spec: StageSpec,
    directory: StageDir,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    servers: Sequence[VllmServer],
    *,
    device: torch.device,
    ranks: int,
    rank: int = 0,
) -> RolloutEngine:
    """The engine of process `rank` that samples from `model`: through the servers, which `ranks` processes share, or in this
    process when there are none."""
    if servers:
        config, cuda = spec.rollout.vllm, device.type == "cuda"
        merged = swaps_merged_weights(config, spec.model, cuda=cuda)
        engine = VllmEngine(
            model,
            tokenizer,
            # Each rank has a queue of its own.
            config.model_copy(update={"sleep": config.sleep and cuda, "concurrency": max(1, config.concurrency // ranks)}),
            servers,
            # An engine begins and ends by removing its folder, which may not be that of another rank.
            weights=_served_folder(directory.root) if ranks == 1 else _served_folder(directory.root) / str(rank),
            dtype=spec.model.dtype,
            merged=merged,
            untied=bool(spec.model.added_tokens) and not cuda,
            shared=ranks > 1,
        )
        if config.base_urls:
            joining = partial(_let_servers_join, directory.servers, engine, adapters=not merged)
            Thread(target=joining, name="joining-servers", daemon=True).start()
        return engine
    return LocalEngine.of(model, tokenizer, spec.resources)


def _let_servers_join(announced: Path, engine: VllmEngine, *, adapters: bool) -> None:
    """In a thread of its own: add the servers that a cluster's driver announces in the stage directory."""
    lines = JsonLinesTail(announced, {"url": str, "weights_url": str})
    while True:
        for line in lines.read():
            server = ForeignServer(line["url"], adapters=adapters, receiver=line["weights_url"])
            # Its first admission inspects it.
            server.stale = True
            engine.pool.add(server)
        time.sleep(JOIN_POLL_S)
