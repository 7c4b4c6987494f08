"""The local engine: a decoding loop in this process, over a copy of the policy with its adapter folded in.

    requests -> batches of similar prompt length -> encode each prompt once -> decode token by token -> completions

All completions of a prompt read one copy of its keys and values, and rows that have ended leave the batch. Paged caches and
continuous batching are left to a server (vllm_engine.py).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from grpo_tasks.attention.shared_prompt import DecodedPrompt, UnsupportedError, no_mask, use_shared_prompts
from grpo_tasks.policy.batch import TokenBatch, position_ids, token_batch
from grpo_tasks.policy.chat import end_token_ids
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.logprobs import encode_context
from grpo_tasks.policy.sharded import is_sharded, sampling_copy
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.fused_decoder import FusedDecoder, agrees
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.rollout.token_sampling import Drawn, sample_tokens, uniform_numbers


class LocalEngine:
    """Samples in this process from a copy of `policy` with its adapter folded in.

    Args:
        policy: a causal language model, with or without an adapter.
        tokenizer: the model's.
        share_prompts: let the completions of a prompt read one copy of its keys and values.
        fold_adapter: sample from a copy with the adapter folded in, not through the adapter.
        fuse_kernels: use fused decoding steps where the model allows it.
    """

    def __init__(
        self,
        policy: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        share_prompts: bool = True,
        fold_adapter: bool = True,
        fuse_kernels: bool = True,
    ) -> None:
        self._folded = sampling_copy(policy) if fold_adapter or is_sharded(policy) else None
        self._model = policy if self._folded is None else self._folded.model
        self._tokenizer, self._share = tokenizer, share_prompts
        # Fusing replaces the model's weights by views, which the optimizer of a model in training would not follow.
        frozen = not any(parameter.requires_grad for parameter in self._model.parameters())
        self._fuse = share_prompts and fuse_kernels and frozen
        self._fused: FusedDecoder | None = None
        self._end_ids = end_token_ids(tokenizer, policy.generation_config.eos_token_id)

    def sync(self) -> None:
        """Load the policy's current weights into the copy."""
        if self._folded is not None:
            self._folded.sync()

    def sleep(self) -> None:
        """Nothing to release: the cache of a batch is freed when the batch ends."""

    def close(self) -> None:
        """Nothing to release: there is no other process."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; see `RolloutEngine`."""
        was_training = self._model.training
        if was_training:
            self._model.eval()
        stop = StopRule.of(self._tokenizer, self._end_ids, sampling)
        done: dict[int, Completion] = {}
        for indices in _batches(requests, sampling.max_batch_size):
            done.update(zip(indices, self._decode([requests[index] for index in indices], sampling, stop), strict=True))
        if was_training:
            self._model.train()
        return [done[index] for index in range(len(requests))]

    def _decode(self, requests: Sequence[Request], sampling: Sampling, stop: StopRule) -> list[Completion]:
        """The completions of one batch, by the fastest way that this model allows."""
        if self._share:
            try:
                if self._fuse:
                    # Tried once per engine; later syncs write into the same weights.
                    self._fuse, self._fused = False, self._fused_decoder(requests)
                return _DecodingLoop(self._model, requests, sampling, stop, partial(SharedPromptState, fused=self._fused)).run()
            except (UnsupportedError, AttributeError, TypeError) as error:
                warnings.warn(f"every completion gets its own copy of its prompt's keys and values ({error})", stacklevel=2)
                self._share = False
        return _DecodingLoop(self._model, requests, sampling, stop, RepeatedPromptState).run()

    def _fused_decoder(self, requests: Sequence[Request]) -> FusedDecoder | None:
        """The fused step, or None if its logits differ from the model's own or the model has another shape."""
        prompts = _unique_prompts(requests[:1], self._model.device)
        tokens = prompts.last_ids
        wanted = SharedPromptState(self._model, prompts, 1).forward(tokens)
        try:
            # `sync` writes into these weights outside of inference mode, which torch forbids for tensors made inside it.
            with torch.inference_mode(mode=False), torch.no_grad():
                fused = FusedDecoder(self._model)
        except UnsupportedError:
            return None
        found = SharedPromptState(self._model, prompts, 1, fused=fused).forward(tokens)
        return fused if agrees(found, wanted) else None


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[int]]:
    """Indices of the requests, in batches of at most `size`."""
    # Sorted by length, so that a batch has little padding, then by content, so that equal prompts are neighbours.
    order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), requests[index].prompt_ids))
    for start in range(0, len(order), size):
        yield order[start : start + size]


@runtime_checkable
class DecodingState(Protocol):
    """Model and key-value cache of the rows that are still being decoded."""

    def forward(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Append a token to every row; returns the logits of the next one."""

    def keep_rows(self, rows: Int[Tensor, " R"]) -> None:
        """Drop all other rows."""


class SharedPromptState:
    """Keeps one copy of each prompt for all its rows (attention/shared_prompt.py)."""

    def __init__(
        self,
        model: CausalLM,
        prompts: TokenBatch,
        max_length: int,
        *,
        fused: FusedDecoder | None = None,
    ) -> None:
        cache = encode_context(model, prompts)
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        self._model, self._fused = model, fused
        self._past = DecodedPrompt(keys, values, prompts.context_mask, prompts.prompt_of, max_length)
        # Position of a row's first input, the prompt's last token: the length of the context. [P] -> [N] -> [N, 1]
        self._positions = prompts.context_mask.sum(1)[prompts.prompt_of][:, None]

    def forward(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """See `DecodingState`."""
        positions = self._positions + self._past.length
        if self._fused is not None:
            logits = self._fused.step(tokens, positions, self._past)
        else:
            logits = self._model_forward(tokens, positions)
        self._past.length += 1
        return logits

    def _model_forward(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, "N 1"]) -> Float[Tensor, "N V"]:
        use_shared_prompts(causal_model(self._model))
        out = self._model(
            input_ids=tokens[:, None],
            position_ids=positions,
            attention_mask=no_mask(tokens.device),
            use_cache=False,
            shared_prompt=self._past,
        )
        logits: Tensor = out.logits[:, -1]  # [N, 1, V] -> [N, V]
        return logits

    def keep_rows(self, rows: Int[Tensor, " R"]) -> None:
        """See `DecodingState`."""
        self._past.keep_rows(rows)
        self._positions = self._positions[rows]


class RepeatedPromptState:
    """Keeps a copy of its prompt for every row, in transformers' own cache: works for every architecture with such a cache."""

    def __init__(self, model: CausalLM, prompts: TokenBatch, max_length: int) -> None:  # noqa: ARG002
        # Padding on the left, so that each context ends where its completion begins: a sliding window counts columns.
        ids, mask = prompts.contexts_padded_left()  # [P, C]
        cache = DynamicCache()
        model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), past_key_values=cache, use_cache=True)
        cache.batch_select_indices(prompts.prompt_of)  # [P, K, C, D] -> [N, K, C, D], layer by layer
        self._model, self._cache = model, cache
        self._mask = mask.long()[prompts.prompt_of]  # [N, C], one column more per step

    def forward(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
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

    def keep_rows(self, rows: Int[Tensor, " R"]) -> None:
        """See `DecodingState`."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]


MakeState = Callable[[CausalLM, TokenBatch, int], DecodingState]


class _DecodingLoop:
    """Decodes one batch of requests, token by token.

    Rows that end are dropped from the tensors. `alive[i]` is the index of the request that row i belongs to.
    """

    def __init__(
        self,
        model: CausalLM,
        requests: Sequence[Request],
        sampling: Sampling,
        stop: StopRule,
        make_state: MakeState,
    ) -> None:
        self.sampling, self.stop = sampling, stop
        self.alive = list(range(len(requests)))
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logps: list[list[float]] = [[] for _ in requests]
        self.policy_logps: list[list[float]] = [[] for _ in requests]
        self.ended = [False] * len(requests)
        # All numbers at once: request i uses number t for its token t, whatever happens to the other requests.
        self.uniform_numbers = uniform_numbers(
            [request.seed for request in requests], sampling.max_completion_length, device=model.device
        )
        prompts = _unique_prompts(requests, model.device)
        self.state = make_state(model, prompts, sampling.max_completion_length)
        # The context has been encoded once per prompt; the prompt's last token is the first input of every row. [P] -> [N]
        self.logits = self.state.forward(prompts.last_ids[prompts.prompt_of])
        self.seen = self._prompt_tokens(requests) if sampling.repetition_penalty != 1.0 else None

    def run(self) -> list[Completion]:
        for step in range(self.sampling.max_completion_length):
            tokens = self._next_tokens(step)
            if not self.alive or step + 1 == self.sampling.max_completion_length:
                break
            self.logits = self.state.forward(tokens)
        return [
            Completion(ids, logps, self.stop.text(ids), "stop" if ended else "length", policy_logps)
            for ids, logps, policy_logps, ended in zip(self.ids, self.logps, self.policy_logps, self.ended, strict=True)
        ]

    def _prompt_tokens(self, requests: Sequence[Request]) -> Bool[Tensor, "N V"]:
        """The tokens that each row has seen before its first new one, as repetition_penalty counts them."""
        seen = torch.zeros(self.logits.shape, dtype=torch.bool, device=self.logits.device)
        for row, request in enumerate(requests):
            seen[row, torch.tensor(list(request.prompt_ids), device=seen.device)] = True
        return seen

    def _next_tokens(self, step: int) -> Int[Tensor, " R"]:
        """Sample and record a token for every row, and drop the rows that have ended; returns the tokens of the others."""
        uniform = self.uniform_numbers[:, step]  # [requests]
        if len(self.alive) < len(self.ids):
            uniform = uniform[torch.tensor(self.alive, device=uniform.device)]
        sampled = sample_tokens(self.logits, uniform, self.sampling, self.seen)
        tokens = sampled.tokens
        drawn = tokens.tolist()  # one transfer from the device per step, not one per row
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], value=True)
        self._record(drawn, sampled)
        if self.sampling.stop:
            ended = [self.stop.ended(self.ids[request]) for request in self.alive]
        else:
            # Without stop strings the last token decides, and nothing has to be decoded.
            ended = [token in self.stop.end_ids for token in drawn]
        staying = [row for row, done in enumerate(ended) if not done]
        if len(staying) == len(self.alive):
            return tokens
        for request, done in zip(self.alive, ended, strict=True):
            self.ended[request] = done
        # Shorter tensors make all further steps cheaper; completions of a group end at very different lengths.
        keep = torch.tensor(staying, dtype=torch.long, device=tokens.device)
        self.alive = [self.alive[row] for row in staying]
        if staying:
            self.state.keep_rows(keep)
            self.seen = None if self.seen is None else self.seen[keep]
        return tokens[keep]

    def _record(self, drawn: Sequence[int], sampled: Drawn) -> None:
        logps = sampled.logps.tolist()
        policy_logps = logps if sampled.policy_logps is sampled.logps else sampled.policy_logps.tolist()
        for request, token, logp, policy_logp in zip(self.alive, drawn, logps, policy_logps, strict=True):
            self.ids[request].append(token)
            self.logps[request].append(logp)
            self.policy_logps[request].append(policy_logp)


def _unique_prompts(requests: Sequence[Request], device: torch.device) -> TokenBatch:
    """A batch that holds neighbouring equal prompts once; its completions are placeholders of one token."""
    groups = [(prompt, len(list(members))) for prompt, members in groupby(list(request.prompt_ids) for request in requests)]
    prompt_of = [index for index, (_, count) in enumerate(groups) for _ in range(count)]
    return token_batch([prompt for prompt, _ in groups], [[0]] * len(prompt_of), prompt_of, device=device)
