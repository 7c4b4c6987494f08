"""What samples for a stage: this process, or rollout servers, which all ranks share."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from grpo_tasks.grpo.token_budget import device_memory, kept_bytes, plan_of
from grpo_tasks.planning.memory_plan import GIB
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_errors, load_tokenizer, pick_device, save_plain
from grpo_tasks.rollout.engine import RolloutEngine
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import ForeignServer, ServerModel, VllmServer, model_servers, swaps_merged_weights
from grpo_tasks.stage.journal import JsonLinesTail
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ModelError
from schemas.paths import resolve

JOIN_POLL_S = 1.0
SERVED = "served"
"""Folder of the stage in which the ranks write the weights that servers load."""


@contextmanager
def rollout_servers(spec: StageSpec, directory: StageDir) -> Iterator[list[VllmServer]]:
    """Servers that sample for the stage: those of the config, or some started here; none for engine local."""
    if spec.rollout.engine == "local":
        yield []
        return
    config, model, cuda = spec.rollout.vllm, spec.model, pick_device(spec.resources).type == "cuda"
    rank = None if model.lora is None or swaps_merged_weights(config, model, cuda=cuda) else model.lora.r
    write = None
    if model.added_tokens:
        base, tokenizer = spec.start.model_copy(update={"adapter": None}), load_tokenizer(spec.start, model)
        write = partial(save_plain, base, model, tokenizer, token_seed=spec.seed, untie=not cuda)
    served = ServerModel(Path(resolve(spec.start.path)), model.dtype, rank, cuda)
    with model_servers(config, served, directory.root, running=bool(config.base_urls), write=write) as servers:
        yield servers


def rollout_engine(
    spec: StageSpec,
    directory: StageDir,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    servers: Sequence[VllmServer],
    *,
    cuda: bool,
    ranks: int = 1,
    rank: int = 0,
    longest: int = 0,
) -> RolloutEngine:
    """The engine of process `rank` that samples from `model`: through the servers, which `ranks` processes share, or in this
    process when there are none. Prompts have at most `longest` tokens."""
    if not servers:
        return LocalEngine.of(model, tokenizer, spec.resources, kept_bytes=kept_bytes(spec, model, longest))
    config, weights = spec.rollout.vllm, directory.root / SERVED
    merged = swaps_merged_weights(config, spec.model, cuda=cuda)
    engine = VllmEngine(
        model,
        tokenizer,
        # Each rank has a queue of its own.
        config.model_copy(update={"sleep": config.sleep and cuda, "concurrency": max(1, config.concurrency // ranks)}),
        servers,
        # An engine begins and ends by removing its folder, which may not be that of another rank.
        weights=weights if ranks == 1 else weights / str(rank),
        dtype=spec.model.dtype,
        merged=merged,
        untied=bool(spec.model.added_tokens) and not cuda,
        shared=ranks > 1,
    )
    if config.base_urls:
        announced = JsonLinesTail(directory.servers, {"url": str, "weights_url": str})
        joining = partial(_let_servers_join, announced, engine, adapters=not merged)
        Thread(target=joining, name="joining-servers", daemon=True).start()
    return engine


def check_copy_fits(spec: StageSpec, prompt_length: int, device: torch.device, memory: float | None = None) -> None:
    """Raise ModelError where sharded weights leave no room on a card for the complete copy that the local engine samples from.

    By calculation, for the longest prompt (tokens) and the bytes of the device; `memory` is for one that does not report them.
    """
    found = device_memory(device)
    if found is not None:
        memory = found.total
    if memory is None:
        return
    with load_errors("the config of the model", f"model.path: {spec.start.path}"):
        architecture = AutoConfig.from_pretrained(resolve(spec.start.path), revision=spec.start.revision)
    plan = plan_of(spec, architecture, prompt_length, memory)
    if not plan.sampling_fits:
        needed = plan.reserve + sum(item.bytes for item in (*plan.standing, *plan.sampling))
        raise ModelError(
            f"engine local samples from a complete copy of the model on each card. With the shards that are trained it needs "
            f"{needed / GIB:.1f} GiB, and the card has {memory / GIB:.1f}",
            place=f"stage {spec.stage.name}: rollout.engine",
            fix="rollout.engine: vllm with rollout.vllm.base_urls, servers whose cards share the model "
            "(--tensor-parallel-size); or a smaller rollout.max_batch_size where the model alone fits",
        )


def _let_servers_join(announced: JsonLinesTail, engine: VllmEngine, *, adapters: bool) -> None:
    """In a thread of its own: add the servers that a cluster's driver announces in the stage directory."""
    while True:
        for line in announced.read():
            server = ForeignServer(line["url"], adapters=adapters, receiver=line["weights_url"])
            # Its first admission inspects it.
            server.stale = True
            engine.pool.add(server)
        time.sleep(JOIN_POLL_S)
