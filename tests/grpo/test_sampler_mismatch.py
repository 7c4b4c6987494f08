"""A sampler in 16 bits follows the trainer from the first updates on."""

import pytest

from tests.benchmarks.mismatch import mismatch


@pytest.mark.slow
def test_after_small_updates_a_16_bit_sampler_has_the_trained_policy():
    found = mismatch(updates=6)
    # Nearly all that the policy has moved reaches the sampler; folded into the weights, most of it would be lost.
    assert found.sampler < 0.1 * found.moved
    assert found.folded > 0.3 * found.moved
    assert max(found.measured) < 0.05
