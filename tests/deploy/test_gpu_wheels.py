"""deploy/gpu-check.sh on a machine that has only what it says: the packages of a GPU machine, and the wheels that it collects."""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.long, pytest.mark.ci]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "gpu-check.sh"
MACHINE = ("torch", "transformers", "accelerate", "peft")
TABLES = ("pyarrow", "pandas")
"""The machine needs them too, for stages and for TRL; they are too large to travel."""


def wheels():
    return re.search(r"packages=\((.*?)\)", SCRIPT.read_text(), re.DOTALL)[1].split()


def with_what_they_need(names):
    """The distributions, and all that their metadata requires."""
    found, left = set(), [(canonicalize_name(name), "") for name in names]
    while left:
        name, extra = one = left.pop()
        if one in found:
            continue
        found.add(one)
        for need in map(Requirement, metadata.requires(name) or []):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(need.name), wanted) for wanted in ("", *need.extras)]
    return {name for name, _ in found}


def tops(name):
    """What a distribution puts into site-packages."""
    return {file.parts[0] for file in metadata.distribution(name).files or []} - {"..", "__pycache__"}


def bare_machine(folder, *packages):
    """The interpreter of an environment with these packages, by links to those of this one."""
    venv.create(folder, with_pip=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in {*with_what_they_need(packages), *map(canonicalize_name, wheels())}:
        for top in tops(name):
            if not (site / top).exists():
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return bare_machine(tmp_path_factory.mktemp("machine") / "venv", *MACHINE, *TABLES)


def run(command, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    own = kept | {"HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False, env=own)


def imports(python, *modules, hidden=()):
    """Import modules where the hidden ones are not installed."""
    # The import system takes None for that.
    code = f"import importlib, sys\nsys.modules.update(dict.fromkeys({sorted(hidden)}))\n"
    code += "for name in sys.argv[1:]:\n    importlib.import_module(name)"
    return run([python, "-c", code, *modules], ROOT, PYTHONPATH=str(ROOT))


def test_everything_that_runs_on_a_gpu_machine_finds_its_packages(machine):
    modules = ["tests.gpu.test_passes", "tests.gpu.test_stages", "tests.gpu.test_compile", "tests.benchmarks.gpu"]
    modules += ["tests.benchmarks.sides"]
    modules += ["grpo_tasks.grpo.__main__", "grpo_tasks.rewards.worker", "trl.trainer.grpo_trainer", "trl.trainer.grpo_config"]
    done = imports(machine, *modules)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No module named 'polars'" in imports(machine, "polars").stderr


def test_passes_need_no_tables(machine):
    without = with_what_they_need(TABLES) - with_what_they_need(MACHINE) - {*map(canonicalize_name, wheels())}
    hidden = {top for name in without for top in tops(name)}
    assert {"pyarrow", "pandas"} <= hidden
    done = imports(machine, "tests.gpu.conftest", "tests.gpu.test_passes", hidden=hidden)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pyarrow" in imports(machine, "tests.gpu.test_stages", hidden=hidden).stderr


def test_the_script_installs_wheels_and_ends_with_the_tests_status(tmp_path, machine):
    """In a copy without tests."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    (tmp_path / ".gpu-check" / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / ".gpu-check" / "wheels" / "travelled-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("travelled.py", "")
        wheel.writestr("travelled-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: travelled\nVersion: 1.0\n")
        wheel.writestr("travelled-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("travelled-1.0.dist-info/RECORD", "")
    (tmp_path / "caller").mkdir()
    # Any request would fail at once.
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    for _ in range(2):
        done = run(["bash", "../deploy/gpu-check.sh", "run", "found"], tmp_path / "caller", PYTHON=str(machine), **proxy)
        assert done.returncode == 4, done.stderr  # pytest's word for a folder that is not there
    listed = (tmp_path / "caller" / "found" / "machine.txt").read_text()
    assert re.search(r"^travelled +1\.0", listed, re.MULTILINE)
    assert re.search(r"^torch ", listed, re.MULTILINE)
    assert "tests/gpu" in (tmp_path / "caller" / "found" / "tests.txt").read_text()


HANGS = """
import os
import time
from pathlib import Path

def test_ends():
    pass

def test_hangs():
    Path(os.environ["HANGS"]).write_text("here\\n")
    time.sleep(600)
"""
FAKE = f"""#!/bin/bash
case "$*" in
*test_passes*) exec {sys.executable} "$@" ;;
*test_stages*)
    trap 'echo and here >>"$HANGS"' INT
    echo "tests/gpu/test_stages.py::test_ends PASSED"
    echo here >>"$HANGS"
    while true; do sleep 600 & wait; done ;;
*benchmarks*) echo measured >"$MEASURED"; echo here >>"$HANGS"; sleep 600 ;;
esac
"""
"""An interpreter: the first part hangs in pytest, the second ignores SIGINT, and the benchmark hangs."""
CLOCK = f"""#!/bin/bash
: >"$HANGS"
{shutil.which("timeout")} "$@" &
seen=0
while kill -0 $! 2>/dev/null; do
    (($(wc -l <"$HANGS") > seen)) && kill -ALRM $! && seen=$((seen + 1))
    sleep 0.05
done
wait $!
"""
"""`timeout`, whose time ends when the command says that it hangs: on a busy machine no number of seconds is the right one."""


def test_what_hangs_is_ended_and_what_ended_before_is_reported(tmp_path):
    (tmp_path / "deploy").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_passes.py").write_text(HANGS)
    (tmp_path / "bin").mkdir()
    for name, text in (("python", FAKE), ("timeout", CLOCK)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"PYTHON": "bin/python", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HANGS": str(tmp_path / "hangs")}
    own["MEASURED"] = str(tmp_path / "measured")

    def check(**limits):
        return run(["bash", tmp_path / "deploy" / "gpu-check.sh", "run", "found"], tmp_path, **own, **limits)

    # As in the background of a script.
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = check(TEST_SECONDS="3600", KILL_SECONDS="3600", BENCH_SECONDS="3600")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert done.returncode != 0
    report = (tmp_path / "found" / "tests.txt").read_text()
    assert "test_passes.py::test_ends PASSED" in report
    assert "1 passed" in report, "pytest sums up"
    assert "test_stages.py::test_ends PASSED" in report
    assert (tmp_path / "measured").exists()
    assert check(TEST_SECONDS="0", BENCH_SECONDS="3600").returncode == 124
    report = (tmp_path / "found" / "tests.txt").read_text()
    assert re.findall(r"test_(\w+)\.py: the time has ended", report) == ["passes", "stages", "risky", "compile"]


def test_the_gpu_tests_pass_on_a_machine_without_one(tmp_path, machine):
    # A compiled layer takes a minute, and a killed stage half of one; other tests have both.
    chosen = {"TEST_ARGS": "--deselect=tests/gpu/test_compile.py::test_compiled_layers_give_the_same_numbers"}
    chosen["TEST_ARGS"] += " --deselect=tests/gpu/test_stages.py::test_a_stage_that_is_killed_and_resumed_ends_in_the_same_bytes"
    limits = {"TEST_SECONDS": "3600", "BENCH_SECONDS": "0", "BENCH_ARGS": "--device cpu"}
    done = run(["bash", SCRIPT, "run", "found"], tmp_path, PYTHON=str(machine), GRPO_TEST_DEVICE="cpu", **chosen, **limits)
    report = (tmp_path / "found" / "tests.txt").read_text()
    assert done.returncode == 0, report[-3000:]
    assert sum(map(int, re.findall(r"(\d+) passed", report))) > 35
    assert "the budget has ended" in (tmp_path / "found" / "bench.jsonl").read_text()
