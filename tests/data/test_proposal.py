"""A config is proposed that the validation step accepts, and it can be loaded as it is written."""

import gzip
import json
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils as published
from typer.testing import CliRunner

from flows.cli.init import run_name
from flows.cli.main import app
from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extract import extract
from grpo_tasks.answers.ground_truths import find_pattern
from grpo_tasks.data.columns import ColumnChoice, candidates, left_out
from grpo_tasks.data.model_names import THINKING, NameHints
from grpo_tasks.data.proposal import data_settings, find_equality, find_unit
from grpo_tasks.data.table import read_prompts
from grpo_tasks.library import base_model, load_data, make, train_stage
from grpo_tasks.steps.probe_rewards import probe_rewards
from schemas.config.load import load_config, parse_yaml

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = [
    ("gsm8k/train.jsonl", "numeric"),
    ("mawps/multiarith.jsonl", "numeric"),
    ("reasoning_gym/chain_sum.jsonl", "numeric"),
    ("reasoning_gym/countdown.jsonl", "math"),
    ("reasoning_gym/knights_knaves.jsonl", "exact"),
    ("logic_kk/3ppl_train.parquet", "exact"),
    ("svamp/svamp_700.json", "numeric"),
    ("reasoning_gym/propositional_logic.jsonl", None),
]
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


def init(*arguments, expect=0, answers=None):
    """Call `grpo init`; its output."""
    result = CliRunner().invoke(app, ["init", *map(str, arguments)], input=answers)
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result.output


def write_rows(path, **columns):
    """Thirty rows; a callable makes the value of a row from its number."""
    rows = [{name: make(n) if callable(make) else make for name, make in columns.items()} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a file of sums."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "sums.jsonl", problem=lambda n: f"What is {n} + {n}?", result=lambda n: 2 * n)
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"question": lambda n: f"What is {n} + 1?", "answer": str}, ColumnChoice("question", None, "answer")),
        ({"id": str, "input": lambda n: f"What is {n} + 1?", "target": lambda n: n}, ColumnChoice("input", None, "target")),
        ({"prompt": CHAT, "answer": str}, ColumnChoice(None, "prompt", "answer")),
        ({"prompt": lambda n: f"Tell me about {n}"}, ColumnChoice("prompt", None, None)),
        ({"question": lambda n: f"Why {n}?", "answer": None}, ColumnChoice("question", None, None)),
        (
            {"Body": lambda n: f"There are {n} cats.", "Question": lambda n: f"How many {n}?", "Answer": float},
            ColumnChoice("Question", None, "Answer", ("Body",), "{Body}\n{Question}"),
        ),
        ({"art": lambda n: f"kurz {n}", "Satz": lambda n: f"Ein langer Satz mit {n}."}, ColumnChoice("Satz", None, None)),
        (
            {"question": "Solve the problem.", "problem": lambda n: f"What is {n}?", "kind": "sums"},
            ColumnChoice("problem", None, None, ("question",), "{question}\n{problem}"),
        ),
        ({"a": lambda n: n, "b": True}, None),
    ],
)
def test_the_likeliest_reading_comes_first(columns, expected, tmp_path):
    found = candidates(write_rows(tmp_path / "rows.jsonl", **columns))
    assert next(iter(found), None) == expected


def chat(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


SHAREGPT = [{"from": "human", "value": "How old is Bo?"}, {"from": "gpt", "value": "He is nine years old."}]
WORDS = ["river", "stone", "lamp", "garden", "winter"]
READINGS = {
    "alpaca": (
        {"instruction": "Add the numbers.", "input": lambda n: f"{n} and 5", "output": lambda n: n + 5},
        ("{instruction}\n{input}", "output"),
    ),
    "alpaca, input in some rows": (
        {
            "instruction": lambda n: f"Sum up {n}.",
            "input": lambda n: "a text" if n % 3 else "",
            "output": lambda n: f"It is {n}.",
        },
        ("{instruction}\n{input?}", "output"),
    ),
    "alpaca, no input": ({"instruction": lambda n: f"Add {n}.", "input": "", "output": str}, ("instruction", "output")),
    "pairs of replies": (
        {"rejected": "No.", "chosen": lambda n: f"Yes, it is {n}.", "prompt": lambda n: f"Is it {n}?"},
        ("prompt", None),
    ),
    "pairs of chats": ({"chosen": lambda n: chat(f"Is it {n}?", "Yes"), "rejected": chat("a", "b")}, ("chosen", None)),
    "sharegpt": ({"id": lambda n: f"conv_{n}", "conversations": SHAREGPT}, ("conversations", None)),
    "a chat of another name": ({"thread": lambda n: n, "dialogue": SHAREGPT, "lang": "en"}, ("dialogue", None)),
    "fine-tuning data": ({"messages": lambda n: chat(f"What is {n}?", str(n)), "topic": "sums"}, ("messages", None)),
    "a question next to its chat": (
        {"messages": lambda n: chat(f"Find x for {n}.", "ok"), "problem": lambda n: f"Find x for {n}.", "answer": str},
        ("problem", "answer"),
    ),
    "German": (
        {"Frage": lambda n: f"Was kosten {n} Äpfel?", "Antwort": lambda n: f"{n},50 €", "Preis": lambda n: n},
        ("Frage", "Antwort"),
    ),
    "Chinese, with the working": (
        {
            "题目": lambda n: f"小明有{n}个苹果，又买了2个，有多少个？",
            "解析": lambda n: f"{n}+2={n + 2}",
            "答案": lambda n: str(n + 2),
        },
        ("题目", "答案"),
    ),
    "a working between question and result": (
        {
            "Aufgabe": lambda n: f"Ein Buch kostet {n} €. Und zwei?",
            "Weg": lambda n: f"zwei mal {n} ist {2 * n}",
            "x": lambda n: 2 * n,
        },
        ("Aufgabe", "x"),
    ),
    "a worked solution and its result": (
        {
            "problem": lambda n: f"Solve x = {n}.",
            "solution": lambda n: f"so \\boxed{{{n}}}",
            "answer": str,
            "uuid": "{:032x}".format,
        },
        ("problem", "answer"),
    ),
    "premise and hypothesis": (
        {"premise": lambda n: f"The {n} men walk home.", "hypothesis": lambda n: f"{n} men sleep.", "label": "neutral"},
        ("{premise}\n{hypothesis}", "label"),
    ),
    "several instructions": (
        {
            "definition": lambda n: f"Translate into {WORDS[n % 2]} please.",
            "input": lambda n: f"w{n} is",
            "targets": lambda n: [str(n)],
        },
        ("{definition}\n{input}", "targets"),
    ),
    "a shared passage": (
        {"passage": lambda n: f"The tower of {WORDS[n // 15]} is high.", "query": lambda n: f"And part {n}?", "expected": str},
        ("{passage}\n{query}", "expected"),
    ),
    "title and body": (
        {
            "title": lambda n: f"The odd engine of {n}",
            "body": lambda n: f"I have {n} of them. What now?",
            "score": lambda n: n % 7,
        },
        ("{title}\n{body}", None),
    ),
    "labels": ({"review": lambda n: f"I liked the {n} songs.", "mood": lambda n: "good" if n % 2 else "bad"}, ("review", "mood")),
    "formulas": ({"lhs": lambda n: f"{n}+{3 * n}-2", "rhs": lambda n: 4 * n - 2}, ("lhs", "rhs")),
    "options in columns": (
        {
            "stem": lambda n: f"What is above {n}?",
            "A": lambda n: n,
            "B": lambda n: n + 1,
            "C": "none",
            "key": lambda n: "AB"[n % 2],
        },
        ("{stem}\nA: {A}\nB: {B}\nC: {C}", "key"),
    ),
    "two sentences": (
        {"sentence1": lambda n: f"The {n} men walk.", "sentence2": lambda n: f"Some {n} men go.", "value": lambda n: n / 7},
        ("{sentence1}\n{sentence2}", "value"),
    ),
    "an answer of a model": (
        {
            "day": lambda n: f"2024-05-{n + 1:02d}",
            "ask": lambda n: f"Square {n} now",
            "model answer": str,
            "correct": lambda n: n * n,
        },
        ("ask", "correct"),
    ),
    "no ground truth": (
        {"post": lambda n: f"Explain why {n} works.", "upvotes": lambda n: n * 31 % 17, "author": lambda n: f"user{n}"},
        ("post", None),
    ),
    "objects as answers": (
        {"post": lambda n: f"Bill {n} of May", "meta": {"page": 1}, "expected": lambda n: {"number": n}},
        ("post", "expected"),
    ),
    "objects": (
        {"prompt": lambda n: chat(f"Compute {n} * 7."), "reward_model": lambda n: {"ground_truth": str(n)}},
        ("prompt", None),
    ),
    "one text": ({"text": lambda n: f"Tell a story about {WORDS[n % 5]} {n}"}, ("text", None)),
    "true or false in parts": (
        {"quiz": lambda n: f"Who of {n} lies?", "solution": [True, False], "solution_text": lambda n: f"{n} is a liar."},
        ("quiz", "solution_text"),
    ),
}


@pytest.mark.parametrize("count", [30, 3])
@pytest.mark.parametrize(("columns", "expected"), READINGS.values(), ids=READINGS)
def test_columns_are_recognised_by_what_they_hold(columns, expected, count, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", **columns)[:count]
    [first, *_] = candidates(rows)
    assert (first.template or first.question or first.chat, first.answer) == expected
    named = {first.question, first.chat, first.answer, *(name.rstrip("?") for name in first.context)}
    assert named - {None} | {name for name, _ in left_out(first, rows, {})} == {*columns}
    assert all(why for _, why in left_out(first, rows, {}))


@pytest.mark.parametrize("as_text", [False, True])
def test_objects_as_answers_get_a_config_that_compares_them(here, as_text):
    def invoice(number):
        found = {"number": number, "vendor": f"Miller {number % 3}", "lines": [{"pens": number}]}
        found |= {"note": "late"} if number % 2 else {}
        return json.dumps(found) if as_text else found

    write_rows(here / "bills.jsonl", text=lambda n: f"Bill {n} from Miller {n % 3}: {n} pens.", output=invoice)
    assert "ground truth output" in init("bills.jsonl", "--yes")
    config = load_config("bills.yaml")
    assert (config.completion.format, config.completion.equality) == ("json", "json")
    assert config.completion.required == ["number", "vendor", "lines"]
    assert config.data.system_prompt == 'Reply with a JSON object: {"number": ..., "vendor": "...", "lines": [...]}'
    assert [stage.rewards for stage in config.stages] == [["format"], ["format", "correctness"]]
    data = load_data(config, here / "data")
    assert data.train_rows + data.eval_rows == 30
    for row in read_prompts(data.train):
        read = extract(row.answer, config.completion)
        assert read.strict_format
        assert answers_equal(read.answer, row.answer, "json")


def test_a_completion_has_room_for_the_longest_object(here):
    write_rows(here / "long.jsonl", text=lambda n: f"Text {n}?", answer=lambda n: {"words": [f"word{k}" for k in range(n + 30)]})
    init("long.jsonl", "--yes")
    config = load_config("long.yaml")
    assert 200 < config.rollout.max_completion_length < 2048
    assert config.rollout.max_completion_length + config.validation.max_prompt_length <= 2048


def test_objects_next_to_an_answer_are_left_out_with_settings(tmp_path):
    rows = [{"question": f"Invoice {number}?", "answer": {"total": number}, "label": number} for number in range(12)]
    [first, *_] = candidates(rows)
    assert first.answer == "label"
    [(name, why)] = left_out(first, rows, {})
    assert name == "answer"
    settings = why.partition("as ground truths: ")[2].split(" and ")
    loaded = [parse_yaml(one, place="fix") for one in settings]
    assert loaded == [{"data.answer_column": "answer"}, {"completion": {"format": "json", "equality": "json"}}]


def test_a_ground_truth_that_is_named_is_never_joined_with_the_question(tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl", body=lambda n: f"There are {n} cats here.", ask=lambda n: f"And {n}?", n=lambda n: n
    )
    [first, *_] = candidates(rows)
    assert (first.template, first.answer) == ("{body}\n{ask}", "n")
    [named, *_] = candidates(rows, question="ask", answer="body")
    assert (named.template, named.answer) == (None, "body")
    talk = write_rows(tmp_path / "talk.jsonl", messages=lambda n: chat(f"{n}?", "yes"))
    assert [one.reply_is_truth for one in (*candidates(talk), *candidates(talk, answer=""))] == [True, False]


def test_whole_conversations_as_text_are_no_question(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", chosen=lambda n: f"Human: {n}? Assistant: a", rejected="Human: a")
    assert candidates(rows) == []
    assert candidates(rows, question="chosen")[0].question == "chosen"


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_the_number_of_rows_changes_no_column(here, count):
    for draw in range(2):
        rows = [{"prompt": f"What is {n * 7919 + draw}+4?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(count)]
        (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = init("pairs.jsonl", "--yes", "--force")
        config = load_config("pairs.yaml")
        assert (config.data.question_column, config.data.answer_column) == ("prompt", None)
        assert "left out: chosen (a preferred reply" in output
        assert "left out: rejected (" in output
        assert "chosen is left out" in (here / "pairs.yaml").read_text()


def test_replies_of_a_chat_are_the_ground_truth_by_any_name(here):
    write_rows(here / "talk.jsonl", dialogue=lambda n: chat(f"What is {n} + 1?", f"So #### {n + 1}"), prompt=lambda n: f"p{n}")
    assert "chat dialogue; ground truth the last reply" in init("talk.jsonl", "--yes")
    config = load_config("talk.yaml")
    assert (config.data.rename, config.data.answer_pattern) == ({"dialogue": "messages"}, "#### (.+)")
    report = load_data(config, here / "data")
    assert (report.rows, report.quarantined) == (30, 0)
    assert {row.answer for row in read_prompts(report.train)} <= {str(n + 1) for n in range(30)}


def test_commas_units_packed_shards_and_splits_are_read_and_said(here):
    parts = here / "parts"
    parts.mkdir()
    lines = "".join(f"Was wiegen {n} Sack?;{n},5 kg\n" for n in range(20))
    for name in ("train-0", "train-1", "test-0"):
        text = f"Frage;Antwort\n{lines.replace('Was', name)}"
        (parts / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    output = init("parts", "--yes")
    assert "60 rows; question Frage; ground truth Antwort" in output
    assert "parts: answers with a decimal comma (60, first '0,5')" in output
    config = load_config("parts.yaml")
    assert [(source.path, source.split) for source in config.data.eval] == [("parts", "test")]
    assert config.data.system_prompt.endswith("Write decimals with a point, as in 1.5.")
    report = load_data(config, here / "data")
    assert (report.train_rows, report.eval_rows, report.quarantined) == (40, 20, 0)
    assert {row.answer for row in read_prompts(report.eval)} == {f"{n}.5" for n in range(20)}


def test_text_next_to_a_question_of_several_columns_joins_all_of_them(tmp_path):
    texts = {name: lambda n, name=name: f"{name} {n} holds {n * 7} of them." for name in ("Body", "Remark")}
    rows = write_rows(tmp_path / "rows.jsonl", **texts, Question=lambda n: f"How many {n}?", Answer=lambda n: n * 7)
    [first, *_] = candidates(rows)
    assert (first.template, [name for name, _ in left_out(first, rows, {})]) == ("{Body}\n{Question}", ["Remark"])
    assert left_out(first, rows, {})[0][1].endswith("set data.question: '{Remark} {Body} {Question}'")


def test_answers_of_all_files_decide_how_they_are_compared(here):
    parts = here / "parts"
    parts.mkdir()
    for name, answer in {"a": "{}", "b": "Zoey is a knight, and Ethan is number {}."}.items():
        rows = [{"question": f"What of {name} {n}?", "answer": answer.format(n)} for n in range(600)]
        (parts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    init("parts", "--yes")
    assert load_config("parts.yaml").completion.equality == "exact"


def test_rows_with_images_are_refused_by_the_name_of_the_column(here):
    write_rows(here / "seen.jsonl", question=lambda n: f"What is on {n}?", answer=str, photo=lambda n: f"pictures/{n}.png")
    output = init("seen.jsonl", "--yes", expect=1)
    assert "column photo" in output
    assert not (here / "seen.yaml").exists()


def test_one_question_with_many_answers_never_becomes_a_prompt_with_its_answer(here):
    write_rows(here / "same.jsonl", question="Tell me a number".format, answer=str)
    output = init("same.jsonl", "--yes", expect=1)
    assert "question: " in output
    assert "rows are refused" in output
    assert not (here / "same.yaml").exists()


def test_a_prompt_column_that_is_not_used_is_switched_off():
    columns = ["prompt", "quiz", "answer"]
    assert data_settings(ColumnChoice("quiz", None, "answer"), columns, None)["prompt_column"] not in columns
    assert data_settings(ColumnChoice("prompt", None, "answer"), columns, None)["question_column"] == "prompt"


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        (["2 + 2 = 4\n#### 4", "so it is\n#### 1,000"], "#### (.+)"),
        ([r"so \boxed{4}", r"\boxed{\pi}"], r"\\boxed\{([^{}]*)\}"),
        (["<answer>4</answer>", "hm <answer>\n5\n</answer>"], r"(?s)<answer>\s*(.*?)\s*</answer>"),
        (["The answer is 4.", "Thus the final answer is: 17"], r"(?i)\banswer is:?\s*(.+?)\.?\s*$"),
        (["4", "5"], None),
        ([], None),
    ],
)
def test_the_mark_of_a_final_answer_is_found(answers, pattern):
    found = find_pattern(answers)
    assert (found and found[0]) == pattern


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        (["5 kg", "1,5kg", "7"], r"^\s*(.*?)\s*(?:kg)?\s*$"),
        (["EUR 12,50", "EUR 3"], r"^\s*(?:EUR)?\s*(.*?)\s*$"),
        (["-7°C", "0 °C"], r"^\s*(.*?)\s*(?:°C)?\s*$"),
        (["5 kg", "3 m"], None),
        (["Hello 1", "Hello 2"], None),
        (["5", "6"], None),
        ([], None),
    ],
)
def test_one_unit_of_all_answers_is_taken_off(answers, pattern):
    found = find_unit(answers)
    assert (found and found[0]) == pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truths", "equality"),
    [
        (["4", "-3.5", "1,000", "51.0"], "numeric"),
        (["A", "b", "C"], "choice"),
        (["92 + 31 - 5", "7 * (3 - 1)"], "math"),
        (["Zoey is a knight, and Ethan is a knave.", "Nobody is."], "exact"),
        ([], "exact"),
        (['{"a": 1}', '{"b": [2]}'], "json"),
        (['{"a": 1}', "a text"], "exact"),
    ],
)
def test_answers_are_compared_as_what_they_are(truths, equality):
    assert find_equality(truths) == equality


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("file", "equality"), FILES)
def test_every_shared_file_gets_a_config_that_trains_unedited(tmp_path, file, equality):
    config, data = checked_proposal(tmp_path, file, equality)
    last = config.stages[-1].model_copy(update={"max_steps": 3})
    result = train_stage(config, last, data, tmp_path / "stage")
    assert result.steps == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "stage" / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("file", "equality"), FILES)
def test_every_shared_file_gets_a_config_for_a_real_model(tmp_path, real_model, file, equality):
    short = ["rollout.max_completion_length=8", "lab.num_prompts=2"]
    config, data = checked_proposal(tmp_path, file, equality, "--model", real_model, settings=short)
    assert config.model.path == str(real_model)
    small = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    last = config.stages[-1].model_copy(update=small)
    assert train_stage(config, last, data, tmp_path / "stage").steps == 1


def checked_proposal(tmp_path, file, equality, *arguments, settings=()):
    """The config that `grpo init` makes of a shared file, and its data, once the lab has found nothing wrong."""
    if not SHARED.exists():
        pytest.skip(f"no shared data at {SHARED}")
    init(SHARED / file, "--yes", *arguments, "--out", tmp_path / "made.yaml")
    config = load_config(tmp_path / "made.yaml", settings)
    if equality:
        assert config.completion.equality == equality
    data = load_data(config, tmp_path / "data")
    assert data.train_rows > 0
    checks = make(probe_rewards, tmp_path / "lab", config, base_model(config), data).checks
    assert checks
    assert [check for check in checks if check.outcome == "failed"] == []
    return config, data


def test_the_only_file_is_taken_and_a_config_never_overwritten_without_force(here):
    assert "grpo validate sums.yaml" in init("--yes")
    config = load_config("sums.yaml")
    assert (config.data.question_column, config.data.answer_column, config.name) == ("problem", "result", "sums")
    assert config.stages[1].rewards == ["format", "correctness"]
    (here / "sums.yaml").write_text("mine")
    assert "--force" in init("sums.jsonl", "--yes", expect=1)
    assert (here / "sums.yaml").read_text() == "mine"
    # Nothing is asked where nobody can answer.
    assert "[" not in init("sums.jsonl", "--force", answers="")
    assert load_config("sums.yaml").name == "sums"


def test_at_most_five_questions_are_asked_and_their_answers_count(here, monkeypatch):
    asked = []

    def answer(question, proposed):
        asked.append(question)
        return {"Base model (folder, hub id or registered model)": QWEN}.get(question, proposed)

    monkeypatch.setattr("flows.cli.init._ask", answer)
    monkeypatch.setattr("flows.cli.init._can_answer", lambda: True)
    write_rows(here / "solved.jsonl", question=lambda n: f"{n} + 1?", answer=lambda n: f"easy\n#### {n + 1}")
    init("solved.jsonl")
    assert len(asked) == 5
    config = load_config("solved.yaml")
    assert (config.model.path, config.data.answer_pattern) == (QWEN, "#### (.+)")


@pytest.fixture
def words(tmp_path):
    """A model folder whose tokenizer has a token for each word, as far as a proposal reads it."""
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<end>": 1}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} <end> {% endfor %}assistant:"
    made = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, unk_token="<unk>", eos_token="<end>", pad_token="<end>", chat_template=template
    )
    made.save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return tmp_path / "words"


def write_long_rows(path, *, working=400):
    """Questions of 700 words, one of them of 2,000; each answer with a working."""
    return write_rows(
        path,
        question=lambda n: f"Count {n}: " + "word " * (2000 if n == 7 else 700),
        answer=lambda n: "so " * working + f"\n#### {n}",
    )


def test_lengths_are_counted_with_the_tokenizer_of_the_model(here, words):
    write_long_rows(here / "long.jsonl")
    output = init("long.jsonl", "--yes", "--model", words)
    assert "refused" not in output
    config = load_config("long.yaml")
    assert config.model.path == str(words)
    assert 2000 < config.validation.max_prompt_length < 2100
    assert 400 * 1.25 <= config.rollout.max_completion_length < 600
    assert "embedded:base" not in output
    data = load_data(config, here / "data")
    assert (data.train_rows + data.eval_rows, data.quarantined) == (30, 0)


def test_a_pretrained_model_gets_the_training_of_the_preset_for_own_tables(here, words):
    init("sums.jsonl", "--yes", "--model", words)
    config, preset = load_config("sums.yaml"), load_config("custom-csv")
    assert config.model.dtype == "auto"
    assert config.rollout.max_completion_length == preset.rollout.max_completion_length
    assert config.evaluation == preset.evaluation
    assert config.stages == preset.stages
    init("sums.jsonl", "--yes", "--force")
    assert load_config("sums.yaml").stages[0].per_device_train_batch_size == 16


def test_thinking_is_off_for_a_model_that_can_think(here, words):
    template = words / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}")
    init("sums.jsonl", "--yes", "--model", words)
    assert load_config("sums.yaml").rollout.chat_template_kwargs == {"enable_thinking": False}


def test_a_model_that_is_not_here_is_counted_with_the_embedded_one(here):
    write_long_rows(here / "long.jsonl", working=0)
    output = " ".join(init("long.jsonl", "--yes", "--model", QWEN).split())
    assert f"lengths are counted in tokens of embedded:base, about one a character, because of {QWEN}" in output
    # Characters are no reason to refuse a row that a real tokenizer makes short.
    assert "29 rows" not in output
    assert QWEN in (here / "long.yaml").read_text()
    assert load_config("long.yaml").validation.max_prompt_length > 3000


@pytest.mark.parametrize(
    ("model", "can_think"),
    [
        ("Qwen/Qwen3.5-0.8B", True),
        ("Qwen/Qwen3.5-122B-A10B-FP8", True),
        ("Qwen/Qwen3.8-27B", True),
        ("Qwen/Qwen3-0.6B", True),
        ("unsloth/Qwen3-30B-A3B", True),
        ("Qwen/Qwen3-4B-Instruct-2507", False),
        ("Qwen/Qwen3-4B-Thinking-2507-FP8", False),
        ("Qwen/Qwen3-VL-4B-Instruct", False),
        ("Qwen/Qwen3.5-0.8B-Base", False),
        (QWEN, False),
        ("acme/model", False),
    ],
)
def test_a_name_says_whether_an_absent_model_can_think(model, can_think):
    assert NameHints.of(model).can_think == can_think


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("Qwen/Qwen3.5-0.8B", "gsm8k-qwen3.5-0.8b"),
        ("Qwen/Qwen3.5-2B", "gsm8k-qwen3.5-2b"),
        ("Qwen/Qwen3.5-9B", "gsm8k-qwen3.5-4b"),
        (QWEN, "gsm8k-qwen2.5-0.5b"),
        ("Qwen/Qwen2.5-0B", None),
        ("Qwen/Qwen3-0.6B", None),
        ("embedded:base", None),
    ],
)
def test_the_nearest_preset_is_of_the_same_family(model, preset):
    assert NameHints.of(model).preset == preset


def test_the_families_that_can_think_have_the_setting_in_their_templates():
    """As TRL ships the templates; that of Qwen3-Instruct-2507 has none."""
    for family in THINKING:
        names = [f"{family.replace('.', '_')}{kind}_chat_template" for kind in ("", "_think", "_nothink")]
        templates = [getattr(published, name) for name in names if hasattr(published, name)]
        assert templates
        assert all("enable_thinking" in template for template in templates)
    assert "enable_thinking" not in published.qwen3_instruct_2507_chat_template


def test_an_absent_qwen35_gets_thinking_off_a_preset_and_packages(here):
    init("sums.jsonl", "--yes", "--model", "Qwen/Qwen3.5-0.8B")
    assert load_config("sums.yaml").rollout.chat_template_kwargs == {"enable_thinking": False}
    written = (here / "sums.yaml").read_text()
    assert "grpo presets gsm8k-qwen3.5-0.8b\n" in written
    assert "flash-linear-attention and causal-conv1d" in written
    init("sums.jsonl", "--yes", "--force", "--model", QWEN)
    assert "enable_thinking" not in (here / "sums.yaml").read_text()
    assert "causal-conv1d" not in (here / "sums.yaml").read_text()


@pytest.mark.parametrize("given", ["no/such/folder", "./none", "sums.jsonl"])
def test_a_path_that_is_no_model_is_refused_at_once(here, given):
    assert "fix:" in init("sums.jsonl", "--yes", "--model", given, expect=2)
    assert not (here / "sums.yaml").exists()


def test_columns_can_be_named_and_missing_questions_are_refused(here):
    write_rows(here / "two.jsonl", question=lambda n: f"Ask {n}", other=lambda n: f"Other {n}?", gold=lambda n: n)
    init("two.jsonl", "--yes", "--question", "other", "--answer", "gold")
    config = load_config("two.yaml")
    assert (config.data.question_column, config.data.answer_column) == ("other", "gold")
    write_rows(here / "none.jsonl", a=lambda n: n, b=lambda n: n)
    output = init("none.jsonl", "--yes", expect=1)
    assert "columns: a, b" in output
    assert "fix:" in output
    assert "did you mean" in init("sumz.jsonl", "--yes", expect=1)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sums.jsonl", "sums"),
        ("/x/gsm8k/train.jsonl", "gsm8k"),
        ("3ppl_train.parquet", "grpo-3ppl"),
        ("My file (1).csv", "My-file-1"),
    ],
)
def test_the_run_is_named_after_the_file_or_its_folder(path, name):
    assert run_name(path) == name
