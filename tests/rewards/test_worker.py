"""Whatever a reward function does in its process, the caller gets scores or a fault, and no process is left."""

import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_tasks.rewards.contract import ContractError, FunctionScores, RewardFault, check_result
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.load import load_config
from schemas.config.rewards import RewardsConfig
from schemas.errors import ConfigError, RewardError

LIMIT_S = {"hangs": 0.5}
"""Short where a test waits for a hang. Elsewhere 30 s, because the machine may be busy."""

FUNCTIONS = """
    import asyncio, ctypes, os, sys, time
    import numpy as np

    def bad(completions):
        return any("bad" in chat[0]["content"] for chat in completions)

    def signature(prompts, completions, completion_ids, answer, trainer_state, **columns):
        assert prompts[0] == [{"role": "user", "content": "What is 15 + 27?"}], prompts
        assert completions[0] == [{"role": "assistant", "content": "first"}], completions
        assert completion_ids == [[1, 2, 3]] * len(completions)
        assert answer == ["42"] * len(completions)
        assert (trainer_state.global_step, trainer_state.max_steps) == (7, 20)
        assert columns["level"] == [3] * len(completions)
        columns["log_metric"]("seen", 1.0)
        return [1.0] * len(completions)

    def reports(prompts, completions, log_extra, log_metric, **columns):
        log_extra("first_words", [chat[0]["content"][:5] for chat in completions])
        log_extra(column="more", values=[None] * len(completions))
        for chat in completions:
            log_metric("share/of b", np.float32("bad" in chat[0]["content"]))
        log_metric(name="never finite", value=float("nan"))
        return [1.0] * len(completions)

    def reports_too_much(prompts, completions, log_metric, **columns):
        for number in range(1_000):
            log_metric(f"number {number}", number)
        return [1.0] * len(completions)

    def params(prompts, completions, factor, level, **columns):
        return [factor * level] * len(completions)

    async def later(prompts, completions, **columns):
        await asyncio.sleep(0.01)
        return [0.5] * len(completions)

    class Judge:
        def __call__(self, prompts, completions, **columns):
            return [0.25] * len(completions)
    judge = Judge()

    def arrays(prompts, completions, **columns):
        return np.arange(len(completions), dtype=np.float32)

    def scalars(prompts, completions, **columns):
        return [np.float32(0.5), np.int64(1), True][: len(completions)]

    def per_token(prompts, completions, **columns):
        return [[index / 10 for index in range(len(ids))] for ids in columns["completion_ids"]]

    def raises(prompts, completions, **columns):
        return [1 / 0 if "bad" in chat[0]["content"] else 1.0 for chat in completions]

    def raises_at_length(prompts, completions, **columns):
        raise ValueError("x" * 1_000_000)

    def gives_up(prompts, completions, **columns):
        sys.exit("no licence")

    def hangs(prompts, completions, **columns):
        while bad(completions):
            pass
        return [1.0] * len(completions)

    def segfaults(prompts, completions, **columns):
        if bad(completions):
            ctypes.string_at(0)
        return [1.0] * len(completions)

    def leaves(prompts, completions, **columns):
        os._exit(3)

    def narrow(prompts, completions):
        return [1.0] * len(completions)

    def nothing(prompts, completions, **columns):
        return None

    def too_few(prompts, completions, **columns):
        return [1.0]

    def text(prompts, completions, **columns):
        return ["good"] * len(completions)

    def not_a_number(prompts, completions, **columns):
        return [1.0] + [float("nan")] * (len(completions) - 1)

    def endless(prompts, completions, **columns):
        return [float("inf")] * len(completions)
"""


@pytest.fixture
def worker_with(own_module, rewards_config):
    """A worker with several functions of FUNCTIONS, one start for all of them."""
    own_module(FUNCTIONS)
    return lambda *names: RewardWorker(rewards_config(**{name: {"function": f"my_rewards:{name}"} for name in names}), names)


SHAPES = {
    "later": [0.5, 0.5, 0.5],
    "judge": [0.25, 0.25, 0.25],
    "arrays": [0.0, 1.0, 2.0],
    "scalars": [0.5, 1.0, 1.0],
    "narrow": [1.0, 1.0, 1.0],
}


def test_every_shape_of_function_and_result_is_understood(worker_with, make_batch):
    with worker_with(*SHAPES, "reports", "reports_too_much", "per_token", "raises_at_length") as worker:
        for name, scores in SHAPES.items():
            outcome = worker.call(name, make_batch("a", "b", "c"), 30.0)
            assert (outcome.scores, outcome.seconds >= 0.0) == (scores, True)
        assert worker.call("reports", make_batch("bad", "good", "good", "good"), 30.0).metrics == {"share_of b": 0.25}
        flood = worker.call("reports_too_much", make_batch("a"), 30.0)
        assert "more than 64 different names" in flood.detail
        assert "my_rewards.py:" in flood.source
        batch = make_batch("a", "b")
        tokens = worker.call("per_token", batch, 30.0).tokens
        assert {index: len(values) for index, values in tokens.items()} == {0: 3, 1: 3}
        outcome = worker.call("raises_at_length", make_batch("a"), 30.0)
        assert (outcome.kind, len(outcome.detail) < 500) == ("raised", True)
        assert "my_rewards.py:" in outcome.source
    assert "my_rewards" not in sys.modules, "own code is never imported by the parent"


def test_a_function_is_called_as_trl_calls_it(worker_of, make_batch):
    worker = worker_of("signature")
    worker.max_steps = 20
    outcome = worker.call("signature", make_batch("first", "second", step=7, level=3), 30.0)
    assert isinstance(outcome, FunctionScores), outcome
    assert (outcome.scores, outcome.tokens, outcome.metrics) == ([1.0, 1.0], {}, {"seen": 1.0})


def test_parameters_of_the_configuration_win_over_columns(worker_of, make_batch):
    worker = worker_of("params", params={"factor": 2.0, "level": 10})
    outcome = worker.call("params", make_batch("a", level=3), 30.0)
    assert isinstance(outcome, FunctionScores)
    assert outcome.scores == [20.0]


BREACHES = [
    ("raises", "raised", "raised ZeroDivisionError: division by zero"),
    ("gives_up", "raised", "raised SystemExit: no licence"),
    ("hangs", "hung", "did not return within 0.5 s"),
    ("segfaults", "died", "ended its worker process (signal SIGSEGV)"),
    ("leaves", "died", "ended its worker process (exit code 3)"),
    ("nothing", "broken", "returned None instead of a list of 2 scores"),
    ("too_few", "broken", "returned 1 scores for 2 completions"),
    ("text", "broken", "returned str 'good' instead of a number"),
    ("not_a_number", "broken", "returned nan, which is not finite"),
    ("endless", "broken", "returned inf, which is not finite"),
]


@pytest.mark.slow
def test_every_breach_is_a_fault_and_the_next_call_is_answered(worker_with, make_batch):
    with worker_with(*(name for name, *_ in BREACHES), "narrow") as worker:
        for name, kind, words in BREACHES:
            outcome = worker.call(name, make_batch("good", "bad"), LIMIT_S.get(name, 30.0))
            assert isinstance(outcome, RewardFault), name
            assert (outcome.kind, words in outcome.detail) == (kind, True), outcome
            assert isinstance(worker.call("narrow", make_batch("good"), 30.0), FunctionScores)


@pytest.mark.slow
def test_the_completion_to_blame_is_found(worker_with, make_batch):
    completions = ["good"] * 11
    completions[6] = "bad"
    with worker_with("raises", "hangs", "segfaults") as worker:
        for name in ("raises", "hangs", "segfaults"):
            assert worker.find_failing_completion(name, make_batch(*completions), LIMIT_S.get(name, 30.0)) == 6


def test_the_worker_imports_neither_torch_nor_sympy_unless_asked(own_module, rewards_config, make_batch):
    own_module("""
        import sys
        def loaded(prompts, completions, **columns):
            return [float(bool({"torch", "sympy", "polars"} & {*sys.modules}))]
    """)
    with RewardWorker(rewards_config(loaded={"function": "my_rewards:loaded"}), ["loaded", "correctness"]) as worker:
        assert isinstance(worker.call("correctness", make_batch("a"), 30.0), FunctionScores)
        outcome = worker.call("loaded", make_batch("a"), 30.0)
    assert isinstance(outcome, FunctionScores)
    assert outcome.scores == [0.0]


REFUSED = [
    ("my_reward:later", {}, "did you mean my_rewards?"),
    ("my_rewards:latr", {}, "did you mean later?"),
    ("my_rewards:os", {}, "module, which cannot be called"),
    ("broken:f", {}, "ZeroDivisionError"),
    ("wanting:f", {}, "imports no_such_library, which is not installed"),
    ("length", {"min_lenth": 3}, "did you mean min_length?"),
    ("format", {"tags": 1}, "tags is not a parameter"),
]


def test_what_cannot_be_loaded_is_refused_with_the_fix(own_module, refusal_of):
    own_module(FUNCTIONS)
    own_module("1 / 0", name="broken")
    own_module("import no_such_library", name="wanting")
    for function, params, words in REFUSED:
        error = refusal_of(function=function, params=params)
        assert words in str(error)
        assert "rewards.functions.mine" in error.place


def test_a_refusal_in_the_worker_is_the_error_of_its_start(worker_with):
    with pytest.raises(ConfigError, match="did you mean later"), worker_with("latr"):
        pass


def test_a_module_that_ends_the_process_or_hangs_is_reported(own_module, rewards_config, monkeypatch):
    own_module("import os\nos._exit(5)\n", name="leaving")
    own_module("import time\ntime.sleep(600)\n", name="endless")
    for name, limit_s, words in (("leaving", 60.0, "exit code 5"), ("endless", 1.0, "did not return within 1 s")):
        monkeypatch.setattr("grpo_tasks.rewards.worker.LOAD_LIMIT_S", limit_s)
        with pytest.raises(RewardError, match=words), RewardWorker(rewards_config(mine={"function": f"{name}:f"}), ["mine"]):
            pass


def test_no_file_replaces_a_library_and_surrogates_pass_through(own_module, rewards_config, make_batch):
    own_module("raise RuntimeError('shadowed')", name="json")
    with RewardWorker(rewards_config(), ["format"]) as worker:
        outcome = worker.call("format", make_batch("\ud800\x00<reasoning>w</reasoning>", "\udfff"), 30.0)
        assert isinstance(outcome, FunctionScores)


CONFIG = """
data: {train: [{path: train.jsonl}]}
rewards: {functions: {mine: {function: 'beside:mine'}}}
stages: [{name: s, rewards: [mine]}]
"""


@pytest.fixture
def config_elsewhere(tmp_path, monkeypatch):
    """A config with its module in a folder that is not the working directory."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "my.yaml").write_text(CONFIG)
    (folder / "beside.py").write_text("import beside_it\ndef mine(completions, **_): return [beside_it.SCORE] * len(completions)")
    (folder / "beside_it.py").write_text("SCORE = 0.5")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder / "my.yaml"


@pytest.mark.slow
def test_a_module_next_to_the_config_is_found_from_anywhere(config_elsewhere, make_batch):
    config = load_config(config_elsewhere)
    for rewards in (config.rewards, RewardsConfig.model_validate_json(config.rewards.model_dump_json())):
        with RewardWorker(rewards, ["mine"]) as worker:
            outcome = worker.call("mine", make_batch("a"), 30.0)
        assert isinstance(outcome, FunctionScores)
        assert outcome.scores == [0.5]


def test_two_different_modules_of_one_name_are_refused(config_elsewhere):
    here = Path("beside.py")
    here.write_text((config_elsewhere.parent / "beside.py").read_text())
    load_config(config_elsewhere)
    here.write_text("def mine(completions, **_): return [9.0] * len(completions)")
    with pytest.raises(ConfigError, match="two different modules are called beside"):
        load_config(config_elsewhere)


@pytest.mark.slow
def test_trls_own_rewards_and_factories_run_unchanged(rewards_config, make_batch):
    config = rewards_config(
        think={"function": "trl.rewards.format_rewards:think_format_reward"},
        accuracy={"function": "trl.rewards.accuracy_rewards:accuracy_reward"},
        soft={
            "function": "trl.rewards.other_rewards:get_soft_overlong_punishment",
            "params": {"max_completion_len": 4, "soft_punish_cache": 2},
        },
    )
    with RewardWorker(config, ["think", "accuracy", "soft"]) as worker:
        assert worker.call("think", make_batch("<think>w</think>42", "42"), 60.0).scores == [1.0, 0.0]
        assert worker.call("soft", make_batch("a"), 60.0).scores == [-0.5]
        answers = (r"\boxed{42}", r"\boxed{41}")
        assert worker.call("accuracy", make_batch(*answers, solution="$42$"), 60.0).scores == [1.0, 0.0]
        assert "data.answer_column" in worker.call("accuracy", make_batch(r"\boxed{42}"), 60.0).fix


def test_scores_of_tokens_are_kept_and_their_mean_is_the_score():
    assert check_result([None, 1, 0.5], [1, 1, 1]) == ([None, 1.0, 0.5], {})
    assert check_result([[0.0, 1.0], 0.5, np.array([1.0, 0.0, 2.0])], [2, 9, 3]) == (
        [0.5, 0.5, 1.0],
        {0: [0.0, 1.0], 2: [1.0, 0.0, 2.0]},
    )
    with pytest.raises(ContractError) as caught:
        check_result([[0.0, 1.0], [1.0]], [2, 3])
    assert caught.value.fault.index == 1
    assert "1 numbers for a completion of 3 tokens" in caught.value.fault.detail
