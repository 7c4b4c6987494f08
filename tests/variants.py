"""The embedded model with another tokenizer, chat template or end token: folders that tests give to a run as its base."""

import json
import shutil
from pathlib import Path

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from schemas.paths import resolve

BASE = Path(resolve("embedded:base"))
TEMPLATE = (BASE / "chat_template.jinja").read_text()
BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

NO_SYSTEM = "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
"""Refuses the system role, as Gemma's does."""
NO_OPENING = TEMPLATE.split("{%- if add_generation_prompt")[0]
"""Opens no turn for the assistant."""
NO_END = TEMPLATE.replace(f"+ '{END}\n'", "+ '\n\n'").replace(END, "")
"""Ends a turn with an empty line."""


def variant(
    folder: Path,
    *,
    before: tuple[str, ...] = (),
    behind: tuple[str, ...] = (),
    template: str | None = TEMPLATE,
    eos: str | None = END,
    bos: str | None = None,
    generation_eos: object = "eos",
) -> Path:
    """The embedded model in a folder of its own.

    Args:
        folder: a new folder.
        before: special tokens that the tokenizer writes before any text.
        behind: and behind it.
        template: the chat template.
        eos: the tokenizer's EOS token.
        bos: its BOS token, by name; `before` says whether it is written.
        generation_eos: end tokens of the generation config and of config.json, by id; "eos" takes the tokenizer's.
    """
    shutil.copytree(BASE, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (BOS, START, END)}
    if before or behind:
        single = [*before, "$A", *behind]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*ids.items()])
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template = eos, bos, template
    # As in a tokenizer whose EOS is another one, both markers stay special tokens.
    tokenizer.add_special_tokens({"extra_special_tokens": [START, END]}, replace_extra_special_tokens=False)
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    number = ids[eos] if generation_eos == "eos" and eos else None if generation_eos == "eos" else generation_eos
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": number}))
    return folder
