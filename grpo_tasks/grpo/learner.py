"""The learner: microbatches in, one optimizer step out. It owns the optimizer and the learning rate."""

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from grpo_tasks.grpo.losses import LossInputs, entropy_threshold, off_policy_mask, policy_loss, sampling_correction
from grpo_tasks.grpo.measure import UpdateFigures, Waits
from grpo_tasks.grpo.microbatches import Microbatch, Microbatches, OldLogps
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.kit.progress import Count
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.logprobs import TokenScores
from grpo_tasks.policy.sharded import gather_shards
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError, NotFiniteError, TrainingError

Found = TypeVar("Found")


@dataclass(slots=True)
class Learner:
    """Makes the updates of a stage."""

    policies: Policies
    stage: StageConfig
    ranks: Ranks
    updates: int
    """Number of updates of the stage, for the schedule of the learning rate."""
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: LRScheduler = field(init=False)
    waits: Waits = field(init=False)
    _trained: list[torch.nn.Parameter] = field(init=False)
    halvings: int = field(init=False, default=0)
    """How often updates halve their microbatches, because larger ones did not fit into the memory of some rank."""
    _halvings: int = field(init=False, default=0)
    """The same on this rank, with those that the figures of the next update report."""

    def __post_init__(self) -> None:
        self.waits = Waits(self.ranks.accelerator.device)
        # Found once, and after sharding, which replaces the parameters.
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.stage, self._trained)
        self.scheduler = make_scheduler(self.stage, self.optimizer, self.updates)
        if self.scaler is not None:
            # Its scale is created at its first use, which a rank without a live group would not reach.
            self.scaler.scale(torch.zeros((), device=self._trained[0].device))

    @property
    def model(self) -> CausalLM:
        """The policy."""
        return self.policies.model

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Multiplies the loss in float16, so that small gradients do not become 0; None for other dtypes."""
        return self.ranks.accelerator.scaler

    def update(self, microbatches: Microbatches, old_logps: OldLogps, *, measure_kl: bool = False) -> UpdateFigures:
        """One optimizer step over the microbatches of an update; without any, when every group is dead, no weight moves.

        `NotFiniteError` where loss or gradient is not finite: no weight was moved. `TrainingError` where the completions come
        from another policy, and where not even the pass of a single completion fits into memory.
        """
        rate = float(self.optimizer.param_groups[0]["lr"])
        if not self.model.training:
            self.model.train()
        # None instead of zeros: the first backward pass then writes the gradient instead of adding to it.
        self.optimizer.zero_grad(set_to_none=True)
        threshold = self._entropy_threshold(microbatches) if self.stage.top_entropy_quantile < 1 else None

        def gradient(parts: Microbatches, old: OldLogps) -> UpdateFigures:
            figures = UpdateFigures(learning_rate=rate, kl=0.0 if self.stage.has_kl_term or measure_kl else None)
            count = Count("computing the gradient", len(parts), "microbatches")
            for index, microbatch in enumerate(self.waits.as_built(parts)):
                self._accumulate(microbatch, None if old is None else old[index], threshold, figures)
                count.add()
            return figures

        found = self._in_memory(gradient, microbatches, old_logps)
        figures = UpdateFigures(out_of_memory=found) if isinstance(found, str) else found
        figures.halvings = self._halvings - self.halvings
        with self.waits.for_numbers():
            figures.read()
        # Before the step: every rank has to decide by the same figures whether to make it.
        figures = figures.over(self.ranks)
        # Equal on all ranks, so that a checkpoint needs one number. They wait for the slowest rank anyway.
        self.halvings += figures.halvings
        if figures.out_of_memory:
            self._refuse_memory(figures.out_of_memory)
        try:
            # On all ranks or on none: `tokens` is the sum over the ranks, so a rank without microbatches joins in.
            if figures.tokens:
                self._step(figures)
        finally:
            with warnings.catch_warnings():
                # torch warns when an update without any live group skips the optimizer's very first step.
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
                # The schedule counts updates, not steps: a dead or a refused update uses up its learning rate.
                self.scheduler.step()
        return figures

    @torch.no_grad()
    def old_logps(self, microbatch: Microbatch) -> Float[Tensor, "N T"]:
        """log-probabilities under the present policy, without gradients."""
        return self.policies.scores(microbatch.tokens).logps

    def with_old_logps(self, microbatches: Microbatches) -> tuple[Microbatches, OldLogps]:
        """An update with `old_logps`; in smaller microbatches where the given ones do not fit into memory."""

        def scored(parts: Microbatches, _: OldLogps) -> tuple[Microbatches, OldLogps]:
            return parts, [self.old_logps(microbatch) for microbatch in parts]

        found = self._in_memory(scored, microbatches)
        # Every rank has to know: the others would wait for this one in the update.
        message = max(self.ranks.gather(found if isinstance(found, str) else ""))
        if message:
            self._refuse_memory(message)
        assert not isinstance(found, str)
        return found

    def slow_down(self, factor: float) -> None:
        """Multiply the learning rate of all further updates."""
        self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        # The scheduler sets the rates of the optimizer only at its next step, so the coming update needs them now.
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate * factor

    def _in_memory(
        self, work: Callable[[Microbatches, OldLogps], Found], microbatches: Microbatches, old_logps: OldLogps = None
    ) -> Found | str:
        """Do work on an update with microbatches that fit into memory; torch's message where not even single completions do.

        A pass that does not fit leaves a part of its gradient, so all of the work is done again, with half of the completions in
        each microbatch. Weights of tokens are those of the complete update, so its gradient is the same. Later updates
        begin with the halves. Ranks exchange nothing within the work, so each decides for itself. TrainingError with
        sharded weights: all ranks gather them at once, and the others would wait for the passes of this one.
        """
        parts, old = microbatches, old_logps
        self._halvings = max(self._halvings, self.halvings)
        while parts.halvings < self._halvings:
            parts, old = parts.halved(old)
        while True:
            try:
                return work(parts, old)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # Without the hints about variables of the allocator and of CUDA.
                message = str(error).partition(" If reserved")[0].partition("\n")[0]
            # Behind the block: the error holds the frames of the failed pass, and these its tensors.
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            if self.policies.sharded:
                raise TrainingError(
                    f"a pass does not fit into memory, and with resources.fsdp it cannot be divided: {message}",
                    place=f"stage {self.stage.name}",
                    fix="a number for max_tokens_per_microbatch, below that of the event token_budget, or "
                    "model.gradient_checkpointing: true; the same command then resumes from the last checkpoint",
                )
            if not parts.divisible:
                return message
            parts, old = parts.halved(old)
            self._halvings = parts.halvings

    def _accumulate(
        self,
        microbatch: Microbatch,
        old_logps: Float[Tensor, "N T"] | None,
        threshold: Float[Tensor, ""] | None,
        figures: UpdateFigures,
    ) -> None:
        supervised = self.stage.kind != "grpo"
        scores = self.policies.scores(microbatch.tokens, entropy_gradients=self.stage.entropy_coef > 0, count_hits=supervised)
        # At beta 0 it does not enter the loss: the update is the same whether the KL is measured or not.
        ref_logps = self.policies.ref_logps(microbatch.tokens) if figures.kl is not None else None
        if microbatch.idle:
            # With sharded weights the backward pass gathers and reduces on all ranks, so this rank has to make it too.
            self.ranks.accelerator.backward(0.0 * scores.logps.sum())
            return
        if supervised:
            # Cross entropy: the mean over the update's trained tokens, of which each has the same weight (microbatches.py).
            loss = -(scores.logps * microbatch.weights).sum()
            self.ranks.accelerator.backward(loss)
            assert scores.hits is not None
            figures.add_supervised(loss, microbatch.trained, scores.entropies, scores.hits)
            return
        inputs = self._loss_inputs(microbatch, scores, old_logps, ref_logps, threshold)
        out = policy_loss(inputs, self.stage)
        # No division by the number of microbatches: the weights are those of the complete update, so gradients add up.
        self.ranks.accelerator.backward(out.loss)
        figures.add(inputs, out, scores.entropies, microbatch.sampler_policy_logps, ref_logps)

    def _loss_inputs(
        self,
        microbatch: Microbatch,
        scores: TokenScores,
        old_logps: Float[Tensor, "N T"] | None,
        ref_logps: Float[Tensor, "N T"] | None,
        threshold: Float[Tensor, ""] | None,
    ) -> LossInputs:
        bonus, mask = self.stage.entropy_coef > 0, microbatch.trained
        # On-policy the ratio is exactly 1 and its gradient that of logp: no second forward pass for pi_old.
        # Padding on the right may be wider: that of the microbatch before it was halved.
        old = scores.logps.detach() if old_logps is None else old_logps[:, : scores.logps.shape[1]]
        # Under the sampler's model alone, where that is known: top_p and the like would count as a change of the policy.
        sampler = microbatch.sampler_logps if microbatch.sampler_policy_logps is None else microbatch.sampler_policy_logps
        return LossInputs(
            logps=scores.logps,
            old_logps=old,
            ref_logps=ref_logps if self.stage.has_kl_term else None,
            advantages=microbatch.advantages,
            mask=mask,
            weights=microbatch.weights,
            # [N, T]; detached: the choice of tokens has no gradient.
            keep=None if threshold is None else scores.entropies.detach() >= threshold,
            correction=sampling_correction(old, microbatch.sampler_logps, mask, self.stage),
            on_policy=off_policy_mask(scores.logps, sampler, microbatch.advantages, mask, self.stage),
            entropies=scores.entropies if bonus else None,
            entropy_weights=microbatch.entropy_weights if bonus else None,
        )

    def _step(self, figures: UpdateFigures) -> None:
        """Sum the gradients over the ranks, clip them, step; no step when something is wrong."""
        limit = self.stage.max_sampling_logp_difference
        difference = 0.0 if limit is None or figures.mismatch is None else figures.mismatch / figures.tokens
        if limit is not None and difference > limit:
            raise TrainingError(
                f"sampler and trainer differ by {difference:.3g} nats a token, more than {limit}",
                place=f"stage {self.stage.name}",
                fix="the completions come from other weights or another tokenizer: check that the rollout engine loads the "
                "policy's weights, or raise max_sampling_logp_difference",
            )
        if not math.isfinite(figures.loss):
            self._refuse(figures)
        for parameter in self._trained:
            # A rank without microbatches has no gradients, but the sum needs some from every rank.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.policies.sharded:  # sharded gradients were summed in the backward pass
            self.ranks.sum_in_place(parameter.grad for parameter in self._trained if parameter.grad is not None)
        scaler = self.scaler
        if scaler is not None:
            # Before clipping: the limit is in units of the true gradient.
            scaler.unscale_(self.optimizer)
        # Clipping by infinity only measures the norm. A norm over shards is itself a sharded tensor.
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.stage.max_grad_norm or math.inf)
        with self.waits.for_numbers():
            figures.grad_norm = float(gather_shards(norm))
        if scaler is not None:
            # No step when the scaled gradient overflowed: no fault, a scaler finds its scale that way.
            figures.loss_scale = scaler.get_scale()
            scaler.step(self.optimizer)
            scaler.update()
            figures.skipped = scaler.get_scale() < figures.loss_scale
            # Below 1 the gradient itself is not finite, and the scaler would skip every update from now on.
            if figures.skipped and scaler.get_scale() < 1.0:
                self._refuse(figures)
        elif math.isfinite(figures.grad_norm):
            self.optimizer.step()
        else:
            self._refuse(figures)

    def _refuse_memory(self, message: str) -> NoReturn:
        raise TrainingError(
            f"the pass of a single completion does not fit into memory: {message}",
            place=f"stage {self.stage.name}",
            fix="model.gradient_checkpointing: true, a shorter rollout.max_completion_length, or a card that nothing else uses",
        )

    def _refuse(self, figures: UpdateFigures) -> NoReturn:
        raise NotFiniteError(
            f"loss {figures.loss}, gradient norm {figures.grad_norm}: not finite",
            place=f"stage {self.stage.name}",
            fix="lower learning_rate, or use bfloat16 instead of float16",
        )

    @torch.no_grad()
    def _entropy_threshold(self, microbatches: Microbatches) -> Float[Tensor, ""] | None:
        """A quantile of the complete update, on all ranks."""

        def entropies_of(parts: Microbatches, _: OldLogps) -> list[Tensor]:
            scored = [(microbatch, self.policies.scores(microbatch.tokens).entropies) for microbatch in parts]
            # [N, T] -> [M]: padding has the entropy 0 and would shift the quantile.
            return [entropies[microbatch.trained].cpu() for microbatch, entropies in scored if not microbatch.idle]

        found = self._in_memory(entropies_of, microbatches)
        # Where not even that fits, the gradient does not either: the update ends with an error on all ranks.
        mine = [] if isinstance(found, str) else found
        every_rank = [entropies for each in self.ranks.gather(mine) for entropies in each]
        return entropy_threshold(torch.cat(every_rank), self.stage) if every_rank else None


def make_optimizer(stage: StageConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer named by `stage.optim`; ConfigError for an 8-bit one without bitsandbytes. On CUDA AdamW is always fused."""
    options: dict[str, Any] = {
        "lr": stage.learning_rate,
        "betas": (stage.adam_beta1, stage.adam_beta2),
        "eps": stage.adam_epsilon,
        "weight_decay": stage.weight_decay,
    }
    if stage.optim in ("adamw_torch", "adamw_torch_fused"):
        # Weight by weight, a step is ten kernels for each: 3,922 for an adapter of 392 matrices, which CUDA launches one by one.
        fused = stage.optim.endswith("fused") or all(parameter.device.type == "cuda" for parameter in parameters)
        return torch.optim.AdamW(parameters, fused=fused, **options)
    try:
        from bitsandbytes.optim import adamw
    except ImportError as error:
        raise ConfigError(
            f"optim {stage.optim} needs bitsandbytes",
            place=f"stage {stage.name}",
            fix="pip install -c deploy/constraints.txt '.[gpu]', or optim: adamw_torch",
        ) from error
    kind = adamw.PagedAdamW8bit if stage.optim.startswith("paged") else adamw.AdamW8bit
    return kind(parameters, **options)


def make_scheduler(stage: StageConfig, optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    """The learning rate over the updates of a stage, as transformers' Trainer sets it."""
    warmup = stage.warmup_steps or math.ceil(stage.warmup_ratio * updates)
    return get_scheduler(stage.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=updates)
