"""Checks calls against the schemas of the tools: only a call whose arguments fit is executed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_tasks.environments.calls import MAX_ERROR_CHARS, Call, printable


class Checker:
    """Checks calls against the schemas of the tools, which are those of `apply_chat_template(tools=...)`."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        from jsonschema import Draft202012Validator
        from referencing import Registry

        self._parameters = {one["function"]["name"]: one["function"].get("parameters", {}) for one in schemas}
        # An empty registry fetches nothing.
        registry: Any = Registry()
        self._validators = {
            name: Draft202012Validator(_with_null(one), registry=registry) for name, one in self._parameters.items()
        }

    def check(self, call: Call) -> Call:
        """The call, with an error if there is no such tool or its arguments do not fit."""
        if call.error is not None:
            return call
        if call.name not in self._validators:
            return replace(call, error=f"there is no tool {call.name}; tools: {', '.join(self._validators)}"[:MAX_ERROR_CHARS])
        known = self._parameters[call.name].get("properties", {})
        unknown = next((name for name in call.arguments if name not in known), None)
        if unknown is not None:
            error = f"{call.name} has no argument {printable(unknown)[:100]}; arguments: {', '.join(known) or 'none'}"
            return replace(call, error=error[:MAX_ERROR_CHARS])
        try:
            wrong = next(self._validators[call.name].iter_errors(call.arguments), None)
        except (RecursionError, ArithmeticError):
            return replace(call, error="the arguments are nested too deeply")
        if wrong is None:
            return call
        # The message repeats the value, which may be long.
        where = ".".join(map(str, wrong.absolute_path))[:100]
        message = printable(wrong.message)
        message = message if len(message) <= MAX_ERROR_CHARS else f"{message[:100]} ... {message[-150:]}"
        return replace(call, error=f"{call.name}: {where + ': ' if where else ''}{message}")


def _with_null(schema: Any) -> Any:
    """The schema as JSON Schema has it: transformers writes `nullable` for `| None`."""
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _with_null(value) for key, value in schema.items() if key not in ("nullable", "enum", "properties")}
    if "enum" in schema:
        made["enum"] = schema["enum"]
    if "properties" in schema:
        # The keys below are names of arguments, whatever they are.
        made["properties"] = {name: _with_null(one) for name, one in schema["properties"].items()}
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made
