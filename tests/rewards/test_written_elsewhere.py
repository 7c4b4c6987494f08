"""Rewards as people have them: the forms of well-known sources, re-written by ourselves, run here unchanged or are refused with
the sentence that says what to do.

RUNS     form -> scores for a right and a wrong completion
REFUSED  form -> where it is refused, and with which sentence
"""

import re
from dataclasses import replace

import pytest

from grpo_tasks.content.modules import cause_of
from grpo_tasks.rewards.contract import FunctionScores, RewardFault, batch_of
from grpo_tasks.rewards.suite import RewardSuite, Scores
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.prompts import PLAIN

RIGHT = "<reasoning>\n15 + 27 = 42\n</reasoning>\n<answer>\n42\n</answer>\n"
WRONG = "it is forty-one"

FUNCTIONS = r"""
    import asyncio, functools, math, re

    # willccbb's GRPO demo: functions on messages
    def extract_xml(text):
        return text.split("<answer>")[-1].split("</answer>")[0].strip()

    def demo_correctness(prompts, completions, answer, **kwargs) -> list[float]:
        replies = [completion[0]["content"] for completion in completions]
        return [2.0 if extract_xml(reply) == truth else 0.0 for reply, truth in zip(replies, answer)]

    # Unsloth's notebooks: compiled patterns and counters at module level
    SOLUTION = re.compile(r"<answer>.*?([\d\.\,]{1,})", flags=re.MULTILINE | re.DOTALL)
    PRINTED_TIMES = 0
    PRINT_EVERY_STEPS = 5

    def unsloth_check_numbers(prompts, completions, answer, **kwargs):
        global PRINTED_TIMES
        if PRINTED_TIMES % PRINT_EVERY_STEPS == 0:
            print("*" * 20, prompts[0][-1]["content"])
        PRINTED_TIMES += 1
        scores = []
        for completion, true in zip(completions, answer):
            found = SOLUTION.search(completion[0]["content"])
            try:
                scores.append(3.5 if float(found.group(1).replace(",", "")) == float(true) else -1.5)
            except (AttributeError, ValueError):
                scores.append(0)
        return scores

    # open-r1: optional results, a list of messages, and factories
    def openr1_accuracy(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
        pairs = zip(completions, solution)
        return [None if truth is None else float(extract_xml(c[0]["content"]) == truth) for c, truth in pairs]

    def get_cosine_scaled_reward(min_value: float = 0.0, max_value: float = 1.0, max_len: int = 1000):
        def cosine_scaled_reward(completions, solution, **kwargs):
            rewards = []
            for completion, truth in zip(completions, solution):
                text = completion[0]["content"]
                right = extract_xml(text) == truth
                wave = 0.5 * (1 + math.cos(math.pi * min(1.0, len(text) / max_len)))
                rewards.append(min_value + (max_value - min_value) * wave if right else -1.0)
            return rewards
        return cosine_scaled_reward

    def get_repetition_penalty_reward(ngram_size: int, max_penalty: float):
        def repetition_penalty_reward(completions, **kwargs):
            out = []
            for completion in completions:
                words = completion[0]["content"].split()
                grams = list(zip(*(words[start:] for start in range(ngram_size))))
                out.append((1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0)
            return out
        return repetition_penalty_reward

    # ms-swift: classes on strings, called with columns
    class ORM:
        def __init__(self, args=None, **kwargs):
            self.args = args
        def __call__(self, **kwargs):
            raise NotImplementedError

    class MathORM(ORM):
        def __call__(self, completions, solution, **kwargs):
            return [float(truth in re.findall(r"\d+", text)) for text, truth in zip(completions, solution)]

    # TRL's documentation: strings, ground_truth, tasks, async, other columns
    def reward_len(completions, **kwargs):
        return [-abs(20 - len(completion)) for completion in completions]

    def reward_func(completions, ground_truth, **kwargs):
        found = [re.search(r"<answer>\s*(.*?)\s*</answer>", completion) for completion in completions]
        return [1.0 if match and match.group(1) == truth else 0.0 for match, truth in zip(found, ground_truth)]

    async def async_reward(prompts, completions, **kwargs):
        async def one(completion):
            await asyncio.sleep(0.001)
            return float("42" in completion[0]["content"])
        return await asyncio.gather(*(one(completion) for completion in completions))

    class Client:
        lock = None
        async def __call__(self, completions, **kwargs):
            # A client opened in the first call belongs to that call's loop.
            self.loop = getattr(self, "loop", None) or asyncio.get_running_loop()
            assert self.loop is asyncio.get_running_loop()
            return [1.0] * len(completions)
    client = Client()

    def math_only(prompts, completions, task, **kwargs):
        return [float("42" in c[0]["content"]) if name == "math" else None for c, name in zip(completions, task)]

    def progress(completions, trainer_state, **kwargs):
        return [trainer_state.global_step / max(1, trainer_state.max_steps)] * len(completions)

    # per-token rewards, partials, plain signatures
    def per_token(prompts, completions, completion_ids, **kwargs):
        return [[0.1] * len(ids) for ids in completion_ids]

    def with_prompt_ids(prompt_ids, completion_ids, **kwargs):
        return [float(len(prompt) + len(ids)) for prompt, ids in zip(prompt_ids, completion_ids)]

    def at_most(completions, limit, **kwargs):
        return [float(len(c[0]["content"]) <= limit) for c in completions]
    short = functools.partial(at_most, limit=30)

    def narrow(completions, answer):
        return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

    # LLM judges that keep what they thought
    def judge(completions, log_extra, log_metric, **kwargs):
        verdicts = ["good" if "42" in c[0]["content"] else None for c in completions]
        log_extra("verdict", verdicts)
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_metric("share good", sum(v is not None for v in verdicts) / len(verdicts))
        return [float(v is not None) for v in verdicts]

    class Judge:
        def __init__(self, weight, bonus=0.0):
            self.weight, self.bonus = weight, bonus
        def __call__(self, completions, **kwargs):
            return [self.weight + self.bonus] * len(completions)

    class NoReward:
        pass

    # other conventions: one completion at a time
    async def rubric(completion, answer, state) -> float:
        return float(answer in completion[-1]["content"])

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(ground_truth in solution_str)

    def on_strings(completions, **kwargs):
        return [float(completion.strip() == "42") for completion in completions]

    def on_messages(completions, **kwargs):
        return [float(completion[0]["content"] == "42") for completion in completions]

    def wants_column(completions, target, **kwargs):
        return [1.0] * len(completions)

    def wants_key(completions, **kwargs):
        return [float(truth == "42") for truth in kwargs["target"]]

    def unguarded_match(completions, **kwargs):
        return [float(re.search("<answer>", c[0]["content"]).group(0) != "") for c in completions]

    def unguarded_float(completions, **kwargs):
        return [float(extract_xml(c[0]["content"])) for c in completions]

    def open_factory(**settings):
        return lambda completions, **kwargs: [1.0] * len(completions)

    def one_number(completions, **kwargs):
        return 1.0

    def uneven_extra(completions, log_extra, **kwargs):
        log_extra("thought", ["only one"])
        return [1.0] * len(completions)
"""

RUNS = [
    ("demo_correctness", {}, [2.0, 0.0]),
    ("unsloth_check_numbers", {}, [3.5, 0.0]),
    ("openr1_accuracy", {}, [1.0, 0.0]),
    ("get_cosine_scaled_reward", {"params": {"max_len": 10_000, "max_value": 0.0}}, [0.0, -1.0]),
    ("get_repetition_penalty_reward", {"params": {"ngram_size": 2, "max_penalty": -1.0}}, [0.0, 0.0]),
    ("MathORM", {"as_text": True}, [1.0, 0.0]),
    ("reward_len", {"as_text": True}, [-40.0, -5.0]),
    ("reward_func", {"as_text": True}, [1.0, 0.0]),
    ("async_reward", {}, [1.0, 0.0]),
    ("client", {}, [1.0, 1.0]),
    ("math_only", {}, [1.0, 0.0]),
    ("progress", {}, [0.0, 0.0]),
    ("per_token", {}, [0.1, 0.1]),
    ("with_prompt_ids", {}, [5.0, 5.0]),
    ("at_most", {"params": {"limit": 30}}, [0.0, 1.0]),
    ("short", {}, [0.0, 1.0]),
    ("narrow", {}, [1.0, 0.0]),
    ("judge", {}, [1.0, 0.0]),
    ("Judge", {"params": {"weight": 0.5, "bonus": 0.25}}, [0.75, 0.75]),
]
REFUSED_AT_ONCE = [
    ("Judge", {}, "is a class. Its constructor needs weight"),
    ("Judge", {"params": {"weight": 1.0, "bonos": 1.0}}, "bonos is not a parameter of this reward"),
    ("Judge(0.5)", {}, "is a call, and only a name can stand here"),
    ("NoReward", {}, "is a class whose instances cannot be called"),
    ("get_repetition_penalty_reward", {}, "so it counts as a factory. It needs ngram_size, max_penalty"),
    ("rubric", {}, "scores one completion at a time (its parameter completion)"),
    ("compute_score", {}, "scores one completion at a time (its parameter solution_str)"),
    ("narrow", {"params": {"limit": 3}}, "limit is not a parameter of this reward"),
]
REFUSED_WHEN_CALLED = [
    ("on_strings", "a function for strings needs as_text: true in its entry"),
    ("wants_column", "add a column of that name to the data"),
    ("wants_key", "if target is meant to be a column: the data have the columns answer, ground_truth, solution, task"),
    ("unguarded_match", "a regular expression that finds nothing gives None: test the match before .group()"),
    ("unguarded_float", "catch the ValueError, and return 0 for text that is no number"),
    ("open_factory", "it is a factory: name what it returns"),
    ("one_number", "return a list with one score per completion"),
    ("uneven_extra", "pass one value per completion"),
]


@pytest.fixture
def batch(make_row):
    rows = [replace(make_row(line, solution="42", ground_truth="42"), task="math") for line in (1, 2)]
    return batch_of(rows, [RIGHT, WRONG], [[1, 2, 3], [4, 5, 6]], prompt_ids=[[7, 8]] * 2)


@pytest.fixture
def loaded(own_module, rewards_config):
    """Workers with several functions of FUNCTIONS, one start for all of them."""
    own_module(FUNCTIONS)

    def make(entries):
        config = {f"r{number}": {"function": f"my_rewards:{name}", **given} for number, (name, given) in enumerate(entries)}
        return RewardWorker(rewards_config(**config), list(config))

    return make


def test_forms_of_well_known_sources_run_unchanged(loaded, batch):
    with loaded([(name, given) for name, given, _ in RUNS]) as worker:
        # Twice: counters, clients and loops live on between calls.
        for _ in range(2):
            for number, (name, _given, scores) in enumerate(RUNS):
                outcome = worker.call(f"r{number}", batch, 30.0)
                assert isinstance(outcome, FunctionScores), (name, outcome)
                assert outcome.scores == pytest.approx(scores), name


def test_what_cannot_be_a_reward_is_refused_when_it_is_loaded(own_module, refusal_of):
    own_module(FUNCTIONS)
    for name, given, sentence in REFUSED_AT_ONCE:
        error = refusal_of(function=f"my_rewards:{name}", **given)
        assert sentence in str(error).replace("\n", " "), name


def test_the_usual_mistakes_are_answered_with_what_to_change(loaded, batch):
    with loaded([(name, {}) for name, _ in REFUSED_WHEN_CALLED]) as worker:
        for number, (name, sentence) in enumerate(REFUSED_WHEN_CALLED):
            outcome = worker.call(f"r{number}", batch, 30.0)
            assert isinstance(outcome, RewardFault), name
            assert sentence in outcome.fix, (name, outcome)


def test_strings_arrive_where_the_data_are_strings(loaded, make_row):
    row = replace(make_row(), messages=[{"role": PLAIN, "content": "2 + 2 ="}])
    plain = batch_of([row], ["42"], [[1]])
    with loaded([("on_strings", {}), ("on_messages", {}), ("reward_len", {})]) as worker:
        assert worker.call("r0", plain, 30.0).scores == [1.0]
        wrong = worker.call("r1", plain, 30.0)
        assert worker.call("r2", plain, 30.0).scores == [-18.0]
    assert isinstance(wrong, RewardFault)
    assert "completions arrive as strings here" in wrong.fix


def test_the_answer_is_a_list_where_the_data_lists_several(own_module, rewards_config, make_row):
    own_module("""
        def sees(completions, answer, **kwargs):
            assert answer == ["42", ["1", "2"], None], answer
            return [1.0, 2.0, None]
    """)
    rows = [make_row(1), replace(make_row(2, "1"), answers=("1", "2")), make_row(3, None)]
    batch = batch_of(rows, ["<answer>42</answer>", "<answer>2</answer>", "x"], [[1]] * 3)
    with RewardSuite(rewards_config(sees={"function": "my_rewards:sees"}), ["sees", "correctness"]) as suite:
        scores = suite.score(batch)
    assert scores.raw[:2].tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert bool(scores.totals[2] != scores.totals[2])


def test_functions_get_objects_and_built_in_ones_their_text(own_module, rewards_config, make_row):
    own_module("""
        def sees(completions, answer, **kwargs):
            assert answer == [{"total": 1}, "free text", "42"], answer
            return [1.0] * 3
    """)
    rows = [make_row(1, '{"total":1}'), make_row(2, None), make_row(3, "42")]
    rows = [
        replace(row, extra=extra)
        for row, extra in zip(rows, ({"answer": {"total": 1}}, {"answer": "free text"}, {}), strict=True)
    ]
    batch = batch_of(rows, ['{"total": 1.0}', "free text", '{"total": 42}'], [[1]] * 3)
    completion = CompletionConfig(format="json", equality="json")
    names = ["sees", "correctness"]
    with RewardSuite(rewards_config(sees={"function": "my_rewards:sees"}), names, completion=completion) as suite:
        scores = suite.score(batch)
    assert scores.raw[:2].tolist()[0] == [1.0, 1.0]
    assert [score == score for score in scores.raw[:, 1]] == [True, False, True]


def test_columns_of_log_extra_travel_with_the_scores(loaded, rewards_config, batch):
    loaded([])
    with RewardSuite(rewards_config(judge={"function": "my_rewards:judge"}), ["judge"]) as suite:
        first, second = suite.score(batch), suite.score(batch.take([1]))
    assert first.metrics == {"logged/judge/share good": 0.5}
    joined = Scores.join([first, second]).take([2, 0])
    assert joined.logged_columns() == {"logged_judge_verdict": [None, "good"], "logged_judge_length": [15.0, float(len(RIGHT))]}


def test_log_extra_is_bounded(own_module, rewards_config, make_batch):
    own_module("""
        def wordy(completions, log_extra, **kwargs):
            log_extra("word/y", ["x" * 10_000_000, chr(0xD800) * 500])
            return [1.0, 1.0]
        def many(completions, log_extra, **kwargs):
            for number in range(100):
                log_extra(f"c{number}", [1, 2])
            return [1.0, 1.0]
    """)
    config = rewards_config(wordy={"function": "my_rewards:wordy"}, many={"function": "my_rewards:many"})
    with RewardWorker(config, ["wordy", "many"]) as worker:
        outcome, many = worker.call("wordy", make_batch("a", "b"), 30.0), worker.call("many", make_batch("a", "b"), 30.0)
    assert all(len(text) <= 300 for text in outcome.extra["word_y"])
    assert "more than 8 different columns" in many.detail


def test_a_function_gets_only_rows_of_the_tasks_that_list_it(own_module, rewards_config, make_row):
    own_module("""
        def sums(completions, task, log_extra, **kwargs):
            assert set(task) == {"sums"}, task
            log_extra("seen", task)
            return [1.0 if "bad" not in c[0]["content"] else 1 / 0 for c in completions]
    """)
    rows = [replace(make_row(line), task=task) for line, task in enumerate(["style", "sums", "style", "sums"], 1)]
    tasks = {"sums": ["sums", "length"], "style": ["length"]}
    with RewardSuite(rewards_config(sums={"function": "my_rewards:sums"}), ["sums", "length"], tasks=tasks) as suite:
        scores = suite.score(batch_of(rows, ["a"] * 4, [[1]] * 4))
        nothing = suite.score(batch_of(rows[:1], ["a"], [[1]]))
        fault = suite.worker.call("sums", batch_of(rows, ["bad", "a", "bad", "bad"], [[1]] * 4), 30.0)
        index = suite.worker.find_failing_completion("sums", batch_of(rows, ["bad", "a", "bad", "bad"], [[1]] * 4), 30.0)
    assert [score == score for score in scores.raw[:, 0]] == [False, True, False, True]
    assert scores.logged_columns() == {"logged_sums_seen": [None, "sums", None, "sums"]}
    assert nothing.raw[0, 0] != nothing.raw[0, 0]
    assert isinstance(fault, RewardFault)
    assert index == 3


def test_a_fault_inside_a_library_names_the_users_line(own_module, refusal_of):
    own_module("""
        import json

        SCORES = json.loads("{")

        def mine(completions, **kwargs):
            return [0.0] * len(completions)
    """)
    error = refusal_of(function="my_rewards:mine")
    assert error.message.startswith("my_rewards cannot be imported: JSONDecodeError")
    assert error.place.endswith("my_rewards.py:4 in <module>")
    own_module("import json\n\ndef mine(completions:\n", name="unfinished")
    assert refusal_of(function="unfinished:mine").place.endswith("unfinished.py:3")
    own_module("import json\nimport no_such_library\n", name="importing")
    assert refusal_of(function="importing:mine").place.endswith("importing.py:2 in <module>")
    own_module(
        "import json\n\nclass Mine:\n    def __init__(self):\n        json.loads('{')\n    def __call__(self): ...\n",
        name="a_class",
    )
    assert refusal_of(function="a_class:Mine").place.endswith("a_class.py:5 in __init__")


def test_code_for_a_gpu_runs_without_one_after_the_fix():
    import torch

    fix = cause_of(AssertionError("Torch not compiled with CUDA enabled"))
    device = re.search(r"write \.to\((.*)\) instead of \.cuda\(\)", fix)[1]
    assert torch.zeros(1).to(eval(device)).shape == (1,)
