"""The process that reward functions run in, seen from the parent: start, call with a time limit, kill, start again.

    RewardWorker.call  --JSON-->  serve.py (own session, stdout on stderr)  --JSON-->  Values | Fault

A call that takes too long or takes the process down costs that process and nothing else. The child dies with the thread that
started it, so a worker is used by one thread. Nothing is decided here about what a fault means.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Self

from grpo_tasks.rewards.contract import Fault, ScoreBatch, Values
from schemas.child import PARENT
from schemas.config import RewardsConfig
from schemas.errors import RewardError, UserError

LOAD_LIMIT_S = 300.0
"""Longest time for importing every function; own ones may load a model."""

CULPRIT_GRACE_S = 0.5
"""Added to a part's share of the time limit while the culprit is looked for: the overhead of a call."""


class RewardWorker:
    """One child process with the functions of `names` loaded; a context manager.

    Raises:
        ConfigError: on entry, when a function cannot be loaded.
        RewardError: on entry, when loading takes the process down.
    """

    def __init__(self, rewards: RewardsConfig, names: Sequence[str]) -> None:
        self.rewards, self.names = rewards, list(names)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and whatever it started in its session."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._connection = None

    def call(self, name: str, batch: ScoreBatch, limit_s: float) -> Values | Fault:
        """Score the batch with one function, in at most `limit_s` seconds."""
        if self._connection is None:
            self._start()
        try:
            self._send({"name": name, **_as_json(batch)})
            reply = self._receive(limit_s)
        except (EOFError, OSError):
            return Fault("died", f"took its worker process down ({self._end()})")
        if reply is None:
            self.close()
            return Fault("hung", f"did not return within {limit_s:g} s", mend="make it faster, or raise its time_limit_s")
        if "fault" in reply:
            return Fault(**reply["fault"])
        values = Values(**reply["values"])
        # JSON knows only strings as keys.
        return replace(values, tokens={int(index): tokens for index, tokens in values.tokens.items()})

    def culprit(self, name: str, batch: ScoreBatch, limit_s: float) -> int | None:
        """The completion that makes the function fail, found by halving; None when no single one does.

        A part of the batch gets its part of the time limit, so after a hang this takes about as long again as the limit:
        worth it before a run is stopped, not otherwise.
        """

        def fails(indices: range) -> bool:
            limit = limit_s * len(indices) / len(batch) + CULPRIT_GRACE_S
            return isinstance(self.call(name, batch.take(indices), limit), Fault)

        indices = range(len(batch))
        while len(indices) > 1:
            half = indices[: len(indices) // 2]
            indices = half if fails(half) else indices[len(half) :]
        return indices[0] if indices and fails(indices) else None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.rewards.serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                # Prints of a function belong into the log, not between the lines of a progress bar or a report.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {PARENT: str(os.getpid())},
                # So that a kill reaches what a function has started, and Ctrl-C is answered by the parent alone.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            self._send({"rewards": self.rewards.model_dump(mode="json"), "names": self.names})
            reply = self._receive(LOAD_LIMIT_S)
        except (EOFError, OSError) as error:
            raise RewardError(
                f"loading the rewards {', '.join(self.names)} took the worker process down ({self._end()})",
                mend="import the modules of your own functions in a Python session and see what ends it",
            ) from error
        if reply is None or "error" in reply:
            self.close()
            if reply is None:
                raise RewardError(f"loading the rewards {', '.join(self.names)} took more than {LOAD_LIMIT_S:g} s")
            raise UserError.from_json(reply["error"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        self._connection.send_bytes(json.dumps(message).encode())

    def _receive(self, limit_s: float) -> dict[str, Any] | None:
        assert self._connection is not None
        if not self._connection.poll(limit_s):
            return None
        reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return reply

    def _end(self) -> str:
        """How the process ended, and make sure that it has."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.close()
        if code is None:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _as_json(batch: ScoreBatch) -> dict[str, Any]:
    return {
        "prompts": [[dict(message) for message in prompt] for prompt in batch.prompts],
        "completions": list(batch.completions),
        "completion_ids": [list(ids) for ids in batch.completion_ids],
        "columns": {name: list(values) for name, values in batch.columns.items()},
        "step": batch.step,
    }
