"""The hash of a user's module covers every file of the user's that it imports."""

import subprocess
import sys

import pytest

from grpo_tasks.content.modules import modules_sha256, own_modules

FILES = {
    "rewards.py": "import json, numpy\nimport helper\nfrom tools import words\n\ndef f(**columns): ...\n",
    "helper.py": "import tables.sums as sums\nimport rewards\n",
    "tables/__init__.py": "",
    "tables/sums.py": "from . import figures\nfrom ..nowhere import x\n",
    "tables/figures.py": "def late():\n    from .deep.inner import thing\n",
    "tables/deep/__init__.py": "from .inner import *\n",
    "tables/deep/inner.py": "thing = 1\n",
    "tables/unused.py": "",
    "tools/words.py": "LIST = []\n",
    "unused.py": "",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_module_behind_an_import_is_found_and_no_installed_one(folder):
    found = {path.relative_to(folder).as_posix() for path in own_modules("rewards", [folder]).values()}
    # tools has no __init__.py: a namespace package.
    assert found == FILES.keys() - {"unused.py", "tables/unused.py"}


def test_the_hash_follows_each_of_them_and_nothing_else(folder):
    before = modules_sha256("rewards", [folder])
    for name, text in FILES.items():
        (folder / name).write_text(text + "# changed\n")
        assert (modules_sha256("rewards", [folder]) != before) is ("unused" not in name), name
        (folder / name).write_text(text)


def test_the_files_found_are_those_that_python_imports(folder):
    code = (
        f"import sys; sys.path.append({str(folder)!r}); import rewards, tables.figures as f; f.late()\n"
        f"print(*[m.__file__ for m in list(sys.modules.values()) if str(getattr(m, '__file__', '')).startswith({str(folder)!r})])"
    )
    (folder / "tables" / "sums.py").write_text("from . import figures\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {str(path) for path in own_modules("rewards", [folder]).values()} == imported


def test_installed_modules_are_not_the_users_own(folder, monkeypatch):
    other = folder / "other" / "lib" / "site-packages"
    other.mkdir(parents=True)
    (other / "extra.py").write_text("")
    (folder / "helper.py").write_text("import extra\n")
    # Installed, it wins over a file of the same name.
    (folder / "json.py").write_text("")
    monkeypatch.syspath_prepend(str(other))
    assert {other / "extra.py", folder / "json.py"}.isdisjoint(own_modules("rewards", [folder]).values())


def test_a_broken_module_is_hashed_by_bytes_and_a_missing_not(folder):
    (folder / "broken.py").write_text("def (")
    assert list(own_modules("broken", [folder])) == ["broken"]
    assert modules_sha256("no_such_module", [folder]) == modules_sha256("no.such.module", [folder]) == ""
