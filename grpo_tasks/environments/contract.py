"""What a conversation asks of its environment, in messages. Tokens are the business of the rollout.

Tools are an environment too: its step executes the calls of a turn and answers each as a message of the role `tool`. A turn
without a call ends the conversation. A fault of a tool is an answer of the tool. A fault of an environment ends the conversation
with `error`, and the conversation never gains by it (rewards/suite.py `charge_faults`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from schemas.config.rollout import RolloutConfig
from schemas.prompts import PromptRow

Message = Mapping[str, Any]
"""A chat message: role and content, and what else a template knows, such as tool_calls and name."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins."""

    messages: Sequence[Message] = ()
    """The prompt. Empty: the messages of the row as they stand."""
    error: str | None = None
    """Why it cannot begin."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What follows a turn of the policy."""

    turn: Message
    """The policy's turn as a message: role assistant, its text, and its calls as they were understood. For rewards and tables:
    the tokens that go on are those that were sampled."""
    messages: Sequence[Message] = ()
    """What is said before the policy's next turn: roles tool and user."""
    done: bool = False
    """True: the conversation is over, and `messages` are its last words."""
    reward: float | None = None
    """What the environment gives for this turn. None: nothing."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else it tells, as JSON values; for tables."""
    calls: int = 0
    """Calls of tools in this turn, refused ones included."""
    error: str | None = None
    """A fault of the environment, or a limit that ended the conversation."""


@runtime_checkable
class Environments(Protocol):
    """The environments of a rollout's conversations, each conversation with one of its own."""

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, as `apply_chat_template(tools=...)` takes them. Empty: there are none."""
        ...

    def begin(self, conversations: Sequence[tuple[int, Mapping[str, Any], int]]) -> list[Opening]:
        """Start these conversations: number, columns of the row, seed. `messages` are among the columns."""
        ...

    def answer(self, turns: Sequence[tuple[int, str]]) -> list[Observation]:
        """Answer the policy's turn in each of these conversations; the text includes special tokens of the tool calls."""
        ...

    def end(self, conversations: Sequence[int]) -> list[float | str | None]:
        """These conversations are over, by whatever cause.

        Returns what an environment gives for the whole conversation, of those that a limit of the rollout has ended, on top of
        the rewards of the turns. None: there is none, or the last observation had it already. A text: the fault by which it could
        not give one.
        """
        ...

    def close(self) -> None:
        """End all worker processes."""
        ...


def with_tools(rollout: RolloutConfig, schemas: Sequence[Mapping[str, Any]]) -> RolloutConfig:
    """The section `rollout` whose chat template shows these tools in every prompt; for this process, not for a file."""
    if not schemas:
        return rollout
    values = {**rollout.chat_template_kwargs, "tools": [dict(schema) for schema in schemas]}
    return rollout.model_copy(update={"chat_template_kwargs": values})


def row_columns(row: PromptRow) -> dict[str, Any]:
    """What an environment gets of a row: its columns, by their names."""
    own = {"messages": [dict(message) for message in row.messages], "answer": row.given_answer}
    return {**row.extra, **own, **({"task": row.task} if row.task else {})}


def too_long(num_tokens: int, limit: int) -> str:
    """The fault of an environment whose prompt has more tokens than are allowed."""
    return f"reset begins with a prompt of {num_tokens:,} tokens, and {limit:,} are the limit (interaction.max_prompt_tokens)"
