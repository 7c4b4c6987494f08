"""`python -P -m grpo_tasks.content.serve_model FD`: reads the files of a strange model, within the limits of limited_model.py."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_parsing.response_templates import load_response_template
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.hub import cached_file

from grpo_tasks.processes.worker_main import answer_requests

_TEXTS = [piece * 1_000 for piece in ("a", "aA", "1", " ", " a", "\n", "\t \n", "!", "é", "漢", "🙂", "a1_-")]
"""Long runs of each kind of character: a pattern that goes back and forth takes longest on these."""
_USER, _ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
_CHATS = [[_USER], [_USER, _ANSWER], [_USER, _ANSWER, _USER], [{"role": "system", "content": "Be brief."}, _USER]]


def tokenizer_class(path: str, revision: str | None) -> type[PreTrainedTokenizerBase]:
    """The class that AutoTokenizer would take, without torch, which AutoTokenizer imports."""
    file = cached_file(path, "tokenizer_config.json", revision=revision)
    named = str(json.loads(Path(str(file)).read_text(encoding="utf-8")).get("tokenizer_class") or "")
    found = getattr(transformers, named.removesuffix("Fast"), None) if named else None
    if isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast):
        return found
    return PreTrainedTokenizerFast


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of chats, as apply_chat_template gives them, and by its index why a chat is refused, whose text is empty."""
    texts, refused = [], {}
    for index, chat in enumerate(request["chats"]):
        text = ""
        try:
            messages, opened = [dict(message) for message in chat], request["opened"]
            made, _ = render_jinja_template(
                [messages], chat_template=request["template"], add_generation_prompt=opened, **request["special"]
            )
            text = str(made[0])
        except Exception as error:  # a template is a program: what it does not expect in a message can fail in any way
            refused[index] = str(error)[:300]
        texts.append(text)
    return {"texts": texts, "refused": refused}


def _check(path: str, revision: str | None) -> dict[str, str]:
    """Do what this project does with every model. Only what never ends, or takes all memory, is a fault."""
    # The process that loads the tokenizer for good says what is wrong with it.
    with suppress(Exception):
        tokenizer = tokenizer_class(path, revision).from_pretrained(path, revision=revision or "main")
        if tokenizer.response_template:
            with suppress(Exception):
                load_response_template(tokenizer.response_template)
        for text in _TEXTS:
            tokenizer.decode(tokenizer.encode(text))
        for chat in _CHATS:
            for opened in (True, False):
                with suppress(Exception):
                    tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False)
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "np") as weights:
                list(weights.keys())
        except (OSError, SafetensorError) as error:
            return {"file": str(file), "error": str(error)[:300]}
    return {}


if __name__ == "__main__":
    answer_requests({"check": lambda request: _check(request["path"], request["revision"]), "render": _render})
