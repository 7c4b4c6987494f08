"""The process that reward functions run in, seen from the parent: start, call functions with a time limit, kill, restart.

    RewardWorker.call  --JSON-->  serve.py (started by supervisor.py, output to the log)  --JSON-->  FunctionScores | Fault

Why a process: a function can hang, crash, exhaust the memory or patch libraries, and only ending its process stops that. A call
that does any of it costs the worker process and nothing else. What a fault means for the run is decided in suite.py.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.processes.link import MalformedReplyError, WorkerEndedError, WorkerLink
from grpo_tasks.rewards.contract import Fault, FunctionScores, ScoreBatch, TaskRewards, applicable, spread
from grpo_tasks.rewards.replies import GOLD_BYTES, MAX_LOADED_BYTES, max_reply_bytes, read_golds, read_loaded, read_scores
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import RewardError, UserError

LOAD_LIMIT_S = 300.0
"""Time limit for importing all functions. A user's function may load a model."""
SEARCH_GRACE_S = 0.5
"""Added to the time limit of each call while the failing completion is searched: the overhead of a call."""
CLOSE_S = 10.0
"""Time limit for the supervisor to end everything that it started."""
MEMORY_SHARE = 0.8
"""Largest share of the machine's memory that a worker may use, whatever the configuration says: the trainer needs the rest."""

Reply = TypeVar("Reply")


class RewardWorker:
    """One child process with reward functions loaded; a context manager.

    Args:
        rewards: settings of the functions.
        names: the functions to load.
        completion: what an answer is, for the built-in functions. None: the defaults of the section.
        tasks: the functions that apply to each task; see contract.py.
        log: file that receives the beginning of what the functions print during each call. None: their output is discarded.

    Raises:
        ConfigError: on entry, when a function cannot be loaded.
        RewardError: on entry, when loading ends the process.
    """

    def __init__(
        self,
        rewards: RewardsConfig,
        names: Sequence[str],
        *,
        completion: CompletionConfig | None = None,
        tasks: TaskRewards | None = None,
        log: Path | None = None,
    ) -> None:
        self.rewards, self.names, self.log = rewards, list(names), log
        self.tasks = tasks or {}
        self.completion = completion or CompletionConfig()
        self.max_steps = 0
        """Number of updates of the stage, which functions see as trainer_state.max_steps. The trainer sets it."""
        self.limit_bytes = int(min(rewards.memory_limit_gb * 1e9, MEMORY_SHARE * psutil.virtual_memory().total))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: WorkerLink | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            _wait(self._process)
        self._process = self._link = None

    def call(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | Fault:
        """Score the batch with one function in at most `limit_s` seconds. Restarts the process if an earlier call ended it.

        The function is not called with completions of a task that does not list it; they get None.
        """
        indices = applicable(name, batch, self.tasks)
        if len(indices) == len(batch):
            return self._call(name, batch, limit_s)
        if not indices:
            return FunctionScores([None] * len(batch), 0.0)
        return spread(self._call(name, batch.take(indices), limit_s), indices, len(batch))

    def _call(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | Fault:
        if self._link is None:
            try:
                self._start()
            except UserError as error:
                return Fault("died", f"could not be loaded again: {error.message}", source=error.place, fix=error.fix)
        assert self._link is not None
        if self._link.has_unread_bytes():
            # Something in that process writes to the socket on its own, so no later reply of it could be trusted.
            self.close()
            return Fault("broken", f"could not be called: {_UNREQUESTED}", fix=_DESCRIPTOR_FIX)
        lengths = [len(ids) for ids in batch.completion_ids]
        message = {"name": name, "trainer_state": {"global_step": batch.step, "max_steps": self.max_steps}, **_as_json(batch)}

        def read(payload: bytes, request: str) -> FunctionScores | Fault:
            return read_scores(payload, request, lengths)

        return self._exchange(message, name, limit_s, max_reply_bytes(lengths), read)

    def gold_completions(self, path: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """One completion for each row from the user's function `path`; None where it has none.

        Raises:
            ConfigError: the function cannot be imported, or raises.
            RewardError: it hangs, or ends the worker process.
        """

        def read(payload: bytes, request: str) -> list[str | None] | UserError:
            return read_golds(payload, request, len(rows))

        size = MAX_LOADED_BYTES + GOLD_BYTES * len(rows)
        made = self._exchange({"gold": path, "rows": list(rows)}, "lab.gold", LOAD_LIMIT_S, size, read)
        if isinstance(made, Fault):
            raise RewardError(f"lab.gold: {path} {made.detail}", place="lab.gold", fix=made.fix or "correct the function")
        if isinstance(made, UserError):
            raise made
        return made

    def find_failing_completion(self, name: str, batch: ScoreBatch, limit_s: float) -> int | None:
        """The index of the completion that makes the function fail, found by halving the batch; None when no single one does.

        Each subset gets its share of the time limit, so after a hang the search takes about as long as the limit again. Use it
        only when the fault stops the run.
        """

        def fails(indices: range) -> bool:
            limit = limit_s * len(indices) / len(batch) + SEARCH_GRACE_S
            return isinstance(self.call(name, batch.take(indices), limit), Fault)

        indices = range(len(batch))
        while len(indices) > 1:
            half = indices[: len(indices) // 2]
            indices = half if fails(half) else indices[len(half) :]
        return indices[0] if indices and fails(indices) else None

    def _start(self) -> None:
        self._link = WorkerLink()
        data, control = self._link.worker_ends
        with data, control, (self.log or Path(os.devnull)).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.rewards.supervisor"]
                + [str(number) for number in (data.fileno(), control.fileno(), self.limit_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(data.fileno(), control.fileno()),
                env=os.environ | {PARENT: str(os.getpid())},
                # A session of its own, so that Ctrl-C in the terminal reaches the parent only.
                start_new_session=True,
            )
        message = {
            "rewards": self.rewards.model_dump(mode="json"),
            "completion": self.completion.model_dump(mode="json"),
            "names": self.names,
        }

        def read(payload: bytes, request: str) -> UserError | None:
            return read_loaded(payload, request, self.names)

        loaded = self._exchange(message, "loading", LOAD_LIMIT_S, MAX_LOADED_BYTES, read)
        if loaded is None:
            return
        self.close()
        if isinstance(loaded, Fault):
            raise RewardError(
                f"loading the rewards {', '.join(self.names)} {loaded.detail}",
                fix=loaded.fix or "import the modules of your own functions in a Python session to find what ends the process",
            )
        raise loaded

    def _exchange(
        self, message: Mapping[str, Any], label: str, limit_s: float, max_bytes: int, read: Callable[[bytes, str], Reply]
    ) -> Reply | Fault:
        """Send a request and read its reply. A fault ends the worker."""
        assert self._link is not None
        # Random, so that a function cannot prepare a reply to a later request.
        request = secrets.token_hex(8)
        payload = json.dumps({"request": request, **message}).encode()
        deadline = time.monotonic() + limit_s
        self._link.begin_call(label, deadline)
        try:
            self._link.send(payload, deadline)
            reply = read(self._link.receive(max_bytes, deadline), request)
        except TimeoutError:
            partial = f" (after {self._link.received:,} bytes of a reply)" if self._link.received else ""
            fault = Fault(
                "hung", f"did not return within {limit_s:g} s{partial}", fix="make it faster, or raise its time_limit_s"
            )
        except MalformedReplyError as error:
            fault = Fault("broken", f"{error} on the socket of its worker process", fix=_DESCRIPTOR_FIX)
        except WorkerEndedError:
            fault = self._exit_fault()
        else:
            self._link.send_order("")
            return reply
        self.close()
        return fault

    def _exit_fault(self) -> Fault:
        """How the worker ended, as a fault."""
        assert self._link is not None
        report = self._link.read_exit_report()
        if "memory" in report:
            limit = self.limit_bytes / 1e9
            found = (
                f"used more than {limit:.3g} GB of memory ({report['memory'] / 1e9:.3g} GB when its worker process was killed)"
            )
            return Fault("died", found, fix="make it use less memory, or raise rewards.memory_limit_gb")
        code = report.get("code")
        if code is None:
            how = "it closed the socket"
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Fault("died", f"ended its worker process ({how})")


_UNREQUESTED = "an earlier call, or a thread that it started, wrote to the socket of the worker process outside any request"
_DESCRIPTOR_FIX = "write only to file descriptors that the function has opened itself"


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the supervisor to end. Kill it and all its descendants if it does not."""
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    one.kill()
        process.kill()
        process.wait()


def _as_json(batch: ScoreBatch) -> dict[str, Any]:
    return {
        "prompts": [[dict(message) for message in prompt] for prompt in batch.prompts],
        "completions": list(batch.completions),
        "completion_ids": [list(ids) for ids in batch.completion_ids],
        "prompt_ids": [list(ids) for ids in batch.prompt_ids],
        "columns": {name: list(values) for name, values in batch.columns.items()},
        "played": [
            {"said": [*one.said], "turns": [*one.turns], "reward": one.reward, "spans": one.spans} for one in batch.played
        ],
    }
