"""The local engine: a decoding loop in this process, over a copy of the policy with its adapter folded in.

All completions of a prompt read one copy of its keys and values (decoding_cache.py), and rows that have ended leave the batch
(decoding_loop.py). Paged caches and continuous batching are left to a server (vllm_engine.py).
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from grpo_tasks.attention.shared_prompt import UnsupportedError, no_mask, use_shared_prompts
from grpo_tasks.content.tokenizer import end_token_ids
from grpo_tasks.kit.memory_errors import is_out_of_memory
from grpo_tasks.kit.pinned import moved
from grpo_tasks.kit.progress import Count
from grpo_tasks.policy.batch import TokenBatch, position_ids, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.forward_check import CheckRows, ForwardScores, Leeway, attention, shaken_adapter, true_scores
from grpo_tasks.policy.logprobs import encode_context
from grpo_tasks.policy.recurrent_layers import encode_contexts, find_mixers, recurrent_layers, share_prompts
from grpo_tasks.policy.sharded import is_sharded, sampling_copy
from grpo_tasks.policy.structure import angles_depend_on_length, check_positions
from grpo_tasks.rollout.decoding_cache import DecodingCache
from grpo_tasks.rollout.decoding_loop import Buckets, DecodingLoop, MakeState
from grpo_tasks.rollout.engine import Completion, Request, RolloutEngine, Sampling
from grpo_tasks.rollout.fused_decoder import FusedDecoder
from grpo_tasks.rollout.graphs import Capture, CudaCapture, Graphs, Place
from grpo_tasks.rollout.stop import StopRule
from schemas.config.operations import ResourcesConfig
from schemas.errors import ModelError, Notice


class LocalEngine(RolloutEngine):
    """Samples in this process from a copy of `policy` with its adapter folded in; switches as in section `resources`.

    On CUDA a step is replayed as a graph, which `capture` captures. Graphs, keys and values stay on the card between two rollouts
    as long as keys and values take at most `kept_bytes` (the plan of a stage counts both); `sleep` frees all where they do not.
    """

    @classmethod
    def of(
        cls,
        policy: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        resources: ResourcesConfig,
        *,
        kept_bytes: float = math.inf,
    ) -> "LocalEngine":
        """The engine as the config wants it."""
        shared, folded, fused = resources.share_prompts, resources.fold_adapter, resources.fuse_kernels
        return cls(policy, tokenizer, share_prompts=shared, fold_adapter=folded, fuse_kernels=fused, kept_bytes=kept_bytes)

    def __init__(
        self,
        policy: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        share_prompts: bool = True,
        fold_adapter: bool = True,
        fuse_kernels: bool = True,
        capture: Capture | None = None,
        kept_bytes: float = math.inf,
    ) -> None:
        self._folded = sampling_copy(policy) if fold_adapter or is_sharded(policy) else None
        self._model = policy if self._folded is None else self._folded.model
        self._tokenizer, self._share = tokenizer, share_prompts
        # Fusing replaces the model's weights by views, which the optimizer of a model in training would not follow.
        frozen = not any(parameter.requires_grad for parameter in self._model.parameters())
        self._policy, self._fuse = policy, share_prompts and fuse_kernels and frozen
        self._make_state: MakeState | None = None
        self._fused: FusedDecoder | None = None
        self._leeway = Leeway.of(self._dtype, shift=0.0, rounding=0.0)
        if is_sharded(policy):
            # Its forward pass wants all processes, and one of them may have no requests.
            self._make_state = self._fitting_state()
        self._buckets = Buckets.of(policy.device)
        if capture is None and policy.device.type == "cuda":
            capture = CudaCapture()
        self._graphs, self._kept_bytes = Graphs(capture), kept_bytes
        self._end_ids = end_token_ids(tokenizer, policy.generation_config.eos_token_id)

    def sync(self) -> None:
        """Load the policy's current weights into the copy."""
        if self._folded is not None:
            self._folded.sync()

    def sleep(self) -> None:
        """Free what decoding has kept, where it is more than an update has room for."""
        if self._graphs.num_bytes > self._kept_bytes:
            self._graphs.release()

    def close(self) -> None:
        """Free what decoding has kept."""
        self._graphs.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; ConfigError where the model has too few positions."""
        reach = [len(one.prompt_ids) + (one.max_tokens or sampling.max_completion_length) for one in requests]
        check_positions(causal_model(self._model), max(reach, default=0))
        if self._make_state is None:
            self._make_state = self._fitting_state()
        return self._generate(requests, sampling, self._make_state)

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Request], sampling: Sampling, make_state: MakeState) -> list[Completion]:
        stop, one_length = StopRule.of(self._tokenizer, self._end_ids, sampling), make_state is EqualPromptState
        # Sorted by length, so that a batch has little padding, then by content, so that equal prompts are neighbours.
        order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), requests[index].prompt_ids))
        done: dict[int, Completion] = {}
        count = Count("sampling", len(requests), "completions")
        # Decoding writes to no place twice at once, and adds up in fixed orders (decoding_loop.py). On CUDA the switch would turn
        # each write by an index from one kernel into about ten, which sort the indices first.
        on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            with _evaluating(self._model):
                for _, alike in groupby(order, key=lambda index: len(requests[index].prompt_ids) if one_length else 0):
                    same, size = list(alike), sampling.max_batch_size
                    for indices in (same[start : start + size] for start in range(0, len(same), size)):
                        batch = [requests[index] for index in indices]
                        loop = DecodingLoop(self._model, batch, sampling, stop, make_state, self._buckets, self._graphs)
                        done.update(zip(indices, loop.run(count), strict=True))
        finally:
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
        return [done[index] for index in range(len(requests))]

    @property
    def _dtype(self) -> str:
        return str(self._model.dtype).removeprefix("torch.")

    def _fitting_state(self) -> MakeState:
        """The fastest way of decoding that says what the policy's own forward pass says; ModelError where none does."""
        rows, name = CheckRows.of(self._policy), type(causal_model(self._model)).__name__
        with shaken_adapter(self._policy, rows, self._dtype) as self._leeway:
            if self._leeway.shift:
                self.sync()
            truth = true_scores(self._policy, rows)
            found = self._agreeing_state(rows, truth)
        if self._leeway.shift:
            self.sync()
        if not isinstance(found, str):
            return found
        raise ModelError(
            f"the local engine cannot sample from {name}: {found}",
            place="rollout.engine",
            fix="rollout.engine: vllm, or another model",
        )

    @torch.no_grad()
    def _agreeing_state(self, rows: CheckRows, truth: ForwardScores) -> MakeState | str:
        """The first way that agrees with the truth; what is wrong with the last one where none does."""
        config, name = causal_model(self._model).config, type(causal_model(self._model)).__name__
        if self._share:
            windows: dict[int, int | None] = {}
            with attention(config):
                fault = self._fault(partial(SharedPromptState, windows=windows), [rows], truth)
            if fault is None:
                use_shared_prompts(causal_model(self._model))
                try:
                    fused = FusedDecoder(self._model, windows) if self._fuse else None
                except UnsupportedError:
                    fused = None
                if fused is not None and self._fault(partial(SharedPromptState, fused=fused), [rows], truth) is None:
                    self._fused = fused
                return partial(SharedPromptState, fused=self._fused)
            warnings.warn(
                f"{name} is sampled from in the slow way: every completion gets its own copy of its prompt's keys and values, so "
                f"decoding takes more memory, and longer where prompts are long (with one copy for all: {fault})",
                Notice,
                stacklevel=2,
            )
        fault = self._fault(RepeatedPromptState, [rows], truth)
        if fault is None:
            return RepeatedPromptState
        alone = self._fault(EqualPromptState, rows.by_prompt(), truth)
        if alone is not None:
            return alone
        warnings.warn(
            f"{name} is sampled from in the slowest way: prompts of one length at a time, so batches are small (with all "
            f"lengths: {fault})",
            Notice,
            stacklevel=2,
        )
        return EqualPromptState

    def _fault(self, make_state: MakeState, batches: Sequence[CheckRows], truth: ForwardScores) -> str | None:
        """What is wrong with a way of decoding these batches; None if it agrees with the truth."""
        try:
            with _evaluating(self._model):
                parts = [decoded_scores(self._model, make_state, rows) for rows in batches]
            found = ForwardScores(
                [each for part in parts for each in part.logps], [each for part in parts for each in part.entropies]
            )
            return self._leeway.fault(found.difference(truth))
        except Exception as error:  # whatever a strange layer raises in a way that it was not written for
            if is_out_of_memory(error):
                raise
            return str(error) or type(error).__name__


@contextmanager
def _evaluating(model: CausalLM) -> Iterator[None]:
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def decoded_scores(model: CausalLM, make_state: MakeState, rows: CheckRows) -> ForwardScores:
    """What a way of decoding says about given completions, as it would decode them: step by step, rows dropped as they end."""
    batch = token_batch(rows.prompts, rows.completions, rows.prompt_of, device=model.device)
    state, alive = make_state(model, batch), list(range(len(rows.completions)))
    tokens, logits = batch.last_ids[batch.prompt_of], [list[Tensor]() for _ in alive]
    for column in range(max(map(len, rows.completions))):
        state.make_room(column + 1)
        found = state.forward(tokens, torch.tensor([column], device=model.device))
        for row, number in enumerate(alive):
            logits[number].append(found[row].clone())
        staying = [row for row, number in enumerate(alive) if len(rows.completions[number]) > column + 1]
        alive = [alive[row] for row in staying]
        if alive:
            # One row more than there are, as where the number of rows takes certain values only.
            state.keep_rows(staying, 1)
            given = [rows.completions[number][column] for number in alive]
            tokens = torch.tensor([*given, given[0]], device=model.device)
    return ForwardScores.of_logits([torch.stack(each) for each in logits], rows.completions)


class SharedPromptState:
    """Keeps one copy of each prompt for all its rows (decoding_cache.py)."""

    def __init__(
        self,
        model: CausalLM,
        prompts: TokenBatch,
        *,
        fused: FusedDecoder | None = None,
        windows: dict[int, int | None] | None = None,
    ) -> None:
        find_mixers(model)
        recurrent = recurrent_layers(model)
        layers = DynamicCache(config=causal_model(model).config).layers
        # transformers has states for layers without attention too (Nemotron-H), which remember nothing.
        known = (DynamicLayer, DynamicSlidingWindowLayer)
        if any(type(layer) not in known and not (recurrent and isinstance(layer, LinearAttentionLayer)) for layer in layers):
            raise UnsupportedError("layers with more to remember than keys and values")
        lengths, prompt_of = [length - 1 for length in prompts.packed.stem_lengths], prompts.prompt_of.tolist()
        if recurrent:
            found = encode_contexts(model, prompts)
            keys, values = list(found.keys.values()), list(found.values.values())
            self.cache = DecodingCache(keys, values, lengths, prompt_of, layers=list(found.keys), states=found.states)
        else:
            cache = encode_context(model, prompts)
            keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
            self.cache = DecodingCache(keys, values, lengths, prompt_of)
        # Behind the contexts: some models (MPT) encode them with the mask of their own attention, which is another one then.
        share_prompts(model)
        self._model, self._fused = model, fused
        self.static = not angles_depend_on_length(causal_model(model))
        if windows is not None:
            self.cache.windows = windows

    def forward(self, tokens: Int[Tensor, " N"], column: Int[Tensor, " 1"]) -> Float[Tensor, "N V"]:
        """See `DecodingState`."""
        positions = self.cache.begin_step(column)
        if self._fused is not None:
            return self._fused.step(tokens, positions, self.cache)
        out = self._model(
            input_ids=tokens[:, None],
            position_ids=positions,
            attention_mask=no_mask(tokens.device),
            use_cache=False,
            shared_prompt=self.cache,
        )
        logits: Tensor = out.logits[:, -1]  # [N, 1, V] -> [N, V]
        return logits

    def make_room(self, columns: int) -> None:
        """See `DecodingState`."""
        self.cache.make_room(columns)
        if self._fused is not None:
            self._fused.reserve(self.cache.longest + columns)

    def keep_rows(self, rows: Sequence[int], copies: int) -> None:
        """See `DecodingState`."""
        self.cache.keep_rows(rows, copies)

    def settle(self, place: Place, context: int) -> None:
        """See `StaticState`."""
        self.cache.settle(place, context)

    def reads(self) -> list[Tensor]:
        """See `StaticState`."""
        return self.cache.reads() + ([] if self._fused is None else [self._fused.angles])


class RepeatedPromptState:
    """Keeps a copy of its prompt for every row, in transformers' own cache, which knows the layers of every architecture."""

    static = False

    def __init__(self, model: CausalLM, prompts: TokenBatch) -> None:
        # Padding on the left, so that each context ends where its completion begins: a sliding window counts columns.
        ids, mask = prompts.contexts_padded_left()  # [P, C]
        cache = DynamicCache(config=causal_model(model).config)
        model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), past_key_values=cache, use_cache=True)
        if not any(isinstance(value, Tensor) for layer in cache.layers for value in vars(layer).values()):
            raise UnsupportedError("it keeps a state of its own, not transformers' cache")
        # [P, K, C, D] -> [N, K, C, D], layer by layer. Not batch_select_indices, which layers with another state do not have.
        cache.reorder_cache(prompts.prompt_of)
        self._model, self._cache = model, cache
        self._mask = mask.long()[prompts.prompt_of]  # [N, C], one column more per step

    def forward(self, tokens: Int[Tensor, " N"], column: Int[Tensor, " 1"]) -> Float[Tensor, "N V"]:  # noqa: ARG002
        """See `DecodingState`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # A short context has padding before it: the position is the number of real tokens before the new one, not its column.
        positions = self._mask.sum(-1, keepdim=True) - 1
        out = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def make_room(self, columns: int) -> None:
        """The cache grows by a column per step."""

    def keep_rows(self, rows: Sequence[int], copies: int) -> None:
        """See `DecodingState`."""
        chosen = moved(torch.tensor([*rows, *[rows[0]] * copies]), self._mask.device)
        self._cache.reorder_cache(chosen)
        self._mask = self._mask[chosen]


class EqualPromptState(RepeatedPromptState):
    """The same without padding, for batches whose prompts have one length: some architectures count padding as tokens."""
