"""When a completion ends: an end token, a stop string in its decoded tail, or the length limit; and what its text is then.

A stop string is searched for in the text that rewards will see, which holds no special tokens. Where a stop string contains a
special token the search reads all tokens instead, and the special tokens before the stop string are taken out afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from grpo_tasks.data.chat_tokens import contains_special, special_tokens
from grpo_tasks.policy.chat import completion_text
from grpo_tasks.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class StopRule:
    """Judges a growing completion after each token."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    """Tokens that end a turn, and the configured stop_token_ids."""
    sampling: Sampling
    special_ids: frozenset[int] = field(init=False)
    """Special tokens that the search reads; empty when no stop string contains one."""

    def __post_init__(self) -> None:
        known = special_tokens(self.tokenizer)
        read = any(contains_special(stop, known.values()) for stop in self.sampling.stop)
        object.__setattr__(self, "special_ids", frozenset(known) if read else frozenset())

    @property
    def reads_special_tokens(self) -> bool:
        """Whether the search reads special tokens; a server that searches has to be told."""
        return bool(self.special_ids)

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token ends the completion."""
        if token_ids[-1] in self.end_ids:
            return True
        return bool(self.sampling.stop) and self._stop_string(self._tail(token_ids)) is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion's text, cut before the stop string when it is not to be included, after it when it is."""
        searched = self._decoded(token_ids)
        found = self._stop_string(searched)
        if found is None:
            return completion_text(self.tokenizer, token_ids)
        before = self._without_special(token_ids, searched[: searched.find(found)])
        return before + found if self.sampling.include_stop_str_in_output else before

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return completion_text(self.tokenizer, token_ids, special=self.reads_special_tokens)

    def _without_special(self, token_ids: Sequence[int], beginning: str) -> str:
        """The beginning of the decoded tokens without the special tokens in it."""
        kept, at = [], 0
        for index, token in enumerate(token_ids):
            if token not in self.special_ids:
                continue
            # By where the token stands, not by what it is called: ordinary tokens may spell the same.
            start, end = (len(self._decoded(token_ids[:count])) for count in (index, index + 1))
            if start >= len(beginning):
                break
            kept.append(beginning[at:start])
            at = end
        return "".join([*kept, beginning[at:]])

    def _tail(self, token_ids: Sequence[int]) -> str:
        # A token decodes to at least one byte, so a stop string spans at most as many tokens as it has bytes; the last token may
        # bring further characters behind it, and a few more tokens keep a split character whole.
        longest = max((len(stop.encode()) for stop in self.sampling.stop), default=0)
        return self._decoded(token_ids[-(longest + 4) :]) if longest else ""

    def _stop_string(self, text: str) -> str | None:
        found = [(text.find(stop), stop) for stop in self.sampling.stop if stop in text]
        return min(found)[1] if found else None
