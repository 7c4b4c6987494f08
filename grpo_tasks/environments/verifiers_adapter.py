"""A `verifiers` environment as an environment: its prompts, its turns, its rubric as the reward.

    interaction:
      environment: grpo_tasks.environments.verifiers_adapter:VerifiersEnvironment
      settings: {id: wordle, arguments: {num_train_examples: 100}}

Its own rollout runs, from the first prompt to the stop condition; only the model behind its client is ours, a client that waits
for the pipeline's policy. `write_rows` writes its data set as rows. Needs verifiers 0.1.9, which resolves with all our pins.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_tasks.content.modules import import_object
from schemas.errors import ConfigError, UserError

PLACE = "interaction.settings"
INSTALL = "pip install 'verifiers>=0.1.9,<0.1.10'"
COLUMNS = ("answer", "info", "task", "example_id")


class VerifiersEnvironment:
    """One conversation with the environment `id`, as `verifiers.load_environment` takes it, or package.module:Class."""

    def __init__(self, id: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._environment = _load(id, json.dumps(dict(arguments or {}), sort_keys=True))
        self.schemas: list[dict[str, Any]] = [dict(one) for one in getattr(self._environment, "oai_tools", None) or []]
        """The environment executes its calls itself, so `step` receives messages; see forms.py."""
        self._model = _Model()
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:  # noqa: ARG002 - its seed is in its data
        """Start the rollout of this row, up to its first request: the messages of the prompt."""
        example = {"prompt": list(row["messages"]), "answer": "", "info": {}, "task": "default", "example_id": 0}
        example |= {name: row[name] for name in COLUMNS if row.get(name) is not None}
        rollout = self._environment.rollout(example, client=self._model, model="policy", sampling_args={})
        self._rollout = asyncio.ensure_future(rollout)
        if not await self._model.asked_before_end(self._rollout):
            _raise_error(self._rollout.result())
            raise RuntimeError("the environment ended the rollout before the first turn")
        return self._model.new_messages()

    async def step(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the environment's request with this turn, up to its next request or its end."""
        assert self._rollout is not None
        self._model.answer(turn)
        if await self._model.asked_before_end(self._rollout):
            return {"messages": self._model.new_messages()}
        state = self._rollout.result()
        _raise_error(state)
        completion = state.get("completion")
        said = completion if isinstance(completion, list) else []
        turns = [index for index, message in enumerate(said) if message["role"] == "assistant"]
        last = [_said(one) for one in said[turns[-1] + 1 :]] if turns else []
        return {"messages": last, "done": True, "info": {"stop_condition": state.get("stop_condition")}}

    async def get_reward(self) -> float:
        """What the rubric gives. A conversation that a limit of ours has ended counts as one whose context is full."""
        assert self._rollout is not None
        if not self._rollout.done():
            self._model.refuse()
        state = await self._rollout
        _raise_error(state)
        # Of a group of one: score_rollout refuses an environment whose rubric only measures.
        await self._environment.rubric.score_group([state], score_sem=contextlib.nullcontext())
        return float(state["reward"])

    def close(self) -> None:
        """Give up a rollout that still waits."""
        if self._rollout is not None:
            self._rollout.cancel()


def write_rows(id: str, path: Path, *, num: int = -1, seed: int | None = None, arguments: Mapping[str, Any] | None = None) -> int:
    """Write `num` (-1: all) training rows of a verifiers environment as JSON lines, shuffled if there is a seed; how many."""
    data = _load(id, json.dumps(dict(arguments or {}), sort_keys=True)).get_dataset(n=num, seed=seed)
    with path.open("w", encoding="utf-8") as file:
        for row in data:
            columns = {name: row[name] for name in COLUMNS if row.get(name) is not None}
            # Rows of one column may differ in their keys, which a table does not hold; as text they may.
            columns |= {"info": json.dumps(columns["info"])} if isinstance(columns.get("info"), Mapping) else {}
            messages = [{key: value for key, value in message.items() if value is not None} for message in row["prompt"]]
            file.write(json.dumps({"messages": messages} | columns, ensure_ascii=False) + "\n")
    return len(data)


class _Model:
    """The client of a rollout: a request waits until the policy has answered."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._waiting: asyncio.Future[Any] | None = None
        self._asked = asyncio.Event()
        self._messages: list[dict[str, Any]] = []
        self._known: list[dict[str, Any]] = []
        """The messages of the request before."""
        self._num_answers = 0

    async def asked_before_end(self, rollout: "asyncio.Task[Any]") -> bool:
        """Wait for the next request or the end of the rollout; True for a request."""
        asked = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait({asked, rollout}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return not rollout.done()

    def new_messages(self) -> list[dict[str, Any]]:
        """What has been said since the policy's last turn."""
        start = len(self._known) + 1 if self._known else 0
        if [_said(one) for one in self._messages[: len(self._known)]] != [_said(one) for one in self._known]:
            raise RuntimeError("the environment rewrites the messages before a turn, and only what is appended can be trained on")
        self._known = self._messages
        return [_said(one) for one in self._messages[start:]]

    def answer(self, turn: Mapping[str, Any]) -> None:
        """Give the policy's turn as the model's answer."""
        from openai.types.chat import ChatCompletion

        calls = [
            {
                "id": f"call_{self._num_answers}_{index}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for index, call in enumerate(turn.get("tool_calls", []))
        ]
        message = {"role": "assistant", "content": turn["content"]} | ({"tool_calls": calls} if calls else {})
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        fields = {"id": f"turn_{self._num_answers}", "created": 0, "model": "policy", "object": "chat.completion"}
        self._num_answers += 1
        self._release().set_result(ChatCompletion.model_validate(fields | {"choices": [choice]}))

    def refuse(self) -> None:
        """End the rollout as an endpoint does whose context is full."""
        import httpx
        from openai import BadRequestError

        text = "this model's maximum context length is reached"
        # Releases of openai differ in the library whose response they name; they read its status and headers only.
        response: Any = httpx.Response(400, text=text, request=httpx.Request("POST", "http://policy"))
        self._release().set_exception(BadRequestError(text, response=response, body=None))

    async def _create(self, *, messages: Sequence[Mapping[str, Any]], **_: Any) -> Any:
        self._messages = [dict(one) for one in messages]
        self._waiting = asyncio.get_running_loop().create_future()
        self._asked.set()
        return await self._waiting

    def _release(self) -> "asyncio.Future[Any]":
        assert self._waiting is not None, "the environment does not wait for a turn"
        waiting, self._waiting = self._waiting, None
        self._asked.clear()
        return waiting


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message.get("content") or ""}


def _raise_error(state: Mapping[str, Any]) -> None:
    error = state.get("error")
    if isinstance(error, BaseException):
        raise RuntimeError(f"{type(error).__name__}: {error.__cause__ or error}") from error


@lru_cache(maxsize=8)
def _load(name: str, arguments: str) -> Any:
    """The environment; it keeps nothing between rollouts, so that conversations share it."""
    given = json.loads(arguments)
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(f"verifiers cannot be imported: {error}", place=PLACE, fix=INSTALL) from error
    load = getattr(verifiers, "load_environment", None)
    if load is None or not hasattr(verifiers, "MultiTurnEnv"):
        version = getattr(verifiers, "__version__", "")
        raise ConfigError(f"verifiers {version} has no load_environment, which this adapter needs", place=PLACE, fix=INSTALL)
    try:
        found = import_object(name, [Path.cwd()], place=PLACE)(**given) if ":" in name else load(name, **given)
    except UserError:
        raise
    except Exception as error:
        fix = "install its package, name it as verifiers.load_environment does, and check its arguments"
        raise ConfigError(f"{name} cannot be loaded: {type(error).__name__}: {error}", place=PLACE, fix=fix) from error
    for rubric in [found.rubric, *getattr(found.rubric, "rubrics", [])]:
        if "rubrics" not in vars(rubric) and (groups := rubric._get_group_reward_funcs()):
            message = f"{name} compares the conversations of a group in {groups[0].__name__}, and each is scored alone here"
            raise ConfigError(message, place=PLACE, fix="use an environment whose rubric scores single rollouts")
    return found
