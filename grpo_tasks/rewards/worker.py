"""The process that reward functions run in, seen from the parent: start, call functions with a time limit, kill, restart.

    RewardWorker.call  --JSON-->  serve.py (a WorkerProcess, output to the log)  --JSON-->  FunctionScores | RewardFault

What a fault means for the run is decided in suite.py.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from grpo_tasks.processes.worker_process import WorkerFault, WorkerProcess
from grpo_tasks.rewards.contract import FunctionScores, RewardFault, ScoreBatch, TaskRewards, applicable, spread
from grpo_tasks.rewards.replies import GOLD_BYTES, MAX_LOADED_BYTES, max_reply_bytes, read_golds, read_loaded, read_scores
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import RewardError, UserError

LOAD_LIMIT_S = 300.0
"""Time limit for importing all functions. A user's function may load a model."""
SEARCH_GRACE_S = 0.5
"""Added to the time limit of each call while the failing completion is searched: the overhead of a call."""

Reply = TypeVar("Reply")


class RewardWorker(WorkerProcess):
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
        super().__init__("grpo_tasks.rewards.serve", rewards.memory_limit_gb * 1e9, log=log)
        self.rewards, self.names = rewards, list(names)
        self.tasks = tasks or {}
        self.completion = completion or CompletionConfig()
        self.max_steps = 0
        """Number of updates of the stage, which functions see as trainer_state.max_steps. The trainer sets it."""

    def __enter__(self) -> Self:
        self._load()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | RewardFault:
        """Score the batch with one function in at most `limit_s` seconds. Restarts the process if an earlier call ended it.

        The function is not called with completions of a task that does not list it; they get None.
        """
        indices = applicable(name, batch, self.tasks)
        if len(indices) == len(batch):
            return self._score(name, batch, limit_s)
        if not indices:
            return FunctionScores([None] * len(batch), 0.0)
        return spread(self._score(name, batch.take(indices), limit_s), indices, len(batch))

    def _score(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | RewardFault:
        if not self.running:
            try:
                self._load()
            except UserError as error:
                return RewardFault("died", f"could not be loaded again: {error.message}", source=error.place, fix=error.fix)
        if self.has_unread_bytes():
            self.close()
            return RewardFault("broken", f"could not be called: {_UNREQUESTED}", fix=_DESCRIPTOR_FIX)
        lengths = [len(ids) for ids in batch.completion_ids]
        message = {"name": name, "trainer_state": {"global_step": batch.step, "max_steps": self.max_steps}, **_as_json(batch)}

        def read(payload: bytes, request: str) -> FunctionScores | RewardFault:
            return read_scores(payload, request, lengths)

        return self._call(message, name, limit_s, max_reply_bytes(lengths), read)

    def gold_completions(self, path: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """One completion for each row from the user's function `path`; None where it has none.

        Raises:
            ConfigError: the function cannot be imported, or raises.
            RewardError: it hangs, or ends the worker process.
        """

        def read(payload: bytes, request: str) -> list[str | None] | UserError:
            return read_golds(payload, request, len(rows))

        size = MAX_LOADED_BYTES + GOLD_BYTES * len(rows)
        made = self._call({"gold": path, "rows": list(rows)}, "lab.gold", LOAD_LIMIT_S, size, read)
        if isinstance(made, RewardFault):
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
            return isinstance(self.call(name, batch.take(indices), limit), RewardFault)

        indices = range(len(batch))
        while len(indices) > 1:
            half = indices[: len(indices) // 2]
            indices = half if fails(half) else indices[len(half) :]
        return indices[0] if indices and fails(indices) else None

    def _load(self) -> None:
        self.start()
        message = {
            "rewards": self.rewards.model_dump(mode="json"),
            "completion": self.completion.model_dump(mode="json"),
            "names": self.names,
        }

        def read(payload: bytes, request: str) -> UserError | None:
            return read_loaded(payload, request, self.names)

        loaded = self._call(message, "loading", LOAD_LIMIT_S, MAX_LOADED_BYTES, read)
        if loaded is None:
            return
        self.close()
        if isinstance(loaded, RewardFault):
            raise RewardError(
                f"loading the rewards {', '.join(self.names)} {loaded.detail}",
                fix=loaded.fix or "import the modules of your own functions in a Python session to find what ends the process",
            )
        raise loaded

    def _call(
        self, message: Mapping[str, Any], label: str, limit_s: float, max_bytes: int, read: Callable[[bytes, str], Reply]
    ) -> Reply | RewardFault:
        """Send a request and read its reply. A fault ends the worker."""
        reply = self.exchange(message, label, limit_s, max_bytes, read)
        return self._as_fault(reply, limit_s) if isinstance(reply, WorkerFault) else reply

    def _as_fault(self, fault: WorkerFault, limit_s: float) -> RewardFault:
        if fault.kind == "hung":
            partial = f" (after {fault.measured:,} bytes of a reply)" if fault.measured else ""
            found = f"did not return within {limit_s:g} s{partial}"
            return RewardFault("hung", found, fix="make it faster, or raise its time_limit_s")
        if fault.kind == "broken":
            return RewardFault("broken", f"{fault.detail} on the socket of its worker process", fix=_DESCRIPTOR_FIX)
        if fault.kind == "memory":
            used, limit = fault.measured / 1e9, self.limit_bytes / 1e9
            found = f"used more than {limit:.3g} GB of memory ({used:.3g} GB when its worker process was killed)"
            return RewardFault("died", found, fix="make it use less memory, or raise rewards.memory_limit_gb")
        return RewardFault("died", f"ended its worker process ({fault.detail})")


_UNREQUESTED = "an earlier call, or a thread that it started, wrote to the socket of the worker process outside any request"
_DESCRIPTOR_FIX = "write only to file descriptors that the function has opened itself"


def _as_json(batch: ScoreBatch) -> dict[str, Any]:
    return {
        "prompts": [[dict(message) for message in prompt] for prompt in batch.prompts],
        "completions": list(batch.completions),
        "completion_ids": [list(ids) for ids in batch.completion_ids],
        "prompt_ids": [list(ids) for ids in batch.prompt_ids],
        "columns": {name: list(values) for name, values in batch.columns.items()},
        "played": [
            {
                "said": [*one.said],
                "turns": [*one.turns],
                "reward": one.reward,
                "spans": one.spans,
                "answered": one.answered,
            }
            for one in batch.played
        ],
    }
