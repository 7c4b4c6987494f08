"""The time of an update on many cards: small cases by hand, what cannot be, and what must hold for every cluster."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from grpo_tasks.planning.memory_plan import META, meta_policy
from schemas.config.load import load_config
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError, ModelError
from tests.benchmarks.scale.cards import CARDS, NETWORKS, Card, Link
from tests.benchmarks.scale.model import ADVICE, SAMPLING, Assumed, Cluster, Layout, Measured, Piece, ScaleModel, ring_s
from tests.benchmarks.scale.sweep import best_layout, saturated, sweep
from tests.benchmarks.scale.workload import Shape, Workload, workload

TINY = Shape(layers=1, hidden=4, intermediate=8, heads=2, key_heads=1, head_dim=2, vocabulary=10, tied=True)
SMALL = Workload(
    shape=TINY, trained=184, full=True, width=2.0, completions=4, group_size=2, rollout_updates=1, iterations=1,
    prompt_tokens=4, completion_tokens=2, longest_tokens=2, forwards=1.0, pass_rows=4, rows_at_once=64, sampler_memory=0.9,
    tensor_parallel=1, served=False, merged=True, fsdp=False, max_staleness=0, save_steps=200,
)  # fmt: skip
SLOW = Card("slow", flops=1000, bandwidth=100, memory=1e12, link=Link("wire", 10, 0.0))
PLAIN = Assumed(train_share=1, prefill_share=1, memory_share=1, link_share=1, step_s=0.5)
RATES = Measured(
    save_rate=100, send_rate=50, receive_rate=20, sync_s=0.25, checkpoint_s=0.6, journal_bytes=2, token_bytes=10, token_s=0
)
QWEN7 = Shape(28, 3584, 18944, 28, 4, 128, 152_064, tied=False)
LARGE = replace(
    SMALL, shape=QWEN7, trained=QWEN7.lora(LoraConfig(r=32)), full=False, completions=256, group_size=16, prompt_tokens=512,
    completion_tokens=700, longest_tokens=1024, forwards=2.0, pass_rows=16, rows_at_once=1024, served=True, merged=False,
)  # fmt: skip
COUNTS = st.integers(1, 12)


def small(cards_per_node=8, **changes):
    return ScaleModel(replace(SMALL, **changes), Cluster(SLOW, cards_per_node, Link("network", 5, 0.0)), PLAIN, RATES)


def large(card="h100", cards_per_node=8, **changes):
    return ScaleModel(replace(LARGE, **changes), Cluster(CARDS[card], cards_per_node, NETWORKS["400gbit"]))


def test_an_update_of_one_card_is_what_a_hand_calculates():
    found = small().forecast(Layout(1, 0))
    assert TINY.body == 16 + 8 + 8 + 16 + 3 * 32
    assert found.pieces == pytest.approx(
        {
            Piece.SYNC: 3 * 3.68,
            Piece.PROMPTS: 3.68,  # reading the weights takes longer than 2 x 1,280 operations
            Piece.DECODE_WEIGHTS: 2 * (144 + 40) * 2 / 100,
            Piece.DECODE_CACHE: 2 * 4 * 5 * 8 / 100,
            Piece.DECODE_STEPS: 2 * 0.5,
            Piece.TRAIN_ARITHMETIC: (2 * 144 * 16 * 3 + 2 * 40 * 8 * 3 + 16 * 56 * 3) / 1000,
            Piece.CHECKPOINT: (0.6 + 12 * 184 / 20) / 200 + 2 / 20,
        }
    )
    assert found.step_s == pytest.approx(45.367)
    assert found.tokens_per_s == pytest.approx(8 / 45.367)
    assert found.bottleneck is Piece.TRAIN_ARITHMETIC


def test_two_processes_halve_the_passes_and_sum_their_gradients():
    one, two = (small(completions=8, pass_rows=8).forecast(Layout(count, 0)) for count in (1, 2))
    assert two.pieces[Piece.TRAIN_ARITHMETIC] == pytest.approx(one.pieces[Piece.TRAIN_ARITHMETIC] / 2)
    assert two.pieces[Piece.GRADIENTS] == pytest.approx(2 * 4 * 184 * (1 / 2) / 10)
    assert two.pieces[Piece.EXCHANGE] == pytest.approx(16 * 10 / 10)
    assert small(cards_per_node=1).forecast(Layout(2, 0)).pieces[Piece.GRADIENTS] == pytest.approx(2 * 4 * 184 * (1 / 2) / 5)


def test_members_of_a_ring_send_everything_twice_but_for_their_part():
    link = Link("wire", 10, 0.5)
    assert ring_s(100, 1, link, 1.0) == 0.0
    assert ring_s(100, 2, link, 1.0) == pytest.approx(1.0 + 10)
    assert ring_s(100, 4, link, 0.5) == pytest.approx(2.0 + 30)


def test_a_rollout_of_several_updates_is_shared_by_them():
    one, two = small().forecast(Layout(1, 0)), small(rollout_updates=2).forecast(Layout(1, 0))
    assert two.pieces[Piece.DECODE_WEIGHTS] == pytest.approx(one.pieces[Piece.DECODE_WEIGHTS] / 2)
    # Each update brings completions of its own.
    assert two.pieces[Piece.DECODE_CACHE] == pytest.approx(one.pieces[Piece.DECODE_CACHE])


def test_every_process_sends_the_weights_to_every_replica_of_other_nodes():
    # 368 bytes of bfloat16 weights: saved, and received twice by each replica, which takes longer than two sendings of each.
    far = small(cards_per_node=2, served=True)
    assert far.forecast(Layout(2, 2)).pieces[Piece.SYNC] == pytest.approx(368 / 100 + 0.25 + 2 * 2 * 368 / 5)
    assert replace(far, sent_once=True).forecast(Layout(2, 2)).pieces[Piece.SYNC] == pytest.approx(3.93 + 2 * 368 / 5)
    near = small(served=True).forecast(Layout(2, 2))
    assert near.pieces[Piece.SYNC] == pytest.approx(3.93 + 2 * 368 / 20)


def test_sampling_ahead_takes_as_long_as_the_slower_side():
    turns, ahead = (small(served=True, max_staleness=k, save_steps=10).forecast(Layout(1, 1)) for k in (0, 1))
    assert turns.step_s == pytest.approx(turns.sampling_s + turns.training_s)
    slow, fast = sorted((ahead.sampling_s, ahead.training_s), reverse=True)
    assert ahead.step_s == pytest.approx(slow + fast / 10)  # one rollout of ten comes after a checkpoint
    assert turns.step_s == pytest.approx(67.2020)
    assert ahead.overlaps
    assert not turns.overlaps


@given(st.sampled_from(sorted(CARDS)), COUNTS, COUNTS, st.integers(1, 300), st.booleans())
def test_more_of_either_side_never_slows_down_its_own_work(card, trainers, replicas, tokens, once):
    model = large(card, completion_tokens=tokens, longest_tokens=2 * tokens)
    cluster = replace(model.cluster, card=replace(model.cluster.card, memory=1e12))
    model = replace(model, cluster=cluster, sent_once=once)
    here = model.forecast(Layout(trainers, replicas))
    passes = (Piece.TRAIN_ARITHMETIC, Piece.TRAIN_WEIGHTS)
    decoding = [piece for piece in Piece if piece.value.startswith("decoding")]

    def seconds(found, pieces):
        return sum(found.pieces.get(piece, 0.0) for piece in pieces)

    assert seconds(model.forecast(Layout(trainers + 1, replicas)), passes) <= seconds(here, passes) * (1 + 1e-9)
    assert seconds(model.forecast(Layout(trainers, replicas + 1)), decoding) <= seconds(here, decoding) * (1 + 1e-9)


@given(st.sampled_from(["a100", "h100", "h200", "b200"]), COUNTS, COUNTS, st.integers(1, 4), st.integers(1, 50))
def test_an_update_takes_at_least_its_slower_side_and_at_most_both(card, trainers, replicas, staleness, every):
    turns = large(card, save_steps=every).forecast(Layout(trainers, replicas))
    ahead = large(card, save_steps=every, max_staleness=staleness).forecast(Layout(trainers, replicas))
    assert max(ahead.sampling_s, ahead.training_s) <= ahead.step_s <= turns.step_s * (1 + 1e-9)
    assert turns.step_s == pytest.approx(sum(turns.pieces.values()))
    slower = [piece for piece in ahead.pieces if (piece in SAMPLING) == (ahead.sampling_s >= ahead.training_s)]
    assert ahead.pieces[ahead.bottleneck] == max(ahead.pieces[piece] for piece in slower)


def test_every_piece_has_a_side_and_an_advice():
    assert set(ADVICE) == set(Piece)
    assert {piece for piece in Piece if piece.value.startswith("decoding")} < SAMPLING
    assert not {piece for piece in SAMPLING if piece.value.startswith("training")}


@pytest.mark.parametrize(
    ("model", "layout", "bottleneck"),
    [
        (large(), Layout(1, 1), Piece.TRAIN_ARITHMETIC),
        (large(longest_tokens=2_000, completion_tokens=2_000, completions=16), Layout(16, 1), Piece.DECODE_WEIGHTS),
        (large(longest_tokens=8_000, completion_tokens=8_000, rows_at_once=512), Layout(64, 1), Piece.DECODE_CACHE),
        (large(shape=replace(QWEN7, layers=1), trained=10**6), Layout(16, 4), Piece.DECODE_STEPS),
        (large(merged=True), Layout(64, 64), Piece.SYNC),
        (
            large(served=False, completion_tokens=8, longest_tokens=8, trained=10**10, save_steps=10**6),
            Layout(64, 0),
            Piece.GRADIENTS,
        ),
        (large(completion_tokens=8, longest_tokens=8, prompt_tokens=8, pass_rows=1), Layout(1, 1), Piece.TRAIN_WEIGHTS),
    ],
    ids=lambda given: given.name if isinstance(given, Piece) else "",
)
def test_the_bottleneck_has_a_name(model, layout, bottleneck):
    cluster = replace(model.cluster, card=replace(model.cluster.card, memory=1e12))
    assert replace(model, cluster=cluster, sent_once=bottleneck is not Piece.SYNC).forecast(layout).bottleneck is bottleneck


@given(st.integers(1, 40), st.floats(1.0, 10.0))
def test_a_better_card_is_never_slower(trainers, factor):
    model = large()
    card = model.cluster.card
    better = replace(card, flops=card.flops * factor, bandwidth=card.bandwidth * factor)
    other = replace(model, cluster=replace(model.cluster, card=better))
    assert other.forecast(Layout(trainers, 2)).step_s <= model.forecast(Layout(trainers, 2)).step_s * (1 + 1e-9)


def test_what_does_not_fit_on_one_card_is_left_out():
    model = large("rtx4090")
    assert best_layout(model, 1) is None
    assert saturated(sweep(large("rtx4090", shape=replace(QWEN7, layers=64)), (1, 2))) is None
    assert saturated(sweep(model, (1, 2))).cards == 2


@pytest.mark.parametrize("served", [False, True])
def test_more_cards_are_never_slower_and_stop_helping_somewhere(served):
    points = sweep(large(served=served, max_staleness=int(served)))
    steps = [point.best.step_s for point in points if point.best is not None]
    assert steps == sorted(steps, reverse=True)
    assert all(point.best.cards <= point.cards for point in points if point.best is not None)
    limit = saturated(points)
    # No doubling after it is worth 1.2.
    after = [step for step in steps if step < limit.step_s]
    assert limit.step_s < 1.2 ** (len(after) + 1) * steps[-1]
    assert limit.layout.trainers <= LARGE.completions
    # Processes and replicas keep each other in balance; what stops them is the work that no card takes from another one.
    assert points[-1].best.limit in (Piece.SYNC, Piece.DECODE_WEIGHTS)


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (large(), Layout(257, 1), "257 processes cannot share the 256 completions"),
        (large(tensor_parallel=16), Layout(1, 1), "16 cards of one node, which has 8"),
        (large("rtx4090", sampler_memory=0.5), Layout(1, 1), "do not fit on 1 x rtx4090"),
        (large("rtx4090", tensor_parallel=4, trained=10**9), Layout(1, 1), "a process that trains needs"),
        (large(trained=10**9), Layout(32, 1), "an adapter for each process that trains"),
        (large("rtx4090"), Layout(1, 0), "a process that trains needs 33 GB on its card"),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(model, layout, message):
    with pytest.raises(ConfigError, match=message) as caught:
        model.forecast(layout)
    assert caught.value.fix


@pytest.mark.parametrize(("card", "trained", "layout"), [("h100", 10**9, Layout(1, 1)), ("l40s", LARGE.trained, Layout(1, 0))])
def test_what_just_fits_is_not_refused(card, trained, layout):
    assert large(card, trained=trained).forecast(layout).step_s > 0


@pytest.mark.parametrize(
    ("config", "why"), [({"num_experts": 64}, "several experts"), ({"model_type": "gpt2"}, "does not name 'hidden_size'")]
)
def test_models_of_another_kind_are_refused(config, why):
    with pytest.raises(ModelError, match=why) as caught:
        Shape.of(config)
    assert caught.value.fix


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2),
        Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=32),
        LlamaConfig(hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, tie_word_embeddings=True),
    ],
    ids=lambda config: config.model_type,
)
def test_counted_weights_are_those_of_the_model(config):
    config.vocab_size = 1000
    shape = Shape.of(config.to_dict())
    with META:
        base = AutoModelForCausalLM.from_config(config)
    matrices = sum(module.weight.numel() for module in base.modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding))
    assert shape.parameters == matrices - (shape.head if shape.tied else 0)
    for lora in (LoraConfig(r=8), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])):
        policy = meta_policy(config, ModelConfig(lora=lora))
        assert shape.lora(lora) == sum(each.numel() for each in policy.parameters() if each.requires_grad)


def test_a_workload_is_read_from_the_config():
    settings = load_config("gsm8k-qwen2.5-1.5b", ["model.gradient_checkpointing=true"])
    config = Qwen2Config(num_hidden_layers=2).to_dict()
    given = {"prompt_tokens": 512, "pass_tokens": 10_560}
    found = workload(config, settings.model, settings.rollout, settings.stages[0], **given)
    assert (found.completions, found.group_size, found.prompts, found.completion_tokens) == (64, 16, 4, 1024)
    assert found.forwards == 3.0  # forward, recomputed, reference
    assert found.pass_rows == 10  # max_tokens_per_microbatch: auto
    assert found.rows_at_once == 256
    assert found.sync_bytes == 4 * found.trained
    assert found.checkpoint_bytes == 3 * found.sync_bytes
    stage = settings.stages[0].model_copy(update={"steps_per_generation": 4, "num_iterations": 2, "beta": 0.0})
    again = workload(config, settings.model, settings.rollout, stage, **given, mean_tokens=300)
    assert (again.rollout_updates, again.iterations, again.completion_tokens, again.longest_tokens) == (2, 2, 300, 1024)
    assert again.forwards == pytest.approx(2 + 1 / 2 + 1 / 10)  # log-probs of the sampler once, the KL every 10 updates
