"""`grpo cluster`, and runs that cannot have the nodes they want."""

import os
import subprocess
import sys

import pytest

from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ClusterError
from tests.rollout.servers import ROOT

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(1800)]


def shown(nodes, *arguments):
    call = [sys.executable, "-m", "flows.cli", "cluster", *arguments]
    environment = os.environ | {"RAY_ADDRESS": nodes.address, "COLUMNS": "200"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def other_code(tmp_path):
    """A folder that makes Python say that torch has another version."""
    folder = tmp_path / "other" / "torch-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    return str(folder.parent)


def test_the_command_names_a_differing_node_and_stages_refuse_it(nodes, stages, tmp_path, other_code):
    nodes.add()
    code, text = shown(nodes)
    assert code == 0, text
    assert "the same as here" in text
    assert "no run uses it" in text
    nodes.add(PYTHONPATH=os.pathsep.join(filter(None, [other_code, os.environ.get("PYTHONPATH")])))
    code, text = shown(nodes)
    assert code == 1
    assert "torch 1.0 instead of" in text
    cluster = {"engine": "ray", "address": nodes.address, "num_nodes": 2}
    spec = StageSpec.load(stages.write("a", resources={"cluster": cluster}).spec)
    with pytest.raises(ClusterError, match=r"torch 1\.0 instead of") as caught:
        run_stage(spec, tmp_path / "there")
    assert "grpo cluster" in caught.value.fix
    assert not StageDir(tmp_path / "there").journal.exists()


def test_a_node_without_our_code_is_refused_by_name(nodes, stages, tmp_path, monkeypatch):
    broken = tmp_path / "broken" / "grpo_tasks"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not the package you look for')")
    nodes.add(PYTHONPATH=str(broken.parent))
    # Ray looks in the working directory of the driver too.
    monkeypatch.chdir(tmp_path)
    spec = StageSpec.load(stages.write("a", resources={"cluster": {"engine": "ray", "address": nodes.address}}).spec)
    with pytest.raises(ClusterError, match=r"\d cannot run our code: .*not the package you look for"):
        run_stage(spec, tmp_path / "there")
    assert not StageDir(tmp_path / "there").events.exists()


def test_a_waiting_run_names_the_cause_and_begins_when_nodes_join(nodes, stages, tmp_path):
    nodes.add()
    cluster = {"engine": "ray", "address": nodes.address, "num_nodes": 2}
    spec = StageSpec.load(stages.write("a", resources={"cluster": cluster}, max_steps=2).spec)
    there, seen = tmp_path / "there", []

    def join():
        path = StageDir(there).events
        if not seen and path.exists() and "waits for 2 nodes with 1 CPU each" in path.read_text():
            seen.append(shown(nodes)[1])
            nodes.add()

    assert run_stage(spec, there, tick=join).steps == 2
    assert "waits for nodes" in seen[0]
