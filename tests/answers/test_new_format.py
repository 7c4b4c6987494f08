"""A new completion format is its shape in the config and its object in the room of answers: nothing else names a format."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPE = 'CompletionFormat = Literal["tags", "json", "regex", "boxed", "none"]'
OBJECT = '''
def read_arrow(text: str, _: CompletionConfig) -> Extraction:
    """The answer is the last line, behind an arrow."""
    before, arrow, answer = text.rpartition("\\n-> ")
    blank = is_blank(answer if arrow else text)
    kept = bool(arrow) and not blank and "\\n" not in answer and "->" not in before
    return Extraction(answer.strip() if kept else None, kept, last_number(text), blank, reasoning=before or None)


FORMATS["arrow"] = Format(
    read_arrow,
    write=lambda answer, reasoning, _: iter([f"{reasoning}\\n-> {answer}"]),
    empty=lambda _: {"bare_arrow": "\\n-> "},
)
'''
USE = """
import polars as pl

from grpo_tasks.answers.extract import check_completion, extract
from grpo_tasks.evaluation.report import score_samples
from grpo_tasks.lab.run import run_lab
from schemas.config.run import RunConfig
from schemas.prompts import PromptRow

stage = {"name": "answers", "rewards": ["format", "correctness"]}
config = RunConfig.model_validate({
    "data": {"train": [{"path": "rows.jsonl"}]},
    "completion": {"format": "arrow"},
    "stages": [stage],
    "lab": {"num_rows": 1, "strict": True},
    "promotion": {"metric": "accuracy"},
})
check_completion(config.completion)
found = extract("15 + 27 is the sum\\n-> 42", config.completion)
assert (found.answer, found.strict_format, found.reasoning) == ("42", True, "15 + 27 is the sum")

question = ({"role": "user", "content": "What is 15 + 27?"},)
row = PromptRow("0" * 16, "rows.jsonl", 1, question, "42", prompt_tokens=9, extra={})
findings = run_lab(config, [row])
assert {check.outcome for check in findings.checks} == {"passed"}, findings.checks
assert {"order", "gold", "gaming", "empty"} <= {check.check for check in findings.checks}
totals = dict(findings.probes.select("probe", "total_answers").iter_rows())
assert totals["perfect"] > totals["wrong_answer_right_format"] > totals["bare_arrow"] == 0.0

texts = ["so\\n-> 42", "so\\n-> 43", "It is 42"]
samples = pl.DataFrame({"prompt_id": [row.prompt_id] * 3, "completion": texts, "finish_reason": ["stop"] * 3})
scored = score_samples(samples, [row], config.completion)
assert scored["strict_format"].to_list() == [True, True, False]
assert scored["correct"].to_list() == [True, False, False]
assert scored["lenient_correct"].to_list() == [True, False, True]
print("ready")
"""


@pytest.fixture
def extended(tmp_path):
    """A copy of the product in which two files have changed."""
    for package in ("grpo_tasks", "schemas"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shape = tmp_path / "schemas/config/completion.py"
    assert shape.read_text().count(SHAPE) == 1
    shape.write_text(shape.read_text().replace(SHAPE, SHAPE.replace('"none"', '"none", "arrow"')))
    formats = tmp_path / "grpo_tasks/answers/extract.py"
    formats.write_text(formats.read_text() + OBJECT)
    return tmp_path


def test_a_new_format_works_when_two_files_know_it(extended):
    environment = os.environ | {"PYTHONPATH": str(extended), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=extended, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr) == ("ready\n", "")
