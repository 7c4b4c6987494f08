"""What a row may look like: plain prompts, chats with parts, joined columns, one answer, several or none, tasks."""

import copy
import json
from datetime import date

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_tasks.data.chat_tokens import TokenCounter
from grpo_tasks.data.records import Columns, Record, read_row
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.table import read_prompts
from grpo_tasks.data.validation import Origin, report_data, validate_rows
from schemas.config.data import DataConfig
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.prompts import PLAIN


def broken(verdict):
    return {row["line"]: row["rule"] for row in verdict.quarantine.iter_rows(named=True)}


def contents(verdict):
    return [[(one["role"], one["content"]) for one in chat] for chat in verdict.accepted["prompt"]]


def validated(path, folder, **data):
    completion = data.pop("completion", {"equality": "exact"})
    source = {"path": path, **data.pop("source", {})}
    tree = {"data": {"train": [source], "eval_fraction": 0.2, **data}, "completion": completion, "seed": 1}
    tree["stages"] = tree["data"].pop("stages", [{"name": "s", "rewards": ["format"]}])
    config = RunConfig.model_validate(tree)
    origin = Origin("k", folder, 0.0, load_sources(config.data, directory=folder))
    report = validate_rows(folder / ROWS, config, origin)
    return report, read_prompts(report.train)


STRINGS = [{"prompt": f"Once upon a time {number}", "answer": "1"} for number in range(12)]


def test_prompts_that_are_strings_are_plain_and_counted_as_trl_encodes_them(judged, write, counter, tmp_path):
    verdict = judged(*STRINGS)
    assert verdict.format == "standard"
    assert broken(verdict) == {}
    assert contents(verdict) == [[(PLAIN, row["prompt"])] for row in STRINGS]
    encoded = [len(counter.tokenizer(row["prompt"])["input_ids"]) for row in STRINGS]
    assert verdict.accepted["prompt_tokens"].to_list() == encoded
    assert counter.count(verdict.accepted["prompt"].to_list()) == encoded
    report, rows = validated(write(*STRINGS), tmp_path)
    assert report.format == "standard"
    assert all(row.plain for row in rows)
    assert "standard format" in (tmp_path / "report.md").read_text()


def test_plain_prompts_need_no_chat_template_and_have_an_upper_bound(counter, verdict_on, write):
    tokenizer = copy.deepcopy(counter.tokenizer)
    tokenizer.chat_template = None
    assert verdict_on({"train": [{"path": write(*STRINGS)}]}, TokenCounter(tokenizer)).accepted.height == len(STRINGS)
    prompts = pl.Series([[{"role": PLAIN, "content": "word " * 9}]])
    [exact], [bound] = counter.count_column(prompts), counter.count_column(prompts, limit=500)
    assert exact <= bound <= 500


QUESTION = {"question": "Q: 1 + 1\nA:", "answer": "2"}


def test_the_configured_form_decides_how_a_string_is_asked(judged):
    asked = judged(STRINGS[0], format="conversational", system_prompt="be brief")
    assert contents(asked) == [[("system", "be brief"), ("user", STRINGS[0]["prompt"])]]
    assert contents(judged(QUESTION, format="standard")) == [[(PLAIN, QUESTION["question"])]]
    with pytest.raises(DataError, match=r"no system message\s.*\s.*data.format: conversational"):
        judged(*STRINGS, system_prompt="be brief")
    with pytest.raises(DataError, match=r"chat messages, not strings\s.*\s.*remove data.format"):
        judged({"prompt": [{"role": "user", "content": "q"}], "answer": "1"}, format="standard")


def test_rows_of_the_rarer_form_are_refused_by_a_rule(judged):
    chat = {"prompt": [{"role": "user", "content": "q"}], "answer": "1"}
    assert broken(judged(*STRINGS, chat)) == {13: "mixed_forms"}
    chats = [{**chat, "prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(3)]
    assert broken(judged(*chats, STRINGS[0])) == {4: "mixed_forms"}


def test_message_of_the_role_plain_stays_an_unknown_role(judged):
    own = {"prompt": [{"role": PLAIN, "content": "q"}], "answer": "1"}
    assert broken(judged({"question": "q", "answer": "1"}, own)) == {2: "unknown_role"}


def test_plain_prompts_may_hold_templates_but_not_be_empty(judged):
    ready = {"prompt": "<|im_start|>user\nhi<|im_end|>\n", "answer": "1"}
    rows = [*STRINGS, ready, {"prompt": " ", "answer": "1"}, {"prompt": "[INST] x [/INST]", "answer": "1"}]
    assert broken(judged(*rows)) == {14: "content_empty"}


def test_a_row_without_answer_among_rows_with_answers_stays_an_error(judged):
    assert broken(judged(*STRINGS, {"prompt": "Once more"})) == {13: "answer_missing"}


def test_parts_of_a_message_that_are_all_text_are_joined(judged):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?", "image": None}]
    image = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    rows = [{"prompt": [{"role": "user", "content": one}], "answer": "2"} for one in (parts, image)]
    verdict = judged(*rows)
    assert contents(verdict) == [[("user", "What is 1 + 1?")]]
    assert broken(verdict) == {2: "message_not_text"}


CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "so #### 2"}]


def test_messages_column_of_supervised_data_loses_the_reply_which_is_the_answer(write, verdict_on, tmp_path):
    path = write({"messages": CHAT}, {"messages": CHAT[:1], "answer": "#### 3"}, {"messages": [*CHAT, *CHAT], "answer": "#### 2"})
    data = {"train": [{"path": path}], "answer_pattern": "#### (.+)"}
    # The same question with several answers, in both splits, to show that only the column decides.
    verdict = verdict_on(data, validation={"ignore_rules": ["contradiction", "leak_exact", "leak_normalised"]})
    assert verdict.accepted["answer"].to_list() == ["2", "3", "2"]
    asked = ("user", "1 + 1?")
    assert contents(verdict) == [[asked], [asked], [asked, ("assistant", "so #### 2"), asked]]
    [source] = load_sources(DataConfig.model_validate(data), directory=tmp_path)
    assert (source.form, source.of_form) == ("messages", 3)
    report_data(verdict, Origin("k", tmp_path, 0, [source]))
    assert "3 prompts are the column `messages`, without" in (tmp_path / "report.md").read_text()


SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1 + 1?"},
    {"from": "gpt", "value": "so #### 2"},
]


def test_sharegpt_conversations_are_chats_whose_reply_is_the_answer(judged, verdict_on, tmp_path):
    verdict = judged({"id": "a", "conversations": SHAREGPT}, answer_pattern="#### (.+)")
    assert contents(verdict) == [[("system", "Be brief."), ("user", "1 + 1?")]]
    assert verdict.accepted["answer"].to_list() == ["2"]
    cells = tmp_path / "rows.csv"
    pl.DataFrame({"conversations": [json.dumps(SHAREGPT)]}).write_csv(cells)
    assert contents(verdict_on({"train": [{"path": str(cells)}]})) == contents(verdict)
    unknown = [{"from": "tool", "value": "x"}, {"from": "human", "value": "q"}]
    assert broken(judged({"conversations": unknown, "answer": "1"})) == {1: "unknown_role"}
    assert broken(judged({"conversations": [{"from": "human", "value": 3}], "answer": "1"})) == {1: "message_shape"}


def test_alpaca_rows_ask_by_instruction_and_input(judged, write, tmp_path):
    rows = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}, {"instruction": "Add 2 and 2.", "input": "", "output": 4}]
    verdict = judged(*rows)
    assert contents(verdict) == [[("user", "Add.\n1 and 2")], [("user", "Add 2 and 2.")]]
    assert verdict.accepted["answer"].to_list() == ["3", "4"]
    # A question or an answer of its own counts before the form.
    own = judged({**rows[0], "question": "q?", "answer": "5"})
    assert (contents(own), own.accepted["answer"].to_list()) == ([[("user", "q?")]], ["5"])
    [source] = load_sources(DataConfig.model_validate({"train": [{"path": write(*rows)}]}), directory=tmp_path)
    report_data(verdict, Origin("k", tmp_path, 0, [source]))
    assert "2 prompts are Alpaca's columns instruction and input" in (tmp_path / "report.md").read_text()


PAIRS = {
    "chosen": [*CHAT[:1], {"role": "assistant", "content": "two"}],
    "rejected": [*CHAT[:1], {"role": "assistant", "content": "3"}],
}


def test_pairs_of_chats_ask_what_both_begin_with(judged):
    verdict = judged(PAIRS, answer_column=None)
    assert contents(verdict) == [[("user", "1 + 1?")]]
    assert verdict.accepted["answer"].to_list() == [None]
    # A preferred reply is a column, and no ground truth.
    assert json.loads(verdict.accepted["extra"][0]) == PAIRS
    assert broken(judged(PAIRS)) == {1: "answer_missing"}


IMAGES = {
    "stored as datasets do": {"image": {"bytes": b"\x89PNG\r\n\x1a\n", "path": None}},
    "several": {"scans": [{"bytes": None, "path": "a.png"}]},
    "bytes": {"blob": b"\xff\xd8\xff\xe0..."},
    "a path": {"image_file": "train/0001.JPG"},
    "an address": {"picture": "data:image/png;base64,iVBORw0KGgo="},
    "a sound": {"audio": {"bytes": None, "path": "a.wav", "sampling_rate": 16000}},
}


@pytest.mark.parametrize("media", IMAGES.values(), ids=IMAGES)
def test_images_next_to_text_are_refused_with_the_name_of_the_column(tmp_path, verdict_on, media):
    path, text = tmp_path / "seen.parquet", {"question": "What is it?", "answer": "a cat", "caption": "image.png is a name"}
    pq.write_table(pa.Table.from_pylist([text | media]), path)
    verdict = verdict_on({"train": [{"path": str(path)}]})
    [(rule, value)] = verdict.quarantine.select("rule", "value").rows()
    assert (rule, value) == ("media_with_text", f"column {next(iter(media))}")
    # Where the text is complete without it, a name of the rule lets the rows pass, without the column.
    passed = verdict_on({"train": [{"path": str(path)}]}, validation={"ignore_rules": ["media_with_text"]})
    assert json.loads(passed.accepted["extra"][0]) == {"caption": "image.png is a name"}


def test_columns_that_only_speak_of_files_are_no_images(judged):
    about = {"file": {"bytes": 1200, "path": "notes.txt"}, "image_count": "3", "photographer": "Ann", "name": "a.png"}
    assert broken(judged({"question": "q", "answer": "1", **about})) == {}


def test_a_column_of_a_template_may_be_empty_where_it_says_so(judged):
    rows = [
        {"a": "Look", "b": "here", "answer": "1"},
        {"a": "See", "b": "", "answer": "2"},
        {"a": "Go", "b": None, "answer": "3"},
    ]
    assert contents(judged(*rows, question="{a}\n{b?}")) == [[("user", text)] for text in ("Look\nhere", "See", "Go")]
    assert broken(judged(*rows, question="{a}\n{b}")) == {3: "prompt_missing"}
    assert contents(judged({"Why?": "sky", "answer": "1"}, question="{Why?}")) == [[("user", "sky")]]


def test_columns_are_renamed_and_joined_by_a_template(write, verdict_on):
    row = {"Body": "Bo has {2}.", "Question": "How many?", "Answer": 2.0, "Type": "easy"}
    data = {"train": [{"path": write(row)}], "question": "{Body} {Question}", "rename": {"Answer": "answer"}}
    verdict = verdict_on(data)
    assert contents(verdict) == [[("user", "Bo has {2}. How many?")]]
    assert verdict.accepted["answer"].to_list() == ["2"]
    own = {"path": write(row), "question": "{Question}", "rename": {"Answer": "answer"}}
    assert contents(verdict_on({"train": [own]})) == [[("user", "How many?")]]


def test_template_with_an_unknown_column_names_it(judged):
    with pytest.raises(DataError, match="no row has a column Bodi; the columns are: Body, answer"):
        judged({"Body": "b", "answer": "1"}, question="{Bodi}")


def test_answers_of_every_kind_are_text(tmp_path, verdict_on):
    path = tmp_path / "typed.parquet"
    answers = {"true": True, "false": False, "2024-02-29": date(2024, 2, 29), "7": 7, "2.5": 2.5}
    frames = [pl.DataFrame({"question": ["q"], "answer": [value]}) for value in answers.values()]
    for frame, expected in zip(frames, answers, strict=True):
        frame.write_parquet(path)
        assert verdict_on({"train": [{"path": str(path)}]}).accepted["answer"].to_list() == [expected]


def test_list_of_answers_has_all_of_them_normalised(judged):
    lists = [["NYC", "New York "], ["1,000", 1000.0, "10 hundred"], ["Bern"], [], "Rome", ["x <answer>", "y"]]
    rows = [{"question": f"q{number}", "answer": value} for number, value in enumerate(lists)]
    verdict = judged(*rows)
    assert verdict.accepted["answer"].to_list() == ["NYC", "1000", "Bern", "Rome"]
    assert verdict.accepted["answers"].to_list() == [["NYC", "New York"], ["1000", "10 hundred"], None, None]
    assert broken(verdict) == {4: "answer_missing", 6: "answer_has_tags"}
    pattern = judged({"question": "q", "answer": ["#### a", "#### b"]}, answer_pattern="#### (.+)")
    assert pattern.accepted["answers"].to_list() == [["a", "b"]]


BARE = [{"question": f"Write a line about {number}."} for number in range(20)]


def test_data_without_answers_validates_where_the_config_says_so(write, tmp_path):
    report, rows = validated(write(*BARE), tmp_path, answer_column=None)
    assert (report.rows, report.quarantined) == (20, 0)
    assert {row.answer for row in rows} == {None}
    assert {row.truths for row in rows} == {()}
    assert len({row.prompt_id for row in rows}) == len(rows)


def test_missing_answer_column_is_refused_with_every_way_out(write, tmp_path):
    with pytest.raises(DataError, match="no row has a column answer; the columns are: question") as caught:
        validated(write(*BARE), tmp_path)
    assert "data.answer_column: null" in caught.value.fix
    assert "completion.format: none" in caught.value.fix
    with pytest.raises(DataError) as caught:
        validated(write({"question": "q", "answers": "1"}), tmp_path)
    assert caught.value.fix.startswith("set data.answer_column: answers")


@pytest.mark.parametrize("completion", [{"format": "none"}, {"format": "json"}])
def test_completions_without_an_answer_may_have_any_ground_truths(write, tmp_path, completion):
    poems = [{"question": f"Write about {number}.", "answer": "a poem"} for number in range(20)]
    stage = {"name": "s", "rewards": ["length"]}
    report, _ = validated(write(*poems), tmp_path, completion=completion | {"equality": "numeric"}, stages=[stage])
    assert (report.rows, report.quarantined) == (20, 0)
    assert "can ever be right" not in (tmp_path / "report.md").read_text()
    with pytest.raises(DataError, match="can ever be right"):
        validated(write(*poems), tmp_path, completion={"equality": "numeric"})


def test_tasks_have_their_own_needs_and_their_counts(judged, write, tmp_path):
    math = [{"question": f"{number} + 1?", "answer": str(number + 1), "kind": "math"} for number in range(20)]
    style = [{**row, "kind": "style"} for row in BARE]
    rows = [*math, *style, {"question": "which?", "answer": "1"}, {"question": "what?", "answer": "1", "kind": "a/b"}]
    data = {"task_column": "kind", "tasks": {"style": {"answers": "optional"}}}
    verdict = judged(*rows, **data)
    assert broken(verdict) == {41: "task_name", 42: "task_name"}
    assert verdict.accepted["task"].to_list() == ["math"] * 20 + ["style"] * 20
    report, _ = validated(write(*math, *style), tmp_path, **data)
    assert [(task.task, task.train_rows + task.eval_rows) for task in report.tasks] == [("math", 20), ("style", 20)]
    assert "| style |" in (tmp_path / "report.md").read_text()


def test_each_source_may_be_a_task_with_a_pattern_of_its_own(write, verdict_on):
    first = {"path": write({"question": "a?", "answer": "so #### 1"}, name="a.jsonl"), "task": "a", "answer_pattern": "#### (.+)"}
    second = {"path": write({"question": "b?", "answer": "2"}, name="b.jsonl"), "task": "b"}
    verdict = verdict_on({"train": [first, second]})
    assert verdict.accepted.select("task", "answer").rows() == [("a", "1"), ("b", "2")]


def test_task_that_no_row_has_is_refused_with_the_nearest_name(write, tmp_path):
    rows = [{"question": f"{number} + 1?", "answer": "1", "task": "math"} for number in range(20)]
    with pytest.raises(DataError, match="has the task maths") as caught:
        validated(write(*rows), tmp_path, task_column="task", tasks={"maths": {}})
    assert caught.value.fix == "did you mean math?"


def test_copy_of_a_refused_row_is_not_left_out_because_of_it(judged):
    named = {"prompt": [{"role": "user", "content": "q", "name": "Bo"}], "answer": "1"}
    sound = {"prompt": [{"role": "user", "content": "q"}], "answer": "1"}
    verdict = judged(named, sound, sound)
    assert verdict.accepted["line"].to_list() == [2]
    assert verdict.dropped.select("line", "value").rows()[0][0] == 3


def test_left_out_duplicates_do_not_stop_a_run(write, tmp_path):
    rows = [{"question": f"{number} + 1?", "answer": "1"} for number in range(20)]
    report, _ = validated(write(*rows, *rows[:10]), tmp_path)
    assert (report.rows, report.duplicates, report.quarantined) == (30, 10, 0)
    assert "10 rows repeat an earlier row and are left out" in (tmp_path / "report.md").read_text()
    with pytest.raises(DataError, match="10 of 30 rows are quarantined"):
        validated(write(*rows, *rows[:10]), tmp_path, duplicates="quarantine")


def test_rewards_get_the_answer_column_under_its_own_name():
    columns = Columns("question", "prompt", "solution")
    row = read_row(Record(1, {"question": "What is 1 + 1?", "solution": "1 + 1 #### 2", "level": 3}), columns)
    assert row.answer == "1 + 1 #### 2"
    assert json.loads(row.extra) == {"solution": "1 + 1 #### 2", "level": 3}
    plain = read_row(Record(1, {"question": "What is 1 + 1?", "answer": "2"}), columns._replace(answer="answer"))
    assert plain.extra == "{}"
