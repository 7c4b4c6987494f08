"""The learner: micro-batches in, one optimizer step out, with the figures that are watched.

    forward -> loss -> backward, pass by pass -> sum over the processes -> (unscale) -> clip -> optimizer

Owns model, optimizer and scheduler. The reference policy costs no second copy of the weights with LoRA: the base is the model
with its adapter off, the stage's first policy a frozen second adapter.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from grpo_tasks.grpo.losses import LossInputs, entropy_threshold, k3, policy_loss, sampling_correction
from grpo_tasks.grpo.microbatches import Microbatch
from grpo_tasks.grpo.ranks import Processes
from grpo_tasks.grpo.schedule import make_optimizer, make_scheduler
from grpo_tasks.policy.batch import TokenBatch
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import compile_layers, load_base
from grpo_tasks.policy.logprobs import Layout, TokenScores, completion_logprobs
from grpo_tasks.policy.sharded import gather_shards, shard
from grpo_tasks.policy.shared_prompt_attention import UnsupportedError
from schemas.config.model import ModelConfig
from schemas.config.stage import StageConfig
from schemas.errors import NotFiniteError, TrainingError
from schemas.results import ModelRef

REFERENCE = "reference"
MAX_LOG_RATIO = 50.0
"""Larger ones are reported as this: e^50 says enough, e^1000 is no number."""
SELF_CHECK_TOLERANCE = 1e-3
"""Largest mean |difference| in nats between a shared and the plain layout in float32; other precisions get 50 times that."""


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
    mismatch_kl: float = 0.0
    mismatch_max: float = 0.0
    correction: float | None = None
    loss_scale: float | None = None
    """What the loss was multiplied by; None: nothing."""
    skipped: bool = False
    """The scaled gradient overflowed and no step was made."""

    def over(self, processes: Processes) -> "UpdateFigures":
        """Of all processes together: sums of the sums, the largest of the largest, the rest is the same everywhere."""
        if processes.count == 1:
            return self
        everyone = processes.everyone(self)
        summed = ("loss", "tokens", "entropy", "kl", "clipped_low", "clipped_high", "mismatch", "mismatch_kl", "correction")
        known = {name: [getattr(one, name) for one in everyone] for name in summed}
        sums: dict[str, Any] = {name: None if None in values else sum(values) for name, values in known.items()}
        return replace(self, **sums, mismatch_max=max(one.mismatch_max for one in everyone))

    def means(self) -> dict[str, float]:
        """Metrics by their names in schemas/metrics.py; those of an update that trained on nothing are left out."""
        known = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        if self.loss_scale is not None:
            known |= {"loss_scale": self.loss_scale, "skipped_step": float(self.skipped)}
        if self.skipped:
            del known["grad_norm"]  # it is not finite
        if self.tokens == 0:
            return known
        per_token = {
            "entropy": self.entropy,
            "clip_ratio/low_mean": self.clipped_low,
            "clip_ratio/high_mean": self.clipped_high,
            "clip_ratio/region_mean": self.clipped_low + self.clipped_high,
            "sampling/sampling_logp_difference/mean": self.mismatch,
            "sampling/kl": self.mismatch_kl,
        }
        if self.kl is not None:
            per_token["kl"] = self.kl
        if self.correction is not None:
            per_token["sampling/importance_sampling_ratio/mean"] = self.correction
        known["sampling/sampling_logp_difference/max"] = self.mismatch_max
        known["sampling/importance_sampling_ratio/max"] = math.exp(min(self.mismatch_max, MAX_LOG_RATIO))
        return known | {name: value / self.tokens for name, value in per_token.items()}


@dataclass(slots=True)
class Learner:
    """Trains `model`; see the module's docstring."""

    model: CausalLM
    stage: StageConfig
    model_config: ModelConfig
    start: ModelRef
    temperature: float
    updates: int
    """Number of updates of the whole stage, for the learning rate's schedule."""
    processes: Processes
    share_prompts: bool = True
    """Encode the prompt of a group once."""
    sharded: bool = False
    """Spread weights, gradients and optimizer state over the processes."""
    compiled: bool = False
    """Compile the layers."""
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    _trained: list[torch.nn.Parameter] = field(init=False)
    _adapted: list[BaseTunerLayer] = field(init=False)
    _reference: CausalLM | None = field(init=False, default=None)
    _layout: Layout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # At beta 0 the KL is only looked at: a whole second model is too dear for that, an adapter is not.
        if self.stage.beta > 0 or (self.stage.kl_every_steps > 0 and self.measures_kl):
            self._prepare_reference(next(self.model.parameters()).device)
        for model in (self.model, self._reference):
            if model is not None and self.compiled:
                compile_layers(model)
            if model is not None and self.sharded:
                shard(model)
        # Found once: walking through all modules at every update costs as much as a layer of the small model.
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._adapted = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        self.optimizer = make_optimizer(self.stage, self._trained)
        self.scheduler = make_scheduler(self.stage, self.optimizer, self.updates)
        if self.scaler is not None:
            # Its scale is made at its first use, which a process without a live group would not come to.
            self.scaler.scale(torch.zeros((), device=self._trained[0].device))
        if self.model_config.gradient_checkpointing or not self.share_prompts or self.sharded:
            self._layout = "plain"

    @property
    def scaler(self) -> "torch.amp.GradScaler | None":
        """What keeps gradients in float16 from becoming 0."""
        return self.processes.accelerator.scaler

    @property
    def measures_kl(self) -> bool:
        """Whether there is a reference policy to measure the KL from at beta 0."""
        return isinstance(self.model, PeftModel)

    def update(
        self, parts: Sequence[Microbatch], old_logps: Sequence[Float[Tensor, "_ _"]] | None, *, measure_kl: bool = False
    ) -> UpdateFigures:
        """One optimizer step over the passes of an update.

        Args:
            parts: the micro-batches; may be empty when every group is dead.
            old_logps: for each of them the log-probabilities under the policy that sampled; None when that is the present one.
            measure_kl: measure the KL although beta is 0.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        rate = float(self.optimizer.param_groups[0]["lr"])
        figures = UpdateFigures(learning_rate=rate, kl=0.0 if self.stage.beta > 0 or measure_kl else None)
        if not self.model.training:
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        threshold = self._entropy_threshold(parts) if self.stage.top_entropy_quantile < 1 else None
        for index, part in enumerate(parts):
            self._accumulate(part, old_logps[index] if old_logps is not None else None, threshold, figures)
        figures = figures.over(self.processes)
        try:
            if figures.tokens:
                self._step(figures)
        finally:
            self._next_learning_rate()
        return figures

    def slow_down(self, factor: float) -> None:
        """Multiply the learning rate of all further updates."""
        self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate * factor

    def _next_learning_rate(self) -> None:
        with warnings.catch_warnings():
            # torch warns when an update without any live group skips the optimizer's very first step.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            self.scheduler.step()

    @torch.no_grad()
    def score(self, part: Microbatch) -> Float[Tensor, "N T"]:
        """log-probabilities under the present policy, without gradients."""
        return self._forward(self.model, part.tokens).logps

    def _accumulate(
        self,
        part: Microbatch,
        old_logps: Float[Tensor, "N T"] | None,
        threshold: Float[Tensor, ""] | None,
        figures: UpdateFigures,
    ) -> None:
        bonus = self.stage.entropy_coef > 0
        scores = self._forward(self.model, part.tokens, entropy_gradients=bonus)
        # Without beta it does not enter the loss: the update is the same whether the KL is measured or not.
        reference = self._reference_logps(part.tokens) if figures.kl is not None else None
        if part.idle:
            self.processes.accelerator.backward(0.0 * scores.logps.sum())
            return
        old = scores.logps.detach() if old_logps is None else old_logps
        correction = sampling_correction(old, part.sampler_logps, part.tokens.completion_mask, self.stage)
        inputs = LossInputs(
            logps=scores.logps,
            old_logps=old,
            ref_logps=reference if self.stage.beta > 0 else None,
            advantages=part.advantages,
            mask=part.tokens.completion_mask,
            weights=part.weights,
            keep=None if threshold is None else scores.entropies.detach() >= threshold,
            correction=correction,
            entropies=scores.entropies if bonus else None,
            entropy_weights=part.entropy_weights if bonus else None,
        )
        out = policy_loss(inputs, self.stage)
        self.processes.accelerator.backward(out.loss)
        mask = inputs.mask
        difference = (old - part.sampler_logps)[mask]
        figures.loss += out.loss.item()
        figures.tokens += int(mask.sum())
        figures.entropy += scores.entropies.sum().item()
        figures.clipped_low += out.clipped_low.item()
        figures.clipped_high += out.clipped_high.item()
        figures.mismatch += difference.abs().sum().item()
        figures.mismatch_kl += _k3_sum(difference)
        figures.mismatch_max = max(figures.mismatch_max, difference.abs().max().item())
        if self.stage.beta > 0 and figures.kl is not None:
            figures.kl += out.kl_sum.item()
        elif reference is not None and figures.kl is not None:
            figures.kl += _k3_sum((reference - scores.logps.detach())[mask])
        if correction is not None:
            figures.correction = (figures.correction or 0.0) + (correction * mask).sum().item()

    def _step(self, figures: UpdateFigures) -> None:
        """Sum the gradients over the processes, clip, and let the optimizer go; nothing of it when something is wrong."""
        limit = self.stage.max_sampling_logp_difference
        if limit is not None and figures.mismatch / figures.tokens > limit:
            raise TrainingError(
                f"sampler and trainer differ by {figures.mismatch / figures.tokens:.3g} nats a token, more than {limit}",
                place=f"stage {self.stage.name}",
                fix="the completions come from other weights or another tokenizer: see that the rollout engine takes over the "
                "policy's weights, or raise max_sampling_logp_difference",
            )
        if not math.isfinite(figures.loss):
            self._not_finite(figures)
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.sharded:
            self.processes.add_up(parameter.grad for parameter in self._trained if parameter.grad is not None)
        scaler = self.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        figures.grad_norm = float(
            gather_shards(torch.nn.utils.clip_grad_norm_(self._trained, self.stage.max_grad_norm or math.inf))
        )
        if scaler is not None:
            self._scaled_step(scaler, figures)
        elif math.isfinite(figures.grad_norm):
            self.optimizer.step()
        else:
            self._not_finite(figures)

    def _scaled_step(self, scaler: torch.amp.GradScaler, figures: UpdateFigures) -> None:
        """A step, or none when the scaled gradient overflowed: that is how a scaler finds its scale, no fault of the update."""
        figures.loss_scale = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        figures.skipped = scaler.get_scale() < figures.loss_scale
        # Below 1 the gradient itself is not finite, and the scaler would skip every update to come.
        if figures.skipped and scaler.get_scale() < 1.0:
            self._not_finite(figures)

    def _not_finite(self, figures: UpdateFigures) -> NoReturn:
        raise NotFiniteError(
            f"loss {figures.loss}, gradient norm {figures.grad_norm}: not finite",
            place=f"stage {self.stage.name}",
            fix="lower learning_rate, or use bfloat16 instead of float16",
        )

    @torch.no_grad()
    def _entropy_threshold(self, parts: Sequence[Microbatch]) -> Float[Tensor, ""] | None:
        scored = [(part, self._forward(self.model, part.tokens).entropies) for part in parts]
        found = [entropies[part.tokens.completion_mask].cpu() for part, entropies in scored if not part.idle]
        everyone = [entropies for mine in self.processes.everyone(found) for entropies in mine]
        return entropy_threshold(torch.cat(everyone), self.stage) if everyone else None

    def _forward(self, model: CausalLM, tokens: TokenBatch, *, entropy_gradients: bool = False) -> TokenScores:
        if self._layout is None:
            self._layout = self._first_that_equals_plain(tokens)
        with self.processes.accelerator.autocast():
            return completion_logprobs(
                model,
                tokens,
                temperature=self.temperature,
                layout=self._layout,
                entropy_gradients=entropy_gradients,
            )

    def _first_that_equals_plain(self, tokens: TokenBatch) -> Layout:
        """First-step self-check: an architecture of another kind gets the plain layout, with a warning."""
        layouts: tuple[Layout, ...] = ("merged", "repeated") if tokens.prompt_ids.device.type == "cpu" else ("repeated",)
        faults = []
        for layout in layouts:
            fault = self._differs_from_plain(tokens, layout)
            if fault is None:
                return layout
            faults.append(f"{layout}: {fault}")
        warnings.warn(f"each prompt is encoded once for every completion ({'; '.join(faults)})", stacklevel=2)
        return "plain"

    @torch.no_grad()
    def _differs_from_plain(self, tokens: TokenBatch, layout: Layout) -> str | None:
        self.model.eval()
        try:
            plain = completion_logprobs(self.model, tokens, temperature=self.temperature, layout="plain").logps
            shared = completion_logprobs(self.model, tokens, temperature=self.temperature, layout=layout).logps
        except (AttributeError, TypeError, RuntimeError, ValueError, UnsupportedError) as error:
            return str(error)
        finally:
            self.model.train()
        difference = (plain - shared)[tokens.completion_mask].abs().mean().item()
        limit = SELF_CHECK_TOLERANCE * (1 if self.model_config.dtype == "float32" else 50)
        return None if difference <= limit else f"off by {difference:.2g} nats"

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
    def _as_reference(self) -> Iterator[CausalLM]:
        if self._reference is not None:
            yield self._reference
            return
        assert isinstance(self.model, PeftModel)
        dropout = self.model_config.lora is not None and self.model_config.lora.lora_dropout > 0
        if dropout:
            self.model.eval()
        stage_start = REFERENCE in self.model.peft_config
        for layer in self._adapted:
            if stage_start:
                layer.set_adapter(REFERENCE)
            else:
                layer.enable_adapters(enabled=False)
        try:
            yield self.model
        finally:
            for layer in self._adapted:
                if stage_start:
                    layer.set_adapter("default")
                else:
                    layer.enable_adapters(enabled=True)
            if dropout:
                self.model.train()


def _k3_sum(log_ratio: Float[Tensor, " M"]) -> float:
    """Sum of the k3 estimates of M tokens, finite however far the two policies are apart."""
    return k3(log_ratio.clamp(max=MAX_LOG_RATIO)).sum().item()
