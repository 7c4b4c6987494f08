"""`grpo trace` on folders as the steps leave them, and on folders whose files are damaged."""

import json

import polars as pl
import pytest

from flows.cli.inspection import show_trace
from flows.cli.show import out
from grpo_tasks.operating.trace import read_completions, trace_row
from schemas.errors import DamagedError, UserError

PROMPT_ID = "0123456789abcdef"
FAULT = {"split": "train", "source": "mine.jsonl", "line": 2, "rule": "content_empty", "value": "", "meaning": "it is empty"}


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one accepted row (line 1), one refused row (line 2) and one evaluation."""
    tables = {
        "validate_data/all-key": {
            "train": pl.DataFrame({"prompt_id": [PROMPT_ID], "source": ["mine.jsonl"], "line": [1]}),
            "eval": pl.DataFrame(schema={"prompt_id": pl.String, "source": pl.String, "line": pl.Int64}),
            "quarantine": pl.DataFrame([FAULT]),
        },
        "evaluate_model/base-key": {"samples": pl.DataFrame({"prompt_id": [PROMPT_ID, "other"], "sample": [0, 0]})},
        "train_stage/format-key": {},
    }
    for folder, files in tables.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "result.json").touch()
        for name, table in files.items():
            table.write_parquet(tmp_path / folder / f"{name}.parquet")
    return tmp_path


def test_a_row_is_found_by_its_id_and_by_its_line(run):
    for name in (PROMPT_ID, "mine.jsonl:1"):
        found = trace_row(run, name)
        assert (found.split, found.source, found.line) == ("train", "mine.jsonl", 1)
        assert found.samples["base"].height == 1
        assert found.completions["format"].is_empty()
    refused = trace_row(run, "mine.jsonl:2")
    assert refused.prompt is None
    assert refused.faults["rule"].to_list() == ["content_empty"]
    with pytest.raises(UserError, match="no row is called"):
        trace_row(run, "mine.jsonl:3")


def test_a_conversation_is_shown_turn_by_turn_wherever_the_row_was_used(run, capsys, monkeypatch):
    monkeypatch.setattr(out, "width", 200)
    turns = [
        {"text": "6 * 7?", "reward": None, "answers": [{"role": "tool", "content": "42"}]},
        {"text": "It is 42.", "reward": 1.0, "answers": []},
    ]
    played = {"prompt_id": PROMPT_ID, "sample": 0, "completion": "It is 42."}
    played |= {"conversation": json.dumps({"turns": turns, "ending": "turns", "error": None})}
    (run / "train_stage/format-key/completions").mkdir()
    scored = {"step": 1, "reward": 1.0, "advantage": 0.5}
    pl.DataFrame([played | scored]).write_parquet(run / "train_stage/format-key/completions/step-000001.parquet")
    judged = {"strict_format": False, "correct": None, "finish_reason": "length"}
    pl.DataFrame([played | judged]).write_parquet(run / "evaluate_model/base-key/samples.parquet")
    prompt = {"prompt_id": PROMPT_ID, "source": "mine.jsonl", "line": 1, "prompt_tokens": 9, "answer": "42"}
    prompt |= {"prompt": [{"role": "user", "content": "6 * 7?"}]}
    pl.DataFrame([prompt]).write_parquet(run / "validate_data/all-key/train.parquet")
    found = trace_row(run, PROMPT_ID)
    shown = "[turn 1] 6 * 7?\n[tool] 42\n[turn 2 (reward 1)] It is 42.\n[out of turns]"
    assert found.completions["format"]["completion"].to_list() == found.samples["base"]["completion"].to_list() == [shown]
    show_trace(found)
    printed = capsys.readouterr().out
    for line in shown.splitlines():
        assert printed.count(line) == 2


@pytest.mark.parametrize("name", ["rows.json:4", "rows.json, record 4"])
def test_a_row_of_a_json_array_has_both_names(run, name, monkeypatch, capsys):
    monkeypatch.chdir(run)
    (run / "rows.json").write_text('[{"question": "1 + 1?"}]')
    prompt = {"role": "user", "content": "1 + 1?"}
    row = {"prompt_id": "fedc", "source": "rows.json", "line": 4, "prompt_tokens": 9, "answer": "2", "prompt": [prompt]}
    pl.DataFrame([row]).write_parquet(run / "validate_data" / "all-key" / "train.parquet")
    show_trace(trace_row(run, name))
    assert capsys.readouterr().out.startswith("rows.json, record 4, train\n")


@pytest.mark.parametrize(
    "name", ["validate_data/all-key/train", "validate_data/all-key/quarantine", "evaluate_model/base-key/samples"]
)
@pytest.mark.parametrize("damage", [lambda whole: whole[:40], lambda _: b"", None], ids=["cut", "empty", "missing"])
def test_a_damaged_table_is_named_with_a_fix(run, name, damage):
    table = run / f"{name}.parquet"
    whole = table.read_bytes()
    table.unlink()
    if damage is not None:
        table.write_bytes(damage(whole))
    with pytest.raises(DamagedError) as refused:
        trace_row(run, "mine.jsonl:2" if "quarantine" in name else PROMPT_ID)
    assert refused.value.place == str(table)
    assert refused.value.fix
    assert "\n" not in refused.value.message


def test_a_row_shows_its_pass_rates_and_which_stage_leaves_it_out(run):
    for folder in ("measure_difficulty/start-key", "measure_difficulty/answers-key", "train_stage/answers-key"):
        (run / folder).mkdir(parents=True)
        (run / folder / "result.json").touch()
    rates = pl.DataFrame({"stage": ["format", "answers"], "prompt_id": [PROMPT_ID] * 2, "pass_rate": [0.5, 0.0]})
    rates.write_parquet(run / "measure_difficulty/start-key/pass_rates.parquet")
    rates[1:].write_parquet(run / "measure_difficulty/answers-key/pass_rates.parquet")
    pl.DataFrame({"prompt_id": ["other", PROMPT_ID], "reason": ["above", "never_solved"]}).write_parquet(
        run / "train_stage/answers-key/left_out.parquet"
    )
    found = trace_row(run, PROMPT_ID)
    assert found.pass_rates["start"].select("stage", "pass_rate").rows() == [("format", 0.5), ("answers", 0.0)]
    assert found.pass_rates["answers"].height == 1
    assert found.left_out == {"answers": "never_solved"}


def test_completions_that_were_not_recorded_are_named_with_a_fix(run):
    folder = run / "train_stage/format-key/completions"
    folder.mkdir()
    with pytest.raises(UserError, match="has recorded no completions yet") as refused:
        read_completions(run)
    assert "grpo run CONFIG continues a stage that has ended before it" in refused.value.fix
    completions = ["4", "5", "4", "4"]
    rows = {"prompt_id": ["a", "a", "a", "b"], "completion": completions, "prompt": "2 + 2?", "answer": "4", "reward": 1.0}
    for step in (1, 20):
        pl.DataFrame(rows).write_parquet(folder / f"step-{step:06d}.parquet")
    found = read_completions(run)
    assert (found.step, found.steps) == (20, [1, 20])
    assert found.table.select("prompt_id", "completion", "count").rows() == [("a", "4", 2), ("a", "5", 1), ("b", "4", 1)]
    assert found.table["prompt"].to_list() == ["2 + 2?"] * 3
    with pytest.raises(UserError, match="the completions of update 7 were not recorded") as refused:
        read_completions(run, step=7)
    assert refused.value.fix.startswith("--step 1 or 20")
