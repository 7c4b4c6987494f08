"""The process that reward functions run in, seen from the parent: start, call functions with a time limit, kill, restart.

What a fault means for the run is decided in suite.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from grpo_tasks.processes.worker_process import MalformedReplyError, Reply, ReportedError, Shape, WorkerFault, WorkerProcess
from grpo_tasks.rewards.contract import (
    MAX_EXTRA_CHARS,
    MAX_EXTRAS,
    MAX_GOLD_CHARS,
    FunctionScores,
    RewardFault,
    ScoreBatch,
    TaskRewards,
    applicable,
    spread,
)
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig
from schemas.errors import RewardError, UserError

LOAD_LIMIT_S = 300.0
SEARCH_GRACE_S = 0.5
"""Added to the time limit of each call while the failing completion is searched: the overhead of a call."""
MAX_LOADED_BYTES, GOLD_BYTES = 2**20, 12 * MAX_GOLD_CHARS + 8
"""Maximum size of the reply after loading, and of one gold completion: a character may become two escapes of six bytes."""
_DESCRIPTOR_FIX = "write only to file descriptors that the function has opened itself"


class Loaded(Reply):
    """The reply to `load`."""

    loaded: list[str] | None = None
    error: ReportedError | None = None

    def _check(self, message: Mapping[str, Any]) -> None:
        if self.error is None and self.loaded != message["names"]:
            raise MalformedReplyError("sent a reply that names other functions")


class Golds(Reply):
    """The reply to `gold`."""

    completions: list[Annotated[str, Field(max_length=MAX_GOLD_CHARS)] | None] | None = None
    error: ReportedError | None = None

    def _check(self, message: Mapping[str, Any]) -> None:
        if self.error is None and len(self.completions or []) != len(message["rows"]):
            raise MalformedReplyError("sent a reply without completions")


class Scored(Reply):
    """The reply to `score`."""

    scores: FunctionScores | None = None
    fault: RewardFault | None = None

    def _check(self, message: Mapping[str, Any]) -> None:
        lengths = [len(ids) for ids in message["completion_ids"]]
        found, fault, num = self.scores, self.fault, len(lengths)
        if fault is not None:
            # How the process ended is for this side to say.
            if found is not None or fault.kind in ("hung", "died"):
                raise MalformedReplyError("sent a reply of the wrong shape (fault)")
            if fault.index is not None and not 0 <= fault.index < num:
                raise MalformedReplyError(f"blamed completion {fault.index} of {num}")
            return
        if found is None:
            raise MalformedReplyError("sent a reply without scores")
        if len(found.scores) != num:
            raise MalformedReplyError(f"sent a reply with {len(found.scores)} scores for {num} completions")
        for index, tokens in found.tokens.items():
            if not 0 <= index < num or len(tokens) != lengths[index]:
                raise MalformedReplyError(f"sent a reply with {len(tokens)} scores for the tokens of completion {index}")
        for column, values in found.extra.items():
            if len(values) != num:
                raise MalformedReplyError(f"sent a reply with {len(values)} values of {column} for {num} completions")


def max_reply_bytes(lengths: Sequence[int]) -> int:
    """Maximum size in bytes of the reply about completions with these numbers of tokens."""
    texts_and_metrics, score, extra = 2**17, 48, MAX_EXTRAS * (12 * MAX_EXTRA_CHARS + 8)
    return texts_and_metrics + score * (len(lengths) + sum(lengths)) + extra * len(lengths)


class RewardWorker(WorkerProcess):
    """One child process with the reward functions `names` loaded; a context manager.

    `completion`: what an answer is, for the built-in functions; None: the defaults of the section. `tasks`: the functions that
    apply to each task; see contract.py. `log` receives the beginning of what the functions print during each call. On entry:
    `ConfigError` where a function cannot be loaded, `RewardError` where loading ends the process.
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

        Completions that the function does not apply to get None without a call.
        """
        indices = applicable(name, batch, self.tasks)
        if len(indices) == len(batch):
            return self._score(name, batch, limit_s)
        if not indices:
            return FunctionScores([None] * len(batch), 0.0)
        return spread(self._score(name, batch.take(indices), limit_s), indices, len(batch))

    def _score(self, name: str, batch: ScoreBatch, limit_s: float) -> FunctionScores | RewardFault:
        if self.link is None:
            try:
                self._load()
            except UserError as error:
                return RewardFault("died", f"could not be loaded again: {error.message}", source=error.place, fix=error.fix)
        assert self.link is not None
        if self.link.has_unread_bytes():
            self.close()
            unrequested = "an earlier call, or a thread that it started, wrote to the socket of the worker process"
            return RewardFault("broken", f"could not be called: {unrequested} outside any request", fix=_DESCRIPTOR_FIX)
        message = {
            "name": name,
            "trainer_state": {"global_step": batch.step, "max_steps": self.max_steps},
            "prompts": [[dict(message) for message in prompt] for prompt in batch.prompts],
            "completions": list(batch.completions),
            "completion_ids": [list(ids) for ids in batch.completion_ids],
            "prompt_ids": [list(ids) for ids in batch.prompt_ids],
            "columns": {column: list(values) for column, values in batch.columns.items()},
            "given_answers": list(batch.given_answers),
            "played": [
                {"said": [*one.said], "turns": [*one.turns], "reward": one.reward, "spans": one.spans, "answered": one.answered}
                for one in batch.played
            ],
        }
        size = max_reply_bytes([len(ids) for ids in batch.completion_ids])
        reply = self._ask("score", message, Scored, limit_s, size, label=name)
        if isinstance(reply, RewardFault):
            return reply
        found = reply.scores or reply.fault
        assert found is not None
        return found

    def gold_completions(self, path: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """One completion for each row from the user's function `path`; None where it has none.

        `ConfigError` where the function cannot be imported, or raises; `RewardError` where it hangs, or ends the worker process.
        """
        size = MAX_LOADED_BYTES + GOLD_BYTES * len(rows)
        made = self._ask("gold", {"path": path, "rows": list(rows)}, Golds, LOAD_LIMIT_S, size, label="lab.gold")
        if isinstance(made, RewardFault):
            raise RewardError(f"lab.gold: {path} {made.detail}", place="lab.gold", fix=made.fix or "correct the function")
        if made.error is not None:
            raise made.error
        return made.completions or []

    def find_failing_completion(self, name: str, batch: ScoreBatch, limit_s: float) -> int | None:
        """The index of the completion that makes the function fail, found by halving the batch; None when no single one does."""

        def fails(indices: range) -> bool:
            # After a hang the search takes about as long as the limit again.
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
        loaded = self._ask("load", message, Loaded, LOAD_LIMIT_S, MAX_LOADED_BYTES, label="loading")
        if isinstance(loaded, RewardFault):
            raise RewardError(
                f"loading the rewards {', '.join(self.names)} {loaded.detail}",
                fix=loaded.fix or "import the modules of your own functions in a Python session to find what ends the process",
            )
        if loaded.error is not None:
            self.close()
            raise loaded.error

    def _ask(
        self, what: str, message: Mapping[str, Any], shape: type[Shape], limit_s: float, max_bytes: int, label: str = ""
    ) -> Shape | RewardFault:
        reply = self.exchange(what, message, shape, limit_s=limit_s, max_bytes=max_bytes, label=label)
        if not isinstance(reply, WorkerFault):
            return reply
        detail = reply.reason(limit_s, f"{self.limit_bytes / 1e9:.3g} GB")
        if reply.kind == "hung":
            detail += f" (after {reply.measured:,} bytes of a reply)" if reply.measured else ""
            return RewardFault("hung", detail, fix="make it faster, or raise its time_limit_s")
        if reply.kind == "broken":
            return RewardFault("broken", detail, fix=_DESCRIPTOR_FIX)
        if reply.kind == "memory":
            detail += f" ({reply.measured / 1e9:.3g} GB when its worker process was killed)"
            return RewardFault("died", detail, fix="make it use less memory, or raise rewards.memory_limit_gb")
        return RewardFault("died", detail)
