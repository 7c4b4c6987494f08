"""Where things of a run lie, as names only: nothing here reads or writes.

OUTPUT_DIR/NAME/                     one run configuration's folder
  prepare_data/KEY/                  one folder a step and content key: same inputs, same folder
  train_stage/format-KEY/            a stage directory (see grpo_tasks/stage)
"""

from pathlib import Path

EMBEDDED = "embedded:"
_DEMO = Path(__file__).resolve().parent.parent / "grpo_tasks" / "demo"


def resolve(path: str) -> str:
    """A path or hub id as given, except that `embedded:NAME` becomes the file or folder inside this project."""
    return str(_DEMO / path.removeprefix(EMBEDDED)) if path.startswith(EMBEDDED) else path


def is_local(path: str) -> bool:
    """Whether the path names something on this disk (otherwise it is taken for a hub id)."""
    return Path(resolve(path)).exists()
