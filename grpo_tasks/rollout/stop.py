"""When a completion ends (an end token, a stop string in its decoded tail, or the length limit), and what its text is then.

Stop strings are searched for in the text that rewards will see, which has no special tokens. If a stop string contains a special
token, the search runs on the text with special tokens instead, and those before the stop string are removed afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.tokenizer import completion_text, contains_special, special_tokens, stop_token_ids
from grpo_tasks.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class StopRule:
    """Decides after each token whether a growing completion has ended: `end_ids` end it, stop_token_ids among them."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    sampling: Sampling
    special_ids: frozenset[int] = field(init=False)
    """Special tokens in the searched text; empty when no stop string contains one."""
    unseen_ids: frozenset[int] = field(init=False)
    """Special tokens that the searched text lacks."""

    def __post_init__(self) -> None:
        known = special_tokens(self.tokenizer)
        read = any(contains_special(stop, known.values()) for stop in self.sampling.stop)
        object.__setattr__(self, "special_ids", frozenset(known) if read else frozenset())
        object.__setattr__(self, "unseen_ids", frozenset() if read else frozenset(known))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int], sampling: Sampling) -> "StopRule":
        """The rule of a sampling; ConfigError where stop_token_ids names a token that the tokenizer does not have."""
        return cls(tokenizer, end_ids | stop_token_ids(tokenizer, sampling.stop_token_ids), sampling)

    @property
    def reads_special_tokens(self) -> bool:
        """True if the searched text includes special tokens; a server that searches needs the same setting."""
        return bool(self.special_ids)

    def ended(self, token_ids: Sequence[int]) -> bool:
        """True if the last token ends the completion."""
        if token_ids[-1] in self.end_ids:
            return True
        if not self.sampling.stop:
            return False
        # Decoding all tokens at every step takes quadratic time. A token of the searched text decodes to at least one byte, so a
        # stop string spans at most as many of them as it has bytes. The last token may add characters behind it, and 4 more
        # tokens complete a character that several tokens share.
        longest = max(len(stop.encode()) for stop in self.sampling.stop)
        seen = (token for token in reversed(token_ids) if token not in self.unseen_ids)
        tail = list(islice(seen, longest + 4))[::-1]
        return bool(longest) and self._stop_string(self._decoded(tail)) is not None

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion's text up to the stop string, which `include_stop_str_in_output` includes."""
        searched = self._decoded(token_ids)
        found = self._stop_string(searched)
        if found is None:
            return completion_text(self.tokenizer, token_ids)
        # What stands before it, without the special tokens in it.
        beginning, kept, at = searched[: searched.find(found)], list[str](), 0
        for index, token in enumerate(token_ids):
            if token not in self.special_ids:
                continue
            # Located by decoding up to the token, not by searching for its name: ordinary tokens may spell the same text.
            start, end = (len(self._decoded(token_ids[:count])) for count in (index, index + 1))
            if start >= len(beginning):
                break
            kept.append(beginning[at:start])
            at = end
        before = "".join([*kept, beginning[at:]])
        return before + found if self.sampling.include_stop_str_in_output else before

    def stopped_text(self, token_ids: Sequence[int]) -> str:
        """The end of the searched text, from the stop string on; empty if none ended the completion."""
        searched = self._decoded(token_ids)
        found = self._stop_string(searched)
        return "" if found is None else searched[searched.find(found) :]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return completion_text(self.tokenizer, token_ids, special=self.reads_special_tokens)

    def _stop_string(self, text: str) -> str | None:
        found = [(text.find(stop), stop) for stop in self.sampling.stop if stop in text]
        return min(found)[1] if found else None
