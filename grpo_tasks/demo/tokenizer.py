"""The demo's tokenizer: a byte-level BPE of 320 tokens, learned from the demo's own texts.

transformers picks the tokenizer class by the model's type, so a tokenizer beside a Qwen2 model comes back as Qwen2Tokenizer
whatever it was saved as: with Qwen's splitting rule, NFC normalisation and nothing but vocabulary and merges read from disk.
This one is therefore made as a Qwen2Tokenizer. The splitting rule makes every digit a token of its own; the tags are plain
text that happens to be cheap, not special tokens.
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
"""ChatML, with no system message of its own."""


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer, the same at every call."""
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
    """The first so many merges of byte-pair encoding on the demo's texts."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator(corpus(), trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def corpus() -> Iterator[str]:
    """Role names, system prompts, questions and demonstrations, as often as they occur."""
    for demonstration in draw_demonstrations(split_problems().rest, 2000, random.Random(0)):
        yield from ("system", "user", "assistant", demonstration.completion)
        yield from (message["content"] for message in chat(demonstration.problem))


def write_tokenizer(folder: Path) -> None:
    """Save the tokenizer so that `AutoTokenizer.from_pretrained(folder)` gives it back."""
    build_tokenizer().save_pretrained(folder)
