"""Errors cross process borders as JSON and stay what they are."""

import ast
import importlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from schemas.errors import OUR_PACKAGES, ConfigError, UserError

ROOT = Path(__file__).resolve().parent.parent.parent
READ = """
import json, sys
import grpo_tasks
grpo_tasks.__path__.append(sys.argv[1])
from schemas.errors import UserError
for line in sys.stdin:
    error = UserError.from_json(line)
    kind = type(error)
    print(json.dumps([kind.__module__, kind.__qualname__, kind.title, kind.exit_code, error.message, error.place, error.fix]))
"""


@cache
def classes():
    """(module, class, names of its bases) of every class in our packages, read from the source: some modules need extras."""
    paths = sorted(path for package in OUR_PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [
        (
            ".".join(path.relative_to(ROOT).with_suffix("").parts),
            node.name,
            {ast.unparse(base).split(".")[-1] for base in node.bases},
        )
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def family():
    """Every class of the family, wherever it is defined."""
    known, found = {"UserError"}, {("schemas.errors", "UserError")}
    while True:
        more = {(module, name) for module, name, bases in classes() if bases & known} - found
        if not more:
            return sorted(found)
        found |= more
        known |= {name for _, name in more}


def read(lines, folder):
    """What a fresh process makes of them; `folder` holds further modules of grpo_tasks."""
    command = [sys.executable, "-c", READ, folder]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_error_survives_a_process_that_does_not_know_it(tmp_path):
    kinds = [getattr(importlib.import_module(module), name) for module, name in family()]
    assert {"NotFiniteError", "ServerGoneError", "ConfigError"} <= {kind.__name__ for kind in kinds}
    errors = [kind("what happened", place="where", fix="the fix") for kind in kinds]
    assert read([error.to_json() for error in errors], tmp_path) == [
        [kind.__module__, kind.__qualname__, kind.title, kind.exit_code, "what happened", "where", "the fix"] for kind in kinds
    ]


def test_an_error_of_an_unloaded_module_keeps_class_and_code(tmp_path):
    (tmp_path / "planted.py").write_text(
        "from schemas.errors import TrainingError\n"
        "class PlantedError(TrainingError):\n"
        "    title, exit_code = 'A title of its own', 7\n"
    )
    line = json.dumps({"type": "PlantedError", "module": "grpo_tasks.planted", "message": "m", "place": "p", "fix": "f"})
    assert read([line], tmp_path) == [["grpo_tasks.planted", "PlantedError", "A title of its own", 7, "m", "p", "f"]]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("planted", "PlantedError"), ("schemas.errors", "json"), ("schemas.none_such", "X"), ("", "UserError")],
)
def test_a_foreign_class_comes_back_plain_an_old_one_as_itself(module, name, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    error = UserError.from_json(json.dumps({"type": name, "module": module, "message": "m", "place": "p", "fix": "f"}))
    assert (type(error), str(error)) == (UserError, "m\n  where: p\n  fix:   f")
    assert type(UserError.from_json('{"type": "ConfigError", "message": "m", "place": "", "fix": ""}')) is ConfigError
