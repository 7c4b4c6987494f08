"""A file or folder that is replaced is the old one or the new one, whatever happens while it is written."""

import signal
import subprocess
import sys

import pytest

from grpo_tasks.kit.files import is_unfinished, replacing

KILLED = """
import os, signal, sys
from pathlib import Path
from grpo_tasks.kit.files import replacing
with replacing(Path(sys.argv[1])) as unfinished:
    (unfinished.mkdir(), (unfinished / "file").touch()) if sys.argv[2] == "folder" else unfinished.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path, kind, text):
    if kind == "folder":
        path.mkdir()
        path = path / "file"
    path.write_text(text)


def read(path):
    return (path / "file").read_text() if path.is_dir() else path.read_text()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_replaced_stays_until_the_new_one_is_whole(tmp_path, kind):
    path = tmp_path / "step-1.json"
    write(path, kind, "old")
    with replacing(path) as unfinished:
        write(unfinished, kind, "new")
        assert read(path) == "old"
        assert is_unfinished(unfinished.name)
        assert [*tmp_path.glob("step-*"), *tmp_path.glob("*.json")] == [path, path]
    assert read(path) == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_after_an_exception_or_a_kill_the_old_one_is_there(tmp_path, kind):
    path = tmp_path / "thing"
    write(path, kind, "old")

    def fail():
        with replacing(path) as unfinished:
            write(unfinished, kind, "half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert read(path) == "old"
    assert [*tmp_path.iterdir()] == [path]
    assert subprocess.run([sys.executable, "-c", KILLED, path, kind], check=False).returncode == -signal.SIGKILL
    assert read(path) == "old"
    with replacing(path) as unfinished:
        write(unfinished, kind, "new")
    assert read(path) == "new"
    assert [*tmp_path.iterdir()] == [path]
