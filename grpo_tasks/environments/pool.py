"""The environments of a rollout: which worker has which conversation, what a turn asks of it, and what follows a fault.

    turn -> calls.py: its calls -> checked against the schemas -> worker: one after the other -> a message of the role tool each
         -> no calls: the environment's step; without one the conversation is over

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
from pathlib import Path
from typing import Any, Self, TypeVar

from grpo_tasks.environments.calls import Call, Checker, ParsedTurn, call_format_of, read_turn, spoken
from grpo_tasks.environments.contract import Message, Observation, Opening
from grpo_tasks.environments.texts import MAX_MESSAGES
from grpo_tasks.environments.worker import (
    BASE_BYTES,
    MAX_OPENING_BYTES,
    MAX_PERFECT_BYTES,
    Answered,
    EnvironmentWorker,
    Final,
    Lost,
    Opened,
    Perfect,
    Stepped,
    max_bytes,
)
from grpo_tasks.processes.worker_process import Reply, Shape
from schemas.config.completion import THINK
from schemas.config.learning.interaction import InteractionConfig

MAX_FAULTS = 2
"""Calls of one conversation that may end their worker. Each costs the time limit, or the start of a process."""
NOT_REPEATED = (
    "the worker of its environment ended through another conversation, and the environment does not repeat itself by seed"
)
OVER = "the conversation is over"
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True)
class _Event:
    """A request that was answered, for a replay."""

    what: str
    message: Mapping[str, Any]
    shape: type[Reply]
    max_bytes: int
    reply: Mapping[str, Any]


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


class EnvironmentPool:
    """Implements `Environments` (contract.py) with worker processes; a context manager.

    Args:
        config: what answers the policy.
        chat_template: that of the model; it names the format of calls.
        reasoning: names of the tags around reasoning. Calls inside do not count.
        starts_inside: True if the prompt ends inside a block of the first of these tags. None: judged by the turn; see calls.py.
        folders: where the modules of tools and environments lie, after the installed ones. None: as the config says.
        log: file that receives what they print.
    """

    def __init__(
        self,
        config: InteractionConfig,
        *,
        chat_template: str = "",
        reasoning: Sequence[str] = THINK,
        starts_inside: bool | None = None,
        folders: Sequence[Path] | None = None,
        log: Path | None = None,
    ) -> None:
        self.config, self._chat_template = config, chat_template
        self._reasoning, self._starts_inside = tuple(reasoning), starts_inside
        found = config.module_dirs() if folders is None else list(folders)
        self._workers = [EnvironmentWorker(config, found, log=log) for _ in range(config.workers)]
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="environments")
        self._conversations: dict[int, _Conversation] = {}
        self._schemas: list[dict[str, Any]] | None = None
        self._read: Callable[[str], ParsedTurn] = lambda text: ParsedTurn(spoken(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools; empty if there are none. The first call starts a worker.

        Raises:
            UserError: the tools or the environment cannot be imported, or the chat template has no place for tools.
        """
        if self._schemas is None:
            schemas = self._workers[0].load(with_schemas=True)
            if schemas:
                call_format = call_format_of(self.config.call_format, self._chat_template)
                inside, tags = self._starts_inside, self._reasoning
                tools = [schema["function"]["name"] for schema in schemas]
                self._read = lambda text: read_turn(text, call_format, reasoning=tags, starts_inside=inside, tools=tools)
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
        return self._by_worker(made, lambda one: one, self._begin)

    def answer(self, turns: Sequence[tuple[int, str]]) -> list[Observation]:
        """Answer the policy's turn in each of these conversations. Different workers answer at the same time."""
        found = [(self._conversations[number], text) for number, text in turns]
        return self._by_worker(found, lambda one: one[0], lambda one: self._answer(*one))

    def end(self, conversations: Sequence[int]) -> list[float | str | None]:
        """These conversations are over. Returns the rewards of those that a limit of the rollout has ended; see contract.py."""
        found = [self._conversations.pop(number, None) for number in conversations]
        known = [one for one in found if one is not None]
        rewards = dict(zip(map(id, known), self._by_worker(known, lambda one: one, self._reward_at_limit), strict=True))
        for worker in {one.worker for one in known}:
            numbers = [one.number for one in known if one.worker is worker and one.generation == worker.generation]
            if numbers and worker.running:
                worker.ask("end", {"conversations": numbers}, Reply, BASE_BYTES)
        return [None if one is None else rewards[id(one)] for one in found]

    def perfect(self, conversation: int) -> list[str] | str | None:
        """The turns of a perfect player, by the environment's method `perfect(row)`; None if it has none, a text if it fails."""
        one = self._conversations[conversation]
        reply = self._ask(one, "perfect", {"row": dict(one.row)}, Perfect, MAX_PERFECT_BYTES)
        if isinstance(reply, Lost):
            return f"perfect {reply.reason}"
        return reply.error or reply.turns

    def close(self) -> None:
        """End all worker processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._conversations.clear()

    def _by_worker(
        self, items: Sequence[Item], of: Callable[[Item], _Conversation], work: Callable[[Item], Result]
    ) -> list[Result]:
        """The results in the order of the items. Items of one worker follow each other; workers work at the same time."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            groups[id(of(item).worker)].append(index)

        def work_off(indices: list[int]) -> list[tuple[int, Result]]:
            return [(index, work(items[index])) for index in indices]

        if len(groups) > 1:
            futures = [self._threads.submit(work_off, indices) for indices in groups.values()]
            # All of them before an error is raised: the caller goes on to end conversations, and a worker serves one at a time.
            wait(futures)
            done = [future.result() for future in futures]
        else:
            done = [*map(work_off, groups.values())]
        results = {index: result for group in done for index, result in group}
        return [results[index] for index in range(len(items))]

    def _begin(self, one: _Conversation) -> Opening:
        one.worker.load(with_schemas=False)
        one.generation = one.worker.generation
        message = {"row": dict(one.row), "seed_of_row": one.seed}
        reply = self._ask(one, "begin", message, Opened, MAX_OPENING_BYTES)
        one.error = f"reset {reply.reason}" if isinstance(reply, Lost) else reply.error
        one.over = one.error is not None
        if isinstance(reply, Lost) or one.error is not None:
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
        return self._finish(one, Observation(turn.message(), done=True, info=_info(one)))

    def _execute(self, one: _Conversation, turn: ParsedTurn) -> Observation:
        """Execute the calls of a turn in their order."""
        messages: list[Message] = []
        allowed = max(0, self.config.max_tool_calls - one.calls)
        num = len(turn.calls) + turn.num_unread
        one.calls += num
        for call in turn.calls[:allowed]:
            checked = self._checker.check(call)
            if checked.error is not None:
                messages.append(_said(call, _as_error(checked.error)))
                continue
            reply = self._call(one, call)
            if isinstance(reply, Lost):
                one.faults += 1
                reason = reply.reason if reply.reason == NOT_REPEATED else f"{call.name} {reply.reason}"
                # A tool keeps nothing, so its conversation can go on. An environment is gone with its process.
                if one.worker.loaded.form != "tools" or one.faults == MAX_FAULTS:
                    return self._fail(one, Observation(turn.message(), messages, calls=num, info=_info(one)), reason)
                messages.append(_said(call, _as_error(reason)))
            else:
                one.state = reply.state
                messages.append(_said(call, reply.text))
        messages += self._beyond(num - allowed)
        return Observation(turn.message(), messages, calls=num, info=_info(one))

    def _beyond(self, num: int) -> list[Message]:
        """The answer to calls beyond the limit."""
        limit = self.config.max_tool_calls
        refused = f"{num:,} calls were refused: {limit:,} calls are allowed in one conversation"
        return [_said(Call(), _as_error(refused))] if num > 0 else []

    def _pass_on(self, one: _Conversation, turn: ParsedTurn, text: str) -> Observation:
        """The step of an environment that executes its calls itself. It gets those that can be read and are within the limit."""
        allowed = max(0, self.config.max_tool_calls - one.calls)
        num = len(turn.calls) + turn.num_unread
        one.calls += num
        within = turn.calls[:allowed]
        refused = [_said(call, _as_error(call.error)) for call in within if call.error is not None]
        refused += self._beyond(num - allowed)
        sound = tuple(call for call in within if call.error is None)
        if refused and not sound:
            # To the environment it would be a turn without a call, which ends many conversations.
            return Observation(turn.message(), refused, calls=num)
        observed = self._step(one, replace(turn, calls=sound, num_unread=0), text)
        # First, because answers of tools follow their turn; the environment may speak as a user after its own.
        return replace(observed, messages=[*refused, *observed.messages], calls=num)

    def _call(self, one: _Conversation, call: Call) -> Answered | Lost:
        message = {"name": call.name, "arguments": dict(call.arguments)}
        return self._ask(one, "call", message, Answered, max_bytes(1, self.config.max_answer_chars))

    def _step(self, one: _Conversation, turn: ParsedTurn, text: str) -> Observation:
        size = max_bytes(MAX_MESSAGES, self.config.max_answer_chars)
        said = turn.message()
        reply = self._ask(one, "step", {"text": text, "turn": said}, Stepped, size)
        if isinstance(reply, Lost):
            reason = reply.reason if reply.reason == NOT_REPEATED else f"step {reply.reason}"
            return self._fail(one, Observation(said), reason)
        if reply.error is not None:
            return self._fail(one, Observation(said), reply.error)
        messages = [message.model_dump() for message in reply.messages]
        observed = Observation(said, messages, reply.done, reply.reward, reply.info)
        return self._finish(one, observed) if reply.done else observed

    def _finish(self, one: _Conversation, observed: Observation) -> Observation:
        """The last observation of a conversation, with what its environment gives for the whole of it."""
        reward = self._final_reward(one)
        one.over = True
        if isinstance(reward, str):
            return self._fail(one, observed, reward)
        total = observed.reward if reward is None else reward + (observed.reward or 0.0)
        return Observation(observed.turn, observed.messages, True, total, observed.info, observed.calls)

    def _fail(self, one: _Conversation, observed: Observation, reason: str) -> Observation:
        """A fault ends the conversation, which gains nothing by it."""
        one.over, one.error = True, reason
        return Observation(observed.turn, observed.messages, True, None, observed.info, observed.calls, reason)

    def _reward_at_limit(self, one: _Conversation) -> float | str | None:
        return None if one.over else self._final_reward(one)

    def _final_reward(self, one: _Conversation) -> float | str | None:
        """What the environment gives for the whole conversation; a text if it fails."""
        if not one.worker.loaded.rewards_at_end:
            return None
        reply = self._ask(one, "final", {}, Final, BASE_BYTES)
        if isinstance(reply, Lost):
            return reply.reason if reply.reason == NOT_REPEATED else f"get_reward {reply.reason}"
        return reply.error or reply.reward

    def _ask(self, one: _Conversation, what: str, message: Mapping[str, Any], shape: type[Shape], size: int) -> Shape | Lost:
        """Send a request of a conversation; in a new process its environment is played up to here first."""
        seed = hashlib.sha256(f"{one.seed}:{one.num_requests}".encode()).digest()
        one.num_requests += 1
        message = {"conversation": one.number, "seed": int.from_bytes(seed[:4], "big"), **message}
        lost = self._restore(one)
        if lost is not None:
            return lost
        reply = one.worker.ask(what, message, shape, size)
        if not isinstance(reply, Lost):
            one.events.append(_Event(what, message, shape, size, reply.model_dump(exclude={"request"})))
        return reply

    def _restore(self, one: _Conversation) -> Lost | None:
        one.worker.load(with_schemas=False)
        if one.generation == one.worker.generation:
            return None
        # A tool keeps nothing between two calls, so there is nothing to play again but the beginning.
        events = one.events[:1] if one.worker.loaded.form == "tools" else one.events
        for event in events:
            reply = one.worker.ask(event.what, event.message, event.shape, event.max_bytes)
            if isinstance(reply, Lost) or reply.model_dump(exclude={"request"}) != event.reply:
                return Lost(NOT_REPEATED)
        one.generation = one.worker.generation
        return None


def _said(call: Call, content: str) -> Message:
    return {"role": "tool", **({"name": call.name} if call.name else {}), "content": content}


def _as_error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


def _info(one: _Conversation) -> dict[str, Any]:
    return {"environment": dict(one.state)} if one.state else {}
