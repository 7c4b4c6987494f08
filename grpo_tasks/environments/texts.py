"""What a user's code returns, as text and messages: text verbatim, anything else as JSON, and never longer than the limit.

An answer may hold markers of the chat or of calls. It stays as it is: where text becomes tokens, such markers are escaped.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_MESSAGES = 64
"""Messages in one reply of an environment."""
MAX_PROMPT_CHARS = 1_000_000
"""Characters of one message of a prompt."""
MAX_INFO_CHARS = 16_384
"""Characters of `info`, and of the attributes of an environment, as JSON."""
ROLES = frozenset({"user", "tool"})
OPENING_ROLES = frozenset({"system", "user", "assistant", "tool"})

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}")
"""The address of an object, which differs from process to process."""


class ShapeError(ValueError):
    """A returned value that breaks the contract. Its text completes a sentence that begins with the name of the method."""


def as_text(result: Any, limit: int) -> str:
    """A result as text of at most `limit` characters, and a mark where it was cut."""
    if isinstance(result, str):
        return cut(result, limit)
    if isinstance(result, bytes):
        return cut(result.decode(errors="replace"), limit)
    try:
        text = json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = str(result)
    return cut(_ADDRESS.sub("", text), limit)


def failure(error: BaseException, limit: int) -> str:
    """An exception as the answer of a tool, as TRL has it."""
    return json.dumps({"error": cut(describe(error), limit)}, ensure_ascii=False)


def describe(error: BaseException) -> str:
    """Type and text of an exception."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return _ADDRESS.sub("", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, and a mark if there were more. Lone surrogates, which UTF-8 does not have, become escapes."""
    kept = text[:limit].encode(errors="backslashreplace").decode()
    return kept if len(text) <= limit else f"{kept}\n[... cut: {len(text):,} characters, the first {limit:,} are shown]"


def read_opening(result: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that a conversation begins with; empty for those of the row, which are `messages`.

    A reset returns messages, text that is appended to the last user message (as in TRL), or None.

    Raises:
        ShapeError: it returned something else.
    """
    if result is None:
        return []
    if isinstance(result, list) and result and all(isinstance(one, Mapping) and "role" not in one for one in result):
        result = "".join(_block(one) for one in result)
    if isinstance(result, str):
        text = cut(result, MAX_PROMPT_CHARS)
        if not messages or messages[-1].get("role") != "user":
            return [*messages, {"role": "user", "content": text}]
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{text}"}]
    if not result and isinstance(result, list | tuple):
        raise ShapeError("returned no messages: return None to keep those of the row")
    return _messages(result, OPENING_ROLES, MAX_PROMPT_CHARS)


def read_step(result: Any, limit: int) -> dict[str, Any]:
    """What a step returned, as {"messages", "done", "reward", "info"}, with at most `limit` characters in each message.

    A step may return an object or a mapping with these names, a tuple of two to four of them, or text.

    Raises:
        ShapeError: it returned something else.
    """
    keys = ("messages", "done", "reward", "info")
    if isinstance(result, str):
        result = {"messages": result}
    elif isinstance(result, tuple):
        if not 2 <= len(result) <= 4:
            raise ShapeError(f"returned a tuple of {len(result)}: return (messages, done, reward, info)")
        result = dict(zip(keys, result, strict=False))
    elif dataclasses.is_dataclass(result) or not isinstance(result, Mapping):
        found = {name: getattr(result, name) for name in keys if hasattr(result, name)}
        if found.keys().isdisjoint({"messages", "done"}):
            raise ShapeError(f"returned {type(result).__name__}: return a dict with messages, done, reward and info")
        result = found
    unknown = sorted(map(str, result.keys() - set(keys)))
    if unknown:
        raise ShapeError(f"returned the key {unknown[0][:80]}: the keys are messages, done, reward and info")
    said = result.get("messages")
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    done = result.get("done", False)
    if not isinstance(done, bool | int) and type(done).__name__ not in ("bool_", "bool"):
        raise ShapeError(f"returned done as {type(done).__name__}: return True or False")
    messages = _messages(said or [], ROLES, limit)
    if not messages and not done:
        raise ShapeError("returned no messages, and the conversation is not over: return done=True, or say something")
    reward, info = read_reward(result.get("reward")), as_info(result.get("info"))
    return {"messages": messages, "done": bool(done), "reward": reward, "info": info}


def read_reward(value: Any) -> float | None:
    """A reward as a finite number, or None; raises `ShapeError` for anything else."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        shown = value if isinstance(value, float) else type(value).__name__
        raise ShapeError(f"returned the reward {shown}: return a finite number, or None")
    return float(value)


def as_info(value: Any) -> dict[str, Any]:
    """A mapping as JSON values; empty with a note when it is too long or no mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = {"info": value}
    try:
        text = _ADDRESS.sub("", json.dumps({str(key): one for key, one in value.items()}, default=_plain))
    except (TypeError, ValueError, RecursionError):
        return {"cut": "info is no JSON"}
    if len(text) > MAX_INFO_CHARS:
        return {"cut": f"info has {len(text):,} characters as JSON, and {MAX_INFO_CHARS:,} are the limit"}
    read: dict[str, Any] = json.loads(text, parse_constant=str)
    return read


def _messages(found: Any, roles: frozenset[str], limit: int) -> list[dict[str, Any]]:
    if not isinstance(found, list | tuple):
        raise ShapeError(f"returned {type(found).__name__} instead of messages: return a list of {{role, content}}")
    if len(found) > MAX_MESSAGES:
        raise ShapeError(f"returned {len(found)} messages, and {MAX_MESSAGES} are the limit")
    messages = []
    for one in found:
        if not isinstance(one, Mapping):
            raise ShapeError(f"returned a message of type {type(one).__name__}: a message is {{role, content}}")
        role, content, name = one.get("role"), one.get("content"), one.get("name")
        if role not in roles:
            raise ShapeError(f"returned a message of the role {str(role)[:40]}: the roles are {', '.join(sorted(roles))}")
        if isinstance(content, list) and content and all(isinstance(part, Mapping) and "type" in part for part in content):
            content = "".join(_block(part) for part in content)
        text = "" if content is None else as_text(content, limit)
        messages.append({"role": role, "content": text} | ({"name": cut(name, 200)} if isinstance(name, str) else {}))
    return messages


def _block(one: Mapping[str, Any]) -> str:
    if one.get("type") != "text" or not isinstance(one.get("text"), str):
        raise ShapeError(f"returned content of the type {str(one.get('type'))[:40]}: only text can be shown to the policy")
    return str(one["text"])


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, tuple) else str(value)
