"""The interface of a rollout engine and its data types.

    generate(requests, sampling) -> completions        sync() -> the engine samples from the policy's current weights

A completion is truncated when its finish reason is `length`. The last token says nothing about it: a stop string also ends a
completion without an end-of-turn token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from schemas.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """All sampled tokens, including the one that ended the completion (end of turn, end of a stop string)."""
    logprobs: list[float]
    """Log-probability (nats) of each token under the distribution it was drawn from: after repetition_penalty, temperature,
    top_k, top_p and min_p. The correction for the sampler divides by this probability, as TRL's does."""
    text: str
    """The decoded tokens without special tokens, except those that are part of a stop string. The stop string itself is included
    only with `include_stop_str_in_output`."""
    finish_reason: Literal["stop", "length"]
    policy_logprobs: list[float] | None = None
    """Log-probability (nats) of each token under the sampler's model at the sampling temperature alone. The trainer computes the
    same, so any difference is a mismatch between the two; `logprobs` would differ by design whenever top_k, top_p, min_p or
    repetition_penalty change the distribution. None: the engine does not report it."""

    @property
    def truncated(self) -> bool:
        """True if the length limit ended the completion."""
        return self.finish_reason == "length"


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
    """One completion to sample.

    The seed belongs to the completion, so the result does not depend on the batch it is sampled in. The seeds of a group are
    consecutive numbers, because vLLM seeds the n completions of a request so.
    """

    prompt_ids: Sequence[int]
    """Token ids of the prompt."""
    seed: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine tells about itself since the last report."""

    figures: dict[str, float] = field(default_factory=dict)
    """Metrics by the names of schemas/metrics.py."""
    events: tuple[str, ...] = ()
    """What happened to its servers, as sentences."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples completions."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order. Requests with equal prompts should be neighbours: they share its computation."""

    def sync(self) -> None:
        """Load the policy's current weights; `generate` samples from them until the next `sync`."""

    def sleep(self) -> None:
        """Release device memory; nothing will be generated until the next `sync`."""

    def report(self) -> EngineReport:
        """Figures and events since the last report."""

    def close(self) -> None:
        """Release what the engine holds in other processes; it is not used afterwards."""


def completion_seed(*parts: int | str) -> int:
    """A 63-bit seed from parts such as (seed, stage, step, prompt id), the same in every process."""
    # Not hash(): Python salts the hash of a str differently in each process.
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
