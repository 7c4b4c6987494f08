"""The interface of a rollout engine and its data types.

Where tools or an environment answer (conversations/play.py), a completion is everything after the prompt: the turns of the policy
and what was said between them. An engine samples one turn, and `play` joins them.

A completion is truncated when its finish reason is `length`. The last token says nothing about it: a stop string also ends a
completion without an end-of-turn token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from grpo_tasks.rollout.conversations.record import Conversation
from schemas.config.rollout import RolloutConfig
from schemas.metrics import QUEUE_DEPTH, REPLICA_TOKENS_PER_S, REPLICAS_SERVING, SYNC_BYTES


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
    """For each token whether the policy wrote it. None: all."""
    conversation: Conversation | None = None
    """Its turns, where tools or an environment answered."""

    @property
    def wrote(self) -> list[bool]:
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
        """The settings of the config; `temperature` overrides the configured one, and 0 also disables top_p, top_k and min_p."""
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
    """What an engine tells about itself since the last report."""

    figures: dict[str, float] = field(default_factory=dict)
    """Metrics by the names of schemas/metrics.py."""
    events: tuple[str, ...] = ()
    """What happened to its servers, as sentences."""

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


def groups_of(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that one call to a server can answer: neighbours with equal prompts and limits, and consecutive seeds."""
    groups: list[list[Request]] = []
    for request in requests:
        last = groups[-1][-1] if groups else None
        alike = last is not None and (request.prompt_ids, request.max_tokens) == (last.prompt_ids, last.max_tokens)
        if last is not None and alike and server_seed(request) == server_seed(last) + 1:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def server_seed(request: Request) -> int:
    """The seed of a request as vLLM takes it."""
    return request.seed % 2**31


def completion_seed(*parts: int | str) -> int:
    """A 63-bit seed from parts such as (seed, stage, step, prompt id), the same in every process."""
    # Not hash(): Python salts the hash of a str differently in each process.
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
