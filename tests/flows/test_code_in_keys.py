"""What the processes of a run really import is in the keys of its steps, as Python itself reports it."""

import re

import pytest
import yaml

from grpo_tasks.running.key import MACHINERY, code_behind
from tests.flows.place import ROOT, SMALL

pytestmark = [pytest.mark.xdist_group("demo")]

IMPORTED = re.compile(r"import time:[^|]*\|[^|]*\|\s+((?:grpo_tasks|schemas)\.[\w.]+)")
PROCESSES = {
    "train_stage": "grpo_tasks.grpo.trainer",
    "evaluate_model": "grpo_tasks.rollout.local",
    "probe_rewards": "",
    "merge_adapter": "",
}


@pytest.mark.long
def test_every_module_of_a_steps_process_counts_in_its_key(place, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    place.write("imports.yaml", yaml.safe_dump(SMALL | {"name": "imports"}))
    place.grpo("run", "imports.yaml")
    imported = {}
    for log in place.root.glob("runs/imports/*/*/*"):
        if log.suffix in {".txt", ".log"}:
            found = set(IMPORTED.findall(log.read_text(errors="replace")))
            # The file of a package holds a docstring only.
            modules = {name for name in found if (ROOT / f"{name.replace('.', '/')}.py").exists()}
            imported.setdefault(log.parts[-3], set()).update(modules)
    for step, module in PROCESSES.items():
        assert len(imported[step]) > 20
        assert not module or module in imported[step]
    for step, names in imported.items():
        assert {name for name in names if not name.startswith(MACHINERY)} <= set(code_behind(f"grpo_tasks.steps.{step}")), step
