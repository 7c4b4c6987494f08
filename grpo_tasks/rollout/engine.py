"""What a rollout engine is.

    generate(requests, sampling) -> completions        sync() takes over the policy's present weights

"Truncated" is the finish reason `length`, never a guess from the last token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from schemas.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: list[int]
    """All sampled tokens; the token that ended the completion (end of turn, end of a stop string) is among them."""
    logprobs: list[float]
    """log-probability (nats) of each token under the distribution it was drawn from."""
    text: str
    """Without special tokens, except those in a stop string; without the stop string when `include_stop_str_in_output` is off."""
    finish_reason: Literal["stop", "length"]

    @property
    def truncated(self) -> bool:
        """Cut off at the length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_completion_length: int
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    stop_token_ids: frozenset[int]
    max_batch_size: int

    @classmethod
    def of(cls, rollout: RolloutConfig, *, temperature: float | None = None) -> "Sampling":
        """From the config; `temperature` replaces the configured one, and 0 drops top_p and top_k with it."""
        greedy = temperature == 0.0
        return cls(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            max_completion_length=rollout.max_completion_length,
            stop=tuple(rollout.stop),
            include_stop_str_in_output=rollout.include_stop_str_in_output,
            stop_token_ids=frozenset(rollout.stop_token_ids),
            max_batch_size=rollout.max_batch_size,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. The seed belongs to the completion, so it comes out the same whatever the batch; those of a group
    count upwards."""

    prompt_ids: Sequence[int]
    seed: int


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order. Requests with equal prompts should stand side by side."""

    def sync(self) -> None:
        """Take over the weights of the policy as they are now."""

    def sleep(self) -> None:
        """No completion is wanted until the next `sync`."""

    def close(self) -> None:
        """Give back what is held elsewhere; the engine is not used afterwards."""


def completion_seed(*parts: int | str) -> int:
    """A 63-bit seed from (seed, stage, step, prompt id, index), independent of Python's hash seed."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
