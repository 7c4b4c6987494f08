"""Which functions of a notebook can be used as rewards, and how the others are refused."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_tasks.library import add_rewards
from grpo_tasks.rewards.registry import load_function
from grpo_tasks.running.key import content_key
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardConfig, RewardsConfig
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
    before = content_key("s", (), {"rewards": section})
    (tmp_path / "package" / "mine.py").write_text("def f(completions, **columns):\n    return [0.0 for _ in completions]\n")
    assert content_key("s", (), {"rewards": section}) != before
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


SAID = [[{"content": "please, please; thanks"}]]
SCRIPT = """
import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

from grpo_tasks.library import add_rewards
from grpo_tasks.running.key import content_key
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ConfigError

LIMIT = 10


def count_words(text, words):
    return min(float(sum(text.count(word) for word in words)), LIMIT)


def uses_a_helper(completions, **columns):
    return [count_words(completion[0]["content"], ("please",)) for completion in completions]


async def later(completions, **columns):
    return uses_a_helper(completions)


def weighted(completions, weight, words=("x",), **columns):
    return [weight * count_words(completion[0]["content"], words) for completion in completions]


class Polite:
    def __init__(self, words=("please",)):
        self.words = words

    def __call__(self, completions, **columns):
        return self.score(completions)

    def score(self, completions, **columns):
        return [math.floor(count_words(completion[0]["content"], self.words)) for completion in completions]


class VeryPolite(Polite):
    def score(self, completions, **columns):
        return [10.0 * one for one in super().score(completions)]


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    value: float

    def __call__(self, completions, **columns):
        return [self.value for _ in completions]


class Holder(Polite):
    def score(self, completions, **columns):
        return [0.0]


FORMS = {
    "helper": uses_a_helper,
    "async": later,
    "class": Polite,
    "instance": Polite(("please", "thanks")),
    "method": Polite(["thanks"]).score,
    "subclass": VeryPolite(("thanks",)),
    "slots": Fixed(4.0),
    "partial": functools.partial(weighted, weight=0.5, words=("please", "thanks")),
    "of-an-instance": functools.partial(Polite(("please",)), note=None),
}
folder = Path(sys.argv[1])
section = add_rewards(RewardsConfig(), FORMS, folder)
refused = {}
for name, reward in {"holds": Holder(folder), "lambda": lambda **_: [1.0]}.items():
    try:
        add_rewards(RewardsConfig(), {name: reward}, folder)
    except ConfigError as error:
        refused[name] = str(error)
print(json.dumps({"functions": {name: one.function for name, one in section.functions.items()}, "refused": refused}))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What a script that defines rewards of every form gets for them, and the folder of the module that is written."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, folder / "script.py", folder]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(folder))
    yield json.loads(done.stdout)
    sys.path.remove(str(folder))
    sys.modules.pop("notebook_rewards")


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("helper", 2.0),
        ("async", 2.0),
        ("class", 2.0),
        ("instance", 3.0),
        ("method", 1.0),
        ("subclass", 10.0),
        ("slots", 4.0),
        ("partial", 1.5),
        ("of-an-instance", 2.0),
    ],
)
def test_a_scripts_definitions_score_in_another_process(script, name, score):
    reward = RewardConfig(function=script["functions"][name])
    assert reward.function.startswith("notebook_rewards:")
    assert load_function(name, reward, RewardsConfig(), CompletionConfig()).call(completions=SAID) == [score]


def test_an_instance_with_more_than_plain_values_is_refused(script):
    assert "its attribute words is no plain value" in script["refused"]["holds"]
    assert "not a plain function" in script["refused"]["lambda"]


def test_classes_instances_methods_and_partials_are_imported_from_their_module(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text(
        "import functools\n"
        "class Judge:\n"
        "    def __call__(self, completions, **columns):\n"
        "        return [1.0 for _ in completions]\n"
        "    def score(self, completions, **columns):\n"
        "        return [2.0 for _ in completions]\n"
        "judge = Judge()\n"
        "half = functools.partial(judge.score, weight=0.5)\n"
        "short = lambda completions, **columns: [3.0 for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judges = importlib.import_module("judges")
    given = {"a": judges.Judge, "b": judges.judge, "c": judges.judge.score, "d": judges.half, "e": judges.short}
    section = add_rewards(RewardsConfig(), given, tmp_path / "stage")
    named = [reward.function for reward in section.functions.values()]
    assert named == ["judges:Judge", "judges:judge", "judges:judge.score", "judges:half", "judges:short"]
    assert section.module_dir == tmp_path
    scores = [
        load_function(name, one, section, CompletionConfig()).call(completions=SAID) for name, one in section.functions.items()
    ]
    assert scores == [[1.0], [1.0], [2.0], [2.0], [3.0]]
    monkeypatch.delitem(sys.modules, "judges")


def test_two_different_functions_of_one_name_are_refused(tmp_path, monkeypatch):
    first = in_a_notebook(uses_globals, monkeypatch)
    second = in_a_notebook(uses_a_table, monkeypatch)
    monkeypatch.setattr(second, "__name__", "uses_globals")
    with pytest.raises(ConfigError, match="two different rewards are called uses_globals"):
        add_rewards(RewardsConfig(), {"a": first, "b": second}, tmp_path)
