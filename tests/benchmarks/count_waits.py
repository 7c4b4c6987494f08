"""`python -m tests.benchmarks.count_waits`: how often the host would wait for a GPU, in an update and in a rollout.

Both run on the pretend card. A line of JSON is printed, {"pass" or "rollout": {"file:line, operation": times}}; a pass is what it
takes to build the microbatches and to score them. It is a process of its own, because the pretend card changes torch. Widths do
not change what waits, so the models are small.
"""

from tests.grpo.pretend_card import CARD, WAITS, card  # first: it names the device

# isort: split
import json
from collections.abc import Callable

from grpo_tasks.attention import packed_attention
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef
from tests.attention.reference_kernel import REFERENCE
from tests.benchmarks.small_update import score_all, small_policy

REQUESTS = [Request(list(range(5, 20 + row // 4)), seed=row) for row in range(8)]
SAMPLING = Sampling.of(RolloutConfig(max_completion_length=12, top_p=0.9))


def main() -> None:
    """Print what waits."""
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda *_: REFERENCE
    base = ModelRef(path="embedded:base")
    with card():
        policy = small_policy(CARD)
        engine = LocalEngine(load_policy(base, ModelConfig(), device=CARD), load_tokenizer(base))
        found = {"pass": waits_in(lambda: score_all(policy)), "rollout": waits_in(lambda: engine.generate(REQUESTS, SAMPLING))}
    print(json.dumps(found))


def waits_in(work: Callable[[], object]) -> dict[str, int]:
    """What waits while this is done, and how often."""
    WAITS.clear()
    work()
    return {f"{line}, {name}": times for (line, name), times in WAITS.items()}


if __name__ == "__main__":
    main()
