"""`make count`: what an update and a decoding step would ask of a GPU, counted without one.

Two tables: the figures that have a limit, for the shape of Qwen2.5-1.5B, and passes of both shapes with ranks, groups and lengths
that are usual. Bytes are those of torch's meta device, which runs the real code of the update at full size without numbers.
Kernels are operations that are no views. How often host and GPU wait for each other is counted on the pretend card of the tests.
No card has run any of it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, Qwen2Config, Qwen3_5TextConfig

from grpo_tasks.grpo.learner import make_optimizer
from grpo_tasks.planning.live_memory import LiveMemory
from grpo_tasks.planning.memory_plan import GIB, META, Groups, PassCounts, StagePlan, count_pass, meta_policy
from grpo_tasks.policy.logprobs import score_tokens
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from tests.benchmarks.count_decode import decode_counts
from tests.benchmarks.shapes import HYBRIDS, PERIOD, SHAPES

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(".bench/counts.json")
MIB = 2**20
SHAPE = SHAPES["qwen2.5-1.5b"]
VOCABULARY = 151_936
PROMPT = 512
EVEN = Groups.equal(prompts=2, prompt_length=PROMPT, group_size=16, completion_length=1024)
MIXED = Groups([PROMPT, 301], [[64 + 61 * index for index in range(16)], [1024 - 37 * index for index in range(16)]])
SIZES = ((1, 2), (1, 18), (4, 14), (16, 16))
"""Groups, and completions in each: passes of 2,600, 19,000, 59,000 and 270,000 tokens."""
LAYERS = 24
"""Layers that counts of kernels are given for."""
ADAPTED = 2 * 7 * SHAPE["num_hidden_layers"]
"""Matrices of an adapter on all linear layers."""
Waits = dict[str, dict[str, dict[str, int]]]
"""As count_waits.py prints them."""
RANKS, GROUP_SIZES, LENGTHS = (16, 32), (8, 16), (64, 256, 1024)


@dataclass(frozen=True)
class Count:
    """One row of the table."""

    figure: str
    before: str
    """What the review of 2026-11-22 counted."""
    limit: float
    now: float


@dataclass(frozen=True)
class PassRow:
    """One row of the second table: a pass of all layers over two groups with prompts of 512 tokens, bfloat16."""

    shape: str
    rank: int
    group: int
    completions: str
    """Their length in tokens."""
    saved_mib: float
    """Bytes saved for the backward pass, a token."""
    checkpointed_mib: float
    """The same with gradient checkpointing."""
    checkpointed_peak_mib: float
    kernels: float
    """Of LAYERS layers, forward and backward, without the head."""
    padding_share: float
    """Tokens computed / tokens that count."""
    prompt_share: float
    """Prompt tokens computed / prompt tokens."""
    attention: dict[str, int]
    """Attention calls of the forward pass by the kernel asked for."""


def architecture(layers: int, shape: str = "qwen2.5-1.5b") -> PreTrainedConfig:
    """The shape with that many layers."""
    if shape in HYBRIDS:
        return Qwen3_5TextConfig(**HYBRIDS[shape] | {"num_hidden_layers": layers})
    widths = SHAPES[shape] | {"num_hidden_layers": layers}
    return Qwen2Config(**widths, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True)


def count(layers: int, groups: Groups = EVEN, *, shape: str = "qwen2.5-1.5b", rank: int = 32, **model: Any) -> PassCounts:
    """One pass with an adapter on all linear layers, bfloat16."""
    config = ModelConfig.model_validate({"dtype": "bfloat16", "lora": {"r": rank, "lora_alpha": 2 * rank}} | model)
    return count_pass(meta_policy(architecture(layers, shape), config), groups)


def plan_of(
    architecture: PreTrainedConfig, *, resources: ResourcesConfig | None = None, entropy_coef: float = 0.0, **model: Any
) -> StagePlan:
    """The plan of a stage with 16 completions of 1,024 tokens to each prompt of 512, and an adapter of rank 32, bfloat16."""
    config = ModelConfig.model_validate({"dtype": "bfloat16", "lora": {"r": 32, "lora_alpha": 64}} | model)
    sizes = {"num_generations": 16, "per_device_train_batch_size": 16, "max_tokens_per_microbatch": "auto"}
    stage = StageConfig(name="s", rewards=["format"], entropy_coef=entropy_coef, **sizes)
    rollout = RolloutConfig(max_completion_length=1024)
    return StagePlan(config, rollout, stage, resources or ResourcesConfig(), architecture, PROMPT, 80 * GIB)


def plan_errors(plan: StagePlan, sizes: Sequence[tuple[int, int]] = SIZES) -> list[float]:
    """Planned bytes / counted bytes - 1 of passes with so many groups and completions in each."""
    length, policy = plan.rollout.max_completion_length, meta_policy(plan.architecture, plan.model)
    bonus = plan.stage.entropy_coef > 0
    each = [Groups.equal(groups, plan.prompt_length, size, length) for groups, size in sizes]
    passes = [count_pass(policy, groups, entropy_gradients=bonus) for groups in each]
    return [plan.update(found.tokens) / found.peak - 1 for found in passes]


def pass_rows() -> Iterator[PassRow]:
    """Passes of a few layers and of twice as many, scaled up."""
    for shape in ("qwen3.5-0.8b", "qwen3.5-2b"):
        # With what torch alone keeps and calls: the kernels of flash-linear-attention do not run on the meta device.
        yield pass_row(shape, 16, 8, "256", Groups.equal(2, PROMPT, 8, 256))
    for shape, rank, size in product(SHAPES, RANKS, GROUP_SIZES):
        mixed = Groups([PROMPT, 301], [[64 + 960 * index // (size - 1) for index in range(size)]] * 2)
        even = {str(length): Groups.equal(2, PROMPT, size, length) for length in LENGTHS}
        for completions, groups in (even | {"64 to 1024": mixed}).items():
            yield pass_row(shape, rank, size, completions, groups)


def pass_row(shape: str, rank: int, size: int, completions: str, groups: Groups) -> PassRow:
    """One row."""
    layers = (HYBRIDS | SHAPES)[shape]["num_hidden_layers"]
    few = PERIOD if shape in HYBRIDS else 2
    two, four = (count(number, groups, shape=shape, rank=rank) for number in (few, 2 * few))
    less, more = (count(number, groups, shape=shape, rank=rank, gradient_checkpointing=True) for number in (few, 2 * few))

    def scaled(of_two: int, of_four: int) -> float:
        return of_two + (of_four - of_two) / few * (layers - few)

    own = groups.tokens - sum(groups.prompts)
    return PassRow(
        shape, rank, size, completions,
        saved_mib=scaled(two.saved, four.saved) / groups.tokens / MIB,
        checkpointed_mib=scaled(less.saved, more.saved) / groups.tokens / MIB,
        checkpointed_peak_mib=scaled(less.peak, more.peak) / groups.tokens / MIB,
        kernels=LAYERS * (four.kernels - two.kernels) / few,
        padding_share=two.tokens / groups.tokens,
        # What is not an own token of a completion is a prompt, once or again.
        prompt_share=(two.tokens - own) / sum(groups.prompts),
        attention={name: round(scaled(two.attention[name], number)) for name, number in four.attention.items()},
    )  # fmt: skip


def update_counts() -> Iterator[Count]:
    """Counts of an update pass."""
    whole = count(SHAPE["num_hidden_layers"])
    yield Count("saved_bytes_per_token, MiB", "4.1", 1.6, whole.saved / whole.tokens / MIB)
    dropout = count(SHAPE["num_hidden_layers"], lora={"r": 32, "lora_alpha": 64, "lora_dropout": 0.05})
    yield Count("the same with dropout 0.05 (no preset has it), MiB", "6.0", float("inf"), dropout.saved / dropout.tokens / MIB)
    checkpointed = count(SHAPE["num_hidden_layers"], gradient_checkpointing=True)
    yield Count("with checkpointing: saved, MiB", "no sharing", 0.10, checkpointed.saved / checkpointed.tokens / MIB)
    yield Count("with checkpointing: peak, MiB", "no sharing", 0.25, checkpointed.peak / checkpointed.tokens / MIB)
    errors = plan_errors(plan_of(architecture(SHAPE["num_hidden_layers"]), gradient_checkpointing=True))
    yield Count("grpo plan against counted passes up to 270k tokens", "0.55", 0.03, max(map(abs, errors)))
    two, four = (count(layers, MIXED) for layers in (2, 4))
    layer = (four.kernels - two.kernels) / 2
    yield Count(f"kernels_per_pass, {LAYERS} layers, without the head", "11,700", 4500, LAYERS * layer)
    yield Count("kernels of the head, 10k tokens, vocabulary 152k", "2,200", 250, head_kernels())
    yield Count("padding_share, mixed lengths", "padded", 1.0, two.tokens / MIXED.tokens)
    yield Count("prompt_tokens_computed / prompt tokens", "G", 1.0, 1 + (whole.tokens - EVEN.tokens) / sum(EVEN.prompts))
    yield Count("attention calls with a dense mask", "every layer", 0, whole.masks)
    waits = count_waits()
    yield from wait_rows(waits)
    yield Count("copies of pageable memory, update and rollout", "-", 0, float(sum(pageable(waits).values())))
    yield Count(f"kernels of an optimizer step, {ADAPTED} matrices", "3,530", 12, optimizer_kernels())


def wait_rows(waits: Waits) -> Iterator[Count]:
    """How often host and GPU wait for each other."""
    yield Count("times that the host waits to build and score a pass", "2-3", 0, float(sum(waits["pass"]["host"].values())))
    # The host reads the figures and the norm of the gradient. The GPU waits for the first microbatch, and after each read.
    yield Count("times that the host waits for the GPU in an update", "-", 2, float(sum(waits["update"]["host"].values())))
    yield Count("times that the GPU waits for the host in an update", "-", 3, float(sum(waits["update"]["gpu"].values())))
    rollout = waits["rollout"]
    of = "a rollout of 64 completions, 512 steps"
    yield Count(f"times that the host waits for the GPU in {of}", "-", 65, float(sum(rollout["host"].values())))
    yield Count(f"times that the GPU waits for the host in {of}", "-", 2, float(sum(rollout["gpu"].values())))


def pageable(waits: Waits) -> dict[str, int]:
    """Those of the host that are copies to the device from memory that is not pinned."""
    host = [found["host"].items() for found in waits.values()]
    return {line: times for items in host for line, times in items if line.endswith("of pageable memory")}


def optimizer_kernels() -> int:
    """Operations of a step on a card, for the adapter of all layers; one over all matrices counts as one."""
    stage = StageConfig(name="s", rewards=["format"])
    with FakeTensorMode():
        adapter = [torch.nn.Parameter(torch.empty(4, 2, device="cuda")) for _ in range(ADAPTED)]
        for matrix in adapter:
            matrix.grad = torch.empty_like(matrix)
        optimizer = make_optimizer(stage, adapter)
        optimizer.step()  # the first one makes the moments
        with LiveMemory() as memory:
            optimizer.step()
    return memory.kernels


def count_waits() -> Waits:
    """How often "host" and "gpu" wait for each other in a "pass", an "update", a "first rollout" and a "rollout", and where."""
    command = [sys.executable, "-m", "tests.benchmarks.count_waits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: Waits = json.loads(done.stdout)
    return found


def decode_rows() -> Iterator[Count]:
    """Counts of a decoding step."""
    torch.set_num_threads(1)
    found = decode_counts()
    yield Count(f"kernels_per_decode_step, {LAYERS} layers", "689-857", 650, found["kernels_per_decode_step"])
    yield Count("the same, adapter apart from 16-bit weights", "-", 650, found["kernels_per_decode_step_adapter"])
    yield Count("host_syncs_per_decode_step", "2", 0.15, found["host_syncs_per_decode_step"])
    yield Count("captures, first rollout of 64 rows", "16", 1, found["captures_of_the_first_rollout"])
    yield Count("captures, the two rollouts after it", "32", 0, found["captures_of_a_later_rollout"])
    yield Count("passes over the logits per token", "15", 3, found["passes_per_token"])
    yield Count("bytes that outlive a rollout of 64 x 512 tokens, MiB", "a batch, by chance", 1100, found["kept_bytes"] / MIB)


def head_kernels(tokens: int = 10_000) -> int:
    """Kernels of the language-model head, forward and backward."""
    head = torch.nn.Linear(SHAPE["hidden_size"], VOCABULARY, bias=False, device=META, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(tokens, SHAPE["hidden_size"], device=META, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device=META)
    with LiveMemory() as memory:
        logps, _ = score_tokens(head, hidden, targets, temperature=1.0)
        logps.sum().backward()
    return memory.kernels


def main() -> int:
    """Count, print and save; the exit status is 1 if a count is above its limit."""
    console = Console(width=130)
    counts = [*update_counts(), *decode_rows()]
    table = Table("figure", "before", "at most", "now", title="Qwen2.5-1.5B, r = 32, bfloat16; counted, not run")
    for row in counts:
        mark = "" if row.now <= row.limit + 1e-9 else " [red]above[/]"
        table.add_row(row.figure, row.before, f"{row.limit:,.6g}", f"{row.now:,.4g}{mark}")
    console.print(table)
    passes = list(pass_rows())
    columns = ("shape", "r", "G", "tokens", "saved", "checkpointed", "its peak", "kernels", "padding", "prompts", "attention")
    table = Table(*columns, title="A pass over two groups with prompts of 512 tokens, all layers; MiB a token; counted, not run")
    for found in passes:
        *names, _ = values = list(asdict(found).values())
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in names), _listed(values[-1]))
    console.print(table)
    OUT.parent.mkdir(exist_ok=True)
    written = {row.figure: asdict(row) for row in counts} | {"passes": [asdict(found) for found in passes]}
    OUT.write_text(json.dumps(written, indent=2), encoding="utf-8")
    return int(any(row.now > row.limit + 1e-9 for row in counts))


def _listed(attention: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in attention.items())


if __name__ == "__main__":
    sys.exit(main())
