"""`python -m tests.benchmarks.scale.measure`: the measured pieces of `grpo plan --nodes`, on this machine's CPU.

    adapters      saved and sent to a real `grpo weights-server` over the loopback address, by rank and width
    gradients     as many bytes summed by two processes (gloo)
    completions   packed and unpacked as between processes
    the demo      journal and checkpoints

Adapters have a few layers and are scaled up to those of the model. All seconds are computing time of the processes (user and
system time): other work that runs here does not change them much. Waiting for a disk is not in them.
Writes .bench/scale.json.
"""

import json
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen2Config

from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy.load import load_tokenizer, new_policy, save_trained
from grpo_tasks.processes.serve import HOST, free_port
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Completion
from grpo_tasks.rollout.vllm_server import Client, deliver, withdraw
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.model import LoraConfig, ModelConfig
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.sides import Work, write_stage
from tests.rollout.test_weights_server import receiver

OUT = Path(".bench/scale.json")
RANKS, LAYERS, TURNS = (8, 32, 128), 2, 1


@dataclass(frozen=True)
class Sync:
    """An adapter on its way to a server; seconds of computing time are those of LAYERS layers."""

    shape: str
    rank: int
    layers: int
    """Of the model; the adapter that was measured has LAYERS."""
    bytes: int
    """What was written and sent."""
    save_s: float
    send_s: float
    receive_s: float

    @property
    def scale(self) -> float:
        """How much larger the adapter of the model is."""
        return self.layers / LAYERS


def median_s(work: Callable[[], object], process: psutil.Process | None = None) -> float:
    """Computing time that a call takes in this process, or in another one; after one call to warm up."""
    work()
    found = []
    for _ in range(TURNS):
        began = computing_s(process)
        work()
        found.append(computing_s(process) - began)
    return statistics.median(found)


def computing_s(process: psutil.Process | None = None) -> float:
    """Computing time so far of this process, or of another one."""
    if process is None:
        return time.process_time()
    times = process.cpu_times()
    return float(times.user + times.system)


def sync(shape: str, rank: int, address: str, server: psutil.Process, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Sync:
    """Save an adapter, and send it to the receiver at `address`, which is that process."""
    layers = SHAPES[shape]["num_hidden_layers"]
    config = Qwen2Config(**SHAPES[shape] | {"num_hidden_layers": LAYERS}, num_key_value_heads=2, vocab_size=320)
    policy = new_policy(AutoModelForCausalLM.from_config(config), ModelConfig(lora=LoraConfig(r=rank)))
    client, target, sent = Client({}, timeout_s=300, retries=0), folder / f"{shape}-{rank}", 0

    def send() -> None:
        nonlocal sent
        sent += 1
        deliver(client, address, f"{target.name}-{sent}", target)

    saved_s = median_s(lambda: save_trained(policy, tokenizer, target))
    sent_s = median_s(send)
    received_s = median_s(send, server)
    for number in range(1, sent + 1):
        withdraw(client, address, f"{target.name}-{number}")
    size = sum(file.stat().st_size for file in target.iterdir())
    return Sync(shape, rank, layers, size, saved_s, sent_s, received_s)


def gradient_sums(sizes: list[int]) -> dict[int, float]:
    """Computing time of each of two processes that sum so many bytes."""
    return dict(zip(sizes, in_processes(2, partial(_sum, free_port(), sizes))[0], strict=True))


def _sum(port: int, sizes: list[int], rank: int) -> list[float]:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2)
    found = [median_s(partial(torch.distributed.all_reduce, torch.ones(size // 4))) for size in sizes]
    torch.distributed.destroy_process_group()
    return found


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns in so many processes at once, each with its number; they share the time of the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.scale.check"])
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=_send, args=(work, number, pipes[number][1])) for number in range(count)]
    for process in processes:
        process.start()
    found = [reader.recv() for reader, _ in pipes]
    for process in processes:
        process.join()
    return found


def _send(work: Callable[[int], Any], number: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(work(number))


def completions() -> dict[str, float]:
    """Bytes and seconds of a token between processes: packed by one, unpacked by each."""
    many = [Completion([*range(100_000, 101_024)], torch.randn(1024).tolist(), "x" * 4096, "stop", None) for _ in range(64)]
    packed = pickle.dumps(many)
    tokens = 64 * 1024
    return {"bytes": len(packed) / tokens, "s": median_s(lambda: pickle.loads(pickle.dumps(many))) / tokens}


def demo() -> dict[str, float]:
    """Journal and checkpoints of a stage with the demo's model and batch."""
    work = Work(str(resolve("embedded:base")), 40, 64, 8, 8, updates=2, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_stage(work, Path(folder))
        spec = StageSpec.load(directory.spec)
        with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
            trainer = Trainer(directory, suite)
            trainer.train()
            seconds = median_s(trainer.checkpoints.save)
        newest = max(path for path in (directory.root / "checkpoints").iterdir())
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        journal = directory.journal.stat().st_size / trainer.step
    return {"checkpoint_bytes": size, "checkpoint_s": seconds, "journal_bytes": journal}


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(ModelRef(path="embedded:base"))
    with tempfile.TemporaryDirectory() as folder, receiver(Path(folder) / "theirs") as (address, process):
        server = psutil.Process(process.pid)
        syncs = [sync(shape, rank, address, server, tokenizer, Path(folder)) for shape in SHAPES for rank in RANKS]
    headings = ("adapter", "bytes", "saved, s", "sent, s", "received, s", "MB/s saved", "sent", "received")
    table = Table(*headings, title="scaled to all layers")
    for one in syncs:
        times = (one.save_s, one.send_s, one.receive_s)
        seconds, rates = ([f"{one.scale * value:.2f}" for value in times], [f"{one.bytes / value / 1e6:.0f}" for value in times])
        table.add_row(f"{one.shape}, r {one.rank}", f"{one.scale * one.bytes:,.0f}", *seconds, *rates)
    sums = gradient_sums([int(one.scale * one.bytes) for one in syncs if one.shape == "qwen2.5-0.5b"])
    found = {"sync": [asdict(one) for one in syncs], "sum": sums, "completions": completions(), "demo": demo()}
    Console(width=120).print(table)
    print(json.dumps({name: found[name] for name in ("sum", "completions", "demo")}, indent=1))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
