"""Chat messages -> text by the tokenizer's chat template -> number of tokens; and which stop strings a tokenizer can produce.

Most data sets have one shape of chat, and most templates insert the content unchanged. Where a template provably does, the text
around it is rendered once and joined to the whole column; all other chats are rendered one by one, to the same text.

No torch: AutoTokenizer imports it, so the tokenizer's class is taken from its own config, as AutoTokenizer would.
"""

from collections.abc import Sequence
from itertools import takewhile

import polars as pl
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.limited_model import check_model_files
from grpo_tasks.content.serve_model import tokenizer_class
from grpo_tasks.content.tokenizer import (
    RefusedError,
    contains_special,
    rendered_all,
    special_tokens,
    stop_token_ids,
    surroundings,
    text_ids,
)
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import resolve
from schemas.prompts import PLAIN, Message

_BATCH = 2048
_BOUND_SAMPLE = 512
_TEMPLATE_SAMPLE = 64
_MAX_SYSTEM_MESSAGES = 16
# Private-use characters mark where the content goes; the other probes have what templates are known to strip, escape or cut at.
_CONTENT = "\ue000QUESTION\ue001"
_PROBES = (_CONTENT, f" \n{_CONTENT}\t \n", f"</think>{_CONTENT}<tool_call>\n{{}}", "a", f'"{_CONTENT}\\n\u00e9')


class ChatTemplate:
    """A tokenizer's chat template, with the opening of the assistant's turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def refusal(self, messages: Sequence[Message]) -> str:
        """The template's own message about a chat that it refuses; empty otherwise."""
        [made] = rendered_all(self._tokenizer, [messages], opened=True)
        return str(made) if isinstance(made, RefusedError) else ""

    def render_all(self, chats: Sequence[Sequence[Message]]) -> list[str | None]:
        """The texts of chats; None when the template refuses one (an unknown role, a turn out of order)."""
        made = rendered_all(self._tokenizer, chats, opened=True)
        return [None if isinstance(text, RefusedError) else text for text in made]

    def render_column(self, messages: pl.Series) -> pl.Series:
        """`render_all` of a column (schemas/tables.py MESSAGES); null where the template refuses or the chat is null."""
        shapes = _shapes(messages)
        made = [shapes.select("index", text="user").clear()]
        for (plain, system), rows in shapes.partition_by("plain", "system", as_dict=True).items():
            chats = messages.gather(rows["index"])
            frame = self.frame(system) if plain else None
            text = pl.concat_str(pl.lit(frame[0]), "user", pl.lit(frame[1])) if frame else pl.lit(None, pl.String)
            found = rows.select("index", text=text)
            # A template may react to a word that no probe contains, so rows of the data are compared as well.
            sample = chats.head(_TEMPLATE_SAMPLE).to_list()
            if frame is None or self.render_all(sample) != found["text"].head(_TEMPLATE_SAMPLE).to_list():
                found = found.with_columns(pl.Series("text", self.render_all(chats.to_list()), dtype=pl.String))
            made.append(found)
        index = messages.to_frame().select(index=pl.int_range(pl.len(), dtype=pl.UInt32))
        return index.join(pl.concat(made), on="index", how="left", maintain_order="left")["text"]

    def frame(self, system: str | None) -> tuple[str, str] | None:
        """What stands before and after a single user message; None when the template does not insert its text unchanged."""
        opening = [] if system is None else [{"role": "system", "content": system}]
        rendered = self.render_all([[*opening, {"role": "user", "content": probe}] for probe in _PROBES])
        head, content, tail = (rendered[0] or "").partition(_CONTENT)
        if not content or _CONTENT in tail:
            return None
        unchanged = all(text == head + probe + tail for text, probe in zip(rendered, _PROBES, strict=True))
        return (head, tail) if unchanged else None


class TokenCounter:
    """Counts the tokens of prompts with a model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)

    @property
    def special_tokens(self) -> list[str]:
        """The tokenizer's own markers, none of which may occur in a message."""
        return list(special_tokens(self.tokenizer).values())

    def count(self, chats: Sequence[Sequence[Message]]) -> list[int]:
        """Tokens of each chat with the opening of the assistant's turn, or of a plain prompt; `ModelError` if one is refused."""
        if chats and all(len(chat) == 1 and chat[0]["role"] == PLAIN for chat in chats):
            return self._count_texts([chat[0]["content"] for chat in chats], plain=True)
        texts = self.template.render_all(chats)
        if None in texts:
            raise ModelError("the chat template refuses the messages", place=f"prompt {texts.index(None)} of the batch")
        return self._count_texts([text for text in texts if text is not None])

    def count_column(self, messages: pl.Series, *, limit: int | None = None) -> pl.Series:
        """`count` of a column, null where there is no chat or it is refused; an upper bound for rows provably within `limit`."""
        first = messages.list.first().struct
        is_plain = ((messages.list.len() == 1) & (first.field("role") == PLAIN)).fill_null(value=False)
        # A data set has one form. A single message of this role among chats is a mistake that a rule reports.
        if is_plain.any() and is_plain.sum() == messages.count():
            return self._count_column(first.field("content"), plain=True, limit=limit)
        return self._count_column(self.template.render_column(messages), plain=False, limit=limit)

    def _count_column(self, texts: pl.Series, *, plain: bool, limit: int | None) -> pl.Series:
        counts = pl.Series("prompt_tokens", [None], dtype=pl.Int64).new_from_index(0, len(texts))
        uncounted = texts.is_not_null()
        if limit is not None:
            bounds = self._upper_bounds(texts, plain=plain)
            within = (bounds <= limit).fill_null(value=False)
            counts = bounds.zip_with(within, counts).rename("prompt_tokens")
            uncounted &= ~within
        indices = uncounted.arg_true()
        exact = self._count_texts(texts.gather(indices).to_list(), plain=plain)
        return counts.scatter(indices, exact) if exact else counts

    def can_produce(self, stop: str) -> bool:
        """Whether the tokenizer can produce the string: encoding and decoding return it unchanged, without unknown tokens."""
        ids = self.tokenizer.encode(stop, add_special_tokens=False)
        # Some tokenizers use an ordinary special token as the unknown token; a stop string may still contain it.
        unknown = self.tokenizer.unk_token_id in ids and str(self.tokenizer.unk_token) not in stop
        return not unknown and self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == stop

    def check_stops(self, rollout: RolloutConfig) -> None:
        """Raise `ConfigError` for an impossible stop setting: a string that the tokenizer cannot produce, a string that would end
        completions inside a special token, a token id that does not exist."""
        for stop in rollout.stop:
            if not self.can_produce(stop):
                raise ConfigError(
                    f"the tokenizer cannot produce {stop!r}",
                    place="rollout.stop",
                    fix="choose a string of characters that the tokenizer knows",
                )
        special = self.special_tokens
        # Once a stop string contains a special token, special tokens are searched, and other strings could match inside them.
        for stop in rollout.stop if any(contains_special(one, special) for one in rollout.stop) else ():
            longer = next((token for token in special if stop in token and stop != token), None)
            if longer is not None:
                raise ConfigError(
                    f"{stop!r} is part of the special token {longer!r} and would end completions there",
                    place="rollout.stop",
                    fix="remove it, or remove the stop strings that contain special tokens",
                )
        for token_id in sorted(stop_token_ids(self.tokenizer, rollout.stop_token_ids)):
            if token_id >= len(self.tokenizer):
                raise ConfigError(
                    f"there is no token {token_id}; the vocabulary has {len(self.tokenizer)}",
                    place="rollout.stop_token_ids",
                    fix=f"choose an id from 0 to {len(self.tokenizer) - 1}",
                )

    def _count_texts(self, texts: Sequence[str], *, plain: bool = False) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            # The chat template writes the special tokens itself.
            bare = {"add_special_tokens": False, "return_attention_mask": False}
            encoded = text_ids(self.tokenizer, batch) if plain else self.tokenizer(batch, **bare)["input_ids"]
            counts.extend(len(ids) for ids in encoded)
        return counts

    def _upper_bounds(self, texts: pl.Series, *, plain: bool) -> pl.Series:
        """An upper bound of each text's tokens; null where none is proven."""
        # Every token of a byte-level or byte-fallback tokenizer stands for at least one byte, so bytes bound tokens.
        # Normalisation (NFKC) may lengthen text that is not ASCII, at most 11 times in bytes; bytes minus characters is at least
        # half of the bytes that are not ASCII, hence the factor 20.
        # The prefix that all texts share is tokenised once, up to a special token: tokenizers never merge across one.
        num_bytes = texts.str.len_bytes().cast(pl.Int64)
        extra = 0
        if plain:
            extra = len(surroundings(self.tokenizer)[0])
        elif texts.count():
            # The common prefix of the smallest and the largest text in sort order is common to all texts between them.
            pairs = zip(str(texts.min()), str(texts.max()), strict=False)
            common = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            end = max((common.rfind(token) + len(token) for token in self.special_tokens if token in common), default=0)
            extra = self._count_texts([common[:end]])[0] - len(common[:end].encode())
        bounds = num_bytes + 20 * (num_bytes - texts.str.len_chars()) + extra
        # The bound is used only if it holds for a sample: the tokenizer may be of another kind.
        sample = texts.is_not_null().arg_true().head(_BOUND_SAMPLE)
        counted = pl.Series(self._count_texts(texts.gather(sample).to_list(), plain=plain), dtype=pl.Int64)
        holds = bool((counted <= bounds.gather(sample)).all())
        return bounds if holds else bounds.new_from_index(0, 0).extend_constant(None, len(bounds))


def load_counter(model: ModelConfig, *, chats: bool = True) -> TokenCounter:
    """The token counter of a model.

    `ModelError` where the tokenizer is missing or damaged, or is needed for chats and has no chat template, or the files of a
    strange model exceed the limits.
    """
    path = resolve(model.path)
    check_model_files(model.path, model.revision)
    try:
        tokenizer = tokenizer_class(path, model.revision).from_pretrained(path, revision=model.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer cannot be loaded: {(str(error).splitlines() or [''])[0]}",
            place=f"model.path: {model.path}",
            fix="name a directory with tokenizer.json and tokenizer_config.json, a hub id, or embedded:base",
        ) from error
    if chats and not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template",
            place=f"model.path: {model.path}",
            fix="use the instruct version of the model, or give the prompts as strings (data.format: standard)",
        )
    return TokenCounter(tokenizer)


def _shapes(messages: pl.Series) -> pl.DataFrame:
    # index; plain: one user message, perhaps after one of few system messages; system; user. Null chats are out.
    chat = pl.col("messages")
    first, last = chat.list.first().struct, chat.list.last().struct
    user_only = (chat.list.len() == 1) & (last.field("role") == "user")
    with_system = (chat.list.len() == 2) & (first.field("role") == "system") & (last.field("role") == "user")
    shapes = messages.alias("messages").to_frame().with_row_index("index").drop_nulls("messages")
    shapes = shapes.select(
        "index",
        plain=user_only | with_system,
        system=pl.when(with_system).then(first.field("content")),
        user=last.field("content"),
    )
    if shapes["system"].n_unique() > _MAX_SYSTEM_MESSAGES:
        shapes = shapes.with_columns(plain=pl.lit(value=False), system=pl.lit(None, pl.String))
    return shapes
