"""One process with tools or environments, seen from the parent.

    EnvironmentWorker.ask  --JSON-->  serve.py (a WorkerProcess, output to the log)  --JSON-->  reply | Lost

A hang, a crash or too much memory ends the process. What that means for the conversations in it is decided in pool.py. Its words
go into conversations and rewards: they hold no times, pids or measurements, so that a repeated run has the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_tasks.environments import replies
from grpo_tasks.environments.replies import Shape
from grpo_tasks.processes.worker_process import WorkerFault, WorkerProcess
from schemas.config.learning.interaction import InteractionConfig
from schemas.errors import UserError

LOAD_LIMIT_S = 300.0
"""Time limit for importing everything. A user's environment may load data."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Lost:
    """The process has ended, and with it every environment that it held."""

    reason: str
    """Completes a sentence that begins with the name of what was called."""


class EnvironmentWorker(WorkerProcess):
    """One child process that holds the environments of several conversations.

    Args:
        config: what it runs, and its limits.
        folders: where modules of the user lie, after the installed ones.
        log: file that receives the beginning of what is printed during each call. None: the output is discarded.
    """

    def __init__(self, config: InteractionConfig, folders: Sequence[Path], *, log: Path | None = None) -> None:
        # Sets of texts then have the same order in every worker.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__("grpo_tasks.environments.serve", config.memory_mb * MIB, log=log, environment=fixed)
        self.config, self.folders = config, list(folders)
        self.form = ""
        """tools, methods or steps; see forms.py."""
        self.own_calls = False
        """Whether the environment executes the calls of a turn itself."""
        self.rewards_at_end = False
        """Whether the environment rewards whole conversations."""
        self.generation = 0
        """How many processes it has had. An environment lives in one of them."""

    def load(self, *, with_schemas: bool) -> list[dict[str, Any]]:
        """Start the process unless it runs, and import what the configuration names.

        Returns:
            The schemas of the tools if they are wanted and the process was started.

        Raises:
            UserError: something cannot be imported, or ends the process.
        """
        # What ended it between two calls, such as a thread, is not the fault of the next conversation.
        if self.running and not self.has_ended() and not self.has_unread_bytes():
            return []
        self.close()
        self.start()
        self.generation += 1
        message = {
            "config": self.config.model_dump(mode="json"),
            "folders": list(map(str, self.folders)),
            "with_schemas": with_schemas,
        }
        loaded = self.exchange(message, "loading", LOAD_LIMIT_S, replies.MAX_LOADED_BYTES, replies.reader(replies.Loaded))
        place = "interaction.environment" if self.config.environment else "interaction.tools"
        if isinstance(loaded, WorkerFault):
            reason = _reason(loaded, LOAD_LIMIT_S, self.config.memory_mb)
            fix = "import its module in a Python session to find what ends the process"
            raise UserError(f"importing the tools or the environment {reason}", place=place, fix=fix)
        if loaded.error is not None or loaded.form is None:
            self.close()
            raise replies.error_of(loaded.error or "", place)
        self.form, self.own_calls, self.rewards_at_end = loaded.form, loaded.own_calls, loaded.rewards_at_end
        return [dict(one) for one in loaded.schemas]

    def ask(self, what: str, message: Mapping[str, Any], shape: type[Shape], max_bytes: int) -> Shape | Lost:
        """Send a request to the process and wait for its reply.

        Args:
            what: kind of the request.
            message: the rest of it.
            shape: shape of the reply.
            max_bytes: maximum size of the reply.
        """
        label = f"{message.get('name', what)} in conversation {message.get('conversation', '')}".strip()
        label, limit_s = label.replace("\n", " ")[:200], self.config.timeout_s
        reply = self.exchange({"what": what, **message}, label, limit_s, max_bytes, replies.reader(shape))
        return Lost(_reason(reply, limit_s, self.config.memory_mb)) if isinstance(reply, WorkerFault) else reply


def _reason(fault: WorkerFault, limit_s: float, memory_mb: int) -> str:
    if fault.kind == "hung":
        return f"did not return within {limit_s:g} s"
    if fault.kind == "memory":
        return f"used more than {memory_mb} MiB of memory"
    if fault.kind == "broken":
        return f"{fault.detail} on the socket of its worker process"
    return f"ended its worker process ({fault.detail})"
