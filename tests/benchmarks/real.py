"""`make bench-real MODEL=DIR`: what a real language model costs on this machine's CPU.

The ratios go to the screen and to .bench/real.json.

Two questions. How near is an update, and a decoding step, to what the same cores can multiply? And how fast and how large is an
update beside TRL's, with the same weights, prompts, lengths, dtype and threads?

    python -m tests.benchmarks.real [DIR]             everything (half an hour)
    python -m tests.benchmarks.real [DIR] --share     the first question only
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_tasks.policy.logprobs import chunk_rows
from tests.benchmarks.comparison import OUT, Line, best, report
from tests.benchmarks.sides import Work
from tests.real_model import real_model_folder

THREADS = 2
SIDE = 2_048
"""Rows and columns of the products that say what the machine can do."""
SHORT = Work("", prompt_tokens=96, completion_tokens=64, prompts=2, group=8, updates=2, beta=0.0, threads=THREADS)
LONG = replace(SHORT, prompt_tokens=512)
PROMISED = {"update share": 0.75, "decoding share": 0.5, "update, 96": 2.0, "update, 512": 2.5, "memory": 2.0}


def machine_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of large matrix products, the best of ten."""
    torch.set_num_threads(THREADS)
    left, right = torch.rand(SIDE, SIDE).to(dtype), torch.rand(SIDE, SIDE).to(dtype)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(times)


@dataclass(frozen=True)
class Products:
    """The matrix products of a model: what an update and a rollout cannot do without, whatever else they do."""

    layers: list[tuple[int, int]]
    """Outputs and inputs of the matrices of all layers, which are multiplied with every token."""
    head: tuple[int, int]
    """Those of the head, which only what is drawn goes through."""

    @classmethod
    def of(cls, folder: str) -> "Products":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        head = model.get_output_embeddings()
        layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
        return cls([tuple(part.weight.shape) for part in layers], tuple(head.weight.shape))

    def operations(self, tokens: int, drawn: int) -> int:
        """Of one direction. The matrices are frozen, so the way back has one product each, too."""
        return 2 * (tokens * sum(out * into for out, into in self.layers) + drawn * self.head[0] * self.head[1])

    @torch.inference_mode()
    def seconds(self, dtype: torch.dtype, tokens: int, drawn: int, *, backward: bool) -> float:
        """How long these products take alone, the best of five; every matrix is a tensor of its own, as in a model.

        Without the way back, as a decoding step takes them (fused_decoder.py): in float32 W x^T.
        """
        chunk = chunk_rows(self.head[0], torch.device("cpu"))
        sized = [(shape, tokens) for shape in self.layers]
        sized += [(self.head, min(chunk, drawn - row)) for row in range(0, drawn, chunk)]
        head = torch.rand(*self.head).to(dtype)
        own = [torch.rand(*shape).to(dtype) for shape in self.layers] + [head] * (len(sized) - len(self.layers))
        given = {(rows, into): torch.rand(rows, into).to(dtype) for (_, into), rows in sized}
        slopes = {(rows, out): torch.rand(rows, out).to(dtype) for (out, _), rows in sized} if backward else {}
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for ((out, into), rows), matrix in zip(sized, own, strict=True):
                if not backward and dtype == torch.float32:
                    matrix @ given[rows, into].t()
                    continue
                functional.linear(given[rows, into], matrix)
                if backward:
                    slopes[rows, out] @ matrix
            times.append(time.perf_counter() - began)
        return min(times)


def shares(work: Work) -> list[Line]:
    """Share of the machine's rate that the model's own products have of an update without its rollout, and of a rollout.

    Counted once, whatever is computed twice: forwards, and backwards to the activations, because the matrices are frozen.
    Attention and the adapter are left out. The rollout has its prompts in it. What the same products reach alone, at these sizes,
    is the most that anything could.
    """
    products, dtype = Products.of(work.model), getattr(torch, work.dtype)
    prompts, drawn = work.prompts * work.prompt_tokens, work.completions * work.completion_tokens
    rate = machine_rate(dtype)
    timing = best([("ours", work)])[0]
    update, rollout = 2 * products.operations(prompts + drawn, drawn), products.operations(prompts + drawn, drawn)
    alone = products.seconds(dtype, prompts + drawn, drawn, backward=True)
    steps = products.seconds(dtype, work.completions, work.completions, backward=False) * work.completion_tokens
    what = f"{work.completions} x {work.completion_tokens} tokens, {work.dtype}"
    found = [
        ("update share", f"update without its rollout, {what}", update / (timing["step_s"] - timing["rollout_s"])),
        ("products of an update", f"its products alone, {what}", update / alone),
        ("decoding share", f"rollout, {what}", rollout / timing["rollout_s"]),
        ("products of a rollout", f"its products alone, {what}", products.operations(drawn, drawn) / steps),
    ]
    return [
        Line(f"{name}, {work.dtype}", f"{said}: of large products", "GFLOP/s", done / 1e9, rate / 1e9, True, PROMISED.get(name))
        for name, said, done in found
    ]


def beside_trl(work: Work) -> list[Line]:
    """Duration and resident memory of an update of each side."""
    ours, theirs = best([("ours", work), ("theirs", work)])
    what = f"{work.completions} x {work.completion_tokens} tokens to prompts of {work.prompt_tokens}, {work.dtype}"
    name, memory = f"{work.prompt_tokens}, {work.dtype}", [side["peak_bytes"] / 2**30 for side in (ours, theirs)]
    promised = PROMISED[f"update, {work.prompt_tokens}"]
    return [
        Line(f"update, {name}", f"update, {what}", "s", ours["step_s"], theirs["step_s"], promised=promised),
        Line(f"memory, {name}", f"peak resident memory, {what}", "GiB", *memory, promised=PROMISED["memory"]),
    ]


def measured(compare: Callable[[Work], list[Line]], folder: str, work: Work) -> list[Line]:
    """In both dtypes. Each line is printed as it is known, because all of it takes half an hour."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        for line in compare(replace(work, model=folder, dtype=dtype)):
            print(f"{line.what}: {line.ours:.4g} and {line.theirs:.4g} {line.unit}, {line.ratio:.2f}", flush=True)
            lines.append(line)
    return lines


def share_lines(folder: str) -> list[Line]:
    """Shares of the machine's rate, in both dtypes."""
    return measured(shares, folder, SHORT)


def main() -> None:
    """Measure, print and write."""
    try:
        folder = str(real_model_folder(next((given for given in sys.argv[1:] if not given.startswith("--")), None)))
    except FileNotFoundError as absent:
        print(f"skipped: {absent}; fix: MODEL=DIR, a folder with config.json, safetensors and a tokenizer")
        return
    began = time.monotonic()
    lines = share_lines(folder)
    if "--share" not in sys.argv:
        lines += measured(beside_trl, folder, SHORT) + measured(beside_trl, folder, LONG)
    report("real", lines, time.monotonic() - began)
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {THREADS} threads, load {load}; written to {OUT / 'real.json'}")
    print(json.dumps([line.name for line in lines if line.promised and line.ratio < line.promised]), "below what is promised")


if __name__ == "__main__":
    main()
