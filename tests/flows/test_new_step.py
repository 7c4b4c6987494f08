"""A new step is one new file and one line of the pipeline: it then has all that a step has."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows import one_step
from schemas.config.load import load_config
from schemas.errors import ConfigError
from tests.flows.place import ROOT, SMALL, ask

STEP = '''
"""Step: count the words of the training prompts."""

from typing import ClassVar

from grpo_tasks.data.table import read_prompts
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.results.base import StepResult
from schemas.results.data import DataReport


class WordCounts(StepResult):
    """How many words there are."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("words.parquet",)
    words: int

    def section(self) -> str:
        return f"{self.words} words in all prompts, seed {SEED}"


SEED = 0


@step(reads="seed")
def count_words(work: Work, config: RunConfig, data: DataReport) -> WordCounts:
    """Count the words of each training prompt."""
    import polars as pl

    rows = read_prompts(data.train)
    counts = [len(row.messages[-1]["content"].split()) for row in rows]
    table = pl.DataFrame({"prompt_id": [row.prompt_id for row in rows], "words": counts})
    table.write_parquet(work.directory / "words.parquet")
    return WordCounts(key=work.key, directory=work.directory, seconds=0.0, words=sum(counts))
'''
LINE = "    count_words(run, config, data)\n"
LIBRARY = """
from grpo_tasks.library import load_data, make
from grpo_tasks.steps.count_words import count_words
from schemas.config.load import load_config

config = load_config("small.yaml")
print(make(count_words, "words", config, load_data(config, "data")).words)
"""


@pytest.fixture
def extended(place, monkeypatch):
    """A copy of the product with the step, in whose place `grpo` runs."""
    copy = place.root / "copy"
    for package in ("flows", "grpo_tasks", "schemas", "deploy"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "grpo_tasks/steps/count_words.py").write_text(STEP.lstrip())
    pipeline = (copy / "flows/pipeline.py").read_text()
    before = "    guards = validate_guards(run)\n"
    assert pipeline.count(before) == 1
    pipeline = pipeline.replace(before, LINE + before)
    imported = "from grpo_tasks.steps.count_words import count_words\nfrom grpo_tasks.steps.merge_adapter import"
    (copy / "flows/pipeline.py").write_text(pipeline.replace("from grpo_tasks.steps.merge_adapter import", imported))
    place.write("small.yaml", yaml.safe_dump(SMALL))

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=place.root,
            env=place.environment | {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_new_step_is_one_file_and_one_line(extended, place):
    said = extended("-m", "flows.cli", "run", "small.yaml")
    assert "registered as" in said
    run = place.parent("small")
    words = int(run.data.metrics["count_words/words"])
    assert words > 200
    # Prefect: a task of its own, in the run of the pipeline.
    server = place.api.removesuffix("/api")
    tasks = ask(f"{server}/api/task_runs/filter", {"limit": 200})
    assert [task["name"] for task in tasks if task["name"].startswith("count_words")] == ["count_words"]
    # MLflow: its table; the report: its section.
    report = place.client.download_artifacts(run.info.run_id, "report/report.html", str(place.root))
    assert f"{words} words in all prompts" in Path(report).read_text()
    assert place.client.list_artifacts(run.info.run_id, "count_words")[0].path == "count_words/words.parquet"
    # The command line, where the step is finished; the trace of a row; the library.
    assert f"{words} words in all prompts" in extended("-m", "flows.cli", "step", "count_words", "small.yaml")
    row = f"{SMALL['data']['train'][0]['path']}:1"
    # A title is wrapped to the width of its table.
    assert "count_words/words.parquet" in "".join(extended("-m", "flows.cli", "trace", row, "small.yaml").split())
    assert extended("-c", LIBRARY).strip() == str(words)
    assert len(list((place.root / "runs/small/count_words").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "says"), [("validate", "one of check_guard, evaluate_model"), ("publish_model", "which only a whole run has")]
)
def test_a_step_that_cannot_run_alone_is_refused(name, says):
    with pytest.raises(ConfigError) as refused:
        one_step.step(name, load_config("demo"))
    assert says in str(refused.value)
