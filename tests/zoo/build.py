"""Builds the models of the zoo: tiny, random, the same on every machine, with weights that make faults visible."""

import dataclasses
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from tests.zoo.kinds import EOS, PAD, TINY, ZOO, Changes

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPREAD = 0.15
"""Standard deviation of all matrices. Attention and gates then are far from uniform, and a lost scale moves whole nats."""


def config(kind: str, changes: Changes) -> PreTrainedConfig:
    """The config of a model type: those of the tiny sizes that it has fields for, and the changes."""
    return CONFIG_MAPPING[kind](**settings(CONFIG_MAPPING[kind], changes))


def settings(owner: type[PreTrainedConfig], changes: Changes) -> Changes:
    """Arguments of a config class; a mapping among the changes is meant for the config below that name."""
    known = {field.name for field in dataclasses.fields(owner)}
    below = {}
    for name, inner in owner.sub_configs.items():
        changed = changes.get(name, {})
        if isinstance(changed, Mapping):
            kind = CONFIG_MAPPING[changed["model_type"]] if "model_type" in changed else inner
            below[name] = settings(kind, changed) if dataclasses.is_dataclass(kind) else changed
    return {name: value for name, value in TINY.items() if name in known} | changes | below


def build(name: str) -> PreTrainedModel:
    """A model of the zoo in float32, in eval mode."""
    kind, changes = ZOO[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, changes), dtype=torch.float32)
    _spread_out(model)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model.eval()


@torch.no_grad()
def _spread_out(model: PreTrainedModel) -> None:
    """Weights of matrices large enough to matter, norms that are not 1, biases that are not 0."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, SPREAD)
        elif "dt" not in name and (name.endswith("bias") or "norm" in name or "ln_" in name):
            # Not the decay rates of recurrent layers, which are stable in a narrow range only.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def save(name: str, folder: Path) -> None:
    """Write a model of the zoo as a folder that `model.path` can name, with the embedded tokenizer."""
    model = build(name)
    model.save_pretrained(folder)
    whole = config(*ZOO[name])
    if type(whole) is not type(model.config):
        # The text model of a wrapper: folders of such models have the config of the wrapper.
        whole.save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(str(files("grpo_tasks.demo") / "base" / file), folder / file)
