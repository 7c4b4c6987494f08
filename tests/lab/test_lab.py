"""The lab lets good rewards through and stops bad ones by name, before any training."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extract import extract
from grpo_tasks.lab.probes import GroupSample, make_probes, wrong_answer
from grpo_tasks.lab.report import FIXES, advice, opinions, report_markdown
from grpo_tasks.lab.run import forecast, lab_error, run_lab, sampled_signal
from schemas.config.completion import CompletionConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.results.data import LabReport

HONEST = "<reasoning>15 + 27 = 42</reasoning><answer>42</answer>"
SMALL = {"num_rows": 3, "max_seconds_per_completion": 0.05, "strict": True}

FUNCTIONS = """
    import itertools, os, random, re, time

    def texts(completions):
        return [chat[-1]["content"] for chat in completions]

    def good(prompts, completions, answer, **columns):
        found = [re.findall("<answer>([^<>]*)</answer>", text[-2000:]) for text in texts(completions)]
        return [float(len(one) == 1 and one[0].strip() == truth) for one, truth in zip(found, answer)]

    def raises(prompts, completions, **columns):
        return [1.0 / len(text.strip()) for text in texts(completions)]

    def hangs(prompts, completions, **columns):
        while any("42 43" in text for text in texts(completions)):
            time.sleep(0.01)
        return [1.0] * len(completions)

    def dies(prompts, completions, **columns):
        os._exit(1)

    def returns_none(prompts, completions, **columns):
        pass

    def all_none(prompts, completions, **columns):
        return [None] * len(completions)

    def some_none(prompts, completions, **columns):
        return [1.0 if "<answer>" in text else None for text in texts(completions)]

    def returns_nan(prompts, completions, **columns):
        return [float("nan") if not text else 1.0 for text in texts(completions)]

    def too_few(prompts, completions, **columns):
        return [1.0 for text in texts(completions) if text]

    def rewards_tags(prompts, completions, **columns):
        return [float(text.count("reasoning>") + text.count("answer>")) for text in texts(completions)]

    def somewhere(prompts, completions, answer, **columns):
        blocks = [text.rpartition("<answer>")[2].partition("</answer>")[0] for text in texts(completions)]
        return [float(truth in block.split()) for block, truth in zip(blocks, answer)]

    def rewards_silence(prompts, completions, **columns):
        return [1.0 / (1.0 + len(text)) for text in texts(completions)]

    calls = itertools.count()
    def remembers(prompts, completions, **columns):
        return [float(next(calls)) for _ in completions]

    def first_wins(prompts, completions, **columns):
        return [1.0] + [0.0] * (len(completions) - 1)

    def slow(prompts, completions, **columns):
        began = time.process_time()
        while any(len(text) > 1_000 for text in texts(completions)) and time.process_time() < began + 0.3:
            pass
        return [1.0 if text.endswith("</answer>") and text.count("<answer>") == 1 else 0.0 for text in texts(completions)]

    def one_task(prompts, completions, answer, task, **columns):
        scores = good(prompts, completions, answer)
        return [score if name == "sums" else None for score, name in zip(scores, task)]

    def sample_breaker(prompts, completions, **columns):
        return [float("nan") if text == "unheard of" else 1.0 for text in texts(completions)]
"""


def lab_of(run_config, own_module, stages, rows, samples=None, functions=(), **lab):
    own_module(FUNCTIONS)
    entries = {name: {"function": f"my_rewards:{name}", "time_limit_s": 0.5 if name == "hangs" else 30.0} for name in functions}
    config = run_config(stages, rewards={"functions": entries}, lab=SMALL | lab)
    return run_lab(config, rows, samples)


def failed(findings):
    return {f"{check.function}/{check.check}" for check in findings.checks if check.outcome == "failed"}


@pytest.fixture(scope="module")
def rows(make_row):
    return [make_row(line, str(line + 40), f"What is 40 + {line}?", task="sums") for line in range(1, 7)]


def test_the_usual_stages_pass_every_check(run_config, rows):
    stages = {
        "format": ["incremental_format", "format"],
        "correctness": ["format", "correctness"],
        "everything": ["correctness", "format", "incremental_format", "length", "repetition", "style"],
        "shape": ["format"],
        "tags": ["incremental_format"],
        "answers": ["correctness"],
    }
    findings = run_lab(run_config(stages, lab=SMALL), rows)
    assert {check.outcome for check in findings.checks} == {"passed"}
    expected = {"contract", "determinism", "speed", "gaming", "gold", "order", "empty"}
    assert {check.check for check in findings.checks} == expected
    assert findings.forecasts == []


def test_a_number_that_is_copied_from_the_question_is_no_expression(run_config, make_row):
    stages = {"format": ["format"], "correctness": ["format", "correctness"]}
    config, copied = run_config(stages, completion={"equality": "math"}, lab=SMALL), "copied_from_the_question"

    def asked(answer, value):
        return [make_row(line, answer, f"Make {value} from 92, 31 and 5.") for line in (1, 2)]

    found = run_lab(config, asked("92 + 31 - 5", 118))
    assert failed(found) == {"stage:correctness/gaming"}
    assert [check.probe for check in found.checks if check.outcome == "failed"] == [copied]
    # A question without the value, and a truth that is a number, have nothing to copy.
    assert failed(run_lab(config, asked("92 + 31 - 5", 7))) == set()
    boxed = CompletionConfig(format="boxed", equality="math")
    for answer, value, times in (("92 + 31 - 5", 118, 1), ("92 + 31 - 5", 7, 0), ("118", 118, 0)):
        [row, _] = asked(answer, value)
        assert [probe.kind for probe in make_probes(row, boxed)].count(copied) == times


@pytest.mark.slow
@pytest.mark.parametrize("equality", ["exact", "numeric", "math", "choice"])
def test_every_kind_of_answer_can_be_probed(run_config, make_row, equality):
    rows = [make_row(line, "B" if equality == "choice" else "42") for line in (1, 2)]
    config = run_config({"both": ["format", "correctness"]}, completion={"equality": equality}, lab=SMALL)
    findings = run_lab(config, rows)
    assert failed(findings) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("raises", "contract", "ZeroDivisionError"),
        ("hangs", "contract", "did not return within 0.5 s"),
        ("dies", "contract", "ended its worker process"),
        ("returns_none", "contract", "returned None instead of a list"),
        ("all_none", "applies", "None for every completion of all 3 rows"),
        ("returns_nan", "contract", "nan"),
        ("too_few", "contract", "scores for"),
        ("remembers", "determinism", "in a second call"),
        ("first_wins", "determinism", "at another position in the batch"),
        ("slow", "speed", "of 4,096 characters; the limit is 0.2 s"),
        ("rewards_tags", "gaming", "the perfect completion only"),
    ],
)
def test_a_bad_function_is_stopped_with_its_name_row_and_completion(run_config, own_module, rows, name, check, words):
    findings = lab_of(run_config, own_module, {"first": ["correctness", name]}, rows, functions=[name])
    assert f"{name}/{check}" in failed(findings)
    error = lab_error(LabReport(key="k", directory=Path("lab"), seconds=1.0, checks=findings.checks, forecasts=[]))
    assert name in error.message
    assert words in error.message
    assert "train.jsonl:" in error.place
    assert "prompt_id 0" in error.place
    assert "completion " in error.place
    assert len(error.place) < 1_000
    assert error.fix.startswith(next(one.fix for one in findings.checks if one.outcome == "failed") or FIXES[check])
    assert f"{name}/{check}" in error.fix


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), [("somewhere", "gaming"), ("rewards_silence", "order"), ("rewards_silence", "empty")])
def test_a_stage_whose_sum_pays_for_nothing_is_stopped(run_config, own_module, rows, name, check):
    findings = lab_of(run_config, own_module, {"first": [name]}, rows, functions=[name])
    assert f"stage:first/{check}" in failed(findings)


def test_right_functions_pass_and_need_not_apply_to_everything(run_config, own_module, rows, make_row):
    mixed, names = [rows[0], make_row(9, "7", task="other")], ["good", "one_task", "some_none"]
    findings = lab_of(run_config, own_module, {name: ["format", name] for name in names}, mixed, functions=names)
    # A stage of some_none alone pays for the wrong things; the right ones pass every check.
    assert {name for name in failed(findings) if "some_none" not in name} == set()
    assert {"some_none/contract", "some_none/applies"}.isdisjoint(failed(findings))
    detail = next(check.detail for check in findings.checks if check.function == "one_task" and check.check == "contract")
    assert "does not apply to" in detail


def test_a_stage_is_judged_on_the_rows_its_functions_apply_to(run_config, own_module, rows, make_row):
    mixed = [rows[0], make_row(9, "7", task="other"), rows[1]]
    findings = lab_of(run_config, own_module, {"first": ["one_task"]}, mixed, functions=["one_task"])
    judged = {check.check: check.outcome for check in findings.checks if check.function == "stage:first"}
    assert (judged["order"], judged["empty"]) == ("passed", "passed")
    for row in mixed:
        totals = findings.probes.filter(prompt_id=row.prompt_id)["total_first"]
        assert totals.null_count() == (len(totals) if row is mixed[1] else 0)


@pytest.mark.slow
def test_functions_see_rows_of_their_tasks_and_print_to_the_log(run_config, own_module, make_row, capfd, tmp_path):
    own_module("""
        def sums(completions, task, **kwargs):
            print("by print")
            assert set(task) == {"sums"}, task
            return [float(len(chat[0]["content"])) for chat in completions]
    """)
    rows = [replace(make_row(line), task=task) for line, task in enumerate(["sums", "style", "sums", "style"], 1)]
    functions = {"sums": {"function": "my_rewards:sums"}}
    tasks = {"sums": {"rewards": ["sums"]}, "style": {"rewards": ["length"]}}
    data = {"train": [{"path": "train.jsonl"}], "task_column": "task", "tasks": tasks}
    config = run_config({"s": ["sums", "length"]}, rewards={"functions": functions}, lab={"num_rows": 4}, data=data)
    findings = run_lab(config, rows, log=tmp_path / "log.txt")
    assert failed(findings) == set()
    table = findings.probes
    assert table.filter(pl.col("line") % 2 == 0)["reward_sums"].null_count() == table.height // 2
    assert table.filter(pl.col("line") % 2 == 1)["reward_sums"].null_count() == 0
    assert capfd.readouterr() == ("", "")
    assert "by print\n" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["speed", "slow/speed"])
def test_an_ignored_opinion_is_not_reported(run_config, own_module, rows, ignored):
    findings = lab_of(run_config, own_module, {"first": ["slow"]}, rows, functions=["slow"], ignore_checks=[ignored])
    assert "slow/speed" not in failed(findings)
    assert [check.outcome for check in findings.checks if check.check == "speed"] == ["ignored"]


def test_a_ground_truth_that_cannot_be_read_is_found_in_any_row(run_config, rows, make_row):
    late = make_row(0xFFFF, "forty-two")
    findings = run_lab(run_config({"only": ["correctness"]}, lab=SMALL), [*rows, late])
    check = next(check for check in findings.checks if check.check == "gold")
    assert (check.outcome, check.place) == ("failed", "train.jsonl:65535")
    assert "forty-two" in check.detail


def group(row, *texts):
    return GroupSample(row.prompt_id, list(texts), [[1]] * len(texts))


def test_the_forecast_counts_groups_that_differ(run_config, rows):
    samples = [group(rows[0], HONEST.replace("42", "41"), "no"), group(rows[1], "no", "neither"), group(rows[2], "", "")]
    findings = run_lab(run_config({"one": ["format"], "two": ["correctness"]}, lab=SMALL), rows, samples)
    one, two = findings.forecasts
    assert (one.stage, one.groups, one.share_with_signal) == ("one", 3, pytest.approx(1 / 3))
    assert one.mean_reward == pytest.approx(1 / 6)
    assert two.share_with_signal == pytest.approx(1 / 3)
    assert failed(findings) == set()


def test_the_signal_of_a_part_is_unknown_where_a_function_fails(run_config, own_module, rows):
    samples = [group(rows[0], HONEST.replace("42", "41"), "no"), group(rows[1], "no", "neither"), group(rows[2], "", "")]
    drawn = [(one.prompt_id, text, [1]) for one in samples for text in one.completions]
    table = pl.DataFrame(drawn, schema=["prompt_id", "completion", "token_ids"], orient="row")
    config = run_config({"one": ["format"], "two": ["correctness"]}, lab=SMALL)
    config = config.model_copy(update={"stages": [one.model_copy(update={"num_generations": 2}) for one in config.stages]})
    assert sampled_signal(config, rows, table, samples) == pytest.approx(1 / 3)
    broken = {"functions": {"raises": {"function": f"{own_module(FUNCTIONS)}:raises"}}}
    assert sampled_signal(run_config({"one": ["raises"]}, rewards=broken), rows, table, samples) is None


def test_base_samples_show_pass_rates_and_advise_measuring(run_config, rows):
    wrong = HONEST.replace("42", "1")
    good = [HONEST.replace("42", row.answer) for row in rows]
    samples = [group(row, "no", "neither") for row in rows[1:3]]
    samples += [group(rows[3], wrong, good[3]), group(rows[0], good[0], good[0])]
    findings = run_lab(run_config({"one": ["format", "correctness"], "two": ["format"]}, lab=SMALL), rows, samples)
    one, two = findings.forecasts
    assert one.pass_rates == [2, 0, 1, 0, 0, 1]
    assert two.pass_rates == [2, 0, 0, 0, 0, 2]
    text = report_markdown(findings.checks, findings.forecasts)
    assert "2 of 4 sampled prompts are never solved by the rewards of stage one and 1 always" in text
    assert "difficulty.samples: 8" in text
    assert "keep_pass_rate would leave no prompt" in advice([two])[0]
    assert advice([one.model_copy(update={"pass_rates": [1, 1, 2, 0, 0, 0]})]) == []


def test_too_little_signal_stops_the_first_stage_and_warns_for_the_next(run_config, rows):
    samples = [group(row, "no", "neither") for row in rows]
    findings = run_lab(run_config({"one": ["format"], "two": ["correctness"]}, lab=SMALL), rows, samples)
    assert failed(findings) == {"stage:one/signal"}
    outcomes = {check.function: check.outcome for check in findings.checks if check.check == "signal"}
    assert outcomes == {"stage:one": "failed", "stage:two": "warned"}


def test_a_function_that_breaks_on_a_base_sample_is_stopped(run_config, own_module, rows):
    samples = [group(rows[0], "heard", "unheard of")]
    findings = lab_of(run_config, own_module, {"one": ["sample_breaker"]}, rows, samples, functions=["sample_breaker"])
    check = next(check for check in findings.checks if check.outcome == "failed")
    assert (check.function, check.check, check.completion) == ("sample_breaker", "contract", "unheard of")
    assert (check.place, check.prompt_id) == ("train.jsonl:1", rows[0].prompt_id)


def test_ties_within_rounding_are_no_signal():
    import numpy as np

    samples = [GroupSample("a", ["x", "y"], [[1], [1]])]
    assert forecast("s", samples, np.array([0.3, 0.1 + 0.2])).share_with_signal == 0.0


def test_the_table_holds_every_probe_with_every_score(run_config, rows):
    findings = run_lab(run_config({"both": ["format", "correctness"]}, lab=SMALL), rows)
    table = findings.probes
    kinds = [probe.kind for probe in make_probes(rows[0], CompletionConfig())]
    assert len({probe.text for probe in make_probes(rows[0], CompletionConfig())}) == len(kinds)
    assert table.height == 3 * len(kinds)
    assert table["prompt_id"].n_unique() == 3
    perfect = table.filter(pl.col("probe") == "perfect")
    assert perfect["reward_format"].to_list() == perfect["reward_correctness"].to_list() == [1.0] * 3
    assert perfect["total_both"].to_list() == [3.0] * 3
    gamed = table.filter(pl.col("role") == "gamed")
    assert gamed["total_both"].max() < 3.0


def test_the_report_shows_the_first_failure_and_every_function(run_config, own_module, rows):
    findings = lab_of(run_config, own_module, {"first": ["format", "returns_nan"]}, rows, functions=["returns_nan"])
    text = report_markdown(findings.checks, findings.forecasts)
    assert "First failure: returns_nan / contract" in text
    assert "## format" in text
    assert "**FAILED**" in text
    assert "- returns_nan/contract: guard the division or logarithm it comes from" in text


@pytest.mark.slow
def test_rows_are_chosen_the_same_whatever_their_order(run_config, rows):
    config = run_config({"one": ["format"]}, lab=SMALL)
    there, back = run_lab(config, rows), run_lab(config, rows[::-1])
    assert there.probes.equals(back.probes)


def test_without_a_truth_any_object_is_perfect_for_format_alone(make_row):
    row, completion = make_row(1, None), CompletionConfig(format="json", required=["total"])
    assert make_probes(row, completion)[0].text == '{"total": "text"}'
    assert {probe.role for probe in make_probes(row, completion, form_suffices=False)} == {"empty", "edge"}
    truth = make_row(1, '{"total":10.5}')
    kinds = {probe.kind: probe.text for probe in make_probes(truth, completion, form_suffices=False)}
    assert kinds["perfect"] == truth.answer
    assert json.loads(kinds["wrong_answer_right_format"]) == {"total": "10.5 and something else"}


@pytest.mark.parametrize(
    ("answer", "equality"),
    [("42", "numeric"), ("-1,234.5", "numeric"), ("3/4", "math"), ("x+1", "math"), ("A", "choice"), ("yes", "exact")],
)
def test_the_wrong_answer_is_wrong(answer, equality):
    assert not answers_equal(wrong_answer(answer, equality), answer, equality)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["train", "test"])
def test_the_perfect_completion_of_every_gsm8k_row_is_right(real_data, run_config, make_row, side):
    lines = (real_data / "gsm8k" / f"{side}.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    rows = [make_row(number, _truth(record), record["question"]) for number, record in enumerate(records, 1)]
    for row in rows:
        perfect = make_probes(row, CompletionConfig())[0]
        found = extract(perfect.text, CompletionConfig())
        assert found.strict_format
        assert answers_equal(found.answer or "", row.answer, "numeric"), row
    findings = run_lab(_gsm8k(run_config), rows)
    assert {check.outcome for check in findings.checks} == {"passed"}
    gold = next(check for check in findings.checks if check.check == "gold")
    assert gold.detail == f"{len(rows)} rows"


def _truth(record: dict[str, str]) -> str:
    return record["answer"].rpartition("####")[2].strip()


def _gsm8k(run_config) -> RunConfig:
    return run_config(
        {"format": ["incremental_format", "format"], "correctness": ["format", "correctness"]}, lab=SMALL | {"num_rows": 32}
    )


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_opinions_stop_the_run_only_when_the_lab_is_strict(run_config, own_module, rows, strict):
    findings = lab_of(run_config, own_module, {"first": ["rewards_tags"]}, rows, functions=["rewards_tags"], strict=strict)
    outcomes = {check.outcome for check in findings.checks if check.check in ("gaming", "empty", "order")} - {"passed"}
    assert outcomes == {"failed" if strict else "warned"}


@pytest.mark.slow
def test_faults_stop_the_run_without_strict_and_only_warn_when_ignored(run_config, own_module, rows):
    for ignored, outcome in (([], "failed"), (["raises/contract"], "warned")):
        findings = lab_of(
            run_config, own_module, {"one": ["raises"]}, rows, functions=["raises"], strict=False, ignore_checks=ignored
        )
        assert [check.outcome for check in findings.checks if check.check == "contract"] == [outcome]


def test_opinions_are_one_table_with_one_line_and_short_texts(run_config, own_module, rows):
    findings = lab_of(
        run_config, own_module, {"s": ["rewards_tags", "remembers"]}, rows, functions=["rewards_tags", "remembers"], strict=False
    )
    table, line = opinions(findings.checks)
    assert len(table) == sum(check.outcome == "warned" for check in findings.checks) > 2
    assert "lab.strict: true" in line
    assert "lab.ignore_checks: [" in line
    assert all(len(check.completion) <= 200 for check in findings.checks)
    text = report_markdown(findings.checks, findings.forecasts, findings.left_out)
    assert text.count(line) == 1
    assert "Not checked: signal" in text


@pytest.mark.slow
def test_a_hang_on_a_text_of_the_configured_length_is_a_fault(run_config, own_module, rows):
    own_module("""
        import time
        def patient(completions, **columns):
            while any(len(chat[0]["content"]) == 400 for chat in completions):
                time.sleep(0.01)
            return [float(len(chat[0]["content"])) for chat in completions]
    """)
    functions = {"patient": {"function": "my_rewards:patient", "time_limit_s": 0.5}}
    rollout = {"max_completion_length": 100}
    config = run_config({"s": ["patient"]}, rewards={"functions": functions}, lab=SMALL, rollout=rollout)
    [fault] = [check for check in run_lab(config, rows).checks if check.check == "contract"]
    assert (fault.outcome, fault.probe) == ("failed", "as long as a completion may be")


def test_a_fault_names_the_users_line_the_arguments_and_the_fix(run_config, own_module, rows):
    own_module("""
        import re
        def inner(text):
            return re.findall("a", text)
        def on_strings(prompts, completions, **kwargs):
            return [float(len(inner(text))) for text in completions]
    """)
    config = run_config({"s": ["mine"]}, rewards={"functions": {"mine": {"function": "my_rewards:on_strings"}}}, lab=SMALL)
    findings = run_lab(config, rows)
    error = lab_error(LabReport(key="k", directory=Path("lab"), seconds=1.0, checks=findings.checks, forecasts=[]))
    assert "my_rewards.py:4 in inner" in error.place
    assert "completions: list of" in error.place
    assert "each [{'role', 'content'}]" in error.place
    assert error.fix.startswith("completions arrive as lists of messages")
    assert "as_text: true" in error.fix


@pytest.fixture
def style_rows(make_row):
    return [
        make_row(line, None, f"Write about {line}.", good=f"Dear reader, {line} is a number. Kind regards") for line in (1, 2, 3)
    ]


STYLE = """
    def kind(prompts, completions, answer, **columns):
        assert answer == [None] * len(completions)
        return [float("Kind regards" in chat[0]["content"]) for chat in completions]

    def golds(rows):
        return [f"{row['prompt'][0]['content']} Kind regards" for row in rows]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "order"), [(None, []), ("good", ["warned"]), ("my_rewards:golds", ["warned"])])
def test_a_task_without_answers_is_tried_and_own_golds_allow_more_checks(run_config, own_module, style_rows, gold, order):
    own_module(STYLE)
    config = run_config(
        {"s": ["kind"]},
        completion={"format": "none"},
        rewards={"functions": {"kind": {"function": "my_rewards:kind"}}},
        lab={"num_rows": 2, "gold": gold},
    )
    findings = run_lab(config, style_rows)
    assert failed(findings) == set()
    assert [check.outcome for check in findings.checks if check.check == "order"] == order
    assert ("lab.gold" in " ".join(findings.left_out)) == (gold is None)
    perfect = findings.probes.filter(role="perfect")["completion"].to_list()
    assert len(perfect) == (0 if gold is None else 2)
    assert all("Kind regards" in text for text in perfect)


@pytest.mark.parametrize(("gold", "words"), [("god", "the data have no column god"), ("my_rewards:gold", "did you mean golds?")])
def test_golds_that_cannot_be_found_are_refused(run_config, own_module, style_rows, gold, words):
    own_module(STYLE)
    config = run_config({"s": ["length"]}, lab={"num_rows": 2, "gold": gold})
    with pytest.raises(ConfigError) as caught:
        run_lab(config, style_rows)
    assert words in str(caught.value)
    assert "lab.gold" in caught.value.place


@pytest.mark.slow
@pytest.mark.parametrize(
    "completion",
    [
        {"format": "boxed"},
        {"format": "json", "answer_key": "n"},
        {"format": "regex", "pattern": "#### (.+)"},
        {"format": "tags", "tags": {"reasoning": None, "answer": "SOLUTION"}},
    ],
)
def test_every_format_can_be_probed(run_config, rows, completion):
    findings = run_lab(run_config({"s": ["format", "correctness"]}, completion=completion, lab=SMALL), rows)
    assert failed(findings) == set()
    assert findings.probes.filter(role="perfect")["reward_correctness"].to_list() == [1.0] * 3


def test_tags_other_than_the_configured_ones_are_named(run_config, own_module, rows):
    own_module("""
        import re
        def think(completions, **kwargs):
            return [float(bool(re.search("<think>.{1,99}</think>", chat[0]["content"]))) for chat in completions]
    """)
    config = run_config({"s": ["think"]}, rewards={"functions": {"think": {"function": "my_rewards:think"}}}, lab={"num_rows": 1})
    [check] = [check for check in run_lab(config, rows).checks if check.check == "same_score"]
    assert check.outcome == "warned"
    assert "its module looks for the tags think, and completion.tags are reasoning and answer" in check.detail
