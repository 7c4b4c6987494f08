"""`make count`: what an update and a decoding step would ask of a GPU, counted without one, for the shape of Qwen2.5-1.5B.

Bytes are those of torch's meta device, which runs the real code of the update at full size without numbers. Kernels are
operations that are no views. No card has run any of it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from grpo_tasks.planning.live_memory import LiveMemory
from grpo_tasks.planning.update_pass import META, Groups, PassCounts, count_pass, meta_policy
from grpo_tasks.policy.logprobs import CHUNK_ELEMENTS_GPU, score_tokens
from schemas.config.model import ModelConfig
from tests.benchmarks.count_decode import decode_counts
from tests.benchmarks.shapes import SHAPES

OUT = Path(".bench/counts.json")
MIB = 2**20
SHAPE = SHAPES["qwen2.5-1.5b"]
VOCABULARY = 151_936
EVEN = Groups.equal(prompts=2, prompt_length=512, group_size=16, completion_length=1024)
MIXED = Groups([512, 301], [[64 + 61 * index for index in range(16)], [1024 - 37 * index for index in range(16)]])
LAYERS = 24
"""Layers that counts of kernels are given for."""


@dataclass(frozen=True)
class Count:
    """One row of the table."""

    figure: str
    before: str
    """What the review of 2026-11-22 counted."""
    limit: float
    now: float


def architecture(layers: int) -> Qwen2Config:
    """The shape with that many layers."""
    return Qwen2Config(
        **SHAPE | {"num_hidden_layers": layers}, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True
    )


def count(layers: int, groups: Groups = EVEN, **model: Any) -> PassCounts:
    """One pass with an adapter of rank 32 on all linear layers, bfloat16."""
    config = ModelConfig.model_validate({"dtype": "bfloat16", "lora": {"r": 32, "lora_alpha": 64}} | model)
    return count_pass(meta_policy(architecture(layers), config), groups)


def update_counts() -> Iterator[Count]:
    """Counts of an update pass."""
    whole = count(SHAPE["num_hidden_layers"])
    yield Count("saved_bytes_per_token, MiB", "4.1", 1.6, whole.saved / whole.tokens / MIB)
    dropout = count(SHAPE["num_hidden_layers"], lora={"r": 32, "lora_alpha": 64, "lora_dropout": 0.05})
    yield Count("the same with dropout 0.05 (no preset has it), MiB", "6.0", float("inf"), dropout.saved / dropout.tokens / MIB)
    checkpointed = count(SHAPE["num_hidden_layers"], gradient_checkpointing=True)
    yield Count("with checkpointing: saved, MiB", "no sharing", 0.10, checkpointed.saved / checkpointed.tokens / MIB)
    yield Count("with checkpointing: peak, MiB", "no sharing", 0.25, checkpointed.peak / checkpointed.tokens / MIB)
    two, four = (count(layers, MIXED) for layers in (2, 4))
    layer = (four.kernels - two.kernels) / 2
    yield Count(f"kernels_per_pass, {LAYERS} layers, without the head", "11,700", 4500, LAYERS * layer)
    yield Count("kernels of the head, 10k tokens, vocabulary 152k", "2,200", 250, head_kernels())
    yield Count("padding_share, mixed lengths", "padded", 1.0, two.tokens / MIXED.tokens)
    yield Count("attention calls with a mask", "every layer", 0, whole.masks)
    # The meta device raises an error where the host would wait for a number.
    yield Count("host_syncs to build and score a pass", "2-3", 0, 0)


def decode_rows() -> Iterator[Count]:
    """Counts of a decoding step."""
    torch.set_num_threads(1)
    found = decode_counts()
    yield Count(f"kernels_per_decode_step, {LAYERS} layers", "689-857", 650, found["kernels_per_decode_step"])
    yield Count("the same, adapter apart from 16-bit weights", "-", 650, found["kernels_per_decode_step_adapter"])
    yield Count("host_syncs_per_decode_step", "2", 0.15, found["host_syncs_per_decode_step"])
    yield Count("rows decoded / rows alive, 12 widths", "1.0", 1.2, found["rows_decoded_per_row_alive"])


def head_kernels(tokens: int = 10_000) -> int:
    """Kernels of the language-model head, forward and backward."""
    head = torch.nn.Linear(SHAPE["hidden_size"], VOCABULARY, bias=False, device=META, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(tokens, SHAPE["hidden_size"], device=META, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device=META)
    with LiveMemory() as memory:
        logps, _ = score_tokens(head, hidden, targets, temperature=1.0, chunk_elements=CHUNK_ELEMENTS_GPU)
        logps.sum().backward()
    return memory.kernels


def main() -> int:
    """Count, print and save; the exit status is 1 if a count is above its limit."""
    counts = [*update_counts(), *decode_rows()]
    table = Table("figure", "before", "at most", "now", title="Qwen2.5-1.5B, r = 32, bfloat16; counted, not run")
    for row in counts:
        mark = "" if row.now <= row.limit + 1e-9 else " [red]above[/]"
        table.add_row(row.figure, row.before, f"{row.limit:,.6g}", f"{row.now:,.4g}{mark}")
    Console(width=120).print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({row.figure: asdict(row) for row in counts}, indent=2), encoding="utf-8")
    return int(any(row.now > row.limit + 1e-9 for row in counts))


if __name__ == "__main__":
    sys.exit(main())
