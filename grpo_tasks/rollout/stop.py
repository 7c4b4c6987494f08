"""When a completion ends: an end token, a stop string in its decoded tail, or the length limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_tasks.policy.chat import completion_text
from grpo_tasks.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class StopRule:
    """Judges a growing completion after each token."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    """Tokens that end a turn, and the configured stop_token_ids."""
    sampling: Sampling

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token ends the completion."""
        if token_ids[-1] in self.end_ids:
            return True
        return bool(self.sampling.stop) and self._stop_string(self._tail(token_ids)) is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion's text, cut before the stop string when it is not to be included, after it when it is."""
        text = completion_text(self.tokenizer, token_ids)
        found = self._stop_string(text)
        if found is None:
            return text
        start = text.find(found)
        return text[: start + len(found)] if self.sampling.include_stop_str_in_output else text[:start]

    def _tail(self, token_ids: Sequence[int]) -> str:
        # A token decodes to at least one byte, so a stop string spans at most as many tokens as it has bytes; the last token may
        # bring further characters behind it, and a few more tokens keep a split character whole.
        longest = max((len(stop.encode()) for stop in self.sampling.stop), default=0)
        return completion_text(self.tokenizer, token_ids[-(longest + 4) :]) if longest else ""

    def _stop_string(self, text: str) -> str | None:
        found = [(text.find(stop), stop) for stop in self.sampling.stop if stop in text]
        return min(found)[1] if found else None
