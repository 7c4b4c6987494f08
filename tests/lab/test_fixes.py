"""Every fix that the lab prints is carried out, and its finding is gone. Code and settings in it are used as they stand."""

import itertools
import json
import re
import sys
import textwrap
from dataclasses import replace

import pytest

from grpo_tasks.lab.environment_checks import check_interaction
from grpo_tasks.lab.judge_checks import check_judges
from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.report import FIXES, advice, fixes
from grpo_tasks.lab.run import run_lab, weighed
from grpo_tasks.rewards.contract import FunctionScores, RewardFault, batch_of
from grpo_tasks.steps.probe_rewards import _date
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import LabConfig, RewardsConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.errors import ConfigError
from schemas.prompts import PLAIN, PromptRow
from tests.data.test_fixes import merge, setting
from tests.environments.conftest import TEMPLATE
from tests.in_process import InProcessWorker
from tests.lab.test_environments import ENVIRONMENTS

pytestmark = pytest.mark.slow

LAB = {"num_rows": 3, "max_seconds_per_completion": 0.05}
HEAD = r"""
    import itertools, json, re, time

    def texts(completions):
        return [chat[-1]["content"] for chat in completions]

    def found(text):
        whole = re.fullmatch(r"\s*<reasoning>[^<>]+</reasoning>\s*<answer>([^<>]+)</answer>\s*", text)
        return whole[1].strip() if whole else ""

    calls = itertools.count()
"""
SOUND = "return [float(found(text) == truth) for text, truth in zip(texts(completions), answer)]"
REPAIRS = {
    # check -> the body of a function that it finds something in, and the body after its fix
    "contract": ("return [1.0]", SOUND),
    "applies": ("return [None] * len(completions)", SOUND),
    "same_score": ("return [float('</think>' in text) for text in texts(completions)]", SOUND),
    "determinism": ("return [float(next(calls)) for _ in completions]", SOUND),
    "speed": (
        """began = time.process_time()
        while max(map(len, texts(completions))) > 3_000 and time.process_time() < began + 0.3:
            pass
        """
        + SOUND,
        SOUND,
    ),
    "gaming": ("return [float(text.count('<answer>')) for text in texts(completions)]", SOUND),
    "empty": ("return [float(found(text) != '42!') for text in texts(completions)]", SOUND),
    "order": ("return [1.0 / (1 + len(text)) for text in texts(completions)]", SOUND),
}


@pytest.fixture
def rows(make_row):
    return [make_row(line, str(line + 40), f"What is 40 + {line}?") for line in range(1, 7)]


@pytest.fixture
def findings_of(monkeypatch, tmp_path, run_config, rows):
    """What the lab finds in functions of this source, in the process of the test: where, check -> the finding."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("grpo_tasks.lab.run.RewardWorker", InProcessWorker)
    numbers = itertools.count()

    def run(source, names, *, entries=None, samples=None, own_rows=None, together=False, **sections):
        module = f"rewards_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(HEAD + source), encoding="utf-8")
        functions = {name: {"function": f"{module}:{name}"} for name in names if f"def {name}(" in source}
        stages = {"s": names} if together else {name: [name] for name in names}
        config = run_config(stages, rewards={"functions": merge(functions, entries or {})}, **{"lab": LAB} | sections)
        found = run_lab(config, own_rows or rows, samples)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return {(one.function, one.check): one for one in found.checks if one.outcome in ("warned", "failed")}, found

    return run


def module_of(bodies):
    return "".join(f"\n    def {name}_(completions, answer, **columns):\n        {body}\n" for name, body in bodies.items())


def test_the_repaired_functions_pass_the_checks_that_found_them(findings_of):
    names = [f"{check}_" for check in REPAIRS]
    before, found = findings_of(module_of({name: body for name, (body, _) in REPAIRS.items()}), names)
    after, _ = findings_of(module_of({name: body for name, (_, body) in REPAIRS.items()}), names)
    for check in REPAIRS:
        function = f"stage:{check}_" if check in ("empty", "order") else f"{check}_"
        assert (function, check) in before
        printed = before[function, check].fix or FIXES[check]
        assert any(line.endswith(printed) and f"{function}/{check}" in line for line in fixes(found.checks))
    # A reward of answers alone pays nothing for a wrong one.
    assert {key for key in after if key[1] != "order"} == set()


def test_weights_put_the_totals_of_a_stage_in_order(findings_of):
    source, names = module_of({"silence": REPAIRS["order"][0]}), ["silence_", "format", "correctness"]
    weights = {"silence_": {"weight": 4.0}}
    assert ("stage:s", "order") in findings_of(source, names, entries=weights, together=True)[0]
    assert "raise the weights of functions that only the perfect completion satisfies (format, correctness)" in FIXES["order"]
    lowered = {"silence_": {"weight": 0.01}, "format": {"weight": 2.0}, "correctness": {"weight": 4.0}}
    assert ("stage:s", "order") not in findings_of(source, names, entries=lowered, together=True)[0]


def test_columns_and_truths_are_repaired_in_the_data(findings_of, make_row):
    rows = [make_row(line, "forty-two", trainer_state="x") for line in (1, 2)]
    before, _ = findings_of("", ["correctness"], own_rows=rows)
    assert {("data", "columns"), ("correctness", "gold")} <= before.keys()
    assert "set completion.equality to the kind of your answers" in FIXES["gold"]
    renamed = [replace(row, extra={"state": "x"}) for row in rows]
    assert findings_of("", ["correctness"], own_rows=renamed, completion={"equality": "exact"})[0] == {}


def test_a_date_is_chosen_or_accepted():
    [check] = _date(RolloutConfig(chat_template_kwargs={"strftime_now": "2020-02-02"}))
    assert "2020-02-02" in check.detail
    values = re.search(r"rollout.chat_template_kwargs: (\{.*?\})", FIXES["date"])[1]
    [check] = _date(RolloutConfig(chat_template_kwargs={"strftime_now": re.search(r"'(.*)'", values)[1]}))
    assert "2026-11-26" in check.detail
    assert setting(FIXES["date"], "lab.ignore_checks") == {"lab": {"ignore_checks": ["date"]}}
    assert weighed(check, LabConfig(**setting(FIXES["date"], "lab.ignore_checks")["lab"])).outcome == "ignored"


LATEX = """
    from math_verify import LatexExtractionConfig, parse, verify
    BOXED = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    def strict(completions, answer, **columns):
        golds = [parse(f"${truth}$") for truth in answer]
        read = [parse(text, extraction_config=BOXED) for text in texts(completions)]
        return [float(verify(gold, own)) for gold, own in zip(golds, read)]

    def skips(completions, answer, **columns):
        golds = [parse(truth) for truth in answer]
        return [float(verify(gold, parse(text))) if gold else None for gold, text in zip(golds, texts(completions))]
"""


def test_a_reward_that_reads_latex_gets_boxed_answers(findings_of):
    before, _ = findings_of(LATEX, ["strict"])
    check = before["strict", "same_score"]
    assert "it reads LaTeX, as math_verify does" in check.detail
    after, _ = findings_of(LATEX, ["strict"], **setting(check.fix, "completion.format"))
    assert ("strict", "same_score") not in after


def test_a_reward_that_skips_plain_truths_gets_them_as_latex(findings_of, make_row):
    rows, how = [make_row(line, f"x^{line}+1", solution=f"x^{line}+1") for line in (2, 3)], {"completion": {"equality": "math"}}
    before, _ = findings_of(LATEX, ["skips"], own_rows=rows, **how)
    check = before["skips", "applies"]
    assert "written as LaTeX" in check.detail
    name, code = named_code(check.fix)
    after, _ = findings_of(LATEX + textwrap.indent(f"\n{code}\n", "    "), [name], own_rows=rows, **how)
    assert (name, "applies") not in after


def named_code(fix):
    """The function or class that a fix names, and its code."""
    name = re.search(r"(?:function|environment): '[\w.]+:(\w+)'", fix)[1]
    return name, fix.partition("\n\n")[2]


RIGHT, WRONG = "15 + 27 = <answer>42</answer>", "it is forty-one"
SINGLE = """
    def of_messages(completion, answer, **kw):
        return 1.0 if answer in completion[-1]["content"] else 0.0

    async def rubric(completion, answer, state, prompt) -> float:
        assert state["completion"] == completion and prompt[-1]["content"].startswith("What")
        return float(answer in completion[-1]["content"])

    def of_text(completion: str, answer) -> float:
        return float(re.search(rf"<answer>{answer}</answer>", completion) is not None)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "sums"
        return float(ground_truth in solution_str)

    class Rubrics:
        @staticmethod
        def response_length(response):
            return float(len(response) > 20)
"""


@pytest.mark.parametrize("name", ["of_messages", "rubric", "of_text", "compute_score", "Rubrics.response_length"])
def test_the_printed_function_scores_what_one_for_a_single_completion_does(
    own_module, refusal_of, worker_of_source, make_row, name
):
    own_module(HEAD + SINGLE)
    fix = refusal_of(function=f"my_rewards:{name}").fix
    made, code = named_code(fix)
    rows = [make_row(line, "42", data_source="sums") for line in (1, 2)]
    worker = worker_of_source(textwrap.dedent(HEAD + SINGLE) + f"\n{code}\n", made)
    outcome = worker.call(made, batch_of(rows, [RIGHT, WRONG], [[1], [1]]), 30.0)
    assert isinstance(outcome, FunctionScores), outcome
    assert outcome.scores == [1.0, 0.0]


def test_a_library_function_is_called_from_a_module_of_ones_own(tmp_path, monkeypatch, worker_of_source, make_row):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / f"verl_{tmp_path.name}.py").write_text(textwrap.dedent(HEAD + SINGLE))
    monkeypatch.syspath_prepend(library)
    config = {"functions": {"mine": {"function": f"verl_{tmp_path.name}:of_messages"}}}
    worker = InProcessWorker(RewardsConfig.model_validate(config), ["mine"])
    with pytest.raises(ConfigError) as refused:
        worker.__enter__()
    assert "my_rewards.py" in refused.value.fix
    made, code = named_code(refused.value.fix)
    outcome = worker_of_source(code, made).call(made, batch_of([make_row(1), make_row(2)], [RIGHT, WRONG], [[1], [1]]), 30.0)
    assert outcome.scores == [1.0, 0.0]


@pytest.fixture
def worker_of_source(tmp_path, monkeypatch):
    """A worker in the process of the test with functions of a source."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    numbers = itertools.count()

    def make(source, *names, **entry):
        module = f"own_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        functions = {name: {"function": f"{module}:{name}"} | entry for name in names}
        return InProcessWorker(RewardsConfig.model_validate({"functions": functions, "module_dir": tmp_path}), names).__enter__()

    return make


CAUSES = {
    # words of the fix -> the body that raises, the body after the fix (None: the same), and the entry after it
    "as_text: true": ("return [float(text.strip() == '42') for text in completions]", None, {"as_text": True}),
    "add **kwargs to the function": ("(lambda completions: 0)(completions, answer=answer)", SOUND, {}),
    "or set it in params": (
        "return (lambda *, target: [target])()",
        "return [columns['target']] * 2",
        {"params": {"target": 1.0}},
    ),
    "set target in params": ("return [float(columns['target'])] * 2", None, {"params": {"target": 1.0}}),
    "define or import that name in the module": ("return [math.pi] * 2", "import math; return [math.pi] * 2", {}),
    "catch the ValueError, and return 0": (
        "return [float(text) for text in texts(completions)]",
        "return [float(text) if text.isdigit() else 0.0 for text in texts(completions)]",
        {},
    ),
    "test the match before .group()": (
        "return [float(re.search('4', text).group()) for text in texts(completions)]",
        "return [float(match.group()) if (match := re.search('4', text)) else 0.0 for text in texts(completions)]",
        {},
    ),
    "return None for a completion whose value is None": (
        "return [float(one + 1) for one in columns['level']]",
        "return [None if one is None else float(one + 1) for one in columns['level']]",
        {},
    ),
    "a value is None: test it before it is used": ("one = None; return [one + 1]", "one = 1; return [one + 1.0] * 2", {}),
    "a relative path starts where grpo was called": (
        "return [float(len(open('scores.txt').read()))] * 2",
        "from pathlib import Path; return [float(len((Path(__file__).parent / 'scores.txt').read_text()))] * 2",
        {},
    ),
    "return a list with one score per completion": ("return 1.0", "return [1.0] * len(completions)", {}),
    "it is a factory: name what it returns": ("return lambda **_: [1.0]", "return [1.0] * 2", {}),
    "return a float or None per completion": ("return ['1', 1.0]", "return [1.0, None]", {}),
    "guard the division or logarithm": ("return [float('nan')] * 2", "return [0.0] * 2", {}),
    "return one number per id of completion_ids": ("return [[1.0], [1.0]]", "return [[1.0] * 3] * 2", {}),
    "pass one value per completion": (
        "columns['log_extra']('a', [1]); return [1.0] * 2",
        "columns['log_extra']('a', [1, None]); return [1.0] * 2",
        {},
    ),
}


def test_each_usual_mistake_is_gone_after_what_its_fix_says(worker_of_source, make_row, tmp_path, monkeypatch):
    (tmp_path / "scores.txt").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    some, none = ([make_row(1, **first), make_row(2)] for first in ({"level": 1}, {}))
    for words, (before, after, entry) in CAUSES.items():
        batch = batch_of(some if "level" in before else none, [RIGHT, WRONG], [[1, 2, 3], [4, 5, 6]])
        source = textwrap.dedent(HEAD + module_of({"cause": before}))
        fault = worker_of_source(source, "cause_").call("cause_", batch, 30.0)
        assert isinstance(fault, RewardFault), words
        assert words in fault.fix, (words, fault)
        source = textwrap.dedent(HEAD + module_of({"cause": after or before}))
        outcome = worker_of_source(source, "cause_", **entry).call("cause_", batch, 30.0)
        assert isinstance(outcome, FunctionScores), (words, outcome)


def test_strings_of_the_standard_format_are_used_as_they_are(worker_of_source, make_row):
    row = replace(make_row(), messages=[{"role": PLAIN, "content": "2 + 2 ="}])
    source = "def mine(completions, **columns):\n    return [float(len({})) for completion in completions]\n"
    fault = worker_of_source(source.format("completion[0]['content']"), "mine").call("mine", batch_of([row], ["42"], [[1]]), 30.0)
    instead = re.search(r"use (\w+) instead of completion\[0\]\['content'\]", fault.fix)[1]
    assert worker_of_source(source.format(instead), "mine").call("mine", batch_of([row], ["42"], [[1]]), 30.0).scores == [2.0]


def sampled(row, *texts):
    return GroupSample(row.prompt_id, list(texts), [[1]] * len(texts))


GRADED = "return [{0} for text in texts(completions)]"


@pytest.mark.parametrize(
    ("score", "stage"),
    [
        ("min(0.7, len(text) / 100)", "never"),  # a classifier that is never quite sure
        ("-10.0 / (1 + len(text))", "never"),  # a loss
        ("float(len(text))", "always"),  # no bound
    ],
)
def test_the_advised_full_score_tells_solved_prompts_from_others(findings_of, rows, score, stage):
    source = module_of({"graded": GRADED.format(score)})
    samples = [sampled(row, "a" * (10 + number), "b" * (20 + 5 * number)) for number, row in enumerate(rows)]
    free = {"completion": {"format": "none"}}
    _, found = findings_of(source, ["graded_"], samples=samples, **free)
    [said] = advice(found.forecasts)
    assert f"{6 if stage == 'always' else 0} always" in said
    assert "They teach all the same" in said
    assert "keep_pass_rate: [" not in said
    value = setting(said, "rewards.functions.graded_.full_score")["rewards"]["functions"]
    _, found = findings_of(source, ["graded_"], samples=samples, entries=value, **free)
    assert advice(found.forecasts) == []
    assert 0 < found.forecasts[0].never_or_always < 1


def test_the_full_score_of_the_perfect_completion_is_preferred(findings_of, rows):
    source = module_of({"half": "return [0.5 * (found(text) != '') + 0.01 * ('a' in text) for text in texts(completions)]"})
    samples = [sampled(row, "<reasoning>so</reasoning><answer>1</answer>", "") for row in rows]
    _, found = findings_of(source, ["half_"], samples=samples)
    value = setting(advice(found.forecasts)[0], "rewards.functions.half_.full_score")["rewards"]["functions"]
    assert value["half_"]["full_score"] == pytest.approx(0.51)


def test_signal_of_parts_needs_no_advice_and_dead_groups_do(findings_of, rows):
    dead = [sampled(row, "no", "neither") for row in rows[:4]]
    good = [f"<reasoning>so</reasoning><answer>{row.answer}</answer>" for row in rows]
    # Never right, and yet the format tells them apart.
    parts = [sampled(row, "<reasoning>so</reasoning><answer>1</answer>", "no") for row in rows]
    stage = {"names": ["format", "correctness"], "together": True}
    assert advice(findings_of("", samples=parts, **stage)[1].forecasts) == []
    [said] = advice(
        findings_of("", samples=[*dead, sampled(rows[4], good[4], "no"), sampled(rows[5], good[5], "no")], **stage)[1].forecasts
    )
    assert setting(said, "difficulty.samples") == {"difficulty": {"samples": 8}}
    low, high = setting(said, "keep_pass_rate")["keep_pass_rate"]
    # Measured with the same completions, the advised band keeps the prompts that teach.
    assert [low <= rate <= high for rate in (0.0, 0.0, 0.0, 0.0, 0.5, 0.5)].count(True) == 2
    before, found = findings_of("", samples=dead, **stage)
    assert "keep_pass_rate would leave no prompt" in advice(found.forecasts)[0]
    assert ("stage:s", "signal") in before
    partly = [sampled(row, "<reasoning>so</reasoning>", "no") for row in rows[:4]]
    assert "incremental" in FIXES["signal"]
    assert "add a reward that also pays for a part of the task" in advice(found.forecasts)[0]
    after, _ = findings_of("", ["incremental_format", "correctness"], samples=partly, together=True)
    assert ("stage:s", "signal") not in after


def fair_points(texts, properties):
    if "points" in properties:
        return {"points": 4 if "good good" in texts["completion"] else 0}
    return {"winner": "a" if texts["completion a"].startswith("good good") else "b"}


JUDGES = {
    "agreement": ("absolute", lambda texts, _: {"points": 4 - 4 * ("good good" in texts["completion"])}),
    "order_bias": ("pairwise", lambda *_: {"winner": "a"}),
    "length_bias": ("absolute", lambda texts, _: {"points": min(4, len(texts["completion"]) // 10)}),
    "verdicts": ("absolute", lambda *_: {"points": "many"}),
}


@pytest.mark.parametrize("check", JUDGES)
def test_another_model_is_the_fix_of_a_poor_judge(settings, endpoint, tmp_path, check):
    mode, endpoint.opinion = JUDGES[check]
    pairs = tmp_path / "gold.jsonl"
    pairs.write_text(json.dumps({"question": "Why?", "better": "good good", "worse": "good"}) + "\n")

    def outcomes(model):
        judge = settings(mode=mode, model=model, gold=pairs)
        checks, _ = check_judges(["taste"], RewardsConfig(functions={"taste": {"function": "judge", "judge": judge}}))
        return {one.check: one.outcome for one in checks}

    assert outcomes("weak")[check] == "failed"
    assert re.search("take a (stronger )?model|empty talk earns nothing", FIXES[check])
    endpoint.opinion = fair_points
    assert outcomes("strong").get(check, "passed") == "passed"


PLAYED = {
    # check -> the environment that it finds something in; its fix gives `Good`
    "begins": "NotForAll",
    "faults": "Crashes",
    "determinism": "Clock",
    "leak": "Leaks",
    "ranking": "PaysSilence",
    "length": "Endless",
    "perfect": "BadPlayer",
    "speed": "Slow",
}


@pytest.fixture
def played(tmp_path, monkeypatch):
    """The findings about an environment of this source."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_play.py").write_text(textwrap.dedent(ENVIRONMENTS), encoding="utf-8")
    rows = [
        PromptRow(f"{n:016x}", "rows.jsonl", n, ({"role": "user", "content": "Play."},), str(n), 9, {"word": "up"})
        for n in (1, 2)
    ]

    def check(environment, **fields):
        config = InteractionConfig(environment=environment, **{"workers": 1, "timeout_s": 5.0, "max_turns": 3} | fields)
        found = check_interaction(
            config, rows, chat_template=TEMPLATE, count_tokens=lambda chats: [9] * len(chats), completion=CompletionConfig()
        )
        return {one.check: one for one in found if one.outcome != "passed"}

    return check


@pytest.mark.long
@pytest.mark.parametrize("check", PLAYED)
def test_a_repaired_environment_passes_the_check_that_found_it(played, check):
    fields = {"timeout_s": 0.35} if check == "speed" else {}
    found = played(f"own_play:{PLAYED[check]}", **fields)
    assert found[check].fix
    assert check not in (played("own_play:Slow") if check == "speed" else played("own_play:Good"))


@pytest.mark.parametrize(
    "source", ["def rollout_func(prompts, trainer): ...", "async def roll(client, model, prompt, answer): ..."]
)
def test_the_printed_class_answers_where_a_rollout_function_stood(played, tmp_path, source):
    (tmp_path / "own_game.py").write_text(source)
    name = re.search(r"def (\w+)", source)[1]
    with pytest.raises(ConfigError, match="a function that samples by itself") as refused:
        played(f"own_game:{name}")
    made, code = named_code(refused.value.fix)
    (tmp_path / "own_game_repaired.py").write_text(code)
    assert played(f"own_game_repaired:{made}") == {}


def test_every_check_has_its_fix_carried_out():
    others = {"columns", "gold", "date", "signal"}
    assert REPAIRS.keys() | JUDGES.keys() | PLAYED.keys() | others == FIXES.keys()
