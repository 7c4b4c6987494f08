"""From a YAML file and `--set` overrides to a `RunConfig`, or to one `ConfigError` that says what to mend.

A preset is named (`demo`) or given as a path. `extends: SOURCE` in a file puts it on top of another: sections are merged by
key, lists replaced. Overrides are `a.b.0.c=value`, the value read as YAML.
"""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from schemas.config import RunConfig
from schemas.errors import ConfigError

PRESETS = Path(__file__).resolve().parent.parent / "deploy" / "presets"


def load_config(source: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override and check a configuration.

    Args:
        source: path of a YAML file, or the name of a file in deploy/presets/ without its ending.
        overrides: `key.path=value` strings; list items go by index.

    Raises:
        ConfigError: the file is missing or no YAML mapping, a key is unknown, a value is refused.
    """
    tree = read_tree(source)
    for override in overrides or []:
        _override(tree, override)
    return check_config(tree, place=str(find_config(source)))


def read_tree(source: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What a file and those it extends say, not checked; `above`: the files that led here."""
    path = find_config(source)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not readable as YAML: {error}", place=str(path), mend="mend the line it names") from error
    if not isinstance(tree, dict):
        raise ConfigError("the file holds no mapping of settings", place=str(path), mend="start from a preset in deploy/presets")
    below = tree.pop("extends", None)
    if below is None:
        return tree
    if not isinstance(below, str) or path in above:
        raise ConfigError(f"extends: {below}", place=str(path), mend="name one preset or file that does not lead back here")
    beside = path.parent / below
    return _merged(read_tree(beside if beside.is_file() else below, (*above, path)), tree)


def _merged(below: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = below | top
    for key in below.keys() & top.keys():
        if isinstance(below[key], dict) and isinstance(top[key], dict):
            merged[key] = _merged(below[key], top[key])
    return merged


def check_config(tree: dict[str, Any], *, place: str = "configuration") -> RunConfig:
    """Validate a tree that is already in memory; raises one `ConfigError` that lists every fault."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_say(dict(fault)) for fault in error.errors()]
        raise ConfigError("\n".join(faults), place=place) from error


def find_config(source: str | Path) -> Path:
    """The file behind a path or a preset's name; raises `ConfigError` naming the presets there are."""
    for candidate in (Path(source), PRESETS / f"{source}.yaml"):
        if candidate.is_file():
            return candidate
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    near = difflib.get_close_matches(Path(source).stem, names, n=1)
    mend = f"did you mean {near[0]}?" if near else f"presets: {', '.join(names)}"
    raise ConfigError(f"no such configuration: {source}", mend=mend)


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set {override} has no value", mend="--set stages.0.learning_rate=1e-5")
    keys = dotted.split(".")
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        following = _child(node, key, dotted)
        if following is None:
            following = {}
            _assign(node, key, following, dotted)
        if not isinstance(following, dict | list):
            raise ConfigError(f"{'.'.join(keys[: depth + 1])} is a value, nothing below it can be set", place=f"--set {override}")
        node = following
    _assign(node, keys[-1], _value(text), dotted)


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not readable as a value: {text}", place="--set", mend="quote it") from error
    # YAML 1.1 reads 1e-5 (no dot) as a string; everybody means the number.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"{key} is no index of a list of {len(node)}", place=f"--set {dotted}", mend=f"0 to {len(node) - 1}")
    return int(key)


def _child(node: dict[str, Any] | list[Any], key: str, dotted: str) -> Any:
    return node[_index(node, key, dotted)] if isinstance(node, list) else node.get(key)


def _assign(node: dict[str, Any] | list[Any], key: str, value: Any, dotted: str) -> None:
    if isinstance(node, list):
        node[_index(node, key, dotted)] = value
    else:
        node[key] = value


def _say(fault: dict[str, Any]) -> str:
    location = [part for part in fault["loc"] if part != "literal['all-linear']"]
    place = ".".join(str(part) for part in location) or "configuration"
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _keys_at(location[:-1]), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_keys_at(location[:-1]))}"
        return f"{place}: unknown key; {hint}"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) or given is None else ""
    return f"{place}: {message}{shown}"


def _keys_at(location: list[Any]) -> list[str]:
    model: type[BaseModel] | None = RunConfig
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields) if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
