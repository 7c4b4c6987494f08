"""Every `python -m MODULE` that a deploy file or a page names starts something."""

import ast
import importlib.util
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("*.md"),
    *(path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".lock"),
    *(path for folder in ("flows", "grpo_tasks", "schemas") for path in (ROOT / folder).rglob("*.py")),
    ROOT / "Makefile",
]
OTHER_ENVIRONMENT, PLACEHOLDERS = {"vllm.entrypoints.openai.api_server"}, {"module", "MODULE"}
"""Modules of environments that the tests do not have, and words that stand for any module."""
IMAGE = "grpo-pipeline"


def containers(tree):
    """Every mapping of a YAML tree that has an image."""
    if isinstance(tree, dict):
        if IMAGE in str(tree.get("image", "")):
            yield tree
        tree = list(tree.values())
    for item in tree if isinstance(tree, list) else []:
        yield from containers(item)


def named_modules():
    """Module -> a file that names it, as `python -m MODULE` or as the first argument of our image, whose entry is `python -m`."""
    found = {}
    for path in WRITTEN:
        text = path.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r"\bpython3? -m ([A-Za-z_][\w.]*\w)", text):
            found.setdefault(name, path.name)
        if path.suffix == ".yaml" and path.is_relative_to(ROOT / "deploy"):
            for tree in yaml.safe_load_all(text):
                for container in containers(tree):
                    arguments = container.get("command") or container.get("args")
                    if arguments and "/" not in arguments[0]:
                        found.setdefault(arguments[0], path.name)
    [command] = re.findall(r'^CMD \["([\w.]+)"', (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    return found | {command: "Dockerfile"}


def file_of(name):
    """The file that `python -m name` executes, found without importing what is above it."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None or not spec.submodule_search_locations:
        return Path(spec.origin) if spec and not rest else None
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    return next((file for file in (path / "__main__.py", path.with_suffix(".py")) if file.exists()), None)


def starts_something(name):
    """Whether the file that `python -m name` executes does more than define: a call, or a block for `__main__`."""
    file = file_of(name)
    if file is None:
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    calls = any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in body)
    return calls or any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in body)


def test_every_module_that_a_file_starts_with_python_m_does_something():
    named = named_modules()
    assert {"flows.cli", "prefect", "mlflow", "grpo_tasks.grpo", "grpo_tasks.operating.guarded_servers"} <= named.keys()
    idle = {
        name: where
        for name, where in named.items()
        if name not in OTHER_ENVIRONMENT | PLACEHOLDERS and not starts_something(name)
    }
    assert not idle
    assert [starts_something(f"flows{name}") for name in (".cli", ".cli.main", "", ".no_such_module")] == [True, *[False] * 3]


def test_the_application_that_compose_names_to_mlflow_is_installed():
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    named = set(re.findall(r"--app-name, ([\w-]+)", text))
    assert named
    assert named <= {entry.name for entry in entry_points(group="mlflow.app")}


@pytest.mark.slow
def test_python_m_flows_cli_is_the_command_line():
    call = [sys.executable, "-m", "flows.cli", "no-such-command"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no-such-command" in done.stdout + done.stderr
