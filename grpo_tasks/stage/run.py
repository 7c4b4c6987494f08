"""Train a stage in a child process or in this one; the seam between the trainers and their callers.

No orchestrator and no tracker is imported: the engine is a library too.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from grpo_tasks.processes.child import run_module
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ConfigError
from schemas.results.model import StageResult

TRAINER = "grpo_tasks.grpo"
"""Package that trains a stage, `python -m grpo_tasks.grpo STAGE_DIR`. Named, not imported: only its process loads torch."""
CLUSTER = "grpo_tasks.cluster.stage"
"""Module that runs it on the nodes of a cluster."""


def run_stage(
    spec: StageSpec, directory: Path, *, in_process: bool = False, tick: Callable[[], None] | None = None
) -> StageResult:
    """Train the stage in `directory`, from its last checkpoint if there is one; a finished stage is only read.

    A child process trains, so that a crash cannot take the caller along; `tick` is called a few times a second meanwhile.
    `in_process` is for a debugger or a notebook. ConfigError where the directory holds a stage with another key.
    """
    stage_dir = StageDir(directory.resolve())
    stage_dir.root.mkdir(parents=True, exist_ok=True)
    try:
        key = StageSpec.load(stage_dir.spec).key
    except (OSError, ValueError):  # there is no spec, or a damaged one: either is written again
        key = spec.key
    if key != spec.key:
        raise ConfigError(
            "the directory holds another stage", place=str(stage_dir.root), fix="choose another directory, or remove this one"
        )
    spec.save(stage_dir.spec)
    on_cluster = spec.resources.cluster.engine == "ray"
    if in_process:
        import_module(CLUSTER if on_cluster else f"{TRAINER}.__main__").main(stage_dir.root)
    else:
        run_module(CLUSTER if on_cluster else TRAINER, stage_dir.root, tick=tick)
    return StageResult.load(stage_dir.result)
