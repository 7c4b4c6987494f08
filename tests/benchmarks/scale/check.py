"""`python -m tests.benchmarks.scale.check`: updates of 1, 2 and 4 processes against the prediction of `grpo plan --nodes`.

    --nodes     a stage on 2 and 4 nodes of a Ray cluster on this machine instead, one process each, without a directory in common

The card of the prediction is this machine: the arithmetic, the bandwidth and the fixed time of a decoding step of so many
processes that run at once, measured right before each stage. So this checks the form of the model, not its figures for a GPU.
Predictions and stages alternate, because other work may run here. Times are computing time of a process, which is what an
update takes when each process has a core for itself; this machine has two. Only the ratios mean something.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy.load import load_tokenizer, new_policy
from grpo_tasks.processes.serve import HOST, free_port
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.metrics import MEAN_LENGTH, STEP_TIME
from schemas.results.model import ModelRef
from tests.benchmarks.scale.cards import Card, Link
from tests.benchmarks.scale.measure import computing_s, gradient_sums, in_processes
from tests.benchmarks.scale.model import Assumed, Cluster, Forecast, Layout, ScaleModel
from tests.benchmarks.scale.workload import workload
from tests.benchmarks.sides import Work, write_stage

OUT = {False: Path(".bench/scale-check.json"), True: Path(".bench/scale-check-nodes.json")}
"""Of processes, and of nodes."""
COUNTS = {False: (1, 2, 4), True: (2, 4)}
TURNS, UPDATES = 2, 2
NODE_UPDATES = 12
"""More of them: on nodes the time is read when a line of the journal arrives, to a quarter of a second."""
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
PROMPT, LENGTH, PROMPTS, GROUP = 64, 32, 8, 8


def base(folder: Path) -> Path:
    """A model with random weights and the embedded tokenizer."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(ModelRef(path="embedded:base"))
    config = Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def speeds(model: Path, rows: int, _: int) -> dict[str, float]:
    """What one process reaches: operations per second in training and for `rows` rows, bytes per second, a step's fixed time."""
    inputs, outputs = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    matrices = [torch.randn(inputs, outputs) for _ in range(16)]

    def rate(height: int, seconds: float = 0.4) -> float:
        """Products of that height with all matrices, per second."""
        left, began, count = torch.randn(height, inputs), time.process_time(), 0
        while time.process_time() - began < seconds:
            for matrix in matrices:
                left @ matrix
            count += len(matrices)
        return count / (time.process_time() - began)

    size = inputs * outputs
    large, few, one = rate(2048), rate(rows), rate(1)
    bandwidth = one * size * 4
    engine = LocalEngine(policy := new_policy(_load(model), ModelConfig()).eval(), load_tokenizer(ModelRef(path=str(model))))
    engine._end_ids = frozenset()
    requests, sampling = [Request([*range(5, 5 + PROMPT)], 7)], Sampling.of(RolloutConfig(max_completion_length=LENGTH))
    times = []
    for _ in range(4):
        began = time.process_time()
        engine.generate(requests, sampling)
        times.append(time.process_time() - began)
    weights = sum(parameter.numel() for parameter in policy.parameters() if not parameter.requires_grad) * 4 / bandwidth
    step = max(0.0, statistics.median(times[1:]) / LENGTH - weights)
    return {"flops": large * 2048 * 2 * size, "few": few * rows * 2 * size, "bandwidth": bandwidth, "step_s": step}


def _load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model).requires_grad_(False)


def speeds_of(model: Path, processes: int) -> dict[str, float]:
    """Means over so many processes at once."""
    found = in_processes(processes, partial(speeds, model, PROMPTS * GROUP // processes))
    return {name: statistics.mean(one[name] for one in found) for name in found[0]}


def measured(model: Path, processes: int, folder: Path) -> dict[str, float]:
    """Updates of a real stage: computing time of a process for each, and the mean length of the completions."""
    folder.mkdir()
    work = Work(str(model), PROMPT, LENGTH, PROMPTS, GROUP, UPDATES, beta=0.0, threads=1, stage={"kl_every_steps": 0})
    directory = write_stage(replace(work, resources={"num_processes": processes}), folder)
    found = in_processes(processes, partial(_train, directory, free_port(), processes))
    steps = [Journal(directory.journal, writes=False).steps[step] for step in range(2, UPDATES + 2)]
    return {STEP_TIME: statistics.mean(found), MEAN_LENGTH: statistics.mean(step[MEAN_LENGTH] for step in steps)}


def _train(directory: StageDir, port: int, processes: int, rank: int) -> float:
    """One of the ranks: computing time of an update, without the first one."""
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    spec, seconds = StageSpec.load(directory.spec), list[float]()
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        trainer = Trainer(directory, suite)
        update = trainer._update

        def timed(batch: Any) -> Any:
            made = update(batch)
            seconds.append(computing_s())
            return made

        trainer._update = timed
        trainer.train()
    return (seconds[-1] - seconds[0]) / UPDATES


def on_nodes(model: Path, nodes: int, folder: Path) -> dict[str, float]:
    """Updates of a stage with a process on each of so many nodes of a Ray cluster: the same as `measured`."""
    # Only this needs Ray and the cluster of the tests.
    from tests.cluster.conftest import Nodes
    from tests.cluster.processes import MARK

    folder.mkdir()
    cluster = Nodes(folder)
    spent = dict[int, float]()
    try:
        for _ in range(nodes):
            cluster.add(**MARK)
        there = {"cluster": {"engine": "ray", "address": cluster.address, "num_nodes": nodes}}
        work = Work(str(model), PROMPT, LENGTH, PROMPTS, GROUP, NODE_UPDATES, beta=0.0, threads=1, stage={"kl_every_steps": 0})
        directory = write_stage(replace(work, resources=there), folder)
        run_stage(StageSpec.load(directory.spec), directory.root, tick=partial(_read_times, directory, nodes, spent))
    finally:
        cluster.cluster.shutdown()
    # The first update warms up. With the last line the processes end.
    first, last = min(spent), max(step for step in spent if step <= NODE_UPDATES)
    lengths = [Journal(directory.journal, writes=False).steps[step][MEAN_LENGTH] for step in range(first + 1, last + 1)]
    return {STEP_TIME: (spent[last] - spent[first]) / (last - first) / nodes, MEAN_LENGTH: statistics.mean(lengths)}


def _read_times(directory: StageDir, nodes: int, spent: dict[int, float]) -> None:
    """Note the computing time of all ranks so far, each time a line of the journal arrives."""
    from tests.cluster.processes import not_of_ray

    steps = directory.journal.read_bytes().count(b"\n") if directory.journal.exists() else 0
    if steps == 0 or steps in spent:
        return
    with suppress(psutil.Error):  # the stage ends
        ranks = [process for process in not_of_ray() if process.cmdline()[1:4] == ["-P", "-m", "grpo_tasks.grpo"]]
        if len(ranks) == nodes:
            spent[steps] = sum(computing_s(rank) for rank in ranks)


def predicted(found: dict[str, float], link: Link, processes: int, mean_tokens: float, directory: StageDir) -> Forecast:
    """The forecast with this machine as the card."""
    spec = StageSpec.load(directory.spec)
    card = Card("this machine", found["flops"], found["bandwidth"], 8e9, link)
    architecture = json.loads((Path(spec.model.path) / "config.json").read_text(encoding="utf-8"))
    work = workload(
        architecture, spec.model, spec.rollout, spec.stage, prompt_tokens=PROMPT, mean_tokens=round(mean_tokens), pass_tokens=1
    )
    assumed = Assumed(1.0, found["few"] / found["flops"], 1.0, 1.0, found["step_s"])
    return ScaleModel(work, Cluster(card, processes, link), assumed).forecast(Layout(processes, 0))


def main() -> None:
    """Alternate predictions and stages, print and write the ratios."""
    parser = argparse.ArgumentParser(description="Updates of real stages against the prediction.")
    parser.add_argument("--nodes", action="store_true", help="on Ray nodes of this machine (needs the extra ray)")
    nodes = parser.parse_args().nodes
    torch.set_num_threads(1)
    # Ray's workers are nice to everything else by default, and each would take all cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        model = base(root / "base")
        gradient = 4 * 2**20
        for turn in range(TURNS):
            link = Link("gloo", gradient / gradient_sums([gradient])[gradient], 1e-4)
            for count in COUNTS[nodes]:
                found = speeds_of(model, count)
                real = (on_nodes if nodes else measured)(model, count, root / f"{turn}-{count}")
                guess = predicted(found, link, count, real[MEAN_LENGTH], StageDir(root / f"{turn}-{count}" / "stage"))
                row = {"processes": count, "turn": turn, "predicted": guess.step_s, "measured": real[STEP_TIME]}
                row |= {"sampling": guess.sampling_s, "training": guess.training_s} | found
                rows.append(row)
                print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
    for count in COUNTS[nodes]:
        ratios = [row["predicted"] / row["measured"] for row in rows if row["processes"] == count]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{count} {'nodes' if nodes else 'processes'}: predicted / measured {middle:.2f} ({low:.2f} to {high:.2f})")
    OUT[nodes].parent.mkdir(exist_ok=True)
    OUT[nodes].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
