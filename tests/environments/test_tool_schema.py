"""Functions with types and docstrings become schemas; others are refused with the line and what to write."""

import subprocess
import sys
from typing import Any, Literal

import pytest

from grpo_tasks.environments.forms import is_ours, public_methods, tool_schema, tool_schemas
from schemas.errors import ConfigError


def add(a: int, b: int | None = None, how: Literal["fast", "slow"] = "fast") -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
        how: How to add.

    Returns:
        Their sum.
    """
    return a + (b or 0)


class Counter:
    """An environment as TRL has it."""

    def reset(self, **kwargs: Any) -> str | None:  # noqa: ARG002 - as TRL has it
        self.count = 0
        return None

    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None: ...

    @property
    def broken(self) -> int:
        raise AssertionError


def test_a_function_becomes_the_schema_that_a_chat_template_takes():
    assert tool_schema(add, place="interaction.tools")["function"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "nullable": True, "description": "The second number."},
                "how": {"type": "string", "enum": ["fast", "slow"], "description": "How to add."},
            },
            "required": ["a"],
        },
        "return": {"type": "integer", "description": "Their sum."},
    }


def test_the_public_methods_of_an_environment_are_its_tools():
    (schema,) = tool_schemas(public_methods(Counter()), place="interaction.environment")
    assert schema["function"]["name"] == "increment"
    assert list(schema["function"]["parameters"]["properties"]) == ["step"]


class House:
    """Tools that have the names of our methods."""

    def reset(self, **kwargs: Any) -> None: ...

    def step(self, left: int, right: int) -> str:
        """Steps.

        Args:
            left: To the left.
            right: To the right.
        """

    def perfect(self, what: str) -> str:
        """Makes something perfect.

        Args:
            what: A thing.
        """

    def close(self, door: str) -> str:
        """Closes a door.

        Args:
            door: Which one.
        """


class Ours:
    """Our methods."""

    def reset(self, row, seed): ...
    def step(self, completion, more=None): ...
    def perfect(self, row: dict): ...
    def close(self): ...


def test_the_parameters_of_a_method_say_whether_it_is_a_tool():
    names = ("step", "perfect", "close")
    assert [is_ours(House(), name) for name in names] == [False] * 3
    assert [is_ours(Ours(), name) for name in names] == [True] * 3
    assert [tool.__name__ for tool in public_methods(House())] == ["close", "perfect", "step"]
    assert public_methods(Ours()) == []
    assert len(tool_schemas(public_methods(House()), place="interaction.environment")) == 3


def bare(a: int) -> int:
    return a


def untyped(a, b: int = 1) -> int:
    """Does.

    Args:
        a: One.
        b: Two.
    """
    return a


def undescribed(a: int) -> int:
    """Does."""
    return a


def open_ended(a: int, **more: int) -> int:
    """Does.

    Args:
        a: One.
        more: Others.
    """
    return a


def strange(a: tuple[int]) -> int:
    """Does.

    Args:
        a: One.
    """
    return a[0]


def unknown(a: "Nothing") -> int:  # noqa: F821
    """Does.

    Args:
        a: One.
    """
    return a


@pytest.mark.parametrize(
    ("tool", "said", "fix"),
    [
        (bare, "the tool bare has no docstring", "Args:"),
        (untyped, "the argument a of untyped has no type", "annotate it: a: str"),
        (undescribed, "the docstring of undescribed does not describe every argument", "Args:"),
        (open_ended, "open_ended takes **more: int", "a name of its own"),
        (strange, "strange: The type hint tuple", "use str, int"),
        (unknown, "the types of unknown cannot be read", "annotations"),
        (lambda: 1, "has no name", "def NAME"),
    ],
)
def test_a_tool_without_types_or_docstring_is_refused_with_its_line(tool, said, fix):
    with pytest.raises(ConfigError) as refused:
        tool_schema(tool, place="interaction.tools.0")
    assert said in refused.value.message
    assert fix in refused.value.fix
    assert f"{__file__}:{tool.__code__.co_firstlineno}" in refused.value.place


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are named add"):
        tool_schemas([add, add], place="interaction.tools")


def test_making_schemas_imports_no_torch():
    """Each replaced worker would wait for it."""
    source = (
        "import sys; from grpo_tasks.environments.forms import tool_schema\n"
        'def f(a: int | None):\n    """Does.\n\n    Args:\n        a: One.\n    """\n'
        "tool_schema(f, place=''); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
