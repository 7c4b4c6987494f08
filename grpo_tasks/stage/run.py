"""Train a stage with the engine it names, in a child process or in this one; the seam between the engines and their callers.

    StageSpec -> spec.json -> grpo_tasks.grpo | grpo_tasks.trl_engine -> result.json -> StageResult

The pipeline's step uses it, and so does anyone who wants the engine as a library: no orchestrator and no tracker is imported.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from grpo_tasks.processes.child import run_module
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.results.model import StageResult

ENGINES = {"native": "grpo_tasks.grpo", "trl": "grpo_tasks.trl_engine"}
"""Package of each `stages[].engine`. Named, not imported: torch is loaded only where the stage is trained."""

CLUSTER = "grpo_tasks.cluster.stage"
"""Package that runs one of these on the nodes of a cluster."""


def run_stage(
    spec: StageSpec, directory: Path, *, in_process: bool = False, tick: Callable[[], None] | None = None
) -> StageResult:
    """Train the stage in `directory`, from its last checkpoint if there is one; a finished stage is only read.

    A child process trains: its memory is returned when it ends, and a crash cannot take the caller along. `tick` is called a few
    times a second meanwhile. `in_process` trains in this process, for a debugger or a notebook. UserError where the stage cannot
    be trained, and ConfigError where the directory holds one with another key.
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
    engine = CLUSTER if spec.resources.cluster.engine == "ray" else package_of(spec.stage)
    if in_process:
        import_module(f"{engine}.__main__").main(stage_dir.root)
    else:
        run_module(engine, stage_dir.root, tick=tick)
    return StageResult.load(stage_dir.result)


def package_of(stage: StageConfig) -> str:
    """Package that trains a stage, as `python -m MODULE STAGE_DIR`."""
    return ENGINES[stage.engine if stage.kind == "grpo" else "native"]
