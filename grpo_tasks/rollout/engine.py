"""The interface of a rollout engine and its data types.

Where tools or an environment answer (conversations.py), a completion is everything after the prompt: the turns of the policy and
what was said between them. An engine samples one turn; a `Player` joins them.

A completion is truncated when its finish reason is `length`. The last token says nothing about it: a stop string also ends a
completion without an end-of-turn token.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from grpo_tasks.environments.contract import Message
from schemas.config.rollout import RolloutConfig
from schemas.metrics import QUEUE_DEPTH, REPLICA_TOKENS_PER_S, REPLICAS_SERVING, SYNC_BYTES

Ending = Literal["done", "turns", "tokens", "error"]
"""done: the environment ended it. turns, tokens: it ran out of them. error: a fault of the environment."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy: the tokens from `start` to before `end` of the completion."""

    start: int
    end: int
    text: str
    finish_reason: Literal["stop", "length"]
    message: Message
    """The turn as a message; it, `answers` and what follows are those of `Observation`."""
    answers: Sequence[Message] = ()
    reward: float | None = None
    calls: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """Calls that were answered with an error."""
        return sum(answer.get("role") == "tool" and _is_error(answer.get("content")) for answer in self.answers)

    def for_rewards(self) -> dict[str, Any]:
        """What a reward function gets of the turn."""
        said = {"text": self.text, "start": self.start, "end": self.end, "finish_reason": self.finish_reason}
        return said | {"reward": self.reward, "calls": self.calls, "errors": self.errors, "info": dict(self.info)}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that is over."""

    prompt_ids: Sequence[int]
    prompt: Sequence[Message]
    turns: Sequence[Turn]
    ending: Ending
    error: str | None = None
    """Why it ended, where that was a fault of the environment."""
    final_reward: float | None = None
    """What the environment gave for the whole of it after a limit had ended it; 0 where it gave nothing then."""

    @property
    def said(self) -> list[dict[str, Any]]:
        """All messages after the prompt."""
        return [dict(message) for turn in self.turns for message in (turn.message, *turn.answers)]

    @property
    def reward(self) -> float | None:
        """Sum of what the environment gave; None if it gave nothing."""
        given = [reward for reward in (*(turn.reward for turn in self.turns), self.final_reward) if reward is not None]
        return sum(given) if given else None

    @property
    def calls(self) -> int:
        """Calls of tools, refused ones included."""
        return sum(turn.calls for turn in self.turns)

    @property
    def errors(self) -> int:
        """Calls that were answered with an error."""
        return sum(turn.errors for turn in self.turns)

    def as_json(self) -> str:
        """The conversation as one JSON object, for tables."""
        turns = [turn.for_rewards() | {"message": turn.message, "answers": list(turn.answers)} for turn in self.turns]
        ended = {"ending": self.ending, "error": self.error, "reward": self.reward}
        shown = {"prompt": list(self.prompt), "turns": turns, **ended}
        # Text of a policy may hold halves of surrogate pairs, which UTF-8 has no form for: escapes are plain ASCII.
        return json.dumps(shown, default=str)


def _is_error(content: object) -> bool:
    if not isinstance(content, str) or not content.lstrip().startswith("{"):
        return False
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "error" in found


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """All tokens after the prompt, including the one that ended the completion (end of turn, end of a stop string)."""
    logprobs: list[float]
    """Log-probability (nats) of each token under the distribution it was drawn from: after repetition_penalty, temperature,
    top_k, top_p and min_p. The correction for the sampler divides by it. 0 where the policy did not write the token."""
    text: str
    """The decoded tokens of the policy's last turn without special tokens, except those that are part of a stop string. The stop
    string itself is included only with `include_stop_str_in_output`."""
    finish_reason: Literal["stop", "length"]
    policy_logprobs: list[float] | None = None
    """Log-probability (nats) of each token under the sampler's model at the sampling temperature alone: any difference from the
    trainer's is a mismatch. None: the engine does not report it."""
    written: list[bool] | None = None
    """`policy_mask`. None: all."""
    conversation: Conversation | None = None
    """Its turns, where tools or an environment answered."""

    @property
    def policy_mask(self) -> list[bool]:
        """For each token whether the policy wrote it."""
        return [True] * len(self.token_ids) if self.written is None else self.written

    @property
    def num_written(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.token_ids) if self.written is None else sum(self.written)

    @property
    def truncated(self) -> bool:
        """True if a limit ended the completion: its length, or the turns of its conversation."""
        return self.finish_reason == "length"

    @property
    def failed(self) -> bool:
        """True if a fault of the environment ended its conversation."""
        return self.conversation is not None and self.conversation.error is not None


def conversation_column(completions: Sequence[Completion]) -> dict[str, list[str | None]]:
    """The column `conversation` of a table, turn by turn as JSON; none when completions are one turn each."""
    played = [completion.conversation for completion in completions]
    if not any(played):
        return {}
    return {"conversation": [None if one is None else one.as_json() for one in played]}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled and when a completion ends. Temperature 0 is greedy decoding."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_completion_length: int
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    stop_token_ids: frozenset[int | str]
    """Tokens by id or by text."""
    max_batch_size: int

    @classmethod
    def of(cls, rollout: RolloutConfig, *, temperature: float | None = None) -> "Sampling":
        """The settings of the config, or with another temperature; 0 also disables top_p, top_k and min_p."""
        greedy = temperature == 0.0
        return cls(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            # The likeliest token is never excluded by these three. The penalty may make another one the likeliest.
            min_p=0.0 if greedy else rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            max_completion_length=rollout.max_completion_length,
            stop=tuple(rollout.stop),
            include_stop_str_in_output=rollout.include_stop_str_in_output,
            stop_token_ids=frozenset(rollout.stop_token_ids),
            max_batch_size=rollout.max_batch_size,
        )

    @property
    def changes_distribution(self) -> bool:
        """True if tokens are drawn from another distribution than the model's at this temperature."""
        truncated = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return truncated or self.repetition_penalty != 1.0 or self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample, with a seed of its own. Those of a group are consecutive, because vLLM seeds n completions so."""

    prompt_ids: Sequence[int]
    seed: int
    max_tokens: int | None = None
    """The most tokens of this completion, where that is less than `max_completion_length`; what a conversation has left."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What happened since the last report: metrics by the names of schemas/metrics.py, and sentences about servers."""

    figures: dict[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()

    @classmethod
    def of_ranks(cls, reports: "Sequence[EngineReport]") -> "EngineReport":
        """One report for the engines of all ranks, which have a queue each and the same servers."""
        figures: dict[str, float] = {}
        for name in dict.fromkeys(name for report in reports for name in report.figures):
            values = [report.figures[name] for report in reports if name in report.figures]
            # Rates, queues and bytes add up. Of times and ages the longest counts, of servers the fewest.
            adds_up = name in (QUEUE_DEPTH, SYNC_BYTES) or name.startswith(REPLICA_TOKENS_PER_S.partition("*")[0])
            figures[name] = sum(values) if adds_up else min(values) if name == REPLICAS_SERVING else max(values)
        return cls(figures, tuple(dict.fromkeys(event for report in reports for event in report.events)))


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples completions. An engine without processes of its own has nothing to release and nothing to report."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order. Requests with equal prompts should be neighbours: they share its computation."""

    def sync(self) -> None:
        """Load the policy's current weights; `generate` samples from them until the next `sync`."""
        return

    def sleep(self) -> None:
        """Release device memory; nothing will be generated until the next `sync`."""
        return

    def report(self) -> EngineReport:
        """Figures and events since the last report."""
        return EngineReport()

    def close(self) -> None:
        """Release what the engine holds in other processes; it is not used afterwards."""
        return


class NoEngine(RolloutEngine):
    """The engine of a stage that samples nothing."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:  # noqa: ARG002
        """Never called."""
        raise AssertionError("a stage without held-out evaluations samples nothing")


def completion_seed(*parts: int | str) -> int:
    """A 63-bit seed from parts such as (seed, stage, step, prompt id), the same in every process."""
    # Not hash(): Python salts the hash of a str differently in each process.
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
