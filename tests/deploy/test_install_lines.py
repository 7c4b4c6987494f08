"""What a page or a message tells to install is the set of packages that is tested, also on a GPU."""

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("README.md", "Makefile", "docs", "deploy", "examples", "flows", "grpo_tasks", "schemas")
EXTRAS = re.compile(r"install\b.*(?:\.|grpo-pipeline)\[")
CONSTRAINTS = re.compile(r"install\b.* (?:-c|--constraint) deploy/constraints\.txt .*\.\[")


def test_every_line_that_installs_an_extra_takes_the_constraints():
    files = [file for place in PLACES for file in [ROOT / place, *(ROOT / place).rglob("*")] if file.is_file()]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files if file.suffix not in (".safetensors", ".pyc")]
    lines = [line for text in texts for line in text.splitlines() if EXTRAS.search(line)]
    assert len([line for line in lines if "gpu" in line]) >= 2
    assert len(lines) >= 10
    assert [line for line in lines if not CONSTRAINTS.search(line)] == []


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_the_line_for_a_gpu_resolves_to_the_pinned_set(tmp_path):
    """By the metadata on the index; nothing is installed. It takes minutes, and longer where the index has only whole wheels."""
    [line] = re.findall(r"\.venv/bin/pip install (.+'\.\[gpu\]')", (ROOT / "README.md").read_text(encoding="utf-8"))
    venv.create(tmp_path / "venv", with_pip=True)
    # A machine may have a CPU build of torch on its disk; only the index counts.
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}

    def pip(*words, **options):
        command = [tmp_path / "venv" / "bin" / "python", "-m", "pip", *words]
        return subprocess.run(command, cwd=ROOT, env=own | {"PIP_CONFIG_FILE": os.devnull}, check=False, text=True, **options)

    if pip("install", "--quiet", "--retries", "0", "--upgrade", "pip", capture_output=True).returncode:
        pytest.skip("no package index is reachable")
    report = tmp_path / "report.json"
    words = line.replace("'", "").split()
    done = pip("install", "--quiet", "--dry-run", "--use-feature=fast-deps", "--report", report, *words, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]}
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    assert {"torch", "triton", "nvidia-nccl-cu13", "bitsandbytes", "nvidia-ml-py"} <= {*found}
    assert {name: version for name, version in found.items() if pinned.get(canonicalize_name(name)) != version} == {
        "grpo-pipeline": found["grpo-pipeline"]
    }
