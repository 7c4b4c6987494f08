"""The annotations of tensors are checked by `make shapes` (tests/conftest.py), and only there."""

import os
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo_tasks.grpo.losses import mean_weights
from grpo_tasks.policy.batch import position_ids
from grpo_tasks.rollout.decoding_loop import sample_tokens
from grpo_tasks.rollout.engine import Sampling
from schemas.config.rollout import RolloutConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif("SHAPES" not in os.environ, reason="`make shapes` checks the annotations")
@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_weights(torch.ones(2, 3)),  # numbers instead of truth values
        lambda: position_ids(torch.ones(5, dtype=torch.bool)),  # one axis instead of two
        lambda: sample_tokens(torch.zeros(2, 7), torch.zeros(3), Sampling.of(RolloutConfig())),  # 2 rows and 3 random numbers
    ],
    ids=["dtype", "axes", "sizes"],
)
def test_a_tensor_that_contradicts_its_annotation_is_refused_in_tests(call):
    with pytest.raises(TypeCheckError):
        call()


def test_production_code_checks_no_annotation_at_run_time():
    sources = [
        path.read_text(encoding="utf-8") for room in ("flows", "grpo_tasks", "schemas") for path in (ROOT / room).rglob("*.py")
    ]
    assert not [source for source in sources if "import_hook" in source or "beartype" in source]
