"""What a decoding step of the local engine would ask of a GPU, counted on a CPU.

Kernels are operations that are no views. They are counted on one and on two layers of the real width and scaled to 24 layers; the
difference of the two is one layer. The buckets are those of a GPU, and so are captures: tapes.py captures and replays steps here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from grpo_tasks.planning.live_memory import VIEWS
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout import decoding_cache, decoding_loop, fused_decoder
from grpo_tasks.rollout.decoding_loop import Buckets, DecodingLoop, sample_tokens
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.tapes import Tapes

GPU = Buckets.of(torch.device("cuda"))
LAYERS, ROWS, PROMPTS, LENGTH = 24, 64, 8, 512
ENDS = range(4)
"""Tokens that end a completion. Each has a probability of about 1 / 512, so that a completion has 128 tokens on average."""
ENDS_SOON = range(16)
"""The same for 32 tokens on average: whether a rollout captures a graph does not depend on its length, up to 512 tokens."""
VOCABULARY = 151_936
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided"])
READS = frozenset(["tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select"])
READS |= {"__bool__", "__int__", "__float__", "__index__", "is_nonzero"}


@dataclass
class Operations(TorchDispatchMode):
    """Records each operation that is no view, with the shapes of its tensors."""

    found: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        found = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if name not in EMPTY and not (_is_view(found, given) and not func._schema.is_mutable):
            self.found.append((name, *[(tuple(value.shape), value.dtype, value.stride()) for value in given]))
        return found


def _is_view(found: Any, given: list[torch.Tensor]) -> bool:
    """True if the result lies in the memory of an argument: a reshape may be a view or a copy, whatever its name."""
    memory = {value.untyped_storage().data_ptr() for value in given}
    results = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
    return bool(results) and all(value.untyped_storage().data_ptr() in memory for value in results)


class Reads(TorchFunctionMode):
    """Counts the calls that make the host wait for the device: reads of a number, and copies to the device that block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.count += name in READS or (_goes_to_a_device(name, args, kwargs) and not kwargs.get("non_blocking"))
        return func(*args, **kwargs)


def _goes_to_a_device(name: str, args: Any, kwargs: Any) -> bool:
    """True if our code moves numbers from the host to a device by this call. Each device is a CPU here.

    The model's own code calls `to` for tensors that are already there.
    """
    # Two frames up is whoever made the call.
    if "/grpo_tasks/" not in sys._getframe(2).f_code.co_filename:
        return False
    if name in {"tensor", "as_tensor"}:
        return kwargs.get("device") is not None
    return name == "to" and any(isinstance(value, torch.device | str) for value in [*args, kwargs.get("device")])


class Passes(TorchDispatchMode):
    """Counts the operations that read all logits of so many rows. A gather reads what it returns, and a view nothing."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [value.numel() for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        # The last block of the vocabulary may be read by itself.
        reads = func._schema.name.partition("::")[2] not in {*VIEWS, "gather"}
        self.count += reads and any(size > 0.9 * self.elements for size in sizes)
        return func(*args, **(kwargs or {}))


def passes_per_token(dtype: torch.dtype, sampling: Sampling) -> int:
    """Operations that read all logits to draw a token, on the meta device, which takes the ways of a GPU."""
    logits = torch.empty(ROWS, VOCABULARY, dtype=dtype, device="meta")
    with Passes(logits.numel()) as passes:
        sample_tokens(logits, torch.empty(ROWS, dtype=torch.float64, device="meta"), sampling)
    return passes.count


@contextmanager
def each_step(before: Callable[[DecodingLoop], None], after: Callable[[DecodingLoop], None]) -> Iterator[None]:
    """Calls both around every step of every loop."""
    plain = DecodingLoop._step

    def watched(loop: DecodingLoop) -> None:
        before(loop)
        plain(loop)
        after(loop)

    # An engine makes its loops itself, one per batch.
    DecodingLoop._step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        DecodingLoop._step = plain  # type: ignore[method-assign]


@contextmanager
def gpu_ways() -> Iterator[None]:
    """A step takes the ways of a GPU, where tokens are drawn by more kernels and products are put into their places by fewer."""

    def multiplied(part: Tensor, multiply: Callable[..., Tensor]) -> None:
        multiply(out=part)

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (decoding_loop, "_draw", decoding_loop.draw_in_blocks),
        (decoding_cache, "multiply_into", multiplied),
        (fused_decoder, "multiply_into", multiplied),
    ]
    kept = [getattr(module, name) for module, name, _ in places]
    for module, name, way in places:
        setattr(module, name, way)
    try:
        yield
    finally:
        for (module, name, _), way in zip(places, kept, strict=True):
            setattr(module, name, way)


def decode_counts() -> dict[str, float]:
    """Counts of a step with 1.5B widths, and of whole completions with a small model.

    `kernels_per_decode_step` is that of plain weights, `kernels_per_decode_step_adapter` that of a 16-bit base whose adapter
    (r = 32, all layers) stays apart.
    """
    counts = {}
    for name, adapter in (("kernels_per_decode_step", False), ("kernels_per_decode_step_adapter", True)):
        one, two = (_kernels(layers, adapter=adapter) for layers in (1, 2))
        counts[name] = float(one + (LAYERS - 1) * (two - one))
    engine = _engine(small_model(NARROW, 1, torch.float32))
    engine._end_ids = frozenset(ENDS)
    steps = [0]

    def count(_: DecodingLoop) -> None:
        steps[0] += 1

    # The check against the model's own forward pass comes before the first completion, once for an engine.
    engine.generate(rollout_requests()[:1], Sampling.of(RolloutConfig(max_completion_length=1)))
    with each_step(count, lambda _: None), Reads() as reads:
        engine.generate(rollout_requests(), Sampling.of(RolloutConfig(max_completion_length=LENGTH)))
    counts["host_syncs_per_decode_step"] = reads.count / steps[0]
    counts["passes_per_token"] = float(passes_per_token(torch.bfloat16, Sampling.of(RolloutConfig())))
    first, later = captures()
    counts |= {"captures_of_the_first_rollout": float(first), "captures_of_a_later_rollout": float(later)}
    one, two = (_kept_bytes(layers) for layers in (1, 2))
    counts["kept_bytes"] = float(one + (SHAPES["qwen2.5-1.5b"]["num_hidden_layers"] - 1) * (two - one))
    return counts


def captures() -> tuple[int, int]:
    """Graphs that a rollout of 64 completions captures, and that the two after it capture, with other prompts and lengths."""
    tapes = Tapes()
    engine = _engine(small_model(NARROW, 1, torch.float32), capture=tapes)
    engine._end_ids = frozenset(ENDS_SOON)
    found = []
    for number in range(3):
        engine.generate(rollout_requests(number), Sampling.of(RolloutConfig(max_completion_length=2 * LENGTH)))
        engine.sync()
        found.append(tapes.count)
    return found[0], found[-1] - found[0]


def _kept_bytes(layers: int) -> int:
    """Bytes that an engine keeps behind a rollout of 64 completions of at most 512 tokens, with heads as those of 1.5B."""
    shape = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 2}
    engine = _engine(small_model(shape, layers, torch.bfloat16), capture=Tapes())
    engine._end_ids = frozenset(range(LENGTH))  # whatever comes
    engine.generate(rollout_requests(), Sampling.of(RolloutConfig(max_completion_length=LENGTH)))
    return engine._graphs.num_bytes


def _kernels(layers: int, *, adapter: bool) -> int:
    policy: CausalLM = small_model(SHAPES["qwen2.5-1.5b"], layers, torch.bfloat16)
    if adapter:
        lora = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy = cast("PeftModel", get_peft_model(policy, lora)).eval()
    engine = _engine(policy)
    engine._end_ids = frozenset()
    found: list[int] = []
    with gpu_ways(), Operations() as operations, each_step(
        lambda _: operations.found.clear(), lambda _: found.append(len(operations.found))
    ):  # fmt: skip
        engine.generate(rollout_requests()[:11], Sampling.of(RolloutConfig(max_completion_length=4)))
    assert engine._fused is not None
    # The first step makes constants, which later ones find.
    assert len(set(found[1:])) == 1
    return found[-1]


def small_model(shape: dict[str, int], layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """A random Qwen2 of that shape and so many layers, whose tokens are about equally likely."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{**shape, "num_hidden_layers": layers}, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval().requires_grad_(False)


def _engine(model: CausalLM, capture: Tapes | None = None) -> LocalEngine:
    engine = LocalEngine(model, load_tokenizer(ModelRef(path="embedded:base")), capture=capture)
    engine._buckets = GPU
    return engine


def rollout_requests(number: int = 0) -> list[Request]:
    """Those of a rollout of 64 completions; each rollout has other prompts, of other lengths."""
    prompts = [list(range(5 + number, 20 + 3 * number + index)) for index in range(PROMPTS)]
    return [Request(prompts[index * PROMPTS // ROWS], seed=number * ROWS + index) for index in range(ROWS)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(decode_counts())
