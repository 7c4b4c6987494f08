"""`python -m tests.benchmarks.count_waits`: how often the host would wait for a GPU to build a pass and to score it.

A small update runs on the pretend card. A line of JSON is printed, {"file:line, operation": times}. It is a process of its own,
because the pretend card changes torch. Widths do not change what waits, so the model is small.
"""

from tests.grpo.pretend_card import CARD, WAITS, card  # first: it names the device

# isort: split
import json

from grpo_tasks.attention import packed_attention
from tests.attention.reference_kernel import REFERENCE
from tests.benchmarks.small_update import score_all, small_policy


def main() -> None:
    """Print what waits."""
    # The kernels of CUDA are missing; the indices that they get are used in all that is around them.
    packed_attention.varlen_kernel = lambda *_: REFERENCE
    with card():
        policy = small_policy(CARD)
        WAITS.clear()
        score_all(policy)
    print(json.dumps({f"{line}, {name}": times for (line, name), times in WAITS.items()}))


if __name__ == "__main__":
    main()
