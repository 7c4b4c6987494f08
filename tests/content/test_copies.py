"""Copies of a user's own modules: what is imported is what was copied, whatever becomes of the files."""

import subprocess
import sys

import pytest

from grpo_tasks.content.modules import copies_in, keep_modules, modules_sha256, own_modules, own_sources

MODULE = "from helper import value\nfrom pack.inner import other\nimport space.deep as deep\nHERE = __file__\n"


@pytest.fixture
def project(tmp_path):
    """A module that imports another, a package and a namespace package."""
    folder = tmp_path / "project"
    for name, text in {
        "mine.py": MODULE,
        "helper.py": "value = 'A'\n",
        "pack/__init__.py": "",
        "pack/inner.py": "from . import beside\nother = beside.text\n",
        "pack/beside.py": "from pathlib import Path\ntext = Path(__file__).with_name('words.txt').read_text()\n",
        "pack/words.txt": "words",
        "space/deep.py": "value = 'A'\ndef fails():\n    raise ValueError('no')\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def imported(kept, project, code, first=""):
    """What a process prints that imports `mine` from copies, in the folder of the project."""
    script = (
        "import sys; from pathlib import Path\n"
        "from grpo_tasks.content.modules import import_object\n"
        f"{first or f'sys.path.append({str(project)!r})'}\n"
        f"import_object('mine:deep.fails', [Path({str(project)!r}), Path({str(kept)!r})], place='here')\n"
        f"import mine\n{code}"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=project, check=True)
    return done.stdout.strip()


def test_a_process_imports_the_copies_and_says_the_names_of_the_files(project, tmp_path):
    found = own_modules("mine", [project])
    assert {*found} == {"mine", "helper", "pack", "pack.inner", "pack.beside", "space.deep"}
    kept = keep_modules(found, tmp_path / "kept", searched=[project])
    before = modules_sha256("mine", [project])
    for name in ("helper.py", "space/deep.py", "pack/inner.py"):
        (project / name).write_text("value = other = 'B'\n")
    (project / "mine.py").unlink()
    shown = imported(kept, project, "print(mine.value, mine.deep.value, mine.other, mine.HERE)")
    assert shown == f"A A words {project / 'mine.py'}"
    failed = imported(kept, project, "import traceback\ntry: mine.deep.fails()\nexcept ValueError: print(traceback.format_exc())")
    assert f'{project / "space" / "deep.py"}", line 3' in failed
    assert modules_sha256("mine", [tmp_path, kept]) == before
    assert {path.name for path in copies_in([kept]).changed()} == {"mine.py", "helper.py", "deep.py", "inner.py"}


def test_the_same_contents_are_kept_once(project, tmp_path):
    first, again = (keep_modules(own_modules("mine", [project]), tmp_path / "kept", searched=[project]) for _ in range(2))
    assert first == again
    (project / "helper.py").write_text("value = 'B'\n")
    assert keep_modules(own_modules("mine", [project]), tmp_path / "kept", searched=[project]) != first
    assert len([*(tmp_path / "kept").iterdir()]) == 2


def test_copies_are_found_before_a_project_that_is_installed_for_editing(project, tmp_path):
    kept = keep_modules(own_modules("mine", [project]), tmp_path / "kept", searched=[project])
    (project / "helper.py").write_text("value = 'B'\n")
    shown = "from grpo_tasks.content.modules import own_sources\n"
    shown += f"print(mine.value, own_sources(['mine:x'], [Path({str(kept)!r})])['mine'].is_relative_to({str(kept)!r}))"
    assert imported(kept, project, shown, first=f"sys.path.insert(0, {str(project)!r})") == "A True"


def test_no_module_at_all_makes_an_empty_folder(tmp_path):
    kept = keep_modules({}, tmp_path / "kept", searched=[tmp_path])
    assert own_sources(["mine:f"], [kept]) == {}
    assert copies_in([kept]).changed() == []
