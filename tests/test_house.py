"""The rules of the house that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from grpo_tasks.running import key
from grpo_tasks.running.key import MACHINERY, code_behind

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "grpo_tasks", "schemas")
STEPS = sorted(path.stem for path in (ROOT / "grpo_tasks" / "steps").glob("*.py") if path.stem != "__init__")


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("flows", "grpo_tasks", "schemas", include_external_packages=True, cache_dir=None)


@pytest.fixture(scope="module")
def without_machinery():
    found = grimp.build_graph(*PACKAGES, cache_dir=None)
    for module in [name for name in found.modules if name.startswith(MACHINERY)]:
        found.remove_module(module)
    return found


def test_the_steps_are_the_files_of_their_folder():
    assert STEPS == [
        "check_guard", "evaluate_model", "measure_difficulty", "merge_adapter", "prepare_data", "probe_rewards", "publish_model",
        "train_stage", "validate_data", "write_report",
    ]  # fmt: skip


STARTED = {
    "train_stage": {"grpo_tasks.grpo.__main__"},
    "evaluate_model": {"grpo_tasks.rollout.__main__", "grpo_tasks.rewards.serve", "grpo_tasks.environments.serve"},
    "merge_adapter": {"grpo_tasks.policy.__main__"},
    "probe_rewards": {"grpo_tasks.rollout.__main__", "grpo_tasks.data.demonstrations"},
    "publish_model": {"grpo_tasks.tracking.log_model", "grpo_tasks.tracking.proof"},
}
"""Modules that a step starts in processes of their own."""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_all_code_that_a_step_imports_or_starts_is_in_its_key(without_machinery, step):
    counted = set(code_behind(f"grpo_tasks.steps.{step}"))
    started = STARTED.get(step, set())
    for root in {f"grpo_tasks.steps.{step}", *started}:
        assert without_machinery.find_upstream_modules(root) | {root} <= counted
    assert not any(name.startswith("grpo_tasks.grpo.") for name in counted) or step == "train_stage"


def test_the_key_ignores_comments_and_sees_code_wherever_a_step_reaches_it(tmp_path, monkeypatch):
    room = tmp_path / "grpo_tasks" / "room"
    (room / "templates").mkdir(parents=True)
    monkeypatch.setattr(key, "_ROOT", tmp_path)
    files = {
        "a.py": "from grpo_tasks.room import b\n",
        "b.py": 'def f():\n    """Doc."""\n    import grpo_tasks.room.c  # why\n',
        "c.py": 'START = "grpo_tasks.room.d"\n',
        "d.py": "x = 1\n",
        "other.py": "",
        "templates/page.html": "<p>",
    }

    def digest(**changed):
        for name, text in (files | {name.replace("_", "."): text for name, text in changed.items()}).items():
            (room / name).write_text(text)
        for cached in (key.code_sha256, key.code_behind, key._source):
            cached.cache_clear()
        return key.code_sha256("grpo_tasks.room.a")

    first = digest()
    assert digest(b_py='def f():\n    """Another."""\n    import grpo_tasks.room.c\n', other_py="y = 2\n") == first
    (room / "templates" / "page.html").write_text("<b>")
    changes = [digest(**{name: "z = 3\n"}) for name in ("a_py", "b_py", "c_py", "d_py")]
    files["templates/page.html"] = "<b>"
    assert len({first, digest(), *changes}) == 6
    for cached in (key.code_sha256, key.code_behind, key._source):
        cached.cache_clear()


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_trainer_imports_neither_orchestrator_nor_tracker_nor_tables():
    code = "import sys, grpo_tasks.grpo.__main__\nassert not {'prefect', 'mlflow', 'polars', 'pandera'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_data_rewards_and_evaluation_need_no_torch():
    code = (
        "import sys, grpo_tasks.data.judge, grpo_tasks.data.chat_tokens, grpo_tasks.lab.run, grpo_tasks.evaluation.report\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


RENAMES_ELSEWHERE = {
    "flows/approval.py": "a file is named by its content once it is written",
    "grpo_tasks/cluster/parcel.py": "two stages on a node may receive one file at once",
    "grpo_tasks/content/modules.py": "a folder is named by its content, and the first of two writers keeps it",
    "grpo_tasks/content/weights_server.py": "arrives in many requests",
    "grpo_tasks/policy/text_tower.py": "files of a merge get the names of shards, in a folder that is not sealed yet",
    "grpo_tasks/running/step.py": "damaged work is set aside",
    "grpo_tasks/tracking/database.py": "synced to the disk while the old file keeps a second name",
    "grpo_tasks/tracking/models.py": "an interrupted download keeps its complete files",
    "schemas/results/base.py": "schemas import no room",
}


def _renames_or_locks(tree):
    """Whether code calls Path.replace or Path.rename (one argument that is no literal), os.replace, os.rename or flock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, of_os = node.func.attr, isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            one = len(node.args) == 1 and not node.keywords and isinstance(node.args[0], ast.Name | ast.Attribute | ast.BinOp)
            if name in ("flock", "lockf") or (name in ("replace", "rename") and (of_os or one)):
                yield node.lineno


@pytest.mark.slow
def test_only_kit_replaces_files_and_takes_locks():
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if any(_renames_or_locks(ast.parse(path.read_text(encoding="utf-8")))):
                found.add(path.relative_to(ROOT).as_posix())
    assert {path for path in found if not path.startswith("grpo_tasks/kit/")} == {*RENAMES_ELSEWHERE}
    assert {"grpo_tasks/kit/files.py", "grpo_tasks/kit/lock.py"} <= found


STARTS_ELSEWHERE = {
    "grpo_tasks/cluster/jobs.py": "a shell that outlives the node, and removes its folder",
    "grpo_tasks/operating/servers.py": "servers that go on when the command has ended",
}
"""Files outside kit and processes that call Popen or fork. subprocess.run, which waits, is free to all."""
SLEEPS_ELSEWHERE = {
    "flows/approval.py": "an event is sent several times, because Prefect may lose one",
    "flows/ends.py": "Prefect tells nobody that a paused run goes on",
    "grpo_tasks/cluster/sampling.py": "the driver tends all nodes in turns",
    "grpo_tasks/cluster/servers.py": "the same",
    "grpo_tasks/cluster/stage.py": "the same",
    "grpo_tasks/grpo/sampler.py": "a thread that adds servers as long as the stage runs",
    "grpo_tasks/judging/store.py": "a turn comes when another process has given it back",
    "grpo_tasks/operating/servers.py": "the supervisor of the stack starts again what ends",
    "grpo_tasks/running/prefect_server.py": "a server that starts may need several requests",
    "grpo_tasks/running/slots.py": "Prefect tells nobody that a slot is free",
    "grpo_tasks/running/step.py": "retries of a step where no Prefect runs it",
}
"""Files outside kit and processes with a loop that sleeps; the others call `wait_until`."""


def _starts_or_sleeps(tree):
    """Names of the calls of Popen and fork, and of those of sleep inside a loop."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For)]
    in_loop = {id(inner) for loop in loops for inner in ast.walk(loop)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("Popen", "fork", "forkpty", "posix_spawn"):
                yield "start"
            # `sleep` of an engine frees the memory of its server, and takes no argument.
            elif name == "sleep" and id(node) in in_loop and node.args:
                yield "sleep"


@pytest.mark.slow
def test_only_kit_and_processes_start_processes_and_sleep_in_loops():
    found = {"start": set(), "sleep": set()}
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("grpo_tasks/kit/", "grpo_tasks/processes/")):
            for kind in _starts_or_sleeps(ast.parse(path.read_text(encoding="utf-8"))):
                found[kind].add(name)
    assert found == {"start": {*STARTS_ELSEWHERE}, "sleep": {*SLEEPS_ELSEWHERE}}


STARTED_ABOVE = {
    ("grpo_tasks/stage/run.py", "grpo_tasks.grpo"): "a stage is a folder and a command",
    ("grpo_tasks/stage/run.py", "grpo_tasks.cluster.stage"): "the same, on other nodes",
    ("grpo_tasks/rollout/spec.py", "grpo_tasks.cluster.sampling"): "samples are a folder and a command too",
}
"""Modules that run in a process of their own and are named, because their room stands above."""


def test_no_string_names_a_module_that_its_room_may_not_import():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floor = {room.strip(): number for number, rooms in enumerate(contracts[0]["layers"]) for room in rooms.split("|")}

    def room(module):
        parts = module.split(".")
        return ".".join(parts[: 2 if parts[0] == "grpo_tasks" else 1])

    found = set()
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        own = room(name.removesuffix(".py").replace("/", "."))
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            module = re.fullmatch(r"(flows|grpo_tasks|schemas)(\.\w+)+", text)
            if module and room(text) != own and floor[room(text)] <= floor[own]:
                found.add((name, text))
    assert found == {*STARTED_ABOVE}


def test_no_test_name_has_more_than_twelve_words():
    names = re.findall(r"def test_(\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")))
    assert len(names) > 1000
    assert [name for name in names if name.count("_") > 11] == []


def test_no_file_has_more_than_six_hundred_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in source_files()}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


@pytest.mark.slow
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
