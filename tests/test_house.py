"""The rules of the house that no linter knows."""

import ast
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path

import grimp
import pytest

from grpo_tasks.running.key import source_digest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "grpo_tasks", "schemas")
STEPS = sorted(path.stem for path in (ROOT / "grpo_tasks" / "steps").glob("*.py") if path.stem != "__init__")


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("flows", "grpo_tasks", "schemas", include_external_packages=True, cache_dir=None)


def declared_rooms(step):
    tree = ast.parse((ROOT / "grpo_tasks" / "steps" / f"{step}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "step":
            return {element.value for keyword in node.keywords if keyword.arg == "rooms" for element in keyword.value.elts}
    raise AssertionError(f"{step} declares no rooms")


def rooms_behind(graph, module):
    below = graph.find_upstream_modules(module, as_package=graph.find_children(module) != set())
    rooms = {name.split(".")[1] for name in below if name.startswith("grpo_tasks.")}
    return {room for room in rooms if (ROOT / "grpo_tasks" / room).is_dir()}


def test_the_steps_are_the_files_of_their_folder():
    assert STEPS == [
        "check_guard", "evaluate_model", "measure_difficulty", "merge_adapter", "prepare_data", "probe_rewards", "publish_model",
        "train_stage", "validate_data", "write_report",
    ]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_step_declares_every_room_its_code_reaches(graph, step):
    declared = declared_rooms(step)
    behind = rooms_behind(graph, f"grpo_tasks.steps.{step}")
    for room in declared:
        behind |= rooms_behind(graph, f"grpo_tasks.{room}")
    # How a step is run, shown, verified and recorded does not change what it makes; the stage directory's names come along.
    assert behind - {"running", "tracking", "stage", "content", "processes", "web", "sweeping"} <= declared
    assert ("grpo" in declared) == (step == "train_stage")


def test_the_digest_of_a_room_ignores_comments_and_sees_code(tmp_path, monkeypatch):
    from grpo_tasks.running import key

    room = tmp_path / "grpo_tasks" / "room"
    room.mkdir(parents=True)
    monkeypatch.setattr(key, "_ROOT", tmp_path / "grpo_tasks")

    def digest(text):
        (room / "file.py").write_text(text)
        source_digest.cache_clear()
        return source_digest("room")

    first = digest('"""Doc."""\nx = 1  # why\n')
    assert digest('"""Another."""\nx = 1\n') == first
    assert digest("x = 2\n") != first
    source_digest.cache_clear()


def test_help_a_dry_run_and_a_refused_config_import_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom flows.cli.main import app\n"
        "def grpo(*arguments):\n    return CliRunner().invoke(app, arguments).output\n"
        "assert 'Registered models' in grpo('--help')\n"
        "assert 'nothing was run' in grpo('run', 'demo', '--dry-run')\n"
        "assert 'custom-csv' in grpo('presets')\n"
        "assert 'did you mean seed' in grpo('run', 'demo', '--set', 'seeed=1')\n"
        "heavy = {'torch', 'pandera', 'polars', 'prefect', 'mlflow', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_trainer_imports_neither_orchestrator_nor_tracker():
    code = "import sys, grpo_tasks.grpo.__main__\nassert not {'prefect', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_rewards_and_evaluation_need_no_torch():
    code = (
        "import sys, grpo_tasks.data.judge, grpo_tasks.data.chat_tokens, grpo_tasks.lab.run, grpo_tasks.evaluation.report\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wheel_holds_exactly_the_three_packages_and_nobody_else_provides_them(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)
    files = zipfile.ZipFile(wheel).namelist()
    assert "grpo_tasks/demo/base/model.safetensors" in files
    others = [
        other.name
        for other in distributions()
        if other.name != "grpo-pipeline"
        for file in other.files or []
        if file.parts[0] in PACKAGES
    ]
    assert others == []


def test_init_files_hold_a_docstring_only():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, path
            assert isinstance(body[0], ast.Expr), path


def test_every_field_of_the_config_is_described():
    from flows.cli.inspection import config_fields
    from schemas.config.run import RunConfig

    fields = config_fields(RunConfig)
    assert len(fields) > 90
    assert [name for name, field in fields if not field.description] == []


def source_files():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_room_has_more_than_twenty_files():
    rooms = {path.parent for path in source_files()}
    sizes = {room.relative_to(ROOT).as_posix(): len([*room.glob("*.py")]) - 1 for room in rooms}
    assert {room: size for room, size in sizes.items() if size > 20} == {}


def test_no_file_has_more_than_six_hundred_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in source_files()}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def test_no_function_has_more_than_sixty_lines():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    assert long == []


def test_no_module_imports_itself_by_a_detour(graph):
    ours = {name for name in graph.modules if name.partition(".")[0] in PACKAGES}
    imports = {name: {each for each in graph.find_modules_directly_imported_by(name) if each in ours} for name in ours}
    # Raises CycleError, which names the modules of a cycle.
    assert set(TopologicalSorter(imports).static_order()) == ours
