"""`python -P -m grpo_tasks.rewards.serve FD`: the child process of worker.py. Loads the reward functions, then answers calls.

Messages are JSON on a socket of their own, so what a function prints (it goes to stderr) can never be taken for an answer.
Functions run in the main thread, where the time limit of math equality works; a hang is ended from outside.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from grpo_tasks.rewards.contract import ContractError, Fault, Values, check_result, shorten
from grpo_tasks.rewards.registry import RewardFunction, load_function
from schemas.child import die_with_parent
from schemas.config import RewardsConfig
from schemas.errors import UserError
from schemas.secret import hide


def main() -> None:
    """Serve until the parent closes the socket."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # At the end of the path: a file beside the data must not stand in for an installed library.
    sys.path.append(os.getcwd())  # noqa: PTH109 - sys.path holds strings
    with Connection(descriptor) as connection:
        try:
            functions = _load(json.loads(connection.recv_bytes()))
        except UserError as error:
            _send(connection, {"error": error.to_json()})
            return
        _send(connection, {"loaded": sorted(functions)})
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except EOFError:
                return
            _send(connection, _answer(functions[request.pop("name")], request))


def _load(request: Mapping[str, Any]) -> dict[str, RewardFunction]:
    rewards = RewardsConfig.model_validate(request["rewards"])
    functions = {}
    for name in request["names"]:
        reward = rewards.resolve(name)
        assert reward is not None, f"the configuration let an unknown reward pass: {name}"
        functions[name] = load_function(name, reward, rewards)
    return functions


def _answer(function: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        scores, tokens = check_result(_call(function, request), [len(ids) for ids in request["completion_ids"]])
    except ContractError as error:
        return {"fault": asdict(error.fault)}
    # SystemExit too: a library that gives up must not look like a crash of the worker.
    except (Exception, SystemExit) as error:
        return {"fault": asdict(_raised(error))}
    return {"values": asdict(Values(scores, time.perf_counter() - began, tokens))}


def _call(function: RewardFunction, request: Mapping[str, Any]) -> Any:
    """Call as TRL does. `log_extra` and `log_metric` are accepted and go nowhere."""
    return function(
        **request["columns"],
        prompts=request["prompts"],
        completions=[[{"role": "assistant", "content": text}] for text in request["completions"]],
        completion_ids=request["completion_ids"],
        trainer_state=SimpleNamespace(global_step=request["step"]),
        log_extra=_drop,
        log_metric=_drop,
    )


def _drop(*_: object, **__: object) -> None:
    """Stand-in for TRL's logging callbacks."""


def _raised(error: BaseException) -> Fault:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "grpo_tasks/rewards/" not in frame.filename]
    source = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    mend = ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        mend = "let the function take **kwargs: it is given every column of the data, as in TRL"
    return Fault("raised", f"raised {type(error).__name__}: {shorten(hide(str(error)))}", source=source, mend=mend)


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
