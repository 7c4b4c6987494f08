"""The two policies of a stage: the one that is trained, and the reference from which its KL is measured.

With LoRA the reference costs no second copy of the weights: the base model is the policy with its adapter switched off, and the
policy at the start of the stage is a second, frozen adapter. Full fine-tuning loads a second model.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grpo_tasks.attention.shared_prompt import use_shared_prompts
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.policy.batch import TokenBatch, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.forward_check import CheckRows, ForwardScores, Leeway, attention, shaken_adapter, true_scores
from grpo_tasks.policy.load import compile_layers, load_base, trainable_policy
from grpo_tasks.policy.logprobs import Layout, TokenScores, completion_logprobs
from grpo_tasks.policy.recurrent_layers import lost_gradient, recurrent_layers
from grpo_tasks.policy.sharded import every_process, shard
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import ModelError, Notice
from schemas.results.model import ModelRef

REFERENCE = "reference"
"""Name of the frozen adapter that holds the policy of the stage's start."""


@dataclass(slots=True)
class Policies:
    """Scores completion tokens under the trained policy and under the reference."""

    model: CausalLM
    spec: StageSpec
    ranks: Ranks
    mesh: DeviceMesh | None = None
    """Devices over which weights, gradients and optimizer state are sharded; None: each rank holds all of them."""
    temperature: float = field(init=False)
    _reference: CausalLM | None = field(init=False, default=None)
    _adapted: list[BaseTunerLayer | AuxiliaryTrainingWrapper] = field(init=False)
    _layout: Layout | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        stage, resources = self.spec.stage, self.spec.resources
        # The likelihood of a demonstration is that of the model itself; the temperature belongs to sampling.
        self.temperature = self.spec.rollout.temperature if stage.kind == "grpo" else 1.0
        # At beta 0 the KL is a metric only. That is not worth a second model; an adapter costs next to nothing.
        if stage.has_kl_term or (stage.kl_every_steps > 0 and self.measures_kl):
            spec, from_base = self.spec, stage.reference == "base"
            if not isinstance(self.model, PeftModel):
                ref = ModelRef(path=spec.model.path, revision=spec.model.revision) if from_base else spec.start
                device = next(self.model.parameters()).device
                self._reference = load_base(ref, spec.model, device=device, token_seed=spec.seed)
            elif not from_base and spec.start.adapter is not None:
                self.model.load_adapter(str(spec.start.adapter), adapter_name=REFERENCE, is_trainable=False)
                self.model.set_adapter("default")
        for model in (self.model, self._reference):
            if model is not None and resources.compile:
                compile_layers(model)
            if model is not None and self.mesh is not None:
                shard(model, self.mesh)
        # Found once: a walk through all modules at every update costs as much as a layer of the small model.
        kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
        self._adapted = [module for module in self.model.modules() if isinstance(module, kinds)]

    @property
    def sharded(self) -> bool:
        """True where each rank holds shards of the weights."""
        return self.mesh is not None

    @property
    def measures_kl(self) -> bool:
        """True where there is a reference policy even at beta 0: with an adapter."""
        return isinstance(self.model, PeftModel)

    @property
    def layout(self) -> Layout:
        """The fastest layout that says what the model's own forward pass says, found before the first pass; else ModelError."""
        if self._layout is None:
            self._layout = self._fitting_layout()
        return self._layout

    @property
    def pads(self) -> bool:
        """True where a pass computes rows as long as its longest one: in the plain layout, and in layers that carry a state."""
        # In this order: the search for the layout lets the model find its mixers.
        return self.layout == "plain" or bool(recurrent_layers(self.model))

    def scores(
        self, tokens: TokenBatch, *, model: CausalLM | None = None, entropy_gradients: bool = False, count_hits: bool = False
    ) -> TokenScores:
        """Scores under the policy that is trained, unless another model is given; on request which tokens it ranks first."""
        layout = self.layout
        with self.ranks.accelerator.autocast():
            return completion_logprobs(
                self.model if model is None else model,
                tokens,
                temperature=self.temperature,
                layout=layout,
                entropy_gradients=entropy_gradients,
                count_hits=count_hits,
            )

    @torch.no_grad()
    def ref_logps(self, tokens: TokenBatch) -> Float[Tensor, "N T"]:
        """log-probabilities under the reference."""
        if self._reference is not None:
            return self.scores(tokens, model=self._reference).logps
        # The policy with another adapter, or with none. Dropout acts on the adapter's input, and the reference is a fixed
        # distribution, so it must not be noisy.
        dropout = self.spec.model.lora is not None and self.spec.model.lora.lora_dropout > 0
        if dropout:
            self.model.eval()
        self._switch_adapters(to_reference=True)
        try:
            return self.scores(tokens).logps
        finally:
            self._switch_adapters(to_reference=False)
            if dropout:
                self.model.train()

    def _fitting_layout(self) -> Layout:
        causal, rows = causal_model(self.model), CheckRows.of(self.model)
        name = type(causal).__name__
        tokens = token_batch(rows.prompts, rows.completions, rows.prompt_of, device=self.model.device)
        shared = None
        if self.spec.resources.share_prompts:
            with attention(causal.config):
                shared = self._fault(rows, tokens, "packed")
            if shared is None:
                use_shared_prompts(causal)
                return "packed"
        fault = self._fault(rows, tokens, "plain")
        if fault is not None:
            raise ModelError(
                f"the trainer cannot compute the log-probabilities of {name}: {fault}",
                place=f"model.path: {self.spec.model.path}",
                fix="engine: trl, which trains through transformers' own forward pass, or another model",
            )
        if shared is not None:
            warnings.warn(
                f"{name} trains in the slow way: each prompt is encoded once for every completion, so updates take longer, with "
                f"long prompts several times as long (encoded once for all: {shared})",
                Notice,
                stacklevel=2,
            )
        return "plain"

    def _fault(self, rows: CheckRows, tokens: TokenBatch, layout: Layout) -> str | None:
        """None if the layout agrees with the model's own forward pass, with and without adapter."""
        shaken = shaken_adapter(self.model, rows, self.spec.model.dtype, temperature=self.temperature)
        with self.ranks.accelerator.autocast(), shaken as leeway:
            for without in (False, True) if leeway.shift else (False,):
                with self.model.disable_adapter() if without else nullcontext():
                    found = self._differs_from_truth(rows, tokens, layout, leeway)
                if found is not None:
                    return found
        return None

    @torch.no_grad()
    def _differs_from_truth(self, rows: CheckRows, tokens: TokenBatch, layout: Layout, leeway: Leeway) -> str | None:
        truth = true_scores(self.model, rows, temperature=self.temperature)
        # As it trains, without the one noise that is wanted: whatever else makes a pass of training another function shows.
        self.model.train()
        noise = [module for layer in self._adapted for name, module in layer.named_modules() if name == "lora_dropout"]
        for module in noise:
            module.eval()
        try:
            scores = completion_logprobs(self.model, tokens, temperature=self.temperature, layout=layout)
            lost = lost_gradient(self.model, tokens) if layout == "packed" else None
        except Exception as error:  # whatever a strange layer raises in a layout that it was not written for
            if is_out_of_memory(error):
                raise
            return str(error) or type(error).__name__
        finally:
            for module in noise:
                module.train()
        lengths = [len(completion) for completion in rows.completions]
        logps, entropies = (
            [row[:length] for row, length in zip(each, lengths, strict=True)] for each in (scores.logps, scores.entropies)
        )
        found = ForwardScores(logps, entropies)
        return leeway.fault(found.difference(truth)) or lost

    def _switch_adapters(self, *, to_reference: bool) -> None:
        assert isinstance(self.model, PeftModel)
        stage_start = REFERENCE in self.model.peft_config
        # Layer by layer: PEFT's own methods walk through all modules and set requires_grad again.
        for layer in self._adapted:
            if stage_start:
                layer.set_adapter(REFERENCE if to_reference else "default")
            else:
                layer.enable_adapters(enabled=not to_reference)


def load_policies(spec: StageSpec, ranks: Ranks, *, seed: int, sharded: bool) -> Policies:
    """Load the policies of a stage onto the device of this rank, or its shards of them; `seed` decides a new adapter."""
    # A device that has room for its shards only cannot load the complete model. The host may not have room for one of each rank.
    device, mesh = ranks.accelerator.device, None
    if sharded:
        device, mesh = torch.device("cpu"), every_process(device)

    def load() -> Policies:
        model = trainable_policy(spec.start, spec.model, device=device, seed=seed, token_seed=spec.seed)
        return Policies(model, spec, ranks, mesh)

    return ranks.in_turn(load) if sharded else load()
