"""`python -P -m grpo_tasks.rewards.serve FD`: the process that reward functions run in. worker.py starts it.

It loads the functions, then answers one call after another (processes/worker_main.py). Functions run in the main thread, because
the time limit of mathematical equality needs signals.
"""

import math
import numbers
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Literal

from grpo_tasks.content.modules import cause_of, users_line
from grpo_tasks.processes.worker_main import answer_requests
from grpo_tasks.rewards.contract import (
    MAX_EXTRA_CHARS,
    MAX_EXTRAS,
    MAX_METRIC_CHARS,
    MAX_METRICS,
    MAX_TEXT_CHARS,
    ContractError,
    Extra,
    FunctionScores,
    RewardFault,
    check_result,
    shorten,
)
from grpo_tasks.rewards.registry import RewardFunction, gold_completions, load_function
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import JudgeUnavailableError, RewardError
from schemas.prompts import PLAIN
from schemas.secret import hide

MAX_SHOWN, MAX_CHARS = 10, 700
_IN_STRING = re.compile(r"'(?:list|dict)' object has no attribute '(\w+)'")
_OF_MATCH = re.compile(r"'NoneType' object has no attribute '(group|groups|groupdict|start|end|span)'")
_NOT_STRINGS = ("expected string or bytes-like object", "expected str instance", "must be str, not", "can only concatenate str")


class Functions:
    """The functions of this process, and a method for each kind of request."""

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load the functions of a stage."""
        self._rewards = RewardsConfig.model_validate(request["rewards"])
        completion = CompletionConfig.model_validate(request["completion"])
        # At the end of the path, so that a file in one of these folders cannot replace an installed library.
        sys.path.extend(str(folder.resolve()) for folder in self._rewards.module_dirs())
        self._loaded: dict[str, RewardFunction] = {}
        for name in request["names"]:
            reward = self._rewards.resolve(name)
            assert reward is not None, f"the configuration accepted an unknown reward: {name}"
            self._loaded[name] = load_function(name, reward, self._rewards, completion)
        return {"loaded": list(self._loaded)}

    def gold(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The completions that the user's function makes for rows (`lab.gold`)."""
        return {"completions": gold_completions(request["path"], request["rows"], self._rewards.module_dirs())}

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function: {"scores"} or {"fault"}."""
        function, notes, began, computed = self._loaded[request["name"]], Notes(), time.perf_counter(), _computed_s()
        # Counted before the call, because the function may change the lists that it receives.
        lengths = [len(ids) for ids in request["completion_ids"]]
        spans = [one.pop("spans") for one in request["played"]]
        columns = sorted(request["columns"])
        arguments = call_arguments(request, notes, as_text=function.as_text)
        if function.module and request["given_answers"]:
            arguments["answer"] = request["given_answers"]
        try:
            scores, tokens = check_result(function.call(**arguments), lengths, spans)
            extras = notes.extras(len(lengths))
            seconds = time.perf_counter() - began
            # Several threads compute for more than a second in each.
            computing_s = min(seconds, _computed_s() - computed)
            return {"scores": asdict(FunctionScores(scores, seconds, tokens, notes.means(), extras, computing_s))}
        except ContractError as error:
            fault = error.fault
        except NotPlayedError:
            # Of a completion that the lab has made up. Samples of the base model have environments.
            return {"scores": asdict(FunctionScores([None] * len(lengths), time.perf_counter() - began))}
        except RewardError as error:
            kind: Literal["raised", "unavailable"] = "unavailable" if isinstance(error, JudgeUnavailableError) else "raised"
            fault = RewardFault(kind, error.message, source=error.place, fix=error.fix)
        # SystemExit too: a library that calls sys.exit must not look like a crash of the worker.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            fault = raised(error, arguments, columns, function.module)
        cut = {name: text[:MAX_TEXT_CHARS] if isinstance(text, str) else text for name, text in asdict(fault).items()}
        return {"fault": cut}


def _computed_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Notes:
    """What a function passes to log_metric and log_extra during a call."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Extra]] = {}

    def record_metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`. A number that is not finite is left out, because no mean would survive it."""
        name = _clean(name)
        if name not in self._metrics and len(self._metrics) == MAX_METRICS:
            raise ValueError(f"log_metric received more than {MAX_METRICS} different names in one call")
        # Scalar arrays and tensors become numbers here.
        if math.isfinite(number := float(value)):
            self._metrics.setdefault(name, []).append(number)

    def record_column(self, column: str, values: Iterable[Any]) -> None:
        """TRL's `log_extra`: values, one per completion. Further calls with the same name add to them."""
        column = _clean(column)
        if column not in self._extras and len(self._extras) == MAX_EXTRAS:
            raise ValueError(f"log_extra received more than {MAX_EXTRAS} different columns in one call")
        self._extras.setdefault(column, []).extend(map(_cell, values))

    def means(self) -> dict[str, float]:
        """The metrics, averaged over the call."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def extras(self, num: int) -> dict[str, list[Extra]]:
        """The columns, each with a value for each of the `num` completions; otherwise ContractError."""
        for column, values in self._extras.items():
            if len(values) != num:
                detail = f"passed {len(values)} values of {column} to log_extra for {num} completions"
                raise ContractError(detail, "pass one value per completion, None where there is none")
        return self._extras


def _clean(name: object) -> str:
    # MLflow accepts few other characters, and a slash would open a further level in its user interface.
    return re.sub(r"[^\w :-]", "_", str(name))[:MAX_METRIC_CHARS].strip() or "_"


def _cell(value: Any) -> Extra:
    value = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return float(value) if value is not None and math.isfinite(value) else None
    return shorten(str(value), MAX_EXTRA_CHARS - 10)[:MAX_EXTRA_CHARS]


def call_arguments(request: Mapping[str, Any], notes: Notes, *, as_text: bool) -> dict[str, Any]:
    """The arguments of a call by name; `as_text`: strings for chats too, the last message and the text of the completion."""
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


def raised(error: BaseException, arguments: Mapping[str, Any], columns: Sequence[str], module: str) -> RewardFault:
    """The fault of a call of a function of the user's `module` that raised."""
    try:
        message = str(error)
    except Exception as second:
        message = f"(its message cannot be read: {type(second).__name__})"
    return RewardFault(
        "raised",
        f"raised {type(error).__name__}: {shorten(hide(message))}",
        source=users_line(error, module),
        fix=next((fix for holds, fix in _causes(error, message, arguments, columns) if holds), ""),
        arguments=_described(arguments),
    )


def _causes(
    error: BaseException, message: str, arguments: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[tuple[object, str]]:
    """The usual causes of an exception: whether it is this one, and what to change then. The first that holds counts."""
    yield cause_of(error), cause_of(error)
    known = f"the data have the columns {', '.join(columns)}"
    yield (
        isinstance(error, TypeError) and "unexpected keyword argument" in message,
        "add **kwargs to the function: as in TRL, it receives every column of the data",
    )
    there = "the one named by data.answer_column arrives as answer"
    yield (
        isinstance(error, TypeError) and "required" in message and "argument" in message,
        f"add a column of that name to the data ({there}), or set it in params; {known}",
    )
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    yield (
        isinstance(key, str) and key not in arguments,
        f"if {key} is meant to be a column: {known}; rename one, add it, or set {key} in params",
    )
    yield (
        isinstance(error, NameError),
        "define or import that name in the module: the worker process knows nothing of a notebook or a script",
    )
    yield (
        isinstance(error, ValueError) and "could not convert string to float" in message,
        "a model can write anything: catch the ValueError, and return 0 for text that is no number",
    )
    if found := _OF_MATCH.search(message):
        yield True, f"a regular expression that finds nothing gives None: test the match before .{found[1]}()"
    lists = {name: values for name, values in arguments.items() if isinstance(values, list)}
    lacking = [name for name, values in lists.items() if any(value is None for value in values)]
    yield (
        "NoneType" in message and lacking,
        f"some rows have no {' and no '.join(lacking)}: return None for a completion whose value is None",
    )
    yield "NoneType" in message, "a value is None: test it before it is used"
    as_strings = isinstance((arguments.get("completions") or [""])[0], str)
    yield (
        as_strings and isinstance(error, TypeError | IndexError) and message.startswith("string ind"),
        "completions arrive as strings here (TRL's standard format): use completion instead of completion[0]['content'], "
        "or set data.format: conversational",
    )
    method = _IN_STRING.search(message)
    yield (
        not as_strings and ((method and hasattr(str, method[1])) or any(words in message for words in _NOT_STRINGS)),
        "completions arrive as lists of messages here (TRL's conversational format): a function for strings needs "
        "as_text: true in its entry, or completion[0]['content'] in its code",
    )


def _described(arguments: Mapping[str, Any]) -> str:
    lists = {name: value for name, value in arguments.items() if isinstance(value, list)}
    # What a function is about comes first, and columns after it.
    first = ["completions", "prompts", "completion_ids", "answer"]
    names = [name for name in first if name in lists] + [name for name in lists if name not in first]
    shown = []
    for name in names[:MAX_SHOWN]:
        kinds = sorted({_kind(value) for value in lists[name]})
        shown.append(f"{name}: list of {len(lists[name])}" + (f", each {' or '.join(kinds[:3])}" if kinds else ""))
    more = [f"{len(names) - MAX_SHOWN} more"] if len(names) > MAX_SHOWN else []
    return shorten("; ".join(shown + more), MAX_CHARS)


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return f"[{{{', '.join(map(repr, value[0]))}}}{', ...' if len(value) > 1 else ''}]"
    if isinstance(value, list | tuple):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return "None" if value is None else type(value).__name__


if __name__ == "__main__":
    functions = Functions()
    answer_requests({"load": functions.load, "gold": functions.gold, "score": functions.score})
