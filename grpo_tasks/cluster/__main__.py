"""`python -m grpo_tasks.cluster STAGE_DIR`: train a stage on the nodes of a Ray cluster, or resume it."""

from pathlib import Path

from grpo_tasks.cluster.connect import connected
from grpo_tasks.cluster.stage import StageSupervisor
from grpo_tasks.processes.child import run_child
from grpo_tasks.stage.stage_dir import StageDir, StageSpec


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    with connected(spec.resources.cluster.address):
        StageSupervisor(directory, spec).train()


if __name__ == "__main__":
    run_child(main)
