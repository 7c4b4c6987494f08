"""Which functions of a notebook can be used as rewards, and how the others are refused."""

import importlib.util
import math
import re
import sys

import pytest

from grpo_tasks.library.own_rewards import add_rewards, rewards_sha256
from schemas.config.rewards import RewardsConfig
from schemas.errors import ConfigError

LIMIT = 3
TABLE = {"a": 1}


def uses_globals(completions, **columns):
    return [math.sqrt(len(re.findall("x", completion[0]["content"]))) + LIMIT for completion in completions]


def uses_a_table(completions, **columns):
    return [float(TABLE["a"]) for _ in completions]


def in_a_notebook(function, monkeypatch):
    """The function as if it had been defined in a cell."""
    monkeypatch.setattr(function, "__module__", "__main__")
    return function


def load(folder, module):
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_a_function_of_a_notebook_takes_its_imports_and_constants_along(tmp_path, monkeypatch):
    section = add_rewards(RewardsConfig(), {"roots": in_a_notebook(uses_globals, monkeypatch)}, tmp_path)
    assert section.functions["roots"].function == "notebook_rewards:uses_globals"
    assert section.module_dir == tmp_path
    written = load(tmp_path, "notebook_rewards")
    assert written.uses_globals([[{"content": "xxxx"}]]) == uses_globals([[{"content": "xxxx"}]]) == [5.0]


def test_a_function_of_a_module_is_imported_from_there(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "mine.py").write_text("def f(completions, **columns):\n    return [1.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("package.mine").f
    section = add_rewards(RewardsConfig(), {"f": function}, tmp_path / "stage")
    assert section.functions["f"].function == "package.mine:f"
    assert section.module_dir == tmp_path
    before = rewards_sha256(section)
    (tmp_path / "package" / "mine.py").write_text("def f(completions, **columns):\n    return [0.0 for _ in completions]\n")
    assert rewards_sha256(section) != before
    monkeypatch.delitem(sys.modules, "package.mine")


def test_what_only_exists_in_the_notebook_is_refused_by_name(tmp_path, monkeypatch):
    def closure(completions, **columns):
        return [float(tmp_path.exists()) for _ in completions]

    for function, message in (
        (in_a_notebook(uses_a_table, monkeypatch), "uses TABLE, which is defined outside"),
        (lambda **_: [1.0], "not a plain function"),
        (closure, "not a plain function"),
        (len, "not a plain function"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            add_rewards(RewardsConfig(), {"mine": function}, tmp_path)
        assert refused.value.place == "rewards.mine"
        assert "module file" in refused.value.fix


def test_functions_of_two_folders_are_refused(tmp_path, monkeypatch):
    section = RewardsConfig(module_dir=tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="several folders"):
        add_rewards(section, {"roots": in_a_notebook(uses_globals, monkeypatch)}, tmp_path)
