"""`python -m grpo_tasks.policy.structure DIRECTORY`: what a base model takes, known from its config alone.

Names that `target_modules` cannot mean, and prompts with completions beyond the positions that the model has, are found here in a
second, instead of in the first update.
"""

import resource
import warnings
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_tasks.policy.adapter_targets import add_adapter, uncovered
from grpo_tasks.policy.text_tower import published_start
from grpo_tasks.processes.child import RESULT, SPEC, run_child
from schemas.errors import ConfigError, ModelError
from schemas.paths import resolve
from schemas.results.model import StructureNotes, StructureSpec

MEMORY_BYTES = 4 * 2**30
"""Memory that the model may take. Without weights the largest ones take some hundred MiB."""
OFFSET = 8
"""Rows that a table of positions may have beyond max_position_embeddings; OPT's has 2."""


def check_structure(spec: StructureSpec) -> list[str]:
    """Warnings about the model; ConfigError where the adapter or the lengths do not fit it."""
    model = empty_model(spec.path, spec.revision)
    if model is None:
        return []
    positions = check_positions(model, spec.longest)
    layers = "" if spec.lora is None else uncovered(add_adapter(model, spec.lora), spec.lora)
    return [note for note in (positions, layers) if note]


def empty_model(path: str, revision: str | None) -> PreTrainedModel | None:
    """The model on the meta device; None where its class cannot be built so. ModelError where it takes too much memory."""
    try:
        config = AutoConfig.from_pretrained(resolve(path), revision=revision)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        # Loading builds a multimodal class as well, without its weights.
        published_start(path, revision)
        return model
    except Exception as error:
        # The message is written below, when the layers that filled the memory are gone. Python and C++ say it each in its way.
        full = isinstance(error, MemoryError) or any(text in str(error) for text in ("bad_alloc", "can't allocate memory"))
    if not full:  # some classes compute with values of their weights while they are built
        return None
    raise ModelError(
        f"the model that config.json describes takes more than {MEMORY_BYTES / 2**30:g} GiB without its weights",
        place=f"model.path: {path}",
        fix="name another model, or correct its config.json",
    )


def check_positions(model: PreTrainedModel, longest: int) -> str:
    """A warning where prompt and completion together have positions that the model was not trained on; else empty.

    ConfigError where the model has a shorter table of positions, or where its angles change beyond some length.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    reach = f"prompts and completions of up to {longest:,} tokens together"
    if angles_depend_on_length(model):
        # Keys in a cache, and short rows next to a long one, would be rotated as the model rotates no row of their own.
        ropes = getattr(config, "rope_parameters", None) or {}
        # Where layers differ, each kind of layer has parameters of its own.
        kinds = [part for part in ropes.values() if isinstance(part, Mapping)] or [ropes]
        turn = min(kind.get("original_max_position_embeddings") or limit or longest for kind in kinds)
        if longest > turn:
            raise ConfigError(
                f"{reach}, and the model's rotary angles change with the length of a row beyond {turn:,} tokens",
                place="validation.max_prompt_length, rollout.max_completion_length",
                fix=f"lower them to {turn:,} tokens together",
            )
    if limit is None or longest <= limit:
        return ""
    tokens = model.get_input_embeddings()
    # Positions may be looked up in a table, learned (GPT-2, OPT) or computed once (GPT-J); rotary models have none.
    learned = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    computed = [len(buffer) for name, buffer in model.named_buffers() if "pos" in name and buffer.ndim == 2]
    if any(limit <= rows <= limit + OFFSET for rows in [*learned, *computed]):
        raise ConfigError(
            f"{reach}, and the model has a table of {limit:,} positions",
            place="validation.max_prompt_length, rollout.max_completion_length",
            fix=f"lower them to {limit:,} tokens together",
        )
    return f"{reach}, and the model was made for {limit:,} (max_position_embeddings): beyond them its answers may be worse"


def angles_depend_on_length(model: PreTrainedModel) -> bool:
    """True if the model chooses its rotary angles by the longest row, a number for which every step makes the host wait."""
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    # Where layers differ, each kind of layer has a type of its own.
    found = {kind for each in kinds for kind in (each.values() if isinstance(each, Mapping) else [each])}
    return not found.isdisjoint({"dynamic", "longrope"})


def main(directory: Path) -> None:
    """Check what the spec names and write the notes. A config may ask for any number of layers, so memory has a limit."""
    most, (_, hard) = psutil.Process().memory_info().data + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    StructureNotes(notes=check_structure(StructureSpec.load(directory / SPEC))).save(directory / RESULT)


if __name__ == "__main__":
    run_child(main)
