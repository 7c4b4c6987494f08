"""`make bench-real MODEL=DIR`: what a real language model costs on this machine's CPU.

The ratios go to the screen and to .bench/real.json.

Two questions. How near is an update, and a decoding step, to what the same cores can multiply? And how fast and how large is an
update beside TRL's, with the same weights, prompts, lengths, dtype and threads?

    python -m tests.benchmarks.real DIR               everything (half an hour)
    python -m tests.benchmarks.real DIR --share       the first question only
"""

import json
import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.benchmarks.__main__ import OUT, Line, best, report
from tests.benchmarks.sides import Work

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


def weights(folder: str) -> tuple[int, int]:
    """Elements of the matrices of all layers, and of the head; both are multiplied with every position that needs them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    head = model.get_output_embeddings()
    layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    return sum(part.weight.numel() for part in layers), head.weight.numel()


def shares(work: Work) -> list[Line]:
    """Share of the machine's rate that the model's own products have of an update without its rollout, and of a rollout.

    Counted once, whatever is computed twice: forwards, and backwards to the activations (the matrices are frozen), so 2 and 2
    operations an element and position. Attention and the adapter are left out. The rollout has its prompts in it.
    """
    layers, head = weights(work.model)
    prompts = work.prompts * work.prompt_tokens
    drawn = work.completions * work.completion_tokens
    rate = machine_rate(getattr(torch, work.dtype))
    timing = best([("ours", work)])[0]
    update = 4 * ((prompts + drawn) * layers + drawn * head) / (timing["step_s"] - timing["rollout_s"])
    rollout = 2 * ((prompts + drawn) * layers + drawn * head) / timing["rollout_s"]
    what = f"{work.completions} x {work.completion_tokens} tokens, {work.dtype}"
    found = [("update share", f"update without its rollout, {what}", update), ("decoding share", f"rollout, {what}", rollout)]
    return [
        Line(f"{name}, {work.dtype}", f"{said}: of large products", "GFLOP/s", done / 1e9, rate / 1e9, True, PROMISED[name])
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


def main() -> None:
    """Measure, print and write."""
    folder, began = sys.argv[1], time.monotonic()
    if not (Path(folder) / "config.json").is_file():
        raise SystemExit(f"{folder} is no model; fix: MODEL=DIR, a folder with config.json, safetensors and a tokenizer")
    lines = [line for dtype in ("float32", "bfloat16") for line in shares(replace(SHORT, model=folder, dtype=dtype))]
    if "--share" not in sys.argv:
        for work in (SHORT, LONG):
            for dtype in ("float32", "bfloat16"):
                lines += beside_trl(replace(work, model=folder, dtype=dtype))
    report("real", lines, time.monotonic() - began)
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {THREADS} threads, load {load}; written to {OUT / 'real.json'}")
    print(json.dumps([line.name for line in lines if line.promised and line.ratio < line.promised]), "below what is promised")


if __name__ == "__main__":
    main()
