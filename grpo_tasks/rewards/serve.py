"""`python -P -m grpo_tasks.rewards.serve FD`: the process that reward functions run in. worker.py starts it.

It loads the functions, then answers one call after another. Requests and replies are JSON in frames on a socket of their own, so
nothing that a function prints can be taken for a reply. Functions run in the main thread, because the time limit of mathematical
equality needs signals. A hang is ended from outside. A function can reach everything in this process, so the parent checks every
reply (replies.py).
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from grpo_tasks.processes.framing import MAX_TEXT_CHARS, read_frame, write_frame
from grpo_tasks.processes.lifetime import die_with_parent
from grpo_tasks.rewards.arguments import Notes, NotPlayedError, call_arguments
from grpo_tasks.rewards.contract import ContractError, FunctionScores, RewardFault, check_result
from grpo_tasks.rewards.explain import raised
from grpo_tasks.rewards.registry import RewardFunction, gold_completions, load_function
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import JudgeUnavailableError, RewardError, UserError
from schemas.secret import hide_output

# Kept here because a function may replace them in the module json.
_dumps, _loads = json.dumps, json.loads


def main() -> None:
    """Answer requests until the parent closes the socket."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Line by line, so that output from before a hang or a crash is not lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    hide_output()
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
            reply = _gold(call, request) if "gold" in call else _score(functions[call["name"]], call)
            _reply(descriptor, call, reply)


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


def _gold(call: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The completions that the user's function makes for rows (`lab.gold`)."""
    rewards = RewardsConfig.model_validate(request["rewards"])
    try:
        return {"completions": gold_completions(call["gold"], call["rows"], rewards.module_dirs())}
    except UserError as error:
        return {"error": error.to_json()}


def _score(function: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    # Counted before the call, because the function may change the lists that it receives.
    lengths = [len(ids) for ids in request["completion_ids"]]
    spans = [one.pop("spans") for one in request["played"]]
    columns = sorted(request["columns"])
    notes = Notes()
    arguments = call_arguments(request, notes, as_text=function.as_text)
    try:
        scores, tokens = check_result(function.call(**arguments), lengths, spans)
        found = FunctionScores(scores, time.perf_counter() - began, tokens, notes.means(), notes.extras(len(lengths)))
    except ContractError as error:
        return {"fault": _fault_as_json(error.fault)}
    except NotPlayedError:
        # Of a completion that the lab has made up. Samples of the base model have environments.
        found = FunctionScores([None] * len(lengths), time.perf_counter() - began)
    except JudgeUnavailableError as error:
        return {"fault": _fault_as_json(RewardFault("unavailable", error.message, source=error.place, fix=error.fix))}
    except RewardError as error:
        return {"fault": _fault_as_json(RewardFault("raised", error.message, source=error.place, fix=error.fix))}
    # SystemExit too: a library that calls sys.exit must not look like a crash of the worker.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"fault": _fault_as_json(raised(error, arguments, columns, function.module))}
    return {"scores": asdict(found)}


def _fault_as_json(fault: RewardFault) -> dict[str, Any]:
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
