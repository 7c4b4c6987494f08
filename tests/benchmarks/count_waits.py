"""`python -m tests.benchmarks.count_waits`: how often host and GPU would wait for each other, in an update and in a rollout.

All of it runs on the pretend card. A line of JSON is printed, {part: {"host": ..., "gpu": ...}}: what the host waits for, and the
lines that give the GPU work after it had none, with their times. The parts are a `pass` (what it takes to build the microbatches
and to score them), an `update` with its optimizer step, the `first rollout` of an engine, which checks the model, and a later
`rollout` of 64 completions. It is a process of its own, because the pretend card changes torch. Widths do not change what waits,
so the models are small.
"""

from tests.grpo.pretend_card import CARD, IDLES, QUEUE, WAITS, card  # first: it names the device

# isort: split
import json
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from grpo_tasks.attention import packed_attention
from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef
from tests.attention.reference_kernel import REFERENCE
from tests.benchmarks.count_decode import ENDS, LENGTH, NARROW, rollout_requests, small_model
from tests.benchmarks.small_update import STAGE, microbatches, score_all, small_policy

REQUESTS = [Request(list(range(5, 20 + row // 4)), seed=row) for row in range(8)]
SAMPLING = Sampling.of(RolloutConfig(max_completion_length=12, top_p=0.9))
BASE = ModelRef(path="embedded:base")


def main() -> None:
    """Print what waits."""
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda like, _window: REFERENCE if like.device.type == "card" else None
    Accelerator.device = property(lambda _: CARD)  # type: ignore[assignment,method-assign]
    with card():
        policy = small_policy(CARD)
        engine = LocalEngine(load_policy(BASE, ModelConfig(), device=CARD), load_tokenizer(BASE))
        found = {
            "pass": waits_in(lambda: score_all(policy)),
            "update": update_waits(),
            "first rollout": waits_in(lambda: engine.generate(REQUESTS, SAMPLING)),
            "rollout": rollout_waits(),
        }
    print(json.dumps(found))


def update_waits() -> dict[str, dict[str, int]]:
    """Those of an update that is not the first one, which checks the model."""
    spec = StageSpec(
        key="k", stage=STAGE, seed=1, model=ModelConfig(), start=BASE, rewards=RewardsConfig(), rollout=RolloutConfig(),
        resources=ResourcesConfig(), train=Path("train.parquet"),
    )  # fmt: skip
    ranks = Ranks(Accelerator(cpu=True))
    learner = Learner(Policies(small_policy(CARD), spec, ranks), STAGE, ranks, updates=2)
    learner.update(microbatches(CARD), None)
    return waits_in(lambda: learner.update(microbatches(CARD), None))


def rollout_waits() -> dict[str, dict[str, int]]:
    """Those of 64 completions, of which the longest has 512 tokens."""
    engine = LocalEngine(small_model(NARROW, 1, torch.float32).to(CARD), load_tokenizer(BASE))
    engine._end_ids = frozenset(ENDS)
    engine.generate(rollout_requests()[:1], Sampling.of(RolloutConfig(max_completion_length=1)))
    return waits_in(lambda: engine.generate(rollout_requests(), Sampling.of(RolloutConfig(max_completion_length=LENGTH))))


def waits_in(work: Callable[[], object]) -> dict[str, dict[str, int]]:
    """What waits while this is done, and how often."""
    WAITS.clear()
    IDLES.clear()
    # The host has read the figures or the completions of what came before.
    QUEUE.wait()
    work()
    return {"host": {f"{line}, {name}": times for (line, name), times in WAITS.items()}, "gpu": dict(IDLES)}


if __name__ == "__main__":
    main()
