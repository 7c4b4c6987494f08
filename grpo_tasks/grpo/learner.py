"""The learner: micro-batches in, one optimizer step out, with the figures that are watched.

Owns model, optimizer and scheduler. The reference policy costs no second copy of the weights with LoRA: the base is the model
with its adapter off, the stage's first policy a frozen second adapter.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from grpo_tasks.grpo.losses import LossInputs, policy_loss
from grpo_tasks.grpo.microbatches import Microbatch
from grpo_tasks.grpo.schedule import make_optimizer, make_scheduler
from grpo_tasks.policy.batch import TokenBatch
from grpo_tasks.policy.load import load_base
from grpo_tasks.policy.logprobs import TokenScores, completion_logprobs
from schemas.config import ModelConfig, StageConfig
from schemas.errors import TrainingError
from schemas.results import ModelRef

REFERENCE = "reference"
SELF_CHECK_TOLERANCE = 1e-3
"""Largest mean |difference| in nats between shared-prefix and plain forward in float32; other precisions get 50 times that."""


@dataclass(slots=True)
class UpdateFigures:
    """Sums over the tokens that were trained on; `means` divides them."""

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    kl: float | None = None
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0

    def means(self) -> dict[str, float]:
        """Metrics by their names in schemas/metrics.py; those of an update that trained on nothing are left out."""
        known = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        if self.tokens == 0:
            return known
        per_token = {
            "entropy": self.entropy,
            "clip_ratio/low_mean": self.clipped_low,
            "clip_ratio/high_mean": self.clipped_high,
            "clip_ratio/region_mean": self.clipped_low + self.clipped_high,
            "sampling/sampling_logp_difference/mean": self.mismatch,
        }
        if self.kl is not None:
            per_token["kl"] = self.kl
        known["sampling/sampling_logp_difference/max"] = self.mismatch_max
        return known | {name: value / self.tokens for name, value in per_token.items()}


@dataclass(slots=True)
class Learner:
    """Trains `model`; see the module's docstring."""

    model: PreTrainedModel
    stage: StageConfig
    model_config: ModelConfig
    start: ModelRef
    temperature: float
    updates: int
    """Number of updates of the whole stage, for the learning rate's schedule."""
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    _accelerator: Accelerator = field(init=False)
    _reference: PreTrainedModel | None = field(init=False, default=None)
    _shared_prefix: bool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.stage, [p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = make_scheduler(self.stage, self.optimizer, self.updates)
        device = next(self.model.parameters()).device
        # Full fine-tuning keeps float32 weights and computes in the configured precision; adapters bring their own casts.
        half = self.model_config.lora is None and device.type == "cuda" and self.model_config.dtype != "float32"
        precision = {"bfloat16": "bf16", "float16": "fp16"}[self.model_config.dtype] if half else "no"
        self._accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
        if self.stage.beta > 0:
            self._prepare_reference(device)
        if self.model_config.gradient_checkpointing:
            self._shared_prefix = False

    def update(self, parts: Sequence[Microbatch], old_logps: Sequence[Float[Tensor, "N T"]] | None) -> UpdateFigures:
        """One optimizer step over the passes of an update.

        Args:
            parts: the micro-batches; may be empty when every group is dead.
            old_logps: for each of them the log-probabilities under the policy that sampled; None when that is the present one.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        figures = UpdateFigures(learning_rate=float(self.scheduler.get_last_lr()[0]), kl=0.0 if self.stage.beta > 0 else None)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for index, part in enumerate(parts):
            self._accumulate(part, old_logps[index] if old_logps is not None else None, figures)
        if parts:
            figures.grad_norm = self._clip()
            if not all(map(_finite, (figures.loss, figures.grad_norm))):
                raise TrainingError(
                    f"loss {figures.loss}, gradient norm {figures.grad_norm}: not finite",
                    place=f"stage {self.stage.name}",
                    mend="lower learning_rate, or use bfloat16 instead of float16",
                )
            self.optimizer.step()
        with warnings.catch_warnings():
            # torch warns when an update without any live group skips the optimizer's very first step.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            self.scheduler.step()
        return figures

    @torch.no_grad()
    def score(self, part: Microbatch) -> Float[Tensor, "N T"]:
        """log-probabilities under the present policy, without gradients."""
        return self._forward(self.model, part.tokens).logps

    def _accumulate(self, part: Microbatch, old_logps: Float[Tensor, "N T"] | None, figures: UpdateFigures) -> None:
        scores = self._forward(self.model, part.tokens)
        old = scores.logps.detach() if old_logps is None else old_logps
        inputs = LossInputs(
            logps=scores.logps,
            old_logps=old,
            ref_logps=self._reference_logps(part.tokens) if self.stage.beta > 0 else None,
            advantages=part.advantages,
            mask=part.tokens.completion_mask,
            weights=part.weights,
        )
        out = policy_loss(inputs, self.stage)
        self._accelerator.backward(out.loss)
        difference = (old - part.sampler_logps)[inputs.mask].abs()
        figures.loss += out.loss.item()
        figures.tokens += int(inputs.mask.sum())
        figures.entropy += scores.entropies.sum().item()
        figures.clipped_low += out.clipped_low.item()
        figures.clipped_high += out.clipped_high.item()
        figures.mismatch += difference.sum().item()
        figures.mismatch_max = max(figures.mismatch_max, difference.max().item())
        if figures.kl is not None:
            figures.kl += out.kl_sum.item()

    def _forward(self, model: PreTrainedModel, tokens: TokenBatch) -> TokenScores:
        if self._shared_prefix is None:
            self._shared_prefix = self._shared_equals_plain(tokens)
        with self._accelerator.autocast():
            return completion_logprobs(model, tokens, temperature=self.temperature, shared_prefix=self._shared_prefix)

    @torch.no_grad()
    def _shared_equals_plain(self, tokens: TokenBatch) -> bool:
        """First-step self-check: an architecture without an ordinary cache falls back to the plain forward, with a warning."""
        self.model.eval()
        try:
            plain = completion_logprobs(self.model, tokens, temperature=self.temperature, shared_prefix=False).logps
            shared = completion_logprobs(self.model, tokens, temperature=self.temperature, shared_prefix=True).logps
            difference = (plain - shared)[tokens.completion_mask].abs().mean().item()
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            warnings.warn(f"no shared prefix for this architecture ({error}); each prompt is encoded G times", stacklevel=2)
            return False
        finally:
            self.model.train()
        limit = SELF_CHECK_TOLERANCE * (1 if self.model_config.dtype == "float32" else 50)
        if difference > limit:
            warnings.warn(f"shared prefix is off by {difference:.2g} nats; each prompt is encoded G times", stacklevel=2)
        return difference <= limit

    def _clip(self) -> float:
        limit = self.stage.max_grad_norm or float("inf")
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), limit)
        assert norm is not None
        return float(norm)

    def _prepare_reference(self, device: torch.device) -> None:
        if not isinstance(self.model, PeftModel):
            base = ModelRef(path=self.model_config.path, revision=self.model_config.revision)
            source = base if self.stage.reference == "base" else self.start
            self._reference = load_base(source, self.model_config, device=device)
        elif self.stage.reference == "stage_start" and self.start.adapter is not None:
            self.model.load_adapter(str(self.start.adapter), adapter_name=REFERENCE, is_trainable=False)
            self.model.set_adapter("default")

    @torch.no_grad()
    def _reference_logps(self, tokens: TokenBatch) -> Float[Tensor, "N T"]:
        with self._as_reference() as model:
            return self._forward(model, tokens).logps

    @contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        if self._reference is not None:
            yield self._reference
            return
        assert isinstance(self.model, PeftModel)
        self.model.eval()
        try:
            if REFERENCE in self.model.peft_config:
                self.model.set_adapter(REFERENCE)
                yield self.model
            else:
                with self.model.disable_adapter():
                    yield self.model
        finally:
            self.model.set_adapter("default")
            self.model.train()


def _finite(value: float) -> bool:
    return math.isfinite(value)
