"""From a YAML file and `--set` overrides to a `RunConfig`, or to one `ConfigError` that says what to fix.

A preset is named (`demo`) or given as a path. `extends: SOURCE` in a file puts it on top of another: sections are merged by
key, lists replaced. Overrides are `a.b.0.c=value`, the value read as YAML.
"""

import difflib
import os
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.config.yaml_text import MAX_CHARS, parse_yaml
from schemas.errors import ConfigError, shorten
from schemas.paths import DEPLOY, module_file, why_not_a_file

_SHOWN = 120
"""Characters of a refused value that an error repeats."""
PRESETS = DEPLOY / "presets"


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
    path = find_config(source)
    return _with_modules(check_config(tree, place=str(path)), path)


def _with_modules(config: RunConfig, path: Path) -> RunConfig:
    """The config with `rewards.module_dir` filled in where modules of its own functions lie beside its file."""
    folder, here = path.resolve().parent, Path.cwd()
    if config.rewards.module_dir is not None or folder == here:
        return config
    functions = [reward.function or "" for reward in config.rewards.functions.values()]
    modules = sorted({function.partition(":")[0] for function in functions if ":" in function})
    beside = {module: file for module in modules if (file := module_file(module, folder)) is not None}
    for module, file in beside.items():
        other = module_file(module, here)
        if other is not None and other.read_bytes() != file.read_bytes():
            raise ConfigError(
                f"two different modules are called {module}: {other} and {file}",
                place=f"{path}: rewards.functions",
                fix="rename or remove one of them, or start the command in the folder of the config",
            )
    if not beside:
        return config
    found = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"module_dir": found})})


def read_tree(source: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What a file and those it extends say, not checked; `above`: the files that led here."""
    path = find_config(source)
    tree = parse_yaml(_text_of(path), place=str(path))
    if not isinstance(tree, dict):
        raise ConfigError("the file holds no mapping of settings", place=str(path), fix="start from a preset: grpo presets")
    below = tree.pop("extends", None)
    if below is None:
        return tree
    above = (*above, path.resolve())
    below_path = find_config(below, beside=path.parent) if isinstance(below, str) else None
    if below_path is None or below_path.resolve() in above:
        raise ConfigError(f"extends: {below}", place=str(path), fix="name one preset or file that does not lead back here")
    return _merged(read_tree(below_path, above), tree)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CHARS + 1)
        if len(content) > MAX_CHARS:
            raise ConfigError(
                f"the file has {path.stat().st_size:,} bytes; at most {MAX_CHARS:,} make a config",
                place=str(path),
                fix="name a YAML config; rows belong into files under data",
            )
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"byte {content[error.start]:#04x} is not UTF-8", place=f"{path}:{line}", fix="save the file as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", place=str(path), fix="check the disk") from error


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


def tracking_at(uri: str | None) -> TrackingConfig:
    """The settings of a tracking store at this address; none: the environment's.

    Raises:
        ConfigError: it is no address.
    """
    try:
        return TrackingConfig(tracking_uri=uri)
    except ValidationError as error:
        raise ConfigError("\n".join(_say(dict(fault)) for fault in error.errors()), place="--tracking-uri") from error


def find_config(source: str | Path, *, beside: Path | None = None) -> Path:
    """The file behind a path or a preset's name; `beside`: a folder to look into first.

    Raises:
        ConfigError: there is none, with the presets there are; or what is there is no file to read.
    """
    candidates = [*([beside / source] if beside else []), Path(source), PRESETS / f"{source}.yaml"]
    reasons = {candidate: why_not_a_file(candidate) for candidate in candidates}
    for candidate, reason in reasons.items():
        if not reason:
            return candidate
    for candidate, reason in reasons.items():
        if os.path.lexists(candidate):
            raise ConfigError(reason, place=str(candidate), fix="name a YAML file or a preset")
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    near = difflib.get_close_matches(Path(source).stem, names, n=1)
    fix = f"did you mean {near[0]}?" if near else f"presets: {', '.join(names)}"
    raise ConfigError(f"no such configuration: {shorten(str(source), _SHOWN)}", fix=fix)


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set {shorten(override, _SHOWN)} has no value", fix="--set stages.0.learning_rate=1e-5")
    keys = dotted.split(".")
    if not all(keys):
        raise ConfigError(f"{dotted} has an empty part between its dots", place="--set", fix="--set stages.0.learning_rate=1e-5")
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        following = _child(node, key, dotted)
        if following is None:
            following = {}
            _assign(node, key, following, dotted)
        if not isinstance(following, dict | list):
            raise ConfigError(f"{'.'.join(keys[: depth + 1])} is a value, nothing below it can be set", place=f"--set {override}")
        node = following
    _assign(node, keys[-1], parse_yaml(text, place="--set"), dotted)


def _index(node: list[Any], key: str, dotted: str) -> int:
    if key not in map(str, range(len(node))):
        indices = f"0 to {len(node) - 1}" if node else "set the whole list: KEY=[...]"
        raise ConfigError(f"{key} is no index of a list of {len(node)}", place=f"--set {dotted}", fix=indices)
    return int(key)


def _child(node: dict[str, Any] | list[Any], key: str, dotted: str) -> Any:
    return node[_index(node, key, dotted)] if isinstance(node, list) else node.get(key)


def _assign(node: dict[str, Any] | list[Any], key: str, value: Any, dotted: str) -> None:
    if isinstance(node, list):
        node[_index(node, key, dotted)] = value
    else:
        node[key] = value


_MESSAGES = {"finite_number": "must be a finite number, neither infinite nor nan"}
"""Our words for faults whose own say too little."""


def _say(fault: dict[str, Any]) -> str:
    location = [part for part in fault["loc"] if part != "literal['all-linear']"]
    place = ".".join(str(part) for part in location) or "configuration"
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _keys_at(location[:-1]), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_keys_at(location[:-1]))}"
        return f"{place}: unknown key; {hint}"
    message = _MESSAGES.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    shown = f" (given: {shorten(repr(given), _SHOWN)})" if isinstance(given, str | int | float | bool) or given is None else ""
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
