"""Whether a sampler serves this policy: the log-probabilities of a few given tokens, the probe, are compared.

    shift = probe under the policy - probe under the base       the trainer has one, and so has the sampler

A sampler that ignores the policy has a shift of 0 whatever the last version was, so it is found as soon as the trainer's own
exceeds the noise: the rounding of two forward passes, measured on the base. Noise has no direction: over T tokens it moves the
slope (1 when the sampler serves the policy) by noise / (size sqrt(T)) only, so the slope sees shifts that no single token shows.

A new adapter is zero, so a server that ignores it answers as one that serves it. And vLLM answers 200 to an adapter whose keys
match nothing in its model (vllm issues 34186, 48019, 49354): a multimodal model holds its text layers under another name than the
text model alone. So before the first policy, each server gets calibration weights with the very keys of the policy, which move
the probe by at least 1 nat, and must show the trainer's shift. Where its model has other names (`NAMINGS`), the keys are written
with those; the calibration decides.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.sharded import gather_shards, shard_like
from grpo_tasks.policy.text_tower import PEFT_START, STARTS, renamed_key
from schemas.errors import ModelError

LEAST_SHIFT = 1.0
"""Mean |shift| (nats per token) of the calibration under the trainer's own forward pass."""
SMALLEST, DOUBLINGS = 2.0**-8, 20
SEED = 37
NAMINGS: tuple[str | None, ...] = (None, *STARTS)
"""None: as the trainer has it."""
PROBE_IDS = [3 + 7 * index % 200 for index in range(128)]
"""Arbitrary token ids that every vocabulary has. The first two are the prompt of the others."""
BASE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean difference (nats per token) between the base of a sampler and the trainer's."""
LEAST_NOISE = {"float32": 1e-4, "bfloat16": 0.01, "float16": 2e-3}
"""Noise of a shift (nats, root mean square over tokens) that is assumed even where less is measured."""
CALIBRATION_SHARE = {"float32": 0.02, "bfloat16": 0.25, "float16": 0.1}
"""Share of the calibration's shift, 1 nat and more, by which a sampler's may differ beyond the noise."""
POLICY_SHARE = 0.5
"""The same for the policy's shift. A sampler that ignores the policy differs by 1."""
SIGMAS = 6.0
"""Multiple of the noise that counts as a difference: chance reaches it once in 10^9 times."""


def probe_ids(*limits: int | None) -> list[int]:
    """The probe's tokens, cut to what fits into each limit with one more token."""
    return PROBE_IDS[: max(3, min([len(PROBE_IDS), *(limit - 1 for limit in limits if limit)]))]


@torch.no_grad()
def probe_logps(model: CausalLM, ids: list[int]) -> Float[Tensor, " T"]:
    """Log-probabilities (nats) of the probe's tokens after the first two, on the CPU."""
    # Without sampling: the tokens are given, so one forward pass on each side is enough. [1, T] -> [T]
    batch = token_batch([ids[:2]], [ids[2:]], [0], device=causal_model(model).device)
    training = model.training
    model.eval()
    try:
        return completion_logprobs(model, batch, temperature=1.0, layout="plain").logps[0].float().cpu()
    finally:
        model.train(training)


def noise_of(found: Float[Tensor, " T"], wanted: Float[Tensor, " T"], dtype: str) -> float:
    """Noise (nats) of a shift, from the log-probabilities of one model on two sides: a shift is a difference of two such."""
    return max(LEAST_NOISE[dtype], math.sqrt(2.0) * _size(found - wanted))


def shift_fault(found: Float[Tensor, " T"], wanted: Float[Tensor, " T"], *, noise: float, share: float) -> str | None:
    """What is wrong with a sampler's shift (nats per token), as a clause; None: it is the trainer's, up to noise and a share."""
    size, off = _size(wanted), _size(found - wanted)
    uncertain = noise / (size * math.sqrt(len(wanted))) if size else math.inf  # standard deviation of the slope
    slope = float(found @ wanted / (wanted @ wanted)) if size else 1.0
    # A slope that chance alone can move by half says nothing.
    misses = SIGMAS * uncertain <= POLICY_SHARE and not abs(slope - 1.0) <= share + SIGMAS * uncertain
    # `not <=` also refuses a sampler that answers NaN.
    if not misses and off <= SIGMAS * noise + share * size:
        return None
    if _size(found) <= max(noise, 0.05 * size):
        return f"it shows no shift from its base, and the trainer's is {size:.3g} nats: it ignores what it loads"
    return (
        f"its shift from the base is another one: {_size(found):.3g} nats, the trainer's {size:.3g}, "
        f"and they differ by {off:.3g} (noise {noise:.2g})"
    )


def _size(values: Float[Tensor, " T"]) -> float:
    return float(values.double().pow(2).mean().sqrt())


@dataclass(frozen=True, slots=True)
class Shifted:
    """The probe (nats) under the base, and what calibration weights change in it."""

    base: Float[Tensor, " T"]
    shift: Float[Tensor, " T"]


@contextmanager
def calibrated(policy: CausalLM, ids: list[int], dtype: str) -> Iterator[Shifted]:
    """The policy with calibration weights in the place of its trained ones, which come back unchanged, and its probe `ids`.

    The weights are exact in `dtype`, the sampler's precision. Collective: with sharded weights every process has to enter it.
    `ModelError` where no change of the trained weights moves the probe.
    """
    adapter = isinstance(policy, PeftModel)
    trained = {
        name: parameter.data
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad and ("lora_" in name if adapter else parameter.ndim > 1)
    }
    before = {name: values.clone() for name, values in trained.items()}
    # Without an adapter the base is what the policy is now.
    with policy.disable_adapter() if isinstance(policy, PeftModel) else nullcontext():
        base = probe_logps(policy, ids)
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
        yield Shifted(base, logps - base)
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


def likely_namings(folder: Path, served: str | None) -> list[str | None]:
    """`NAMINGS`, those first under which most weights of a folder have names of the served model (a folder, or a name)."""
    ours, theirs = _layers(folder), _layers(Path(served)) if served else set()
    return sorted(NAMINGS, key=lambda start: len({renamed_key(layer, start) for layer in ours} - theirs))


def without_match(folder: Path, served: str | None) -> str:
    """Which keys of a folder's weights match nothing in a server's model, as a sentence; what is known where that is not."""
    theirs = _layers(Path(served)) if served else set()
    if not theirs:
        return f"Its model, {served or 'which it does not name'}, is not on this machine, so its layers are not known here."
    architectures = json.loads((Path(str(served)) / "config.json").read_text(encoding="utf-8")).get("architectures")
    architecture, ours = (architectures or ["model"])[0], _layers(folder)
    missing = sorted(ours - theirs)
    if not missing:
        return f"All keys name layers of its {architecture}."
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"It serves a {architecture}, in whose files {len(missing)} of {len(ours)} keys match nothing: {shown}"


def _drawn(name: str, shape: torch.Size, scale: float, generator: torch.Generator) -> Float[Tensor, "..."]:
    """Normal numbers: A keeps the size of its input, and B scales it."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if "lora_" not in name:
        return scale * drawn
    return drawn * (scale if "B" in name.rpartition("lora_")[2].partition(".")[0] else 1.0) / shape[1] ** 0.5


def _layers(folder: Path) -> set[str]:
    """The layers that have weights in the files of a model or an adapter; none where there is no such folder."""
    layers = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = [key.removeprefix(PEFT_START) for key in opened.keys()]  # noqa: SIM118 - not a mapping
        layers |= {name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0] for name in names}
    return layers
