"""Reads a YAML file with `--set` overrides into a `RunConfig`, or raises one `ConfigError` that says what to fix.

    file --extends--> merged tree --overrides--> checked RunConfig --own reward modules next to the file--> RunConfig

A source is the name of a preset (`demo`) or a path; in Python also a dict of the same settings, or a `RunConfig`.
`extends: SOURCE` merges settings over those of another source: sections are merged by key, lists are replaced. An override is
`a.b.0.c=value` with a YAML value.

Beyond what YAML itself refuses, a text may have no duplicate key, no deep nesting, no aliases that grow without bound ("billion
laughs") and no value that contains itself. Merge keys (`<<: *anchor`) work; an explicit key overrides a merged one.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.config.section import FLAT
from schemas.errors import MAX_LINES, ConfigError, shorten
from schemas.hints import hint_for, hint_for_value, why_gone, without_gone
from schemas.paths import DEPLOY, module_file, why_not_a_file

Checked = TypeVar("Checked")
_SHOWN = 120
"""Characters of an invalid value that an error repeats."""
_MOST_FILES = 50
"""YAML files that are read for a suggestion."""
MAX_CHARS = 2**20
"""Longest text in characters. The largest preset has 4,000 characters; PyYAML parses a million in a few seconds."""
MAX_DEPTH = 50
"""Deepest nesting. The deepest field of a config is at depth 6; parameters of a reward function may be deeper."""
MAX_EXPANDED = 2 * MAX_CHARS
"""Most values and characters after all aliases and merge keys are expanded. A text without aliases is always below it."""
PRESETS = DEPLOY / "presets"
IN_MEMORY = Path("configuration")
"""Where settings stand that no file holds: paths in them are relative to the working directory."""


def load_config(source: str | Path | dict[str, Any] | RunConfig, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, a preset or settings in memory, apply overrides and validate; `ConfigError` where anything is wrong."""
    layers = _layers(source)
    tree = _merge_layers(layers)
    for override in overrides or []:
        _override(tree, override)
    files = [path for path, _ in layers]
    config = check_config(tree, place=str(files[0]))
    return _with_modules(config, files)


def read_tree(source: str | Path) -> dict[str, Any]:
    """The settings of a file and of those that it extends, merged and not yet validated."""
    return _merge_layers(_layers(source))


def _layers(source: str | Path | dict[str, Any] | RunConfig) -> list[tuple[Path, dict[str, Any]]]:
    """A file and those that it extends, the file itself first, each with its own settings."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    given = source.model_dump(mode="json") if isinstance(source, RunConfig) else source
    path: Path | None = find_config(given) if isinstance(given, str | Path) else IN_MEMORY
    while path is not None:
        tree = parse_yaml(_text_of(path), place=str(path)) if path is not IN_MEMORY else deepcopy(given)
        if not isinstance(tree, dict):
            raise ConfigError("the file is not a mapping of settings", place=str(path), fix="start from a preset: grpo presets")
        extended = tree.pop("extends", None)
        layers.append((path, tree))
        path = None if extended is None else _extended(extended, [file for file, _ in layers])
    return layers


def _extended(name: object, files: list[Path]) -> Path:
    """The file that the last of `files` extends."""
    found = find_config(name, folder=files[-1].parent) if isinstance(name, str) else None
    if found is None or found.resolve() in [file.resolve() for file in files]:
        raise ConfigError(
            f"extends: {name} does not name another config",
            place=str(files[-1]),
            fix="name a preset or a file that does not extend this one",
        )
    return found


def _merge_layers(layers: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for _, tree in reversed(layers):
        merged = _merged(merged, tree)
    return merged


def _with_modules(config: RunConfig, files: list[Path]) -> RunConfig:
    """The config with `rewards.module_dir` set to the first folder of its files that holds one of its own modules."""
    if config.rewards.module_dir is not None:
        return config.with_module_dir(config.rewards.module_dir)
    functions = [reward.function or "" for reward in config.rewards.functions.values()]
    functions += config.interaction.references
    functions += [stage.demonstrations.function or "" for stage in config.stages if stage.demonstrations is not None]
    modules = sorted({function.partition(":")[0] for function in functions if ":" in function})
    here = Path.cwd()
    for file in files:
        folder = file.resolve().parent
        own = {module: found for module in modules if (found := module_file(module, folder)) is not None}
        if folder == here or not own:
            continue
        for module, found in own.items():
            other = module_file(module, here)
            # The working directory is searched first.
            if other is not None and other.read_bytes() != found.read_bytes():
                raise ConfigError(
                    f"two different modules are called {module}: {other} and {found}",
                    place=f"{file}: rewards.functions",
                    fix="rename or remove one of them, or start the command in the folder of the config",
                )
        return config.with_module_dir(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    return config


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CHARS + 1)
        if len(content) > MAX_CHARS:
            raise ConfigError(
                f"the file has {path.stat().st_size:,} bytes; a config has at most {MAX_CHARS:,}",
                place=str(path),
                fix="name a YAML config; rows belong in the files that section data names",
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
    """Validate settings in memory; the `ConfigError` lists every fault."""
    return _valid(lambda: RunConfig.model_validate(tree, context=FLAT), place)


def with_setting(config: RunConfig, override: str) -> RunConfig:
    """A config with one setting changed, PATH=VALUE; `ConfigError` where it cannot have that value."""
    tree = config.model_dump(mode="json")
    _override(tree, override)
    return check_config(tree, place=override)


def _valid(make: Callable[[], Checked], place: str) -> Checked:
    try:
        return make()
    except ValidationError as error:
        raise ConfigError("\n".join(_fault_lines(error)), place=place) from error


def check_recorded(text: str, *, place: str) -> RunConfig:
    """The config that a run recorded, now or with an earlier version of GRPO; raises as `check_config` does."""
    return check_config(without_gone(parse_yaml(text, place=place)), place=place)


def form_faults(values: dict[str, Any]) -> list[str]:
    """What is wrong with the values of a form, a line for each field."""
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        return _fault_lines(error)
    return []


def tracking_at(uri: str | None) -> TrackingConfig:
    """The settings of the tracking store at this address (None: that in the environment), or a `ConfigError`."""
    return _valid(lambda: TrackingConfig(tracking_uri=uri), "--tracking-uri")


def find_config(source: str | Path, *, folder: Path | None = None) -> Path:
    """The file of a path or of a preset's name; `folder` is searched first. `ConfigError` lists the presets."""
    candidates = [*([folder / source] if folder else []), Path(source), PRESETS / f"{source}.yaml"]
    reasons = {candidate: why_not_a_file(candidate) for candidate in candidates}
    for candidate, reason in reasons.items():
        if not reason:
            return candidate
    for candidate, reason in reasons.items():
        if os.path.lexists(candidate):
            raise ConfigError(reason, place=str(candidate), fix="name a YAML file or a preset")
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    here = configs_in(Path(source).parent if len(str(source)) < _SHOWN else Path())
    near = difflib.get_close_matches(Path(source).name, here, n=1) or difflib.get_close_matches(Path(source).stem, names, n=1)
    fix = f"did you mean {near[0]}?" if near else f"presets: {', '.join(names)}"
    if here and not near:
        fix = f"configs there: {', '.join(here)}; {fix}"
    raise ConfigError(f"no such configuration: {shorten(str(source), _SHOWN)}", fix=fix)


def configs_in(folder: Path) -> list[str]:
    """Names of the files in a folder that look like a config, at most eight."""
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and not why_not_a_file(path))
    except (OSError, ValueError):
        return []
    names = []
    for path in found[:_MOST_FILES]:
        with path.open("rb") as file:
            start = b"\n" + file.read(MAX_CHARS)
        names += [path.name] if b"\nstages:" in start or b"\nextends:" in start else []
    return names[:8]


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"--set {shorten(override, _SHOWN)} has no value", fix="--set stages.0.learning_rate=1e-5")
    keys = dotted.split(".")
    if not all(keys):
        raise ConfigError(f"{dotted} has an empty key between its dots", place="--set", fix="--set stages.0.learning_rate=1e-5")
    node: Any = tree
    for depth, key in enumerate(keys):
        if not isinstance(node, dict | list):
            raise ConfigError(f"{'.'.join(keys[:depth])} is a value, not a section", place=f"--set {override}")
        if isinstance(node, list) and key not in map(str, range(len(node))):
            indices = f"0 to {len(node) - 1}" if node else "set the whole list: KEY=[...]"
            raise ConfigError(f"{key} is not an index of a list of {len(node)} items", place=f"--set {dotted}", fix=indices)
        at: Any = int(key) if isinstance(node, list) else key
        if depth == len(keys) - 1:
            node[at] = parse_yaml(text, place="--set")
        elif (node[at] if isinstance(node, list) else node.get(at)) is None:
            node[at] = {}
        node = node[at]


def _fault_lines(error: ValidationError) -> list[str]:
    # No more than an error shows: a hint compares a key with every field there is.
    faults = error.errors()
    if len(faults) <= MAX_LINES:
        return [_fault_line(dict(fault)) for fault in faults]
    shown = faults[: MAX_LINES - 1]
    return [*(_fault_line(dict(fault)) for fault in shown), f"... {len(faults) - len(shown):,} more faults"]


def _fault_line(fault: dict[str, Any]) -> str:
    location = [part for part in fault["loc"] if part != "literal['all-linear']"]
    place = ".".join(str(part) for part in location) or "configuration"
    if fault["type"] == "extra_forbidden":
        return f"{place}: unknown key; {why_gone(location) or hint_for(location)}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "finite_number":
        message = "must be a finite number, neither infinite nor nan"
    given = fault.get("input")
    shown = f" (given: {shorten(repr(given), _SHOWN)})" if isinstance(given, str | int | float | bool) or given is None else ""
    fix = hint_for_value(location, given)
    return f"{place}: {message}{shown}" + (f"; fix: {fix}" if fix else "")


def parse_yaml(text: str, *, place: str) -> Any:
    """The value of one YAML document; `ConfigError` with the line where it is none, or exceeds one of the bounds above."""
    if len(text) > MAX_CHARS:
        raise ConfigError(
            f"the text has {len(text):,} characters; a config has at most {MAX_CHARS:,}",
            place=place,
            fix="put rows into data files",
        )
    try:
        loader = _Loader(text, place)
        node = loader.get_single_node()
        if node is None:
            return None
        _Check(place).size(node, 1)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise _not_yaml(error, place) from error
    except Exception as error:  # its constructors raise many kinds: !!int "", 2024-99-99, a number of 5,000 digits
        raise ConfigError(f"YAML cannot read a value: {error}", place=place, fix="quote it: 'VALUE'") from error


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number. YAML 1.1 takes it for text, because it has no dot; in quotes it remains text.

    Stops at MAX_DEPTH: the scanner looks through all open brackets at each token, so a deeper text would take seconds.
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self._place, self._depth = place, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node with all below it."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep(f"{self._place}:{self.peek_event().start_mark.line + 1}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Check:
    """Checks the nodes before any value is constructed, because constructing the values is what expands a bomb."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._sizes: dict[yaml.Node, int | None] = {}
        """None while the children of a node are being counted."""

    def size(self, node: yaml.Node, depth: int) -> int:
        """Values and characters of a node, its aliases expanded."""
        if depth > MAX_DEPTH:
            raise _too_deep(self._at(node))
        if node in self._sizes:
            known = self._sizes[node]
            if known is None:
                raise ConfigError("a value contains itself", place=self._at(node), fix="remove the alias")
            return known
        self._sizes[node] = None
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicate_keys(node)
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        total = 1 + own + sum(self.size(child, depth + 1) for child in _children(node))
        if total > MAX_EXPANDED:
            raise ConfigError(
                f"more than {MAX_EXPANDED:,} characters after its aliases are expanded",
                place=self._at(node),
                fix="use fewer aliases",
            )
        self._sizes[node] = total
        return total

    def _refuse_duplicate_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            first = seen.setdefault((key.tag, key.value), key)
            if first is not key:
                raise ConfigError(
                    f"duplicate key {key.value}, first in line {first.start_mark.line + 1}",
                    place=self._at(key),
                    fix="remove one" if key.value != "<<" else "merge both in one line: <<: [*a, *b]",
                )

    def _at(self, node: yaml.Node) -> str:
        return f"{self._place}:{node.start_mark.line + 1}"


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def _too_deep(place: str) -> ConfigError:
    return ConfigError(f"values are nested more than {MAX_DEPTH} levels deep", place=place, fix="remove unneeded brackets")


def _not_yaml(error: yaml.YAMLError, place: str) -> ConfigError:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ConfigError(f"not readable as YAML: {error}", place=place, fix="save the file as plain UTF-8 text")
    what = ": ".join(part for part in (error.context, error.problem) if part)
    tab = "'\\t'" in (error.problem or "")
    fix = "indent with spaces; YAML does not allow tabs there" if tab else "correct that line"
    return ConfigError(f"not readable as YAML: {what}", place=f"{place}:{error.problem_mark.line + 1}", fix=fix)
