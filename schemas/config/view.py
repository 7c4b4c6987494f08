"""The settings that a step declares, and no others.

    view(config, "difficulty model -model.lora stages.rewards")

is the config with the section `difficulty`, the section `model` without `lora`, and of each stage its `rewards`. Reading anything
else raises AttributeError, so a step cannot depend on a setting that its content key does not hold. A path goes through lists and
mappings: `stages.rewards` is that of every stage, `data.tasks.rewards` that of every task.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from schemas.config.section import Section

UNMERGED = "model -model.merged_dtype -model.merged_system_prompt"
"""The model without the settings of its merge: to merge in another precision is no reason to train or evaluate again."""
Viewed = TypeVar("Viewed", bound=Section)
Paths = dict[str, "Paths"]
"""Names of fields, each with those below it; none below: all of it."""


def view(config: Viewed, reads: str) -> Viewed:
    """A copy of the config that has only these settings. Its methods work if they need no other.

    Args:
        config: the config.
        reads: dotted paths, separated by spaces; a minus in front takes a setting away again.

    Raises:
        AttributeError: the config has no such setting.
    """
    paths = reads.split()
    kept, left_out = [path for path in paths if path[0] != "-"], [path[1:] for path in paths if path[0] == "-"]
    part: Viewed = _part(config, _tree(kept), _tree(left_out))
    return part


def _tree(paths: Iterable[str]) -> Paths:
    tree: Paths = {}
    for path in paths:
        below = tree
        for name in path.split("."):
            below = below.setdefault(name, {})
    return tree


def _part(value: Any, kept: Paths, left_out: Paths) -> Any:
    if isinstance(value, list):
        return [_part(item, kept, left_out) for item in value]
    if isinstance(value, dict):
        return {name: _part(item, kept, left_out) for name, item in value.items()}
    if not isinstance(value, Section) or not (kept or left_out):
        return value
    fields = type(value).model_fields
    if unknown := (kept.keys() | left_out.keys()) - fields.keys():
        raise AttributeError(f"{type(value).__name__} has no setting {', '.join(sorted(unknown))}")
    gone = {name for name, below in left_out.items() if not below}
    names = [name for name in kept or fields if name not in gone and name in value.__dict__]
    part = value.model_copy()
    part.__dict__.clear()
    part.__dict__.update({name: _part(getattr(value, name), kept.get(name, {}), left_out.get(name, {})) for name in names})
    return part
