"""Decodes one batch of requests in steps that a CUDA graph can replay (graphs.py).

Between two changes of shape (`Buckets`) a step reads and writes tensors that stay where they are. Every few steps one copy of the
sampled tokens goes to the host, which looks for ends and drops rows; the host waits for the device nowhere else. Stop strings are
found in text, which only the host has. Meanwhile the device runs steps that were launched before (`ahead`):

    device    1 ... 8 | copy | 9 10 | 11 ... 16 | copy | 17 18 | ...
    host                     | ends in 1 ... 8  |      | ends in 9 ... 16

Rows that have ended are decoded on until the host knows, and their surplus tokens are cut off.

The same batch gives the same completions on the same device with the same torch. Buckets and other rows change a completion by
rounding only: in 16 bits, matrix products of other sizes move its log-probabilities, and so now and then a token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from grpo_tasks.kit.pinned import moved
from grpo_tasks.kit.progress import Count
from grpo_tasks.policy.batch import TokenBatch, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.graphs import Graphs, Place
from grpo_tasks.rollout.stop import StopRule

BLOCK = 256
"""Tokens that are summed by one product with a triangle of ones."""


def uniform_numbers(seeds: Sequence[int], length: int, *, device: torch.device) -> Float[Tensor, "N L"]:
    """`length` uniform numbers in [0, 1) per seed, float64, the same on every device (Philox, doi:10.1145/2063384.2063405)."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return moved(torch.from_numpy(np.stack(rows)), device)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token per row, with its log-probability (nats) under the distribution that it was drawn from.

    `policy_logps` are those before truncation and penalty: what the trainer computes.
    """

    tokens: Int[Tensor, " N"]
    logps: Float[Tensor, " N"]
    policy_logps: Float[Tensor, " N"]


def sample_tokens(
    logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"], sampling: Sampling, seen: Bool[Tensor, "N V"] | None = None
) -> Drawn:
    """Sample a token per row by a number in [0, 1) of its own; temperature 0 takes the most likely token.

    `torch.multinomial` draws from one stream for the whole batch, so a completion would get other numbers with other neighbours.
    `seen` marks the tokens of each row's prompt and completion, for repetition_penalty.

    The order is that of transformers: repetition_penalty, temperature, top_k, top_p, min_p. vLLM applies min_p before top_k and
    top_p; alone, each gives the same distribution in both.
    """
    # Greedy decoding draws from a point mass; reported are the log-probabilities at temperature 1, as vLLM does.
    greedy, temperature = sampling.temperature == 0.0, sampling.temperature or 1.0
    penalised = logits if seen is None else repetition_penalty(logits.float(), seen, sampling.repetition_penalty)
    scaled = _scaled(penalised, temperature)
    kept = truncate(scaled, sampling)  # [N, V]
    if greedy:
        tokens = penalised.argmax(-1)
        logps = _logps_of(kept, tokens)
    else:
        tokens, logps = _draw(kept, uniform)
    if greedy or not sampling.changes_distribution:
        # A second softmax over [N, V] would cost as much as the first.
        return Drawn(tokens, logps, logps)
    return Drawn(tokens, logps, _logps_of(_scaled(logits, temperature), tokens))


def _scaled(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    if temperature == 1.0:
        return logits.float()
    # Divided by a tensor of float32, logits of 16 bits are converted in the same operation.
    return logits / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)


def _logps_of(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


def _draw(logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Tokens and their log-probabilities."""
    if logits.device.type != "cpu":
        return draw_in_blocks(logits, uniform)
    logp = torch.log_softmax(logits, dim=-1)
    # float64: in float32 the sum over 150,000 tokens would round away the probabilities of rare ones.
    cdf = logp.exp().double().cumsum(-1)
    # The first token whose cumulative probability exceeds the number. The last entry of the CDF is not exactly 1, so the number
    # is scaled by it; otherwise a number close to 1 could fall behind the last token.
    goal = (uniform * cdf[:, -1])[:, None]
    tokens = torch.searchsorted(cdf, goal, right=True).squeeze(-1).clamp(max=logp.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def draw_in_blocks(logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """The same for a GPU: after the softmax the vocabulary is read once more, for the sums of its blocks."""
    # One operation less than exp(log_softmax), and nearer to float64: of a million tokens that differ in 3, this in none.
    probabilities = logits.softmax(-1)  # float32
    tokens = inverse_cdf_in_blocks(probabilities, uniform)
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def inverse_cdf_in_blocks(probabilities: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The first token whose cumulative probability exceeds the number: first its block of tokens, then the token.

    On a GPU `cumsum` adds in an order that changes from run to run. Here sums and products add in a fixed one, and only one block
    per row is summed token by token. Sums are float64, of probabilities in their own precision.
    """
    size = probabilities.shape[-1]
    whole = size - size % BLOCK
    # Views: padding the last block would copy all probabilities.
    totals = probabilities[:, :whole].unflatten(-1, (whole // BLOCK, BLOCK)).sum(-1, dtype=torch.float64)
    if whole < size:
        totals = torch.cat([totals, probabilities[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)
    ends = _running_sums(totals)  # [N, B]
    goal = (uniform * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, goal, right=True).clamp(max=ends.shape[1] - 1)  # [N, 1]
    places = torch.add(_columns(BLOCK, block.device), block, alpha=BLOCK)  # [N, C]
    if whole < size:
        chosen = probabilities.gather(1, places.clamp(max=size - 1)).double().masked_fill_(places >= size, 0.0)
    else:
        chosen = probabilities.gather(1, places).double()
    inner = _running_sums(chosen)
    # Rounding may put the number just outside its block; then it means the block's first or last token that has a probability.
    rest = (goal - (ends - totals).gather(1, block)).clamp(min=0.0)
    rest = torch.minimum(rest, inner[:, -1:] * (1 - 2**-50))
    token = torch.add(torch.searchsorted(inner, rest, right=True), block, alpha=BLOCK)
    return token.squeeze(-1).clamp(max=size - 1)


def sums_in_blocks(values: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """`values.cumsum(-1)`, added in a fixed order on every device."""
    blocks = functional.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [N, B, C]
    totals = blocks.sum(-1)  # [N, B]
    before = _running_sums(totals) - totals
    return (_running_sums(blocks) + before[:, :, None]).flatten(1)[:, : values.shape[-1]]


def _running_sums(values: Float[Tensor, "*N C"]) -> Float[Tensor, "*N C"]:
    return values @ _triangle(values.shape[-1], values.dtype, values.device)


@cache
def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "C C"]:
    """Ones on and above the diagonal: a product with it gives running sums. Made once, not at every step."""
    # Outside of inference mode, so that it can be used everywhere.
    with torch.inference_mode(mode=False):
        return torch.ones(size, size, dtype=dtype, device=device).triu()


@cache
def _columns(size: int, device: torch.device) -> Int[Tensor, " C"]:
    with torch.inference_mode(mode=False):
        return torch.arange(size, device=device)


def repetition_penalty(logits: Float[Tensor, "N V"], seen: Bool[Tensor, "N V"], penalty: float) -> Float[Tensor, "N V"]:
    """Logits of seen tokens divided by the penalty, or multiplied where they are negative (CTRL, arXiv:1909.05858, 4.1)."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def truncate(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Logits with -inf for all tokens outside the `top_k` most likely, then outside the `top_p` nucleus (arXiv:1904.09751), then
    less likely than `min_p` times the most likely one (arXiv:2407.01082)."""
    if 0 < sampling.top_k < logits.shape[-1]:
        limit = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        # Probability of all more likely tokens. A token stays while these have not reached top_p, so the most likely one always
        # stays.
        likely = ordered.softmax(-1)
        before = (likely.cumsum(-1) if likely.device.type == "cpu" else sums_in_blocks(likely)) - likely
        # scatter takes the decision back from the sorted order to the order of the vocabulary.
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if sampling.min_p > 0.0:
        # A ratio of probabilities is a difference of logits, whatever the other two have removed.
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which shapes are decoded, and after how many steps the host reads the tokens."""

    check_every: int
    ahead: int
    """Steps that are launched before the host waits for the tokens of those before them: the device has work meanwhile."""
    fewest_rows: int
    """Rows are dropped down to this number times 1, 4, 16, ... only; 0: whenever some have ended."""
    first_columns: int
    """Room for new tokens in the first bucket; the next ones have 1.5, 2, 3, 4, 6, ... times as much."""

    @classmethod
    def of(cls, device: torch.device) -> "Buckets":
        """On a CPU a new shape costs nothing and neither does reading a token; elsewhere both make the device wait.

        On a card a step of 64 rows takes hardly longer than one of a single row, because it reads all weights; a new shape costs
        a capture and some eager steps. Measured on an H100 with the shape of Qwen2.5-1.5B and 64 completions as long as those of
        GSM8K: 2.3 s with one capture, 3.4 s with the 17 captures of rows and columns in twelve widths. Two steps of a card take
        longer than the host takes to search 8 tokens of 256 rows for stop strings.
        """
        return cls(1, 0, 0, 16) if device.type == "cpu" else cls(8, 2, 64, 512)

    def rows(self, alive: int) -> int:
        """Rows for so many unfinished completions."""
        size = self.fewest_rows
        while 0 < size < alive:
            size *= 4
        return size or alive

    def columns(self, needed: int, limit: int) -> int:
        """Room for at least `needed` new tokens per row, of at most `limit`."""
        return min(limit, _wider(self.first_columns, needed))

    def context(self, needed: int, prompts: int, cells: int) -> int:
        """Columns for contexts of at most `needed` tokens; `cells` is the room for new tokens of all rows."""
        wide = _wider(self.first_columns, needed)
        # A few prompts take hardly any time, so all batches may have one width. Where each row has a prompt of its own, padding
        # costs as much as tokens.
        return wide if 4 * prompts * wide <= cells else _wider(64, needed)


def _wider(size: int, needed: int) -> int:
    """The smallest of size x 1, 1.5, 2, 3, 4, 6, ... that is large enough."""
    while size < needed:
        # 1.5 is left out for an odd number.
        if size % 2 == 0 and size * 3 // 2 >= needed:
            return size * 3 // 2
        size *= 2
    return size


@runtime_checkable
class DecodingState(Protocol):
    """Model and key-value cache of the rows that are being decoded."""

    static: bool
    """All steps of a bucket run the same operations on the same tensors; it has the two methods of `StaticState`."""

    def forward(self, tokens: Int[Tensor, " N"], column: Int[Tensor, " 1"]) -> Float[Tensor, "N V"]:
        """Append a token to every row, each of which has `column` new tokens already; returns the logits of the next one."""

    def make_room(self, columns: int) -> None:
        """Room for `columns` new tokens per row."""

    def keep_rows(self, rows: Sequence[int], copies: int) -> None:
        """Drop all other rows, and append `copies` copies of the first one."""


@runtime_checkable
class StaticState(DecodingState, Protocol):
    """A state whose steps a graph can replay."""

    def settle(self, place: Place, context: int) -> None:
        """Keep everything at places from now on, contexts in at least so many columns, in shapes that no ended row changes."""

    def reads(self) -> Sequence[Tensor]:
        """All tensors that a step reads or writes, besides the weights and what it makes itself."""


MakeState = Callable[[CausalLM, TokenBatch], DecodingState]


class DecodingLoop:
    """One batch of requests; `alive` has the row and the request of each unfinished one, and nobody reads the other rows."""

    def __init__(
        self,
        model: CausalLM,
        requests: Sequence[Request],
        sampling: Sampling,
        stop: StopRule,
        make_state: MakeState,
        buckets: Buckets,
        graphs: Graphs,
    ) -> None:
        self.sampling, self.stop, self.buckets, device = sampling, stop, buckets, model.device
        self.alive = [(index, index) for index in range(len(requests))]
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logps: list[list[float]] = [[] for _ in requests]
        self.policy_logps: list[list[float]] = [[] for _ in requests]
        self.ended = [False] * len(requests)
        most = sampling.max_completion_length
        self.limits = [min(most, request.max_tokens or most) for request in requests]
        # All numbers at once: request i uses number t for its token t, whatever happens to the other requests.
        self.uniform = uniform_numbers([request.seed for request in requests], sampling.max_completion_length, device=device)
        # Neighbouring equal prompts are held once; the completions of the batch are placeholders of one token.
        groups = [(prompt, len(list(members))) for prompt, members in groupby(list(request.prompt_ids) for request in requests)]
        prompt_of = [index for index, (_, count) in enumerate(groups) for _ in range(count)]
        prompts = token_batch([prompt for prompt, _ in groups], [[0]] * len(prompt_of), prompt_of, device=device)
        self.state = make_state(model, prompts)
        # The context has been encoded once per prompt; the prompt's last token is the first input of every row. [P] -> [N]
        self.tokens = prompts.last_ids[prompts.prompt_of]
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.seen: Bool[Tensor, "N V"] | None = None
        if sampling.repetition_penalty != 1.0:
            # The tokens that each row has seen before its first new one.
            seen = torch.zeros(len(requests), model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
            for row, request in enumerate(requests):
                seen[row, list(request.prompt_ids)] = True
            self.seen = moved(seen, device)
        both = sampling.changes_distribution and sampling.temperature != 0.0
        # Token, log-probability, and the policy's if it is another, of the last steps. [E, F, N]
        self.record = torch.zeros(buckets.check_every, 3 if both else 2, len(requests), device=device)
        self._launched = self._room = 0
        self._widest = max(self.limits)
        self.graphs = graphs if self.state.static else Graphs(None)
        if self.graphs.enabled:
            # The same room for requests with any limits, and any contexts: other shapes would need other graphs.
            self._widest = most
            longest, cells = max(len(prompt) for prompt, _ in groups) - 1, len(requests) * buckets.columns(1, most)
            assert isinstance(self.state, StaticState)
            self.state.settle(self.graphs.place, buckets.context(longest, len(groups), cells))
            self._place()

    def run(self, count: Count) -> list[Completion]:
        """Decode until every completion has ended, and count them."""
        read, limit = 0, max(self.limits)
        while self.alive and read < limit:
            columns, before = min(self.buckets.check_every, limit - read), len(self.alive)
            self._launch(read + columns)
            copied = Copied(self.record[:columns])
            self._launch(min(read + columns + self.buckets.ahead, limit))
            self._check(copied.numbers())
            read += columns
            left = len(self.alive)
            count.add(before - left, tokens=before * columns, begun=left * read / limit)
        return [
            Completion(ids, logps, self.stop.text(ids), "stop" if ended else "length", policy_logps)
            for ids, logps, policy_logps, ended in zip(self.ids, self.logps, self.policy_logps, self.ended, strict=True)
        ]

    def _launch(self, steps: int) -> None:
        """Launch steps until there are so many."""
        while self._launched < steps:
            if self._launched == self._room:
                self._room = self.buckets.columns(self._launched + 1, self._widest)
                self.state.make_room(self._room)
                self._use_graph()
            self.graphs.run(self._step)
            self._launched += 1

    def _step(self) -> None:
        """One token for every row. Everything it reads and writes stays at its place until the bucket ends."""
        logits = self.state.forward(self.tokens, self.column)
        uniform = self.uniform.index_select(1, self.column).squeeze(1)  # [N, T] -> [N]
        drawn = sample_tokens(logits, uniform, self.sampling, self.seen)
        # float32 holds every integer up to 2^24, more than any vocabulary has tokens.
        fields = [drawn.tokens.float(), drawn.logps, *([] if drawn.policy_logps is drawn.logps else [drawn.policy_logps])]
        self.record.index_copy_(0, self.column.remainder(len(self.record)), torch.stack(fields)[None])
        if self.seen is not None:
            self.seen.scatter_(1, drawn.tokens[:, None], value=True)
        self.tokens.copy_(drawn.tokens)
        self.column.add_(1)

    def _check(self, steps: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take in the next tokens of every row, [steps, 2 or 3, N], and drop the rows that have ended."""
        staying = [
            (row, request)
            for row, request in self.alive
            if not self._append(request, [[field[row] for field in step] for step in steps])
        ]
        width = self.buckets.rows(len(staying))
        self.alive = staying
        if not staying or width >= len(self.tokens):
            return
        rows, copies = [row for row, _ in staying], width - len(staying)
        self.alive = [(row, request) for row, (_, request) in enumerate(staying)]
        # Shorter tensors make all further steps cheaper; completions of a group end at very different lengths.
        self.state.keep_rows(rows, copies)
        chosen = moved(torch.tensor([*rows, *rows[:1] * copies]), self.tokens.device)
        self.tokens, self.uniform = self.tokens.index_select(0, chosen), self.uniform.index_select(0, chosen)
        self.seen = None if self.seen is None else self.seen.index_select(0, chosen)
        # It has tokens of steps ahead, which are read later.
        self.record = self.record.index_select(2, chosen)
        self._place()
        self._use_graph()

    def _append(self, request: int, steps: Sequence[Sequence[float]]) -> bool:
        """Append the tokens of one row up to its end or limit; returns True if it is reached."""
        for token, logp, *policy in steps:
            self.ids[request].append(int(token))
            self.logps[request].append(logp)
            self.policy_logps[request].append(policy[0] if policy else logp)
            if self.stop.ended(self.ids[request]):
                self.ended[request] = True
                return True
            if len(self.ids[request]) == self.limits[request]:
                return True
        return False

    def _place(self) -> None:
        place = self.graphs.place
        self.tokens, self.column = place("tokens", self.tokens), place("column", self.column)
        self.uniform, self.record = place("uniform", self.uniform), place("record", self.record)
        self.seen = None if self.seen is None else place("seen", self.seen)

    def _use_graph(self) -> None:
        """The shapes have changed, so the next steps may need another graph."""
        if not self.graphs.enabled:
            return
        assert isinstance(self.state, StaticState)
        own = [self.tokens, self.column, self.uniform, self.record, *([] if self.seen is None else [self.seen])]
        chosen = self.sampling
        settings = chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.repetition_penalty
        self.graphs.use([*own, *self.state.reads()], *settings)


class Copied:
    """A copy of a tensor on the way to the host, begun behind the work that has been launched so far."""

    def __init__(self, tensor: Tensor) -> None:
        # CUDA copies to pinned memory, which torch takes by itself.
        self._host = tensor.to("cpu", non_blocking=True, copy=True)
        self._event = torch.cuda.current_stream().record_event() if tensor.device.type == "cuda" else None

    def numbers(self) -> list[Any]:
        """Its numbers, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
