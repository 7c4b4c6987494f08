"""`python -P -m grpo_tasks.rewards.serve FD`: the process that reward functions run in, started by supervisor.py.

It loads the functions, then answers calls.
Messages are JSON in frames on a socket of their own, so that nothing a function prints can be taken for an answer. Functions run
in the main thread, where the time limit of math equality works; a hang is ended from outside. A function can reach everything in
this process, so the parent checks whatever comes out of it (replies.py).
"""

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from grpo_tasks.processes.entry import die_with_parent
from grpo_tasks.processes.framing import MAX_TEXT, read_frame, write_frame
from grpo_tasks.rewards.contract import ContractError, Fault, FunctionScores, check_result, shorten
from grpo_tasks.rewards.registry import RewardFunction, load_function
from schemas.config.rewards import RewardsConfig
from schemas.errors import UserError
from schemas.secret import hide

# Held here because a reward may replace them in their modules.
_dumps, _loads = json.dumps, json.loads


def main() -> None:
    """Serve until the parent closes the socket."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # What was printed before a hang or a crash must not be lost with it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with suppress(EOFError):
        request = _loads(read_frame(descriptor))
        try:
            functions = _load(request)
        except UserError as error:
            _answer(descriptor, request, {"error": error.to_json()})
            return
        _answer(descriptor, request, {"loaded": list(functions)})
        while True:
            call = _loads(read_frame(descriptor))
            _answer(descriptor, call, _score(functions[call["name"]], call))


def _load(request: Mapping[str, Any]) -> dict[str, RewardFunction]:
    rewards = RewardsConfig.model_validate(request["rewards"])
    # At the end of the path: a file beside the data must not stand in for an installed library.
    sys.path.extend(str(folder.resolve()) for folder in rewards.module_dirs())
    functions = {}
    for name in request["names"]:
        reward = rewards.resolve(name)
        assert reward is not None, f"the configuration let an unknown reward pass: {name}"
        functions[name] = load_function(name, reward, rewards)
    return functions


def _score(function: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    # Counted before the call: the function may change the lists it is given.
    lengths = [len(ids) for ids in request["completion_ids"]]
    try:
        scores, tokens = check_result(_call(function, request), lengths)
    except ContractError as error:
        return {"fault": _plain(error.fault)}
    # SystemExit too: a library that gives up must not look like a crash of the worker.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"fault": _plain(_raised(error))}
    return {"values": asdict(FunctionScores(scores, time.perf_counter() - began, tokens))}


def _call(function: RewardFunction, request: Mapping[str, Any]) -> Any:
    """Call as TRL does. `log_extra` and `log_metric` are accepted and go nowhere."""
    return function(
        **request["columns"],
        prompts=request["prompts"],
        completions=[[{"role": "assistant", "content": text}] for text in request["completions"]],
        completion_ids=request["completion_ids"],
        trainer_state=SimpleNamespace(**request["trainer_state"]),
        log_extra=_drop,
        log_metric=_drop,
    )


def _drop(*_: object, **__: object) -> None:
    """Stand-in for TRL's logging callbacks."""


def _raised(error: BaseException) -> Fault:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "grpo_tasks/rewards/" not in frame.filename]
    source = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    fix = ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        fix = "let the function take **kwargs: it is given every column of the data, as in TRL"
    if isinstance(error, TypeError) and "required" in str(error) and "argument" in str(error):
        fix = (
            "give the data a column of that name (the one that data.answer_column names is passed as answer), or set it in params"
        )
    return Fault("raised", f"raised {type(error).__name__}: {shorten(hide(_words(error)))}", source=source, fix=fix)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be read: {type(second).__name__})"


def _plain(fault: Fault) -> dict[str, Any]:
    """The fault as JSON has it; lone surrogates (of a completion, say) as escapes."""
    fields = asdict(fault)
    texts = {name: text for name, text in fields.items() if isinstance(text, str)}
    return fields | {name: text.encode(errors="backslashreplace").decode()[:MAX_TEXT] for name, text in texts.items()}


def _answer(descriptor: int, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    # What C code has printed still waits in its own buffer.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    write_frame(descriptor, _dumps({"request": request["request"], **answer}).encode())


if __name__ == "__main__":
    main()
