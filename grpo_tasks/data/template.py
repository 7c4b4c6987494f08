"""Chat messages -> the text a tokenizer's chat template makes of them, for a column at once.

Most data sets are one shape of chat (a system message common to all rows, then a user message), and most templates put the
content in as it is. Where a template shows that it does, head and tail are rendered once and the column is put between them;
everything else goes through the template row by row. Both ways give the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
from jinja2 import TemplateError

if TYPE_CHECKING:
    # Everything that reads prompts comes through here; importing transformers takes most of a second.
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
_PLACE = "\ue000QUESTION\ue001"
_PROBES = (_PLACE, f" \n{_PLACE}\t \n", f"</think>{_PLACE}<tool_call>\n{{}}", "a", f'"{_PLACE}\\n\u00e9')
_MOST_SYSTEMS = 16
_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes before and after the user's text."""

    head: str
    tail: str


class ChatTemplate:
    """A tokenizer's chat template, with the opening of the assistant's turn."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message]) -> str | None:
        """The text of one chat; None when the template refuses it (a role it does not know, a turn out of order)."""
        chat = [dict(message) for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        except TemplateError:
            return None

    def render_column(self, messages: pl.Series) -> pl.Series:
        """Texts of a column of chats (schemas/tables.py MESSAGES); null where the template refuses or the chat is null."""
        shapes = _shapes(messages)
        texts = pl.Series("text", [None], dtype=pl.String).new_from_index(0, len(messages)).to_frame().with_row_index("at")
        parts = []
        for (plain, system), rows in shapes.partition_by("plain", "system", as_dict=True).items():
            frame = self.frame(system) if plain else None
            if frame and self._fits(frame, messages.gather(rows["at"].head(_SAMPLE)).to_list()):
                text = rows.select("at", text=pl.concat_str(pl.lit(frame.head), "user", pl.lit(frame.tail)))
            else:
                chats = messages.gather(rows["at"]).to_list()
                rendered = [None if chat is None else self.render(chat) for chat in chats]
                text = rows.select("at").with_columns(pl.Series("text", rendered, dtype=pl.String))
            parts.append(text)
        return (pl.concat(parts).sort("at") if parts else texts)["text"]

    def _fits(self, frame: Frame, chats: Sequence[Sequence[Message]]) -> bool:
        # The probes cannot know every word a template may heed; the data's own rows say the rest.
        return all(self.render(chat) == frame.head + chat[-1]["content"] + frame.tail for chat in chats)

    def frame(self, system: str | None) -> Frame | None:
        """Head and tail around a lone user message; None when the template does more with its text than putting it in."""
        rendered = [self.render(_chat(system, probe)) for probe in _PROBES]
        head, place, tail = (rendered[0] or "").partition(_PLACE)
        if not place or _PLACE in tail:
            return None
        as_expected = all(text == head + probe + tail for text, probe in zip(rendered, _PROBES, strict=True))
        return Frame(head, tail) if as_expected else None


def _chat(system: str | None, user: str) -> list[Message]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": user}]


def _shapes(messages: pl.Series) -> pl.DataFrame:
    """Columns at, plain (one user message, maybe after a system message that few rows differ in), system, user."""
    chat = pl.col("messages")
    first, last = chat.list.first().struct, chat.list.last().struct
    alone = (chat.list.len() == 1) & (last.field("role") == "user")
    led = (chat.list.len() == 2) & (first.field("role") == "system") & (last.field("role") == "user")
    shapes = messages.alias("messages").to_frame().with_row_index("at")
    shapes = shapes.select(
        "at",
        plain=(alone | led).fill_null(value=False),
        system=pl.when(led).then(first.field("content")),
        user=last.field("content"),
    )
    if shapes["system"].n_unique() > _MOST_SYSTEMS:
        shapes = shapes.with_columns(plain=pl.lit(value=False), system=pl.lit(None, pl.String))
    return shapes
