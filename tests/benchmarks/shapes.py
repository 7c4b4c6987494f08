"""Models of known shapes with random weights: for speed and memory the numbers in them do not matter."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_tasks.policy.load import load_tokenizer
from schemas.results.model import ModelRef

SHAPES = {
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}

_HYBRID = {
    "vocab_size": 248_320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
_SMALL = _HYBRID | {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _SMALL | {"hidden_size": 1024, "intermediate_size": 3584},
    "qwen3.5-2b": _SMALL | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3.5-4b": _HYBRID | {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
}  # fmt: skip
"""Text towers of multimodal checkpoints."""
PERIOD = 4
"""Of their layers: three of Gated DeltaNet, one of attention."""


@contextmanager
def random_model(shape: str) -> Iterator[str]:
    """Directory of a bfloat16 model of that shape, with the embedded tokenizer beside it."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        load_tokenizer(ModelRef(path="embedded:base")).save_pretrained(folder)
        yield folder
