"""Calibration weights: they move the probe (probe.py) by at least 1 nat, so that a sampler shows whether it takes over weights.

A new adapter is zero, so a server that ignores it answers as one that serves it. And vLLM answers 200 to an adapter whose keys
match nothing in its model (vllm issues 34186, 48019, 49354): a multimodal model holds its text layers under another name than the
text model alone. So before the first policy, each server gets weights with the very keys of the policy, and must show the
trainer's shift. Where its model has other names (`NAMINGS`), the keys are written with those; the calibration decides.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.sharded import gather_shards, shard_like
from grpo_tasks.rollout.probe import base_logps, probe_logps
from schemas.errors import ModelError

LEAST_SHIFT = 1.0
"""Mean |shift| (nats per token) of the calibration under the trainer's own forward pass."""
SMALLEST, DOUBLINGS = 2.0**-8, 20
SEED = 37
NAMINGS: tuple[str | None, ...] = (None, "model.language_model.", "language_model.model.", "model.")
"""What stands before the names of the text layers: as the trainer has it, in transformers' multimodal models, in vLLM's and in
older files of transformers, in text models."""
STARTS = ("model.language_model.", "language_model.model.", "model.")
"""The longer ones first: the last one is the beginning of the first."""
PEFT_START = "base_model.model."


@dataclass(frozen=True, slots=True)
class Shifted:
    """The probe under calibration weights, and under the base."""

    base: Float[Tensor, " T"]
    logps: Float[Tensor, " T"]

    @property
    def shift(self) -> Float[Tensor, " T"]:
        """What the weights change, in nats."""
        return self.logps - self.base


@contextmanager
def calibrated(policy: CausalLM, ids: list[int], dtype: str) -> Iterator[Shifted]:
    """The policy with calibration weights in the place of its trained ones, which come back unchanged, and its probe `ids`.

    The weights are exact in `dtype`, the sampler's precision. Collective: with sharded weights every process has to enter it.

    Raises:
        ModelError: no change of the trained weights moves the probe.
    """
    adapter = isinstance(policy, PeftModel)
    trained = {
        name: parameter.data
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad and ("lora_" in name if adapter else parameter.ndim > 1)
    }
    before = {name: values.clone() for name, values in trained.items()}
    base = base_logps(policy, ids)
    try:
        for doubling in range(DOUBLINGS):
            generator = torch.Generator(policy.device).manual_seed(SEED)
            for name, values in trained.items():
                drawn = _drawn(name, values.shape, SMALLEST * 2.0**doubling, generator)
                if not adapter:
                    # All weights: each keeps most of what it was.
                    whole = gather_shards(before[name]).float()
                    drawn = whole + whole.pow(2).mean().sqrt() * drawn
                values.copy_(shard_like(drawn.to(getattr(torch, dtype)).to(values.dtype), values))
            logps = probe_logps(policy, ids)
            if float((logps - base).abs().mean()) >= LEAST_SHIFT:
                break
        else:
            raise ModelError(
                "no weights of the adapter change what the model says: its layers take no part in a text's forward pass",
                place="model.lora.target_modules" if adapter else "model.lora",
                fix="name layers of the language model, for example [q_proj, k_proj, v_proj, o_proj]",
            )
        yield Shifted(base, logps)
    finally:
        for name, values in trained.items():
            values.copy_(before[name])


def write_like(adapter: Path, folder: Path) -> None:
    """An adapter with the keys and shapes of `adapter` and large seeded weights, for a server whose trainer is not here."""
    folder.mkdir(parents=True)
    shutil.copy(adapter / "adapter_config.json", folder)
    generator = torch.Generator().manual_seed(SEED)
    weights = load_file(adapter / "adapter_model.safetensors")
    drawn = {
        name: _drawn(name, values.shape, 1.0, generator).to(values.dtype) if "lora_" in name else values
        for name, values in weights.items()
    }
    save_file(drawn, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def rename_keys(folder: Path, start: str | None) -> None:
    """Write the weights of a folder, an adapter or a model, with names that begin with `start`, one of `NAMINGS`."""
    if start is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        renamed = {_renamed(name, start): values for name, values in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    for index in folder.glob("*.safetensors.index.json"):
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"] = {_renamed(name, start): file for name, file in listed["weight_map"].items()}
        index.write_text(json.dumps(listed), encoding="utf-8")


def likely_namings(folder: Path, served: str | None) -> list[str | None]:
    """`NAMINGS`, those first under which most weights of a folder have names of the served model (a folder, or a name)."""
    theirs = _layers(Path(served)) if served else set()
    ours = {key for file in folder.glob("*.safetensors") for key in _keys(file)}
    return sorted(NAMINGS, key=lambda start: len({_layer(_renamed(key, start)) for key in ours} - theirs))


def without_match(folder: Path, served: str | None) -> str:
    """Which keys of a folder's weights match nothing in a server's model, as a sentence; what is known where that is not."""
    theirs = _layers(Path(served)) if served else set()
    if not theirs:
        return f"Its model, {served or 'which it does not name'}, is not on this machine, so its layers are not known here."
    architectures = json.loads((Path(str(served)) / "config.json").read_text(encoding="utf-8")).get("architectures")
    architecture = (architectures or ["model"])[0]
    ours = sorted({_layer(key) for file in folder.glob("*.safetensors") for key in _keys(file)})
    missing = [name for name in ours if name not in theirs]
    if not missing:
        return f"All keys name layers of its {architecture}."
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"It serves a {architecture}, in whose files {len(missing)} of {len(ours)} keys match nothing: {shown}"


def _drawn(name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Float[Tensor, "..."]:
    """Normal numbers: A keeps the size of its input, and so does B but for the scale."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if "lora_" not in name:
        return scale * drawn
    return drawn * (scale if "B" in name.rpartition("lora_")[2].partition(".")[0] else 1.0) / shape[1] ** 0.5


def _renamed(name: str, start: str | None) -> str:
    if start is None:
        return name
    head = PEFT_START if name.startswith(PEFT_START) else ""
    rest = name.removeprefix(head)
    found = next((known for known in STARTS if rest.startswith(known)), None)
    return name if found is None else head + start + rest.removeprefix(found)


def _keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _layer(key: str) -> str:
    """The layer that a weight belongs to."""
    name = key.removeprefix(PEFT_START)
    return name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]


def _layers(model: Path) -> set[str]:
    """The layers in the files of a model, under the names that vLLM reads; none where there is no such folder."""
    if not (model / "config.json").is_file():
        return set()
    return {_layer(key) for file in model.glob("*.safetensors") for key in _keys(file)}
