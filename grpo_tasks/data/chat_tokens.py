"""How many tokens a prompt is after the chat template, and which stop strings a tokenizer can write; without torch.

The tokenizer is loaded by the class its own config names, as AutoTokenizer would, but AutoTokenizer imports torch.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from grpo_tasks.data.template import ChatTemplate, Message
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import resolve

_SAMPLE = 512
_BATCH = 2048


class TokenCounter:
    """Counts prompts with a model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)

    @property
    def special_tokens(self) -> list[str]:
        """The tokenizer's own markers; none of them belongs inside a message."""
        return list(special_tokens(self.tokenizer).values())

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self.tokenizer)

    def count(self, chats: Sequence[Sequence[Message]]) -> list[int]:
        """Tokens of each chat and the opening of the assistant's turn; raises `ModelError` when the template refuses one."""
        texts = [self.template.render(chat) for chat in chats]
        if None in texts:
            raise ModelError("the chat template refuses the messages", place=f"prompt {texts.index(None)} of the batch")
        return self._count_texts([text for text in texts if text is not None])

    def count_column(self, messages: pl.Series, *, within: int | None = None) -> pl.Series:
        """Tokens of each chat of a column; null where the template refuses it or the chat is null.

        Args:
            messages: column of schemas/tables.py MESSAGES.
            within: a limit in tokens; rows that provably keep it get an upper bound not above it instead of an exact count.
        """
        texts = self.template.render_column(messages)
        counts = pl.Series("prompt_tokens", [None], dtype=pl.Int64).new_from_index(0, len(texts))
        open_rows = texts.is_not_null()
        if within is not None:
            bounds = self._bounds(texts)
            proven = (bounds <= within).fill_null(value=False)
            counts = bounds.zip_with(proven, counts).rename("prompt_tokens")
            open_rows &= ~proven
        places = open_rows.arg_true()
        exact = self._count_texts(texts.gather(places).to_list())
        return counts.scatter(places, exact) if exact else counts

    def can_produce(self, stop: str) -> bool:
        """Whether the tokenizer can write the string: encoded and decoded it is itself again, without unknown tokens."""
        ids = self.tokenizer.encode(stop, add_special_tokens=False)
        # Some tokenizers name an ordinary special token as their unknown one; asked for by name it is known.
        unknown = self.tokenizer.unk_token_id in ids and str(self.tokenizer.unk_token) not in stop
        return not unknown and self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == stop

    def check_stops(self, rollout: RolloutConfig) -> None:
        """Raise `ConfigError` for a stop string that the tokenizer cannot produce or that would end completions inside a special
        token, and for a stop token id that does not exist."""
        for stop in rollout.stop:
            if not self.can_produce(stop):
                raise ConfigError(
                    f"the tokenizer cannot produce {stop!r}",
                    place="rollout.stop",
                    fix="choose a string made of characters it knows",
                )
        self._check_parts(rollout.stop)
        for token_id in rollout.stop_token_ids:
            if token_id >= self.vocab_size:
                raise ConfigError(
                    f"there is no token {token_id}; the vocabulary has {self.vocab_size}",
                    place="rollout.stop_token_ids",
                    fix=f"an id from 0 to {self.vocab_size - 1}",
                )

    def _check_parts(self, stops: Sequence[str]) -> None:
        """The search reads special tokens when a stop string contains one, and would find other stop strings inside them."""
        special = self.special_tokens
        if not any(contains_special(stop, special) for stop in stops):
            return
        for stop in stops:
            around = next((token for token in special if stop in token and stop != token), None)
            if around is not None:
                raise ConfigError(
                    f"{stop!r} is part of the special token {around!r}, and would end completions there",
                    place="rollout.stop",
                    fix="leave it out, or the stop strings that contain special tokens",
                )

    def _count_texts(self, texts: Sequence[str]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(texts), _BATCH):
            batch = self.tokenizer(list(texts[start : start + _BATCH]), add_special_tokens=False, return_attention_mask=False)
            counts.extend(len(ids) for ids in batch["input_ids"])
        return counts

    def _bounds(self, texts: pl.Series) -> pl.Series:
        """Numbers of tokens that no text can exceed; null where nothing is proven."""
        # Every token of a byte-level or byte-fallback tokenizer stands for at least one byte. The common beginning is counted
        # once, up to a special token: nothing is merged across one. Beyond ASCII normalisation may lengthen a text, in bytes 11
        # times at most (NFKC); bytes minus characters is at least half of the bytes beyond ASCII.
        num_bytes = texts.str.len_bytes().cast(pl.Int64)
        bounds = num_bytes + 20 * (num_bytes - texts.str.len_chars()) - self._saved(texts)
        # Whether this tokenizer is of that kind is not taken on trust.
        sample = texts.is_not_null().arg_true().head(_SAMPLE)
        counted = pl.Series(self._count_texts(texts.gather(sample).to_list()), dtype=pl.Int64)
        holds = bool((counted <= bounds.gather(sample)).all())
        return bounds if holds else bounds.new_from_index(0, 0).extend_constant(None, len(bounds))

    def _saved(self, texts: pl.Series) -> int:
        """Bytes minus tokens of the longest common beginning that ends with a special token."""
        if not texts.count():
            return 0
        common = _common_beginning(str(texts.min()), str(texts.max()))
        end = max((common.rfind(mark) + len(mark) for mark in self.special_tokens if mark in common), default=0)
        return len(common[:end].encode()) - self._count_texts([common[:end]])[0]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """What decoding without special tokens leaves out, by token id."""
    # Not all_special_tokens: those are the ones with a role, and adding one by add_special_tokens drops others from that list.
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def contains_special(text: str, special: Iterable[str]) -> bool:
    """Whether one of the special tokens stands in the text."""
    return any(token in text for token in special)


def load_counter(model: ModelConfig) -> TokenCounter:
    """The counter of a model's tokenizer.

    Raises:
        ModelError: no tokenizer there, or one without a chat template.
    """
    path = resolve(model.path)
    try:
        tokenizer = _tokenizer_class(path, model.revision).from_pretrained(path, revision=model.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"no tokenizer can be loaded: {(str(error).splitlines() or [''])[0]}",
            place=f"model.path: {model.path}",
            fix="a directory with tokenizer.json and tokenizer_config.json, a hub id, or embedded:base",
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template", place=f"model.path: {model.path}", fix="use the instruct version of the model"
        )
    return TokenCounter(tokenizer)


def _tokenizer_class(path: str, revision: str | None) -> type[PreTrainedTokenizerBase]:
    file = cached_file(path, "tokenizer_config.json", revision=revision)
    named = str(json.loads(Path(str(file)).read_text(encoding="utf-8")).get("tokenizer_class") or "")
    found = getattr(transformers, named.removesuffix("Fast"), None) if named else None
    if isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast):
        return found
    return PreTrainedTokenizerFast


def _common_beginning(one: str, other: str) -> str:
    differs = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:differs]
