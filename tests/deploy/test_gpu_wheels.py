"""The engine runs without polars and what needs it: their wheels would not travel to a GPU machine without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("polars", "pandera")
ABSENT = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
"""Makes every import of them fail."""


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", f"{ABSENT}\n{code}"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def test_what_runs_on_a_gpu_machine_imports_without_polars():
    modules = ["tests.gpu.test_passes", "tests.gpu.test_stages", "tests.benchmarks.gpu", "tests.benchmarks.sides"]
    modules += ["grpo_tasks.grpo.__main__", "grpo_tasks.rewards.worker"]
    done = python("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in modules))
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_wheel_of_theirs_is_collected():
    wheels = re.search(r"packages=\((.*?)\)", (ROOT / "deploy" / "gpu-check.sh").read_text(), re.DOTALL)[1].split()
    assert "orjson" in wheels
    assert not [name for name in wheels if name.startswith(HEAVY)]


@pytest.mark.long
def test_a_stage_trains_without_polars():
    test = "tests/gpu/test_stages.py::test_every_precision_trains"
    code = f"import pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}, '-k', 'bfloat16 and not True']))"
    done = python(code, GRPO_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
