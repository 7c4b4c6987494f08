"""The environments of a rollout: which worker has which conversation, what a turn asks of it, and what follows a fault.

Which worker serves a conversation must not change it. So a conversation whose worker was ended by another one is played again in
the new process, up to where it was: a conversation pays only for its own faults. If it then goes another way, its environment
does not repeat itself by seed, and the conversation ends with an error.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from grpo_tasks.environments.calls import Call, ParsedTurn, read_turn, spoken
from grpo_tasks.environments.checker import Checker
from grpo_tasks.environments.contract import Message, Observation, Opening
from grpo_tasks.environments.families import call_format_of
from grpo_tasks.environments.forms import MAX_MESSAGES
from grpo_tasks.processes.worker_process import MalformedReplyError, Reply, ReportedError, Shape, WorkerFault, WorkerProcess
from schemas.config.completion import THINK
from schemas.config.rollout import InteractionConfig
from schemas.errors import UserError

MAX_FAULTS = 2
"""Calls of one conversation that may end their worker. Each costs the time limit, or the start of a process."""
NOT_REPEATED = (
    "the worker of its environment ended through another conversation, and the environment does not repeat itself by seed"
)
OVER = "the conversation is over"
Result = TypeVar("Result")
LOAD_LIMIT_S = 300.0
MIB = 2**20
BASE_BYTES = 2**18
"""Maximum size of a reply without its texts: info, the attributes of an environment, an error."""
MAX_LOADED_BYTES, MAX_OPENING_BYTES, MAX_PERFECT_BYTES = 2**22, 2**26, 2**24


def max_bytes(num_texts: int, max_chars: int) -> int:
    """Maximum size of a reply with as many texts: a character may become two escapes of six bytes."""
    mark_chars = 200  # more than the mark of a cut answer takes
    return BASE_BYTES + num_texts * 12 * (max_chars + mark_chars)


class Loaded(Reply):
    """The worker has imported what the configuration names, or cannot."""

    form: Literal["tools", "methods", "steps", ""] = ""
    schemas: list[dict[str, JsonValue]] = Field(default_factory=list)
    own_calls: bool = False
    rewards_at_end: bool = False
    error: ReportedError | None = None

    def _check(self, message: Mapping[str, Any]) -> None:  # noqa: ARG002 - it holds for every request
        if self.error is None and not self.form:
            raise MalformedReplyError("sent a reply without a form")


class EnvironmentMessage(BaseModel):
    """A message."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Annotated[str, Field(max_length=40)]
    content: JsonValue = ""


class Opened(Reply):
    """A conversation has begun."""

    messages: list[EnvironmentMessage] = Field(default_factory=list)
    state: dict[str, JsonValue] = Field(default_factory=dict)
    error: str | None = None


class Answered(Reply):
    """A tool has answered."""

    text: str
    state: dict[str, JsonValue]


class Stepped(Reply):
    """An environment has answered a turn, or rewards the whole conversation."""

    messages: Annotated[list[EnvironmentMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    done: bool = False
    reward: FiniteFloat | None = None
    info: dict[str, JsonValue] = Field(default_factory=dict)
    error: str | None = None


class Perfect(Reply):
    """The turns of a perfect player."""

    turns: list[str] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The process has ended, and with it every environment that it held."""

    reason: str
    """Completes a sentence that begins with the name of what was called."""


class EnvironmentWorker(WorkerProcess):
    """One child process that holds the environments of several conversations. A hang, a crash or too much memory ends it."""

    def __init__(self, config: InteractionConfig, *, log: Path | None = None) -> None:
        # Sets of texts then have the same order in every worker.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__("grpo_tasks.environments.serve", config.memory_mb * MIB, log=log, environment=fixed)
        self.config = config
        self.loaded = Loaded(request="")
        """What the process has imported."""
        self.generation = 0
        """How many processes it has had. An environment lives in one of them."""

    def load(self, *, with_schemas: bool) -> list[dict[str, Any]]:
        """Start the process unless it runs, and import what the configuration names; `UserError` where that fails, or ends it.

        Returns the schemas of the tools if they are wanted and the process was started.
        """
        # What ended it between two calls, such as a thread, is not the fault of the next conversation.
        if self.link is not None and not self.link.has_ended() and not self.link.has_unread_bytes():
            return []
        self.close()
        self.start()
        self.generation += 1
        message = {"config": self.config.model_dump(mode="json"), "with_schemas": with_schemas}
        loaded = self._ask("load", message, Loaded, LOAD_LIMIT_S, MAX_LOADED_BYTES, "loading")
        if isinstance(loaded, Lost):
            place = "interaction.environment" if self.config.environment else "interaction.tools"
            fix = "import its module in a Python session to find what ends the process"
            raise UserError(f"importing the tools or the environment {loaded.reason}", place=place, fix=fix)
        if loaded.error is not None:
            self.close()
            raise loaded.error
        self.loaded = loaded
        return [dict(one) for one in loaded.schemas]

    def ask(self, what: str, message: Mapping[str, Any], shape: type[Shape], max_bytes: int) -> Shape | Lost:
        """The reply of the process to a request, of this shape and at most as many bytes."""
        label = f"{message.get('name', what)} in conversation {message.get('conversation', '')}".strip()
        return self._ask(what, message, shape, self.config.timeout_s, max_bytes, label.replace("\n", " ")[:200])

    def _ask(
        self, what: str, message: Mapping[str, Any], shape: type[Shape], limit_s: float, max_bytes: int, label: str
    ) -> Shape | Lost:
        reply = self.exchange(what, message, shape, limit_s=limit_s, max_bytes=max_bytes, label=label)
        return Lost(reply.reason(limit_s, f"{self.config.memory_mb} MiB")) if isinstance(reply, WorkerFault) else reply


@dataclass(slots=True)
class _Event:
    """A request that was answered, for a replay."""

    what: str
    message: Mapping[str, Any]
    shape: type[Reply]
    max_bytes: int
    reply: Any


@dataclass(slots=True)
class _Conversation:
    number: int
    row: Mapping[str, Any]
    seed: int
    worker: EnvironmentWorker
    generation: int = 0
    """The process of the worker that has its environment."""
    num_requests: int = 0
    events: list[_Event] = field(default_factory=list)
    calls: int = 0
    faults: int = 0
    over: bool = False
    error: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """What a table shows of its environment."""
        return {"environment": dict(self.state)} if self.state else {}


class EnvironmentPool:
    """Implements `Environments` (contract.py) with worker processes; a context manager.

    `chat_template` is that of the model, or several by name, and `response_template` that of its tokenizer, if it has one: they
    name the format of calls. `reasoning` and `starts_inside` are those of `read_turn` (calls.py), and `log` receives what the
    environments print.
    """

    def __init__(
        self,
        config: InteractionConfig,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        response_template: Mapping[str, Any] | None = None,
        reasoning: Sequence[str] = THINK,
        starts_inside: bool | None = None,
        log: Path | None = None,
    ) -> None:
        if isinstance(chat_template, Mapping):
            # transformers takes the one of this name where there are tools.
            chat_template = chat_template.get("tool_use") or chat_template.get("default")
        self.config, self._templates = config, (chat_template or "", response_template)
        self._reasoning, self._starts_inside = tuple(reasoning), starts_inside
        self._workers = [EnvironmentWorker(config, log=log) for _ in range(config.workers)]
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="environments")
        self._conversations: dict[int, _Conversation] = {}
        self._schemas: list[dict[str, Any]] | None = None
        self._read: Callable[[str], ParsedTurn] = lambda text: ParsedTurn(spoken(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools; UserError: something cannot be imported, or the model's calls have no known format."""
        if self._schemas is None:
            schemas = self._workers[0].load(with_schemas=True)
            if schemas:
                call_format = call_format_of(self.config.call_format, *self._templates)
                inside, tags = self._starts_inside, self._reasoning
                self._read = lambda text: read_turn(text, call_format, reasoning=tags, starts_inside=inside, tools=schemas)
            self._checker = Checker(schemas)
            self._schemas = schemas
        return self._schemas

    def begin(self, conversations: Sequence[tuple[int, Mapping[str, Any], int]]) -> list[Opening]:
        """Start conversations: number, columns of the row, seed."""
        self.schemas()
        made = []
        for number, row, seed in conversations:
            # A number may come again with every round: what is left of the one before is dropped.
            self.end([number])
            made.append(_Conversation(number, row, seed, self._workers[number % len(self._workers)]))
            self._conversations[number] = made[-1]
        return self._by_worker([(one, partial(self._begin, one)) for one in made])

    def answer(self, turns: Sequence[tuple[int, str]]) -> list[Observation]:
        """Answer the policy's turn in each of these conversations. Different workers answer at the same time."""
        found = [(self._conversations[number], text) for number, text in turns]
        return self._by_worker([(one, partial(self._answer, one, text)) for one, text in found])

    def end(self, conversations: Sequence[int]) -> list[float | str | None]:
        """These conversations are over. Returns the rewards of those that a limit of the rollout has ended; see contract.py."""
        found = {number: one for number in conversations if (one := self._conversations.pop(number, None)) is not None}
        given = self._by_worker([(one, partial(self._final_reward, one)) for one in found.values()])
        rewards = dict(zip(found, given, strict=True))
        for worker in {one.worker for one in found.values()}:
            numbers = [one.number for one in found.values() if one.worker is worker and one.generation == worker.generation]
            if numbers and worker.link is not None:
                worker.ask("end", {"conversations": numbers}, Reply, BASE_BYTES)
        return [rewards.get(number) for number in conversations]

    def perfect(self, conversation: int) -> list[str] | str | None:
        """The turns of a perfect player, by the environment's method `perfect(row)`; None if it has none, a text if it fails."""
        one = self._conversations[conversation]
        reply = self._ask(one, "perfect", {"row": dict(one.row)}, Perfect, MAX_PERFECT_BYTES)
        return _blamed("perfect", reply) if isinstance(reply, Lost) else reply.error or reply.turns

    def close(self) -> None:
        """End all worker processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._conversations.clear()

    def _by_worker(self, items: Sequence[tuple[_Conversation, Callable[[], Result]]]) -> list[Result]:
        """The results in the order of the items. Items of one worker follow each other; workers work at the same time."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, (one, _) in enumerate(items):
            groups[id(one.worker)].append(index)
        results: dict[int, Result] = {}

        def work_off(indices: list[int]) -> None:
            for index in indices:
                results[index] = items[index][1]()

        if len(groups) > 1:
            futures = [self._threads.submit(work_off, indices) for indices in groups.values()]
            # All of them before an error is raised: the caller then ends conversations, and a worker serves one at a time.
            wait(futures)
            for future in futures:
                future.result()
        else:
            work_off([*range(len(items))])
        return [results[index] for index in range(len(items))]

    def _begin(self, one: _Conversation) -> Opening:
        one.worker.load(with_schemas=False)
        one.generation = one.worker.generation
        reply = self._ask(one, "begin", {"row": dict(one.row), "seed_of_row": one.seed}, Opened, MAX_OPENING_BYTES)
        one.error = _blamed("reset", reply) if isinstance(reply, Lost) else reply.error
        one.over = one.error is not None
        if isinstance(reply, Lost) or one.over:
            return Opening(error=one.error)
        one.state = reply.state
        return Opening([said.model_dump() for said in reply.messages])

    def _answer(self, one: _Conversation, text: str) -> Observation:
        turn = self._read(text)
        if one.over:
            return Observation(turn.message(), done=True, error=one.error or OVER)
        if one.worker.loaded.own_calls:
            return self._pass_on(one, turn, spoken(text))
        if turn.calls:
            return self._execute(one, turn)
        if one.worker.loaded.form == "steps":
            return self._step(one, turn, spoken(text))
        return self._finish(one, Observation(turn.message(), info=one.info))

    def _execute(self, one: _Conversation, turn: ParsedTurn) -> Observation:
        within, num, refused = self._counted(one, turn)
        messages: list[Message] = []
        for call in map(self._checker.check, within):
            if call.error is not None:
                messages.append(_said(call, error=call.error))
                continue
            message = {"name": call.name, "arguments": dict(call.arguments)}
            reply = self._ask(one, "call", message, Answered, max_bytes(1, self.config.max_answer_chars))
            if isinstance(reply, Lost):
                one.faults += 1
                reason = _blamed(call.name, reply)
                # A tool keeps nothing, so its conversation can go on. An environment is gone with its process.
                if one.worker.loaded.form != "tools" or one.faults == MAX_FAULTS:
                    return _fail(one, Observation(turn.message(), messages, calls=num, info=one.info), reason)
                messages.append(_said(call, error=reason))
            else:
                one.state = reply.state
                messages.append(_said(call, reply.text))
        return Observation(turn.message(), messages + refused, calls=num, info=one.info)

    def _pass_on(self, one: _Conversation, turn: ParsedTurn, text: str) -> Observation:
        """The step of an environment that executes its calls itself. It gets those that can be read and are within the limit."""
        within, num, beyond = self._counted(one, turn)
        refused = [_said(call, error=call.error) for call in within if call.error is not None] + beyond
        sound = tuple(call for call in within if call.error is None)
        if refused and not sound:
            # To the environment it would be a turn without a call, which ends many conversations.
            return Observation(turn.message(), refused, calls=num)
        observed = self._step(one, replace(turn, calls=sound, num_unread=0), text)
        # First, because answers of tools follow their turn; the environment may speak as a user after its own.
        return replace(observed, messages=[*refused, *observed.messages], calls=num)

    def _counted(self, one: _Conversation, turn: ParsedTurn) -> tuple[Sequence[Call], int, list[Message]]:
        """The calls of a turn within the limit of the conversation, how many there are, and the answer to those beyond it."""
        limit, num = self.config.max_tool_calls, len(turn.calls) + turn.num_unread
        allowed = max(0, limit - one.calls)
        one.calls += num
        refused = f"{num - allowed:,} calls were refused: {limit:,} calls are allowed in one conversation"
        return turn.calls[:allowed], num, [_said(Call(), error=refused)] if num > allowed else []

    def _step(self, one: _Conversation, turn: ParsedTurn, text: str) -> Observation:
        said = turn.message()
        size = max_bytes(MAX_MESSAGES, self.config.max_answer_chars)
        reply = self._ask(one, "step", {"text": text, "turn": said}, Stepped, size)
        if isinstance(reply, Lost):
            return _fail(one, Observation(said), _blamed("step", reply))
        if reply.error is not None:
            return _fail(one, Observation(said), reply.error)
        messages = [message.model_dump() for message in reply.messages]
        observed = Observation(said, messages, reward=reply.reward, info=reply.info)
        return self._finish(one, observed) if reply.done else observed

    def _finish(self, one: _Conversation, observed: Observation) -> Observation:
        reward = self._final_reward(one)
        one.over = True
        if isinstance(reward, str):
            return _fail(one, observed, reward)
        total = observed.reward if reward is None else reward + (observed.reward or 0.0)
        return replace(observed, done=True, reward=total)

    def _final_reward(self, one: _Conversation) -> float | str | None:
        """What the environment gives for the whole conversation, unless it is over; a text if it fails."""
        if one.over or not one.worker.loaded.rewards_at_end:
            return None
        reply = self._ask(one, "final", {}, Stepped, BASE_BYTES)
        return _blamed("get_reward", reply) if isinstance(reply, Lost) else reply.error or reply.reward

    def _ask(self, one: _Conversation, what: str, message: Mapping[str, Any], shape: type[Shape], size: int) -> Shape | Lost:
        """Send a request of a conversation; in a new process its environment is played up to here first."""
        seed = hashlib.sha256(f"{one.seed}:{one.num_requests}".encode()).digest()
        one.num_requests += 1
        message = {"conversation": one.number, "seed": int.from_bytes(seed[:4], "big"), **message}
        one.worker.load(with_schemas=False)
        if one.generation != one.worker.generation:
            # A tool keeps nothing between two calls, so there is nothing to play again but the beginning.
            for event in one.events[:1] if one.worker.loaded.form == "tools" else one.events:
                again = one.worker.ask(event.what, event.message, event.shape, event.max_bytes)
                if isinstance(again, Lost) or again.model_dump(exclude={"request"}) != event.reply:
                    return Lost(NOT_REPEATED)
            one.generation = one.worker.generation
        reply = one.worker.ask(what, message, shape, size)
        if not isinstance(reply, Lost):
            one.events.append(_Event(what, message, shape, size, reply.model_dump(exclude={"request"})))
        return reply


def _fail(one: _Conversation, observed: Observation, reason: str) -> Observation:
    """A fault ends the conversation, which gains nothing by it."""
    one.over, one.error = True, reason
    return replace(observed, done=True, reward=None, error=reason)


def _blamed(called: str, lost: Lost) -> str:
    return lost.reason if lost.reason == NOT_REPEATED else f"{called} {lost.reason}"


def _said(call: Call, content: str = "", *, error: str | None = None) -> Message:
    text = content if error is None else json.dumps({"error": error}, ensure_ascii=False)
    return {"role": "tool", **({"name": call.name} if call.name else {}), "content": text}
