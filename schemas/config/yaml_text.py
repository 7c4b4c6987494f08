"""Parses YAML text into plain values, within bounds. `load.py` uses it for files and for `--set` values.

Beyond what YAML itself refuses, it refuses a duplicate key, deep nesting, aliases that grow without bound ("billion laughs") and
a value that contains itself. Merge keys (`<<: *anchor`) work; an explicit key overrides a merged one.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from schemas.errors import ConfigError

MAX_CHARS = 2**20
"""Longest text in characters. The largest preset has 4,000 characters; PyYAML parses a million in a few seconds."""
MAX_DEPTH = 50
"""Deepest nesting. The deepest field of a config is at depth 6; parameters of a reward function may be deeper."""
MAX_EXPANDED = 2 * MAX_CHARS
"""Most values and characters after all aliases and merge keys are expanded. A text without aliases is always below it."""


def parse_yaml(text: str, *, place: str) -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: the text is not YAML or exceeds one of the bounds above. Its place includes the line.
    """
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
        """One node and all below it."""
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
        """Values and characters of a node after its aliases are expanded."""
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
