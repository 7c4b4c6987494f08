"""Every command on a page belongs to one of three classes: run here, run by another test, or marked as not run with a reason.

RUN        cheap ones, run here word for word
ELSEWHERE  the file that runs the same command, and the words by which one finds it there
not run    below `<!-- not run: REASON -->` on the page
"""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from schemas.config.load import check_config, load_config
from schemas.config.stage import StageConfig
from tests.docs.pages import DOCS, ROOT, command_text, commands, written_pages

BIN = Path(sys.executable).parent
RUN = {
    "grpo run config.yaml --dry-run",
    "cp -r examples/my-csv my-project && cd my-project",
    "cp -r examples/word-problems my-problems && cd my-problems",
    "cp -r examples/multiple-choice my-choice && cd my-choice",
    "cp -r examples/own-model my-model && cd my-model",
    "cp -r examples/json-task my-json && cd my-json",
    "cp -r examples/style-task my-style && cd my-style",
    "cp -r examples/demonstrations my-demonstrations && cd my-demonstrations",
    "cp -r examples/calculator my-calculator && cd my-calculator",
    "cp -r examples/game my-game && cd my-game",
    "python copy_model.py",
    "make docs",
}
COMMAND_LINE, REPORTS = "tests/flows/test_command_line.py", "tests/flows/test_reports.py"
SERVERS, EXAMPLES = "tests/operating/conftest.py", "tests/examples/test_examples.py"
NAMES = "tests/flows/test_model_names.py"
ELSEWHERE = {
    "python train.py": ("tests/library/test_steps.py", "EXAMPLE, *SETTINGS"),
    "make demo": ("tests/flows/conftest.py", '"run", "demo"'),
    "make demo-cluster": ("tests/cluster/test_demo_cluster.py", '"run", "demo"'),
    "make test": (".ci/run", "make test"),
    "make test-ci": ("Makefile", '-m "long and ci"'),
    "make test-long": ("Makefile", "-m long --durations=30 $(ARGS)"),
    "make check": ("Makefile", '-m "not containers and (not long or ci)"'),
    "make count": ("Makefile", "-m tests.benchmarks.counts"),
    "make vllm": (".ci/run", "vllm audit lint types"),
    "make chaos": ("tests/flows/test_chaos.py", "rampage("),
    "python -m pytest -m long tests/flows/test_planted.py": ("tests/flows/test_planted.py", "plant("),
    "python -m grpo_tasks.grpo STAGE_DIR": ("tests/flows/test_ends.py", '"grpo_tasks.grpo"'),
    "grpo up": (SERVERS, 'grpo("up"'),
    "grpo up --workers 2": (SERVERS, '"--workers", "2"'),
    "grpo down": (SERVERS, 'grpo("down"'),
    "grpo clean": ("tests/operating/test_clean.py", 'grpo("clean")'),
    "grpo clean --superseded --caches --yes": ("tests/operating/test_clean.py", '"--superseded", "--caches"'),
    "grpo validate config.yaml": (COMMAND_LINE, 'grpo("validate"'),
    "grpo rewards config.yaml": (COMMAND_LINE, '"rewards": ["rewards", config]'),
    "grpo difficulty config.yaml --set difficulty.samples=8": ("tests/flows/test_difficulty.py", 'grpo("difficulty"'),
    "grpo retrain config.yaml": ("tests/flows/test_retrain.py", "['retrain', 'small.yaml']"),
    "grpo run config.yaml": (EXAMPLES, '"run", "config.yaml"'),
    "grpo run config.yaml --set model.path=grpo-demo@champion": (
        "tests/flows/test_export.py",
        '"run", "small.yaml", "--set", "model.path=small@champion"',
    ),
    "grpo train config.yaml --stage correctness --from grpo-demo@champion": (NAMES, '"train", "small.yaml", "--from"'),
    "grpo trace data.csv:17 config.yaml": (COMMAND_LINE, 'grpo("trace"'),
    "grpo download grpo-demo@champion my-model": (REPORTS, 'grpo("download"'),
    "grpo export grpo-demo@champion my-adapter": ("tests/flows/test_export.py", 'grpo("export"'),
    "grpo download my-csv@champion my-model": (REPORTS, 'grpo("download"'),
    'grpo chat my-model "What is 15 + 27?"': (REPORTS, 'grpo("chat"'),
    "grpo chat my-model": (REPORTS, 'grpo("chat"'),
    "grpo compare grpo-demo@champion grpo-demo@challenger": (REPORTS, 'grpo("compare"'),
    "grpo sweep demo --over stages.0.learning_rate=1e-3,1e-4 --over stages.0.num_generations=4,8 --seeds 2 --dry-run": (
        "tests/flows/test_sweep_command.py",
        '"--dry-run"',
    ),
    "grpo lineage grpo-demo@champion": (REPORTS, 'grpo("lineage"'),
    "grpo reproduce grpo-demo@champion": (REPORTS, 'grpo("reproduce"'),
    'grpo rollback grpo-demo --reason "answers in French"': ("tests/flows/chaos.py", '"rollback", "small"'),
}
PRESETS = ("gsm8k-qwen2.5-0.5b", "gsm8k-qwen2.5-1.5b", "gsm8k-qwen2.5-1.5b-4gpu", "gsm8k-qwen2.5-0.5b-vllm", "custom-csv")


def every_command():
    return [command for page in written_pages() for command in commands(page)]


def test_every_command_is_run_or_marked_as_not_run():
    unknown = [
        f"{command.page}:{command.line}: {command.text}"
        for command in every_command()
        if not command.not_run and command.text not in RUN and command.text not in ELSEWHERE
    ]
    assert unknown == [], "add it to RUN or ELSEWHERE, or mark it: <!-- not run: REASON -->"


def test_the_lists_hold_no_command_that_is_on_no_page():
    written = {command.text for command in every_command()}
    assert RUN | set(ELSEWHERE) <= written


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_file_that_runs_a_command_has_it(command):
    path, words = ELSEWHERE[command]
    assert words in (ROOT / path).read_text(encoding="utf-8")


def test_a_command_is_found_in_its_block(tmp_path):
    assert command_text("    ../.venv/bin/grpo run x.yaml      # why") == "grpo run x.yaml"
    assert command_text("    GRPO_POSTGRES=postgresql://a grpo up --workers 2") == "grpo up --workers 2"
    assert command_text("    train_stage        a drawing") is None


def test_make_targets_on_pages_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = [path.read_text(encoding="utf-8") for path in written_pages()]
    named = {name for text in pages for name in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)}
    assert named <= targets


def test_the_demo_of_make_is_the_demo_of_the_tests():
    assert "$(BIN)/grpo run demo $(ARGS)" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_docs_are_made_by_what_the_tests_run():
    target = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2].partition("\n\n")[0]
    assert "docs/generate.py" in target
    assert "mkdocs build" in target


def modules_on_pages():
    texts = [path.read_text(encoding="utf-8") for path in [*written_pages(), ROOT / "Makefile"]]
    return sorted({name for text in texts for name in re.findall(r"-m ((?:tests|flows|grpo_tasks)\.[a-z_.]+[a-z_])", text)})


@pytest.mark.slow
@pytest.mark.parametrize("name", modules_on_pages())
def test_a_module_that_a_page_starts_can_be_started(name):
    if importlib.util.find_spec(name).submodule_search_locations:
        name += ".__main__"
    assert '__name__ == "__main__"' in Path(importlib.import_module(name).__file__).read_text(encoding="utf-8")


def test_grpo_commands_on_pages_exist():
    known = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    pages = [path.read_text(encoding="utf-8") for path in written_pages()]
    named = {name for text in pages for name in re.findall(r"(?:^    |`|bin/)grpo ([a-z][a-z-]*)", text, re.MULTILINE)}
    assert named <= known


@pytest.mark.slow
@pytest.mark.parametrize("copied", sorted(command for command in RUN if command.startswith("cp ")))
def test_an_example_copied_as_its_page_says_answers_a_dry_run(copied, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    model = f"{sys.executable} copy_model.py && " if "own-model" in copied else ""
    script = f"{copied} && {model}{BIN / 'grpo'} run config.yaml --dry-run"
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing was run" in done.stdout


def test_the_config_and_the_reward_of_the_readme_answer_a_dry_run(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [reward] = re.findall(r"```python\n# rewards.py\n(.*?)```", text, re.DOTALL)
    [config] = re.findall(r"```yaml\n# config.yaml\n(.*?)```", text, re.DOTALL)
    assert len((reward + config).splitlines()) <= 20
    (tmp_path / "rewards.py").write_text(reward)
    (tmp_path / "config.yaml").write_text(config)
    shutil.copy(ROOT / "examples" / "my-csv" / "data.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["run", "config.yaml", "--dry-run"])
    assert outcome.exit_code == 0, outcome.output
    functions = {}
    exec(reward, functions)
    chats = [[{"role": "assistant", "content": "it costs 8 pounds"}], [{"role": "assistant", "content": "eight"}]]
    assert functions["names_currency"](None, chats, currency=["pounds", "pounds"]) == [1.0, 0.0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_on_a_page_is_a_config(name):
    load_config(name)


def test_yaml_on_pages_is_yaml_and_its_fields_exist():
    for page in DOCS.glob("*.md"):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            tree = yaml.safe_load(block)
            if "guards" in tree:
                StageConfig(name="s", rewards=["format"], **tree)
                continue
            # A piece of a config, completed by the rest of one.
            check_config({"data": {"train": [{"path": "data.csv"}]}, "stages": [{"name": "s", "rewards": ["format"]}]} | tree)
