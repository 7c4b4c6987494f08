"""What a decoding step of the local engine would ask of a GPU, counted on a CPU.

Kernels are operations that are no views. They are counted on one and two layers of the real width, and scaled to 24: the
difference of the two is a layer. The buckets are those of a GPU.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from grpo_tasks.content.hashes import seed_of
