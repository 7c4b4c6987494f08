"""Steps that are replayed: they draw what single steps draw, and what they need lives with the engine."""

import gc
import math
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout import graphs
from grpo_tasks.rollout.engine import Request
from grpo_tasks.rollout.graphs import EAGER_STEPS, CudaCapture, Graphs
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from tests.benchmarks.count_decode import GPU
from tests.benchmarks.tapes import Tapes
from tests.rollout.test_decoding_loop import REQUESTS, engine_of, sampling

FINE = replace(GPU, fewest_rows=1, first_columns=16)
"""Many changes of shape."""


def rollout(number):
    """Four groups of eight, with prompts and seeds of their own."""
    prompts = [[(7 * number + 40 * index + place) % 300 for place in range(6 + 5 * index + number)] for index in range(4)]
    return [Request(prompts[index // 8], seed=100 * number + index) for index in range(32)]


def move_weights(engine):
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter.mul_(1.05)


@contextmanager
def without_cycles():
    """Nothing that only Python's collector would find is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Single(Graphs):
    """Steps at the same places, and none of them replayed."""

    def run(self, step):
        step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {"repetition_penalty": 1.2, "top_p": 0.9, "temperature": 0.8}),
        ("gemma3", {"stop": ["7", "is"]}),
        ("llama-dynamic", {"max_completion_length": 20}),
    ],
    ids=str,
)
def test_replayed_steps_draw_what_single_steps_draw_in_every_rollout(model, settings, tokenizer):
    tapes, counts = Tapes(), []
    replayed, single = (engine_of(model, tokenizer, FINE, capture=tapes) for _ in range(2))
    plain = engine_of(model, tokenizer, FINE)
    single._graphs = Single(tapes)
    for number in range(3):
        drawn = [engine.generate(rollout(number), sampling(**settings)) for engine in (replayed, single, plain)]
        assert drawn[0] == drawn[1]
        # Contexts of other widths are rounded otherwise, and a nucleus may then have a token more.
        if "top_p" not in settings:
            assert [found.token_ids for found in drawn[0]] == [wanted.token_ids for wanted in drawn[2]]
        for engine in (replayed, single, plain):
            move_weights(engine)
        counts.append(tapes.count)
    # A model whose steps do not repeat is never captured; the others change their shape several times, and not for ever.
    assert counts == [0] * 3 if model == "llama-dynamic" else 3 <= counts[0] <= counts[-1] < 3 * counts[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_step_has_the_weights_of_the_last_sync(dtype, base_ref, tokenizer):
    policy = trainable_policy(base_ref, ModelConfig(dtype=dtype), device=torch.device("cpu"), seed=1)
    tapes, drawn = Tapes(), []
    replayed = LocalEngine(policy, tokenizer, capture=tapes)
    for _ in range(2):
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
        fresh = LocalEngine(policy, tokenizer, capture=tapes)
        fresh._graphs = Single(tapes)
        for engine in (replayed, fresh):
            engine._buckets, engine._end_ids = GPU, frozenset()
            engine.sync()
            drawn.append(engine.generate(REQUESTS, sampling(max_completion_length=12)))
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3] != drawn[0]
    # The second rollout has replayed the graph of the first one.
    assert tapes.count == 1


def test_no_graph_is_replayed_for_other_settings_of_sampling(tokenizer):
    tapes = Tapes()
    replayed, single = (engine_of("qwen2", tokenizer, GPU, capture=tapes) for _ in range(2))
    single._graphs = Single(tapes)
    # The tensors of each line have the same shapes.
    every = [
        *({}, {"temperature": 0.5}),
        *({"top_k": 3}, {"top_k": 5}, {"top_k": 3, "top_p": 0.3}, {"top_k": 3, "min_p": 0.5}),
        *({"repetition_penalty": 1.3}, {"repetition_penalty": 1.6}),
    ]
    settings = [sampling(max_completion_length=8, **each) for each in every]
    settings.append(replace(settings[0], temperature=0.0))
    for each in settings:
        assert replayed.generate(REQUESTS, each) == single.generate(REQUESTS, each)
    assert tapes.count == len(settings)


def test_later_rollouts_find_graphs_and_memory_where_they_were(tokenizer):
    tapes = Tapes()
    engine, places = engine_of("qwen2", tokenizer, GPU, capture=tapes), []
    for number in range(3):
        engine.generate(rollout(number), sampling())
        places.append({name: memory.data_ptr() for name, memory in engine._graphs._memory.items()})
    assert (len(places[0]) > 10, places[0] == places[1] == places[2], tapes.count) == (True, True, 1)


@pytest.mark.slow
def test_all_that_a_graph_reads_is_owned_by_the_engine(tokenizer):
    tapes = Tapes()
    engine = engine_of("qwen2", tokenizer, FINE, capture=tapes)
    for number in range(2):
        engine.generate(rollout(number), sampling(repetition_penalty=1.1))
    gc.collect()
    tapes_own = {id(tensor) for tape in tapes.recorded for tensor in tape.outside}
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    owned = {each.untyped_storage().data_ptr() for each in tensors if id(each) not in tapes_own}
    # Of the graphs that can still be replayed.
    kept = {replay.__self__ for replay in engine._graphs._replays.values()}
    assert kept
    for tape in kept:
        assert {tensor.untyped_storage().data_ptr() for tensor in tape.outside} <= owned


@pytest.mark.parametrize("kept_bytes", [0, math.inf])
def test_an_update_gets_the_memory_that_it_has_no_room_for(kept_bytes, tokenizer):
    tapes = Tapes()
    engine = engine_of("qwen2", tokenizer, GPU, capture=tapes, kept_bytes=kept_bytes)
    with without_cycles():
        engine.generate(REQUESTS, sampling(max_completion_length=16))
        memory = [weakref.ref(each) for each in engine._graphs._memory.values()]
        assert engine._graphs.num_bytes > 10_000
        engine.sleep()
        assert {each() is None for each in memory} == {kept_bytes == 0}
    assert (engine._graphs.num_bytes == 0) == (kept_bytes == 0)
    engine.generate(REQUESTS, sampling(max_completion_length=16))
    assert tapes.count == (2 if kept_bytes == 0 else 1)
    engine.close()
    assert engine._graphs.num_bytes == 0


def test_a_failed_capture_is_tried_once_by_an_engine(tokenizer):
    tapes, settings = Tapes(failures=2), sampling(max_completion_length=16, max_batch_size=16)
    engine = engine_of("qwen2", tokenizer, GPU, capture=tapes)
    wanted = engine_of("qwen2", tokenizer, GPU).generate(REQUESTS, settings)
    for said in (pytest.warns(UserWarning, match="lost some memory"), nullcontext()):  # a second warning would be an error
        with said:
            found = engine.generate(REQUESTS, settings)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert tapes.count == 1
    assert engine._graphs.num_bytes == 0


def test_a_failed_capture_leaves_no_graph_behind():
    left = []

    class Broken:
        pass

    def capture(_):
        graph = Broken()
        graph.itself = graph
        left.append(weakref.ref(graph))
        raise RuntimeError("operation not permitted when stream is capturing")

    done, steps = [], Graphs(capture)
    with without_cycles():
        for _ in range(EAGER_STEPS):
            steps.run(lambda: done.append(1))
        with pytest.warns(UserWarning, match="CUDA graphs cannot be used"):
            steps.run(lambda: done.append(1))
        assert [graph() for graph in left] == [None]
    steps.use([])
    for _ in range(EAGER_STEPS + 1):
        steps.run(lambda: done.append(1))
    assert (len(left), len(done)) == (1, 2 * (EAGER_STEPS + 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card captures the graph")
def test_without_a_card_steps_run_singly_after_one_warning():
    done, steps = [], Graphs(CudaCapture())
    for _ in range(EAGER_STEPS):
        steps.run(lambda: done.append(1))
    with pytest.warns(UserWarning, match="CUDA graphs cannot be used"):
        steps.run(lambda: done.append(1))
    assert len(done) == EAGER_STEPS + 1


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(monkeypatch):
    pools, used = iter(range(10)), []

    class Graph:
        def replay(self):
            pass

    def capturing(_, pool):
        used.append(pool)
        return nullcontext()

    for name, stand_in in {
        "graph_pool_handle": lambda: next(pools), "CUDAGraph": Graph, "graph": capturing,
        "current_stream": lambda: None, "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaCapture()
    with without_cycles():
        replays = [capture(lambda: None) for _ in range(2)]
        replays.pop(0)
        replays.append(capture(lambda: None))
        replays.clear()
        # The allocator has given the pool up with its last graph, and refuses its handle.
        replays.append(capture(lambda: None))
    assert used == [0, 0, 0, 1]


def test_the_oldest_graph_makes_room_for_a_new_one(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    tapes = Tapes()
    steps = Graphs(tapes)
    for key in (1, 2, 3, 3, 2, 1):
        steps.use([], key)
        for _ in range(EAGER_STEPS + 1):
            steps.run(lambda: None)
    # Of the second half only the first one had to make room.
    assert (tapes.count, len(steps._replays)) == (4, 2)
