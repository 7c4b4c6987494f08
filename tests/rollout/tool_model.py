"""The embedded model as one that can call tools: calls are tokens that come up like digits, and its template shows tools."""

import json
from pathlib import Path

import torch

from grpo_tasks.policy.load import load_base, load_tokenizer
from schemas.config.model import ModelConfig
from schemas.results.model import ModelRef
from tests.demo.build import CHAT_TEMPLATE

TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''
SHOWS = (
    "{%- if tools %}{{- '<|im_start|>system\\nCalls: <tool_call>JSON</tool_call>\\n' -}}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n' -}}{% endfor %}{{- '<|im_end|>\\n' -}}{% endif -%}"
)
"""What the template writes before a chat, as Qwen's does."""


def written_call(a: int, b: int) -> str:
    """A call of `add` as the model writes it."""
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>"


CALL = written_call(1, 2)
CALLS = {"1": CALL, "2": written_call(20, 30), "0": '<tool_call>{"name": "add"}</tool_call>'}
"""Calls by the digit as which each of them comes up; the last one lacks its arguments."""


def write_model(folder: Path, *, opening: str = "", before: str = "", weights: bool = False) -> Path:
    """Write the tokenizer of the model, with its weights if they are wanted. Returns the folder.

    Args:
        folder: receives the files.
        opening: what the template writes at the beginning of each turn of the policy.
        before: part of the template that stands before everything.
        weights: whether to write the model too.
    """
    base = ModelRef(path="embedded:base")
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(list(CALLS.values()))
    turn = "<|im_start|>assistant\\n"
    assert CHAT_TEMPLATE.count(turn) == 1
    begun = turn + opening.replace("\n", "\\n")
    tokenizer.chat_template = before + SHOWS + CHAT_TEMPLATE.replace(turn, begun)
    tokenizer.save_pretrained(folder)
    if weights:
        model = load_base(base, ModelConfig(), device=torch.device("cpu"))
        embedded = model.resize_token_embeddings(len(tokenizer), mean_resizing=False).weight
        with torch.no_grad():
            for digit, call in CALLS.items():
                # A little less, because of equal scores the order of additions would choose.
                embedded[tokenizer.convert_tokens_to_ids(call)] = 0.97 * embedded[tokenizer.convert_tokens_to_ids(digit)]
        model.save_pretrained(folder)
    return folder
