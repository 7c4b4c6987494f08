"""The verdict on disk: tables, report, and the error that stops a run."""

import polars as pl
import pytest

from grpo_tasks.data.rules import BY_NAME
from grpo_tasks.data.table import read_prompts
from grpo_tasks.data.validation import Origin, enforce, report_data, stop_warnings
from schemas.config.data import ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import DataError
from schemas.results.data import DataReport, SourceFile
from schemas.tables import Prompts, Quarantine

ROWS = [{"question": f"What is {n} + 0?", "answer": f"{n}.0", "level": n} for n in range(60)]
BAD = [{"question": "evil | `value`\n# heading <b>", "answer": None}, {"question": " ", "answer": "1"}]


@pytest.fixture
def verdict(write, verdict_on):
    return verdict_on({"train": [{"path": write(*ROWS, *BAD)}], "eval_fraction": 0.3, "system_prompt": "be short"})


def report(verdict, directory):
    directory.mkdir(exist_ok=True)
    source = SourceFile(path="rows.jsonl", split="train", rows=62, sha256="0" * 64)
    return report_data(verdict, Origin("key", directory, 1.5, [source]))


def test_tables_hold_every_row_once(verdict, tmp_path):
    made = report(verdict, tmp_path)
    train, held = Prompts.validate(pl.read_parquet(made.train)), Prompts.validate(pl.read_parquet(made.eval))
    refused = Quarantine.validate(pl.read_parquet(made.directory / "quarantine.parquet"))
    lines = train["line"].to_list() + held["line"].to_list() + refused["line"].to_list()
    assert sorted(lines) == list(range(1, 63))
    assert (made.rows, made.quarantined, made.train_rows, made.eval_rows) == (62, 2, train.height, held.height)
    assert made.train_rows + made.eval_rows == 60


def test_a_stop_string_that_occurs_in_prompts_gives_a_warning(verdict):
    [warning] = stop_warnings(verdict, RolloutConfig(stop=["</answer>", "+ 0?"]))
    assert warning.startswith("60 prompts contain the stop string '+ 0?'")
    assert stop_warnings(verdict, RolloutConfig(stop=["be short", "What is 7 +"]))[1].startswith("1 prompts")


def test_prompt_rows_come_back_as_they_were_accepted(verdict, tmp_path):
    rows = read_prompts(report(verdict, tmp_path).train)
    assert [row.line for row in rows] == verdict.split("train")["line"].to_list()
    for row in rows:
        assert row.answer == str(row.extra["level"])
        assert row.messages[0] == {"role": "system", "content": "be short"}
        assert row.messages[1]["content"] == ROWS[row.line - 1]["question"]
        assert row.prompt_tokens > 10


def test_limited_rows_are_the_first_by_hash_in_any_order(verdict, tmp_path):
    path = report(verdict, tmp_path).train
    chosen = [row.prompt_id for row in read_prompts(path, limit=5)]
    assert chosen == sorted(row.prompt_id for row in read_prompts(path))[:5]
    pl.read_parquet(path).reverse().write_parquet(path)
    assert [row.prompt_id for row in read_prompts(path, limit=5)] == chosen


def test_digest_follows_the_accepted_rows_only(verdict, tmp_path, write, verdict_on):
    def digest(*rows):
        data = {"train": [{"path": write(*rows, name="other.jsonl")}], "eval_fraction": 0.3, "system_prompt": "be short"}
        return report(verdict_on(data), tmp_path / "other").digest

    first = report(verdict, tmp_path).digest
    assert digest(*ROWS) == first
    assert digest(*ROWS[:-1]) != first
    assert digest(*ROWS[:-1], {**ROWS[-1], "level": 7}) != first


def test_report_names_sources_rules_first_rows_and_lengths(verdict, tmp_path):
    made = report(verdict, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "62 rows read: **2 quarantined** (3.23%)" in text
    assert "| `rows.jsonl` | train | 62 |" in text
    assert "| answer_missing | 1 |" in text
    assert "rows.jsonl:61` | answer_missing |" in text
    assert made.digest in text
    assert f"| {made.prompt_tokens.mean:.1f} |" in text


def test_hostile_value_breaks_neither_table_nor_page(tmp_path, write, verdict_on):
    hostile = {"question": "q", "answer": "<answer>|`\n\n# heading\n<script>"}
    verdict = verdict_on({"train": [{"path": write(*ROWS, hostile)}]})
    report(verdict, tmp_path)
    line = next(line for line in (tmp_path / "report.md").read_text().splitlines() if ":61` |" in line)
    assert line.endswith("| `<answer>\\|' # heading <script>` |")


def test_report_survives_as_json(verdict, tmp_path):
    made = report(verdict, tmp_path)
    made.save(tmp_path / "result.json")
    assert DataReport.load(tmp_path / "result.json") == made


def test_too_many_quarantined_rows_stop_the_run_with_rules_and_first_rows(verdict):
    with pytest.raises(DataError, match="2 of 62 rows are quarantined") as caught:
        enforce(verdict, ValidationConfig(max_invalid_fraction=0.01))
    assert "answer_missing" in caught.value.message
    assert "rows.jsonl:61" in caught.value.message
    assert caught.value.place.endswith("rows.jsonl:61")
    assert "max_invalid_fraction" in caught.value.fix


def test_allowed_share_of_quarantined_rows_stops_nothing(verdict):
    enforce(verdict, ValidationConfig(max_invalid_fraction=0.05))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_too_few_accepted_rows_stop_the_run(verdict, split):
    settings = {"max_invalid_fraction": 1.0, f"min_{split}_rows": 61}
    with pytest.raises(DataError, match=f"the {split} split has"):
        enforce(verdict, ValidationConfig.model_validate(settings))


def test_file_of_nothing_but_bad_rows_is_reported_and_refused(tmp_path, write, verdict_on):
    verdict = verdict_on({"train": [{"path": write(*BAD)}]})
    made = report(verdict, tmp_path)
    assert (made.train_rows, made.eval_rows, made.quarantined) == (0, 0, 2)
    with pytest.raises(DataError, match=r"100\.0%"):
        enforce(verdict, ValidationConfig())


def test_report_names_the_fix_of_each_broken_rule(verdict, tmp_path):
    report(verdict, tmp_path)
    text = (tmp_path / "report.md").read_text()
    for rule in ("answer_missing", "content_empty"):
        assert f"| {BY_NAME[rule].meaning} | {BY_NAME[rule].fix} |" in text
