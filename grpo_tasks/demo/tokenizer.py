"""The demo's tokenizer: a byte-level BPE of 320 tokens, trained on the demo's own texts.

transformers chooses the tokenizer class by the model's type. So the tokenizer of a Qwen2 model is always loaded as
Qwen2Tokenizer, with Qwen's splitting rule and NFC normalisation; only vocabulary and merges are read from disk. This one is
therefore built as a Qwen2Tokenizer. Its splitting rule makes every digit a token of its own. The tags are plain text of few
tokens, not special tokens.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from grpo_tasks.demo.arithmetic import chat, split_problems
from grpo_tasks.demo.demonstrations import draw_demonstrations

VOCAB_SIZE = 320
MAX_LENGTH = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML without a default system message."""


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; the result is the same at every call."""
    merges = learn_merges(VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    return Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate([*names, *SPECIAL_TOKENS])},
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )


def learn_merges(count: int) -> list[tuple[str, str]]:
    """The first `count` merges of byte-pair encoding on the demo's texts."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator(corpus(), trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def corpus() -> Iterator[str]:
    """Role names, system prompts, questions and demonstrations, with the frequencies of real chats."""
    for demonstration in draw_demonstrations(split_problems().rest, 2000, random.Random(0)):
        yield from ("system", "user", "assistant", demonstration.completion)
        yield from (message["content"] for message in chat(demonstration.problem))


def write_tokenizer(folder: Path) -> None:
    """Save the tokenizer so that `AutoTokenizer.from_pretrained(folder)` gives it back."""
    build_tokenizer().save_pretrained(folder)
