"""The local engine: our own decoding loop over the folded policy.

Each prompt is encoded once and its cache handed to all its completions; rows that have ended leave the batch. Left out:
paged caches and continuous batching, which are a server's business.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from grpo_tasks.policy.batch import TokenBatch, positions, token_batch
from grpo_tasks.policy.chat import end_token_ids
from grpo_tasks.policy.folded import FoldedPolicy
from grpo_tasks.rollout.draw import draw, uniforms
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.stop import StopRule


class LocalEngine:
    """Samples in this process from a copy of `policy` with its adapter folded in."""

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folded = FoldedPolicy(policy)
        self._tokenizer = tokenizer
        self._end_ids = end_token_ids(tokenizer, policy.generation_config.eos_token_id)

    def sync(self) -> None:
        """Take over the policy's present weights."""
        self._folded.sync()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; see `RolloutEngine`."""
        model = self._folded.model
        was_training = model.training
        model.eval()
        stop = StopRule(self._tokenizer, self._end_ids | sampling.stop_token_ids, sampling)
        done: dict[int, Completion] = {}
        for indices in _batches(requests, sampling.max_batch_size):
            decode = _Decode(model, [requests[index] for index in indices], sampling, stop)
            done.update(zip(indices, decode.run(), strict=True))
        model.train(was_training)
        return [done[index] for index in range(len(requests))]


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[int]]:
    # Prompts of like length side by side: less padding, and equal prompts stay neighbours.
    order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), requests[index].prompt_ids))
    for start in range(0, len(order), size):
        yield order[start : start + size]


class _Decode:
    """One batch of requests, token by token. `alive[i]` is the request that row i of the tensors belongs to."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, stop: StopRule) -> None:
        self.model, self.sampling, self.stop = model, sampling, stop
        self.alive = list(range(len(requests)))
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logps: list[list[float]] = [[] for _ in requests]
        self.ended = [False] * len(requests)
        self.uniforms = uniforms([request.seed for request in requests], sampling.max_completion_length, device=model.device)
        self.cache = DynamicCache()
        self.mask, self.logits = self._encode_prompts(requests)

    def run(self) -> list[Completion]:
        for step in range(self.sampling.max_completion_length):
            tokens = self._take(step)
            if not self.alive or step + 1 == self.sampling.max_completion_length:
                break
            self._forward(tokens)
        return [
            Completion(ids, logps, self.stop.text(ids), "stop" if ended else "length")
            for ids, logps, ended in zip(self.ids, self.logps, self.ended, strict=True)
        ]

    def _encode_prompts(self, requests: Sequence[Request]) -> tuple[Int[Tensor, "N S"], Float[Tensor, "N V"]]:
        batch = _unique_prompts(requests, self.model.device)
        out = self.model(
            input_ids=batch.prompt_ids,
            attention_mask=batch.prompt_mask.long(),
            position_ids=positions(batch.prompt_mask),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache.batch_select_indices(batch.prompt_of)
        return batch.prompt_mask.long()[batch.prompt_of], out.logits[batch.prompt_of, -1]

    def _take(self, step: int) -> Int[Tensor, " N"]:
        """Draw a token for every living row, record it, and let the rows go that have ended."""
        rows = torch.tensor(self.alive, device=self.logits.device)
        tokens, logps = draw(self.logits, self.uniforms[rows, step], self.sampling)
        staying: list[int] = []
        for row, (token, logp) in enumerate(zip(tokens.tolist(), logps.tolist(), strict=True)):
            request = self.alive[row]
            self.ids[request].append(token)
            self.logps[request].append(logp)
            self.ended[request] = self.stop.ended(self.ids[request])
            if not self.ended[request]:
                staying.append(row)
        if len(staying) == len(self.alive):
            return tokens
        keep = torch.tensor(staying, dtype=torch.long, device=tokens.device)
        self.alive = [self.alive[row] for row in staying]
        self.cache.batch_select_indices(keep)
        self.mask = self.mask[keep]
        return tokens[keep]

    def _forward(self, tokens: Int[Tensor, " N"]) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        out = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(-1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]


def _unique_prompts(requests: Sequence[Request], device: torch.device) -> TokenBatch:
    groups = [(prompt, len(list(members))) for prompt, members in groupby(list(request.prompt_ids) for request in requests)]
    prompt_of = [index for index, (_, count) in enumerate(groups) for _ in range(count)]
    return token_batch([prompt for prompt, _ in groups], [[0]] * len(prompt_of), prompt_of, device=device)
