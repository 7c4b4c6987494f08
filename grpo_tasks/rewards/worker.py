"""The process that reward functions run in, seen from the parent: start, call with a time limit, kill, start again.

    RewardWorker.call  --JSON-->  serve.py (below supervisor.py, output to the log)  --JSON-->  FunctionScores | Fault

A call that takes too long, uses too much memory, answers nonsense or takes the process down costs that process and nothing else.
Nothing is decided here about what a fault means.
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

from grpo_tasks.processes.entry import PARENT
from grpo_tasks.processes.link import MalformedReplyError, WorkerEndedError, WorkerLink
from grpo_tasks.rewards.contract import Fault, FunctionScores, ScoreBatch
from grpo_tasks.rewards.replies import LOADED_BYTES, max_bytes, read_loaded, read_scores
from schemas.config.rewards import RewardsConfig
from schemas.errors import RewardError, UserError

LOAD_LIMIT_S = 300.0
"""Longest time for importing every function; own ones may load a model."""
CULPRIT_GRACE_S = 0.5
"""Added to a part's share of the time limit while the find_failing_completion is looked for: the overhead of a call."""
CLOSE_S = 10.0
"""Longest time for the supervisor to end what it started."""
MEMORY_SHARE = 0.8
"""Largest share of the machine's memory that a worker may use, whatever the configuration says."""

Answer = TypeVar("Answer")


class RewardWorker:
    """One child process with the functions of `names` loaded; a context manager.

    Args:
        rewards: settings of the functions.
        names: which are loaded.
        log: file that takes what the functions print, the beginning of it for each call; None: nothing of it is kept.

    Raises:
        ConfigError: on entry, when a function cannot be loaded.
        RewardError: on entry, when loading takes the process down.
    """

    def __init__(self, rewards: RewardsConfig, names: Sequence[str], *, log: Path | None = None) -> None:
        self.rewards, self.names, self.log = rewards, list(names), log
        self.max_steps = 0
        """Updates of the stage, which functions see as trainer_state.max_steps; set by the trainer, who counts them."""
        self.limit_bytes = int(min(rewards.memory_limit_gb * 1e9, MEMORY_SHARE * psutil.virtual_memory().total))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: WorkerLink | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and whatever it started."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            _wait(self._process)
        self._process = self._link = None

    def call(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | Fault:
        """Score the batch with one function, in at most `limit_s` seconds."""
        if self._link is None:
            try:
                self._start()
            except UserError as error:
                return Fault("died", f"could not be loaded again: {error.message}", source=error.place, fix=error.fix)
        assert self._link is not None
        if self._link.stray():
            # Nobody knows what else that process would do.
            self.close()
            return Fault("broken", f"could not be asked: {_STRAY}", fix=_CHANNEL)
        lengths = [len(ids) for ids in batch.completion_ids]
        message = {"name": name, "trainer_state": {"global_step": batch.step, "max_steps": self.max_steps}, **_as_json(batch)}

        def read(payload: bytes, request: str) -> FunctionScores | Fault:
            return read_scores(payload, request, lengths)

        return self._exchange(message, name, limit_s, max_bytes(lengths), read)

    def find_failing_completion(self, name: str, batch: ScoreBatch, limit_s: float) -> int | None:
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
        self._link = WorkerLink()
        data, control = self._link.far
        with data, control, (self.log or Path(os.devnull)).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.rewards.supervisor"]
                + [str(number) for number in (data.fileno(), control.fileno(), self.limit_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(data.fileno(), control.fileno()),
                env=os.environ | {PARENT: str(os.getpid())},
                # Ctrl-C is answered by the parent alone.
                start_new_session=True,
            )
        message = {"rewards": self.rewards.model_dump(mode="json"), "names": self.names}

        def read(payload: bytes, request: str) -> UserError | None:
            return read_loaded(payload, request, self.names)

        loaded = self._exchange(message, "loading", LOAD_LIMIT_S, LOADED_BYTES, read)
        if loaded is None:
            return
        self.close()
        if isinstance(loaded, Fault):
            raise RewardError(
                f"loading the rewards {', '.join(self.names)} {loaded.detail}",
                fix=loaded.fix or "import the modules of your own functions in a Python session and see what ends it",
            )
        raise loaded

    def _exchange(
        self, message: Mapping[str, Any], label: str, limit_s: float, most_bytes: int, read: Callable[[bytes, str], Answer]
    ) -> Answer | Fault:
        """Send a request and read its answer; a fault ends the worker."""
        assert self._link is not None
        request = secrets.token_hex(8)
        payload = json.dumps({"request": request, **message}).encode()
        deadline = time.monotonic() + limit_s
        self._link.begin(label, deadline)
        try:
            self._link.send(payload, deadline)
            answer = read(self._link.receive(most_bytes, deadline), request)
        except TimeoutError:
            part = f" (after {self._link.received:,} bytes of an answer)" if self._link.received else ""
            fault = Fault("hung", f"did not return within {limit_s:g} s{part}", fix="make it faster, or raise its time_limit_s")
        except MalformedReplyError as error:
            fault = Fault("broken", f"{error} on the socket of its worker", fix=_CHANNEL)
        except WorkerEndedError:
            fault = self._ending()
        else:
            self._link.order("")
            return answer
        self.close()
        return fault

    def _ending(self) -> Fault:
        """How the worker ended."""
        assert self._link is not None
        report = self._link.report()
        if "memory" in report:
            limit = self.limit_bytes / 1e9
            found = f"used more than {limit:.3g} GB of memory ({report['memory'] / 1e9:.3g} GB when its worker was ended)"
            return Fault("died", found, fix="make it use less, or raise rewards.memory_limit_gb")
        code = report.get("code")
        if code is None:
            how = "it closed its socket"
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Fault("died", f"took its worker process down ({how})")


_STRAY = "bytes on the socket of its worker answer no request; a function called before, or a thread of it, has written them"
_CHANNEL = "let it write to no file descriptor that it has not opened"


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a supervisor; one that does not come is ended from here."""
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
        "columns": {name: list(values) for name, values in batch.columns.items()},
    }
