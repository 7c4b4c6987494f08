"""`python -P -m grpo_tasks.rewards.serve FD`: the process that reward functions run in. supervisor.py starts it.

It loads the functions, then answers one call after another. Requests and replies are JSON in frames on a socket of their own, so
nothing that a function prints can be taken for a reply. Functions run in the main thread, because the time limit of mathematical
equality needs signals. A hang is ended from outside. A function can reach everything in this process, so the parent checks every
reply (replies.py).
"""

import ctypes
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from grpo_tasks.processes.framing import MAX_TEXT_CHARS, read_frame, write_frame
from grpo_tasks.processes.lifetime import die_with_parent
from grpo_tasks.rewards.contract import MAX_METRIC_CHARS, MAX_METRICS, ContractError, Fault, FunctionScores, check_result, shorten
from grpo_tasks.rewards.registry import RewardFunction, load_function
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import UserError
from schemas.secret import hide

# Kept here because a function may replace them in the module json.
_dumps, _loads = json.dumps, json.loads


def main() -> None:
    """Answer requests until the parent closes the socket."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Line by line, so that output from before a hang or a crash is not lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with suppress(EOFError):
        request = _loads(read_frame(descriptor))
        try:
            functions = _load(request)
        except UserError as error:
            _reply(descriptor, request, {"error": error.to_json()})
            return
        _reply(descriptor, request, {"loaded": list(functions)})
        while True:
            call = _loads(read_frame(descriptor))
            _reply(descriptor, call, _score(functions[call["name"]], call))


def _load(request: Mapping[str, Any]) -> dict[str, RewardFunction]:
    rewards = RewardsConfig.model_validate(request["rewards"])
    completion = CompletionConfig.model_validate(request["completion"])
    # At the end of the path, so that a file in one of these folders cannot replace an installed library.
    sys.path.extend(str(folder.resolve()) for folder in rewards.module_dirs())
    functions = {}
    for name in request["names"]:
        reward = rewards.resolve(name)
        assert reward is not None, f"the configuration accepted an unknown reward: {name}"
        functions[name] = load_function(name, reward, rewards, completion)
    return functions


def _score(function: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    # Counted before the call, because the function may change the lists that it receives.
    lengths = [len(ids) for ids in request["completion_ids"]]
    metrics: dict[str, list[float]] = {}
    try:
        scores, tokens = check_result(_call(function, request, metrics), lengths)
        means = {name: fmean(values) for name, values in metrics.items()}
    except ContractError as error:
        return {"fault": _fault_as_json(error.fault)}
    # SystemExit too: a library that calls sys.exit must not look like a crash of the worker.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"fault": _fault_as_json(_raised(error))}
    return {"scores": asdict(FunctionScores(scores, time.perf_counter() - began, tokens, means))}


def _call(function: RewardFunction, request: Mapping[str, Any], metrics: dict[str, list[float]]) -> Any:
    """Call the function as TRL does. What it passes to log_metric is added to `metrics`."""
    return function(
        **request["columns"],
        prompts=request["prompts"],
        completions=[[{"role": "assistant", "content": text}] for text in request["completions"]],
        completion_ids=request["completion_ids"],
        trainer_state=SimpleNamespace(**request["trainer_state"]),
        log_extra=_ignore_column,
        log_metric=partial(_record_metric, metrics),
    )


def _ignore_column(column: str, values: object) -> None:
    """TRL's `log_extra`. Functions may call it; the column is not stored."""


def _record_metric(metrics: dict[str, list[float]], name: str, value: float) -> None:
    """TRL's `log_metric`: remember a finite number. A value that is not finite is left out, because no mean would survive it."""
    # MLflow accepts few other characters, and a slash would open a further level in its user interface.
    name = re.sub(r"[^\w :-]", "_", str(name))[:MAX_METRIC_CHARS].strip() or "_"
    if name not in metrics and len(metrics) == MAX_METRICS:
        raise ValueError(f"log_metric received more than {MAX_METRICS} different names in one call")
    # Scalar arrays and tensors become numbers here.
    if math.isfinite(number := float(value)):
        metrics.setdefault(name, []).append(number)


def _raised(error: BaseException) -> Fault:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "grpo_tasks/rewards/" not in frame.filename]
    source = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    message, fix = _message_of(error), ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in message:
        fix = "add **kwargs to the function: as in TRL, it receives every column of the data"
    if isinstance(error, TypeError) and "required" in message and "argument" in message:
        fix = "add a column of that name to the data (the one named by data.answer_column arrives as answer), or set it in params"
    return Fault("raised", f"raised {type(error).__name__}: {shorten(hide(message))}", source=source, fix=fix)


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be read: {type(second).__name__})"


def _fault_as_json(fault: Fault) -> dict[str, Any]:
    """The fault for JSON. Lone surrogates, which a completion may contain, become escapes: UTF-8 has no form for them."""
    fields = asdict(fault)
    texts = {name: text for name, text in fields.items() if isinstance(text, str)}
    return fields | {name: text.encode(errors="backslashreplace").decode()[:MAX_TEXT_CHARS] for name, text in texts.items()}


def _reply(descriptor: int, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
    # Output of C code is still in the buffer of the C library.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    write_frame(descriptor, _dumps({"request": request["request"], **reply}).encode())


if __name__ == "__main__":
    main()
