"""How an update is split: every live completion once, with the weights of the complete update."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.losses import token_weights
from grpo_tasks.grpo.microbatches import make_microbatches
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Rollout
from grpo_tasks.rollout.engine import Completion
from schemas.config.stage import StageConfig
from schemas.prompts import PromptRow

ROW = PromptRow("0" * 16, "rows.jsonl", 1, ({"role": "user", "content": "1+1?"},), "2", 1, {})


class FirstOfTwo(Ranks):
    """A rank that does all the work of its own, and hears from another one that it has `others` microbatches."""

    def __init__(self, others=0):
        object.__setattr__(self, "others", others)

    def share(self, items):
        return items

    def gather(self, mine):
        return [mine, self.others]


def rollout(lengths, prompt_lengths):
    size = len(lengths) // len(prompt_lengths)
    completions = [Completion(list(range(n)), [-0.5 * n] * n, "", "length" if n > 8 else "stop") for n in lengths]
    return Rollout([ROW] * len(prompt_lengths), [[1] * n for n in prompt_lengths], completions, size, 0.0)


def split(lengths, prompt_lengths, dead=(), *, others=0, same_count=False, padded=False, **settings):
    groups, size = len(prompt_lengths), len(lengths) // len(prompt_lengths)
    tied = torch.tensor([group in dead for group in range(groups)])
    values = torch.arange(1.0, len(lengths) + 1)[:, None]
    advantages = Advantages(values, torch.ones(groups), tied)
    stage = StageConfig(
        name="s", rewards=["format"], num_generations=size, **{"per_device_train_batch_size": len(lengths)} | settings
    )
    return stage, make_microbatches(
        rollout(lengths, prompt_lengths),
        advantages,
        range(len(lengths)),
        stage,
        max_completion_length=16,
        device=torch.device("cpu"),
        ranks=FirstOfTwo(others),
        same_count=same_count,
        padded=padded,
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=6, max_size=6),
    prompts=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    dead=st.sets(st.integers(0, 2)),
    budget=st.none() | st.integers(1, 60),
    loss_type=st.sampled_from(["grpo", "dapo", "dr_grpo", "bnpo"]),
    padded=st.booleans(),
)
def test_each_live_completion_is_in_one_microbatch_with_its_weights(lengths, prompts, dead, budget, loss_type, padded):
    stage, found = split(lengths, prompts, dead, max_tokens_per_microbatch=budget, loss_type=loss_type, padded=padded)
    assert sorted(index for each in found for index in each.indices) == [index for index in range(6) if index // 2 not in dead]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    weights = token_weights(mask, stage, max_completion_length=16, microbatch_size=6)
    for each in found:
        for row, index in enumerate(each.indices):
            length = lengths[index]
            assert each.tokens.completion_mask[row].sum() == length
            torch.testing.assert_close(each.weights[row, :length], weights[index, :length])
            assert not each.weights[row, length:].any()
            assert each.advantages[row].tolist() == [index + 1.0]
            assert each.sampler_logps[row].sum().item() == pytest.approx(-0.5 * length * length)
        masks = each.tokens.prompt_mask, each.tokens.completion_mask
        tokens = sum(mask.numel() if padded else int(mask.sum()) for mask in masks)
        assert budget is None or tokens <= budget or len(each.indices) == 1


@given(
    lengths=st.lists(st.integers(1, 12), min_size=6, max_size=6),
    budget=st.integers(1, 60),
    times=st.integers(1, 3),
)
@settings(max_examples=20)
def test_halved_microbatches_are_the_same_update(lengths, budget, times):
    _, whole = split(lengths, [3, 4, 2], max_tokens_per_microbatch=budget)
    old = [torch.arange(each.weights.numel()).view(each.weights.shape) for each in whole]
    parts, parts_old = whole, old
    for _ in range(times):
        parts, parts_old = parts.halved(parts_old)
    assert [index for each in parts for index in each.indices] == [index for each in whole for index in each.indices]
    assert max(len(each.indices) for each in parts) == -(-max(len(each.indices) for each in whole) // 2**times)
    assert parts.divisible == any(len(each.indices) > 1 for each in parts)
    both = list(zip(whole, old, strict=True))
    rows = {index: (each, each_old, row) for each, each_old in both for row, index in enumerate(each.indices)}
    for part, part_old in zip(parts, parts_old, strict=True):
        width = part.weights.shape[1]
        for row, index in enumerate(part.indices):
            wanted, wanted_old, place = rows[index]
            assert part.weights[row].equal(wanted.weights[place, :width])
            assert part.advantages[row].equal(wanted.advantages[place])
            assert part_old[row, :width].equal(wanted_old[place, :width])


def test_microbatches_are_built_one_by_one_and_once():
    _, found = split([3, 5, 4, 2], [2, 2], per_device_train_batch_size=2)
    built, build = [], found.build
    found.build = lambda rows: built.append(rows) or build(rows)
    first, second = iter(found), iter(found)
    assert (len(found), built) == (2, [])
    assert next(first) is next(second)
    assert built == [[0, 1]]
    assert [list(each.indices) for each in found] == [[0, 1], [2, 3]] == built


def test_truncated_completions_are_left_out_when_they_are_masked():
    _, [found] = split([3, 9, 4, 9], [2, 2], mask_truncated_completions=True)
    assert list(found.indices) == [0, 2]
    assert found.weights.sum().item() == pytest.approx(1.0)


def test_dead_groups_are_kept_when_asked_and_for_the_entropy_bonus():
    for changes in ({"skip_dead_groups": False}, {"entropy_coef": 0.01}):
        _, [found] = split([3, 5, 4, 2], [2, 2], {0}, **changes)
        assert list(found.indices) == [0, 1, 2, 3]
        assert found.entropy_weights.sum().item() == pytest.approx(1.0)
    _, [found] = split([3, 5, 4, 2], [2, 2], {0})
    assert found.entropy_weights.sum().item() == pytest.approx(1.0)


def test_a_rank_with_fewer_microbatches_fills_up_with_idle_ones():
    _, found = split([3, 5, 4, 2], [2, 2], {0, 1}, same_count=True, others=2)
    assert [each.idle for each in found] == [True, True]
    assert [list(each.indices) for each in found] == [[3], [3]]  # the shortest completion


def test_shared_beginnings_of_completions_are_computed_once():
    # Each completion is 0, 1, 2, ...: the shorter one is the start of the longer one, and nothing of it is left to compute.
    _, (microbatch,) = split([6, 9], [4])

    assert microbatch.tokens.packed.ids.shape == (1, 4 + 8)
    assert microbatch.weights.shape == (2, 9)
