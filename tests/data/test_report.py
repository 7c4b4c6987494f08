"""The verdict on disk: tables, report, and the error that stops a run."""

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_tasks.data.rules import BY_NAME
from grpo_tasks.data.table import read_prompts, read_table
from grpo_tasks.data.validation import Origin, enforce, report_data, stop_warnings
from schemas.config.data import ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import DamagedError, DataError
from schemas.results.data import DataReport, SourceFile
from schemas.tables import Prompts, Quarantine

ROWS = [{"question": f"What is {n} + 0?", "answer": f"{n}.0", "level": n} for n in range(60)]
BAD = [{"question": "evil | `value`\n# heading <b>", "answer": None}, {"question": " ", "answer": "1"}]


@pytest.fixture
def verdict(judged):
    return judged(*ROWS, *BAD, eval_fraction=0.3, system_prompt="be short")


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
    made.save(tmp_path / "result.json")
    assert DataReport.load(tmp_path / "result.json") == made


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


def test_digest_follows_the_accepted_rows_only(verdict, tmp_path, judged):
    def digest(*rows):
        return report(judged(*rows, eval_fraction=0.3, system_prompt="be short"), tmp_path / "other").digest

    first = report(verdict, tmp_path).digest
    assert digest(*ROWS) == first
    assert digest(*ROWS[:-1]) != first
    assert digest(*ROWS[:-1], {**ROWS[-1], "level": 7}) != first


def test_report_names_sources_rules_with_fixes_first_rows_and_lengths(verdict, tmp_path):
    made = report(verdict, tmp_path)
    text = (tmp_path / "report.md").read_text()
    says = ["62 rows read: **2 quarantined** (3.23%)", "| `rows.jsonl` | train | 62 |", "rows.jsonl:61` | answer_missing |"]
    says += [f"| {rule} | 1 | {BY_NAME[rule].meaning} | {BY_NAME[rule].fix} |" for rule in ("answer_missing", "content_empty")]
    for what in (*says, made.digest, f"| {made.prompt_tokens.mean:.1f} |"):
        assert what in text


def test_hostile_value_breaks_neither_table_nor_page(tmp_path, judged):
    report(judged(*ROWS, {"question": "q", "answer": "<answer>|`\n\n# heading\n<script>"}), tmp_path)
    line = next(line for line in (tmp_path / "report.md").read_text().splitlines() if ":61` |" in line)
    assert line.endswith("| `<answer>\\|' # heading <script>` |")


def test_too_many_quarantined_or_too_few_rows_stop_the_run(verdict):
    enforce(verdict, ValidationConfig(max_invalid_fraction=0.05))
    with pytest.raises(DataError, match="2 of 62 rows are quarantined") as caught:
        enforce(verdict, ValidationConfig(max_invalid_fraction=0.01))
    assert "answer_missing" in caught.value.message
    assert "rows.jsonl:61" in caught.value.message
    assert caught.value.place.endswith("rows.jsonl:61")
    assert "max_invalid_fraction" in caught.value.fix
    for split in ("train", "eval"):
        with pytest.raises(DataError, match=f"the {split} split has"):
            enforce(verdict, ValidationConfig.model_validate({"max_invalid_fraction": 1.0, f"min_{split}_rows": 61}))


def test_file_of_nothing_but_bad_rows_is_reported_and_refused(tmp_path, judged):
    verdict = judged(*BAD)
    made = report(verdict, tmp_path)
    assert (made.train_rows, made.eval_rows, made.quarantined) == (0, 0, 2)
    with pytest.raises(DataError, match=r"100\.0%"):
        enforce(verdict, ValidationConfig())


TABLE = pl.DataFrame({"prompt": [[{"role": "user", "content": "é" * 9}]] * 30, "answer": ["1"] * 30, "line": range(30)})


@pytest.mark.parametrize("content", [None, b"", b"PAR1", b"\0" * 999, b"PAR1" + b"\xff" * 999 + b"PAR1"])
def test_a_missing_or_damaged_table_is_an_error_with_place_and_fix(tmp_path, content):
    path = tmp_path / "train.parquet"
    if content is not None:
        path.write_bytes(content)
    for read in (read_table, read_prompts):
        with pytest.raises(DamagedError, match="the table cannot be read") as caught:
            read(path)
        assert caught.value.place == str(path)
        assert "again" in caught.value.fix


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), content=st.binary(min_size=1, max_size=40), cut=st.booleans())
def test_damage_at_any_position_raises_no_other_error(tmp_path, position, content, cut):
    path = tmp_path / "train.parquet"
    TABLE.write_parquet(path, compression="uncompressed")
    intact = path.read_bytes()
    position %= len(intact)
    path.write_bytes(intact[:position] if cut else intact[:position] + content + intact[position + len(content) :])
    error = None
    try:
        read_table(path)
    except DamagedError as caught:
        error = caught
    assert error is not None or not cut
    assert error is None or error.place == str(path)
