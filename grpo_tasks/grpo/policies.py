"""The two policies of a stage: the one that is trained, and the reference from which its KL is measured.

    scores(tokens)          the policy, with gradients
    ref_logps(tokens)       the reference, without

With LoRA the reference costs no second copy of the weights: the base model is the policy with its adapter switched off, and the
policy at the start of the stage is a second, frozen adapter. Full fine-tuning loads a second model.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from grpo_tasks.attention.shared_prompt import UnsupportedError
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.batch import TokenBatch, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.load import compile_layers, load_base
from grpo_tasks.policy.logprobs import Layout, TokenScores, completion_logprobs
from grpo_tasks.policy.sharded import shard
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.results.model import ModelRef

REFERENCE = "reference"
"""Name of the frozen adapter that holds the policy of the stage's start."""
SELF_CHECK_TOLERANCE = 1e-3
"""Largest mean |difference| of a completion in the packed layout from the same in the plain one, in float32: in nats, or as a
share of the log-probabilities where those are larger, as they are for made-up tokens. Other dtypes get 50 times that."""
LONGEST_WINDOW = 4096
"""The self-check has a completion that is longer than the window of the attention, up to this window."""


@dataclass(slots=True)
class Policies:
    """Scores completion tokens under the trained policy and under the reference."""

    model: CausalLM
    """The policy that is trained."""
    spec: StageSpec
    ranks: Ranks
    sharded: bool = False
    """Shard weights, gradients and optimizer state over the ranks."""
    temperature: float = field(init=False)
    _reference: CausalLM | None = field(init=False, default=None)
    _adapted: list[BaseTunerLayer | AuxiliaryTrainingWrapper] = field(init=False)
    _layout: Layout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        stage, resources = self.spec.stage, self.spec.resources
        self.temperature = self.spec.rollout.temperature
        # At beta 0 the KL is a metric only. That is not worth a second model; an adapter costs next to nothing.
        if stage.beta > 0 or (stage.kl_every_steps > 0 and self.measures_kl):
            self._prepare_reference(next(self.model.parameters()).device)
        for model in (self.model, self._reference):
            if model is not None and resources.compile:
                compile_layers(model)
            if model is not None and self.sharded:
                shard(model)
        # Found once: a walk through all modules at every update costs as much as a layer of the small model.
        kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
        self._adapted = [module for module in self.model.modules() if isinstance(module, kinds)]
        if not resources.share_prompts:
            self._layout = "plain"

    @property
    def measures_kl(self) -> bool:
        """True where there is a reference policy even at beta 0: with an adapter."""
        return isinstance(self.model, PeftModel)

    def scores(self, tokens: TokenBatch, *, entropy_gradients: bool = False, count_hits: bool = False) -> TokenScores:
        """log-probabilities and entropies [N, T] under the policy that is trained, and on request which tokens it ranks first."""
        return self._forward(self.model, tokens, entropy_gradients=entropy_gradients, count_hits=count_hits)

    @torch.no_grad()
    def ref_logps(self, tokens: TokenBatch) -> Float[Tensor, "N T"]:
        """log-probabilities under the reference."""
        with self._as_reference() as model:
            return self._forward(model, tokens).logps

    def _forward(
        self, model: CausalLM, tokens: TokenBatch, *, entropy_gradients: bool = False, count_hits: bool = False
    ) -> TokenScores:
        if self._layout is None:
            self._layout = self._fitting_layout(tokens.packed.ids.device)
        with self.ranks.accelerator.autocast():
            return completion_logprobs(
                model,
                tokens,
                temperature=self.temperature,
                layout=self._layout,
                entropy_gradients=entropy_gradients,
                count_hits=count_hits,
            )

    def _fitting_layout(self, device: torch.device) -> Layout:
        """Check the packed layout before the first pass: an architecture it does not fit gets the plain one, with a warning."""
        config = causal_model(self.model).config
        attention = config._attn_implementation
        fault = self._differs_from_plain(check_batch(self.model, device))
        if fault is None:
            return "packed"
        # The packed pass has replaced it. Whoever is not served may need the one it had: soft caps are eager attention's, say.
        config._attn_implementation = attention
        warnings.warn(f"each prompt is encoded once for every completion ({fault})", stacklevel=2)
        return "plain"

    @torch.no_grad()
    def _differs_from_plain(self, tokens: TokenBatch) -> str | None:
        # Without dropout, which would make any two passes differ.
        self.model.eval()
        try:
            with self.ranks.accelerator.autocast():
                plain = completion_logprobs(self.model, tokens, temperature=self.temperature, layout="plain").logps
                packed = completion_logprobs(self.model, tokens, temperature=self.temperature, layout="packed").logps
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, TypeError, RuntimeError, ValueError, UnsupportedError) as error:
            return str(error)
        finally:
            self.model.train()
        # Padding is 0 in both. [N, T] -> [N], of which the worst counts: what leaks may change the first tokens only.
        difference = ((plain - packed).abs().sum(1) / tokens.completion_mask.sum(1)).max().item()
        limit = SELF_CHECK_TOLERANCE * (1 if self.spec.model.dtype == "float32" else 50)
        size = plain[tokens.completion_mask].abs().mean().item()
        return None if difference <= limit * max(1.0, size) else f"off by {difference:.2g} nats"

    def _prepare_reference(self, device: torch.device) -> None:
        spec = self.spec
        if not isinstance(self.model, PeftModel):
            base = ModelRef(path=spec.model.path, revision=spec.model.revision)
            ref = base if spec.stage.reference == "base" else spec.start
            self._reference = load_base(ref, spec.model, device=device, token_seed=spec.seed)
        elif spec.stage.reference == "stage_start" and spec.start.adapter is not None:
            self.model.load_adapter(str(spec.start.adapter), adapter_name=REFERENCE, is_trainable=False)
            self.model.set_adapter("default")

    @contextmanager
    def _as_reference(self) -> Iterator[CausalLM]:
        """The model that computes the reference: a model of its own, or the policy with another adapter or none."""
        if self._reference is not None:
            yield self._reference
            return
        assert isinstance(self.model, PeftModel)
        # Dropout acts on the adapter's input. The reference is a fixed distribution, so it must not be noisy.
        dropout = self.spec.model.lora is not None and self.spec.model.lora.lora_dropout > 0
        if dropout:
            self.model.eval()
        self._switch_adapters(to_reference=True)
        try:
            yield self.model
        finally:
            self._switch_adapters(to_reference=False)
            if dropout:
                self.model.train()

    def _switch_adapters(self, *, to_reference: bool) -> None:
        assert isinstance(self.model, PeftModel)
        stage_start = REFERENCE in self.model.peft_config
        # Layer by layer: PEFT's own methods walk through all modules and set requires_grad again.
        for layer in self._adapted:
            if stage_start:
                layer.set_adapter(REFERENCE if to_reference else "default")
            else:
                layer.enable_adapters(enabled=not to_reference)


def check_batch(model: CausalLM, device: torch.device) -> TokenBatch:
    """Two prompts with two completions each, of unequal lengths: what leaks from one to the next in a packed row shows.

    A microbatch of the stage may hold a single completion, whose packed row is an ordinary sequence.
    """
    causal = causal_model(model)
    words = causal.get_input_embeddings().weight.shape[0]
    windows = [getattr(causal.config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    beyond = max((window for window in windows if window <= LONGEST_WINDOW), default=0)
    numbers = count(7, 31)

    def made_up(length: int) -> list[int]:
        return [next(numbers) % words for _ in range(length)]

    prompts, completions = [made_up(length) for length in (7, 12)], [made_up(length) for length in (5, 3 + beyond, 4, 6)]
    return token_batch(prompts, completions, [0, 0, 1, 1], device=device)
