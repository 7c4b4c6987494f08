"""The arguments of one call of a reward function, as TRL passes them, and what the function reports through two of them.

    request --call_arguments--> prompts, completions, ..., log_metric, log_extra --call--> Notes (means, columns)

Runs in the worker process.
"""

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from grpo_tasks.rewards.contract import MAX_EXTRA_CHARS, MAX_EXTRAS, MAX_METRIC_CHARS, MAX_METRICS, Extra, breach, shorten
from schemas.prompts import PLAIN


class Notes:
    """What a function passes to log_metric and log_extra during a call."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Extra]] = {}

    def record_metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`: remember a finite number. Any other is left out, because no mean would survive it."""
        name = _clean(name)
        if name not in self._metrics and len(self._metrics) == MAX_METRICS:
            raise ValueError(f"log_metric received more than {MAX_METRICS} different names in one call")
        # Scalar arrays and tensors become numbers here.
        if math.isfinite(number := float(value)):
            self._metrics.setdefault(name, []).append(number)

    def record_column(self, column: str, values: Iterable[Any]) -> None:
        """TRL's `log_extra`: remember values, one per completion. Further calls with the same name add to them."""
        column = _clean(column)
        if column not in self._extras and len(self._extras) == MAX_EXTRAS:
            raise ValueError(f"log_extra received more than {MAX_EXTRAS} different columns in one call")
        self._extras.setdefault(column, []).extend(map(_cell, values))

    def means(self) -> dict[str, float]:
        """The metrics, averaged over the call."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def extras(self, num: int) -> dict[str, list[Extra]]:
        """The columns.

        Raises:
            ContractError: a column has not one value for each of the `num` completions.
        """
        for column, values in self._extras.items():
            if len(values) != num:
                fix = "pass one value per completion, None where there is none"
                raise breach(f"passed {len(values)} values of {column} to log_extra for {num} completions", fix)
        return self._extras


def call_arguments(request: Mapping[str, Any], notes: Notes, *, as_text: bool) -> dict[str, Any]:
    """The arguments by name.

    Args:
        request: the request of the parent (worker.py).
        notes: receives what the function reports.
        as_text: pass strings for chats too: the content of the last message, and the text of the completion.
    """
    prompts: list[Any] = []
    completions: list[Any] = []
    for messages, text in zip(request["prompts"], request["completions"], strict=True):
        plain = as_text or (bool(messages) and messages[0].get("role") == PLAIN)
        prompts.append((messages[-1].get("content", "") if messages else "") if plain else messages)
        completions.append(text if plain else [{"role": "assistant", "content": text}])
    given = {"prompt_ids": request["prompt_ids"]} if request["prompt_ids"] else {}
    if played := request["played"]:
        completions = completions if as_text else [one["said"] for one in played]
        # Lists of their own: a function may change what it receives.
        given["messages"] = [[*before, *one["said"]] for before, one in zip(request["prompts"], played, strict=True)]
        given |= {"turns": [one["turns"] for one in played], "environment_reward": [one["reward"] for one in played]}
        given["environments"] = [_environment(one) for one in played]
    return {
        **request["columns"],
        **given,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": request["completion_ids"],
        "trainer_state": SimpleNamespace(**request["trainer_state"]),
        "log_extra": notes.record_column,
        "log_metric": notes.record_metric,
    }


class NotPlayedError(AttributeError):
    """A function reads an attribute of an environment that nobody has played with."""


class _NotPlayed:
    def __getattr__(self, name: str) -> Any:
        raise NotPlayedError(f"no environment has played, so it has no {name}")


def _environment(played: Mapping[str, Any]) -> Any:
    """What TRL passes as environment, as far as rewards read it: its public attributes after the last turn."""
    if not played["answered"]:
        return _NotPlayed()
    known = played["turns"][-1]["info"].get("environment") if played["turns"] else None
    return SimpleNamespace(**known) if isinstance(known, dict) else SimpleNamespace()


def _clean(name: object) -> str:
    # MLflow accepts few other characters, and a slash would open a further level in its user interface.
    return re.sub(r"[^\w :-]", "_", str(name))[:MAX_METRIC_CHARS].strip() or "_"


def _cell(value: Any) -> Extra:
    value = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return float(value) if value is not None and math.isfinite(value) else None
    # Lone surrogates, which a completion may contain, become escapes: UTF-8 has no form for them.
    text = shorten(str(value), MAX_EXTRA_CHARS - 10).encode(errors="backslashreplace").decode()
    return text[:MAX_EXTRA_CHARS]
