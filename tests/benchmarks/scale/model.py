"""Predicts the time of an update on many cards, and what it is spent on. A calculation: nothing of it has run on a card.

    sampling    exchange of weights -> prompts -> decoding, step by step -> exchange of completions
    training    forward and backward passes -> sum of the gradients -> share of a checkpoint

With `max_staleness` 0 both take turns and their times add up; above 0 the slower one decides. A kernel takes as long as its
arithmetic or as its memory, whichever is longer. Reward functions are not included: their time is known only after a run.
What was measured is in `Measured`, what is assumed in `Assumed`; everything else follows from public figures (cards.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from grpo_tasks.planning.memory_plan import RESERVE
from schemas.errors import ConfigError
from tests.benchmarks.scale.cards import Card, Link
from tests.benchmarks.scale.workload import Workload

TRAINED_BYTES = 16.0
"""Bytes per trained weight: float32 weight and gradient, and two moments."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Shares of the public figures that real kernels reach. They are assumptions."""

    train_share: float = 0.35
    """Of the arithmetic, while training. Below the 0.38 to 0.43 of arXiv:2407.21783, whose passes are larger."""
    prefill_share: float = 0.5
    """Of the arithmetic, while sampling."""
    memory_share: float = 0.6
    """Of the memory bandwidth."""
    link_share: float = 0.7
    """Of a link's bandwidth."""
    step_s: float = 0.002
    """Time of a decoding step that does not depend on its size: launches, sampling, scheduling."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured on two CPU cores by `python -m tests.benchmarks.scale.measure` (docs/scale.md has date and table)."""

    save_rate: float = 900e6
    """Bytes per second of writing an adapter."""
    send_rate: float = 800e6
    """Bytes per second that one process reads, hashes and sends to `grpo weights-server`."""
    receive_rate: float = 250e6
    """Bytes per second that one `grpo weights-server` receives, hashes, writes and hashes again. Checkpoints count the same."""
    sync_s: float = 0.03
    """Fixed part of an exchange of weights: requests, and the load of a small adapter by vLLM (5 to 11 ms on a CPU)."""
    checkpoint_s: float = 0.026
    """Time of the demo's checkpoint, which has 1.4 MB."""
    journal_bytes: float = 1081.0
    """Bytes of the journal for an update of the demo."""
    token_bytes: float = 14.1
    """Bytes of a sampled token in the messages between processes."""
    token_s: float = 1.13e-7
    """Time for which each process packs and unpacks a sampled token of such a message."""


class Piece(StrEnum):
    """What time is spent on."""

    SYNC = "weights to the replicas"
    PROMPTS = "prompts"
    DECODE_WEIGHTS = "decoding: reading weights"
    DECODE_CACHE = "decoding: reading keys and values"
    DECODE_ARITHMETIC = "decoding: arithmetic"
    DECODE_MESSAGES = "decoding: messages between cards"
    DECODE_STEPS = "decoding: fixed time of a step"
    EXCHANGE = "exchange of completions"
    TRAIN_ARITHMETIC = "training: arithmetic"
    TRAIN_WEIGHTS = "training: reading weights"
    SHARDS = "training: gathering shards"
    GRADIENTS = "sum of the gradients"
    CHECKPOINT = "checkpoints and journal"


SAMPLING = frozenset(list(Piece)[:8])
"""Pieces of the samplers' time; the others are the trainers'."""

DIVIDED = frozenset({Piece.PROMPTS, Piece.DECODE_CACHE, Piece.DECODE_ARITHMETIC, Piece.TRAIN_ARITHMETIC})
"""Pieces that more cards share among themselves; the others stay or grow."""

ADVICE: Mapping[Piece, str] = {
    Piece.SYNC: "the adapter instead of all weights, a smaller rank, or fewer of both: each process sends to each replica",
    Piece.PROMPTS: "shorter prompts, or more completions for each prompt",
    Piece.DECODE_WEIGHTS: "a larger batch, or a higher tensor_parallel_size: each step reads all weights for its rows",
    Piece.DECODE_CACHE: "more replicas, or shorter completions",
    Piece.DECODE_ARITHMETIC: "more replicas",
    Piece.DECODE_MESSAGES: "a smaller tensor_parallel_size, or cards with NVLink",
    Piece.DECODE_STEPS: "a larger batch, or shorter completions",
    Piece.EXCHANGE: "fewer completions per update, or fewer processes",
    Piece.TRAIN_ARITHMETIC: "more processes that train",
    Piece.TRAIN_WEIGHTS: "a larger batch, or fewer processes: each one reads all weights for its few completions",
    Piece.SHARDS: "fsdp: false, larger passes, or a faster network",
    Piece.GRADIENTS: "an adapter, a smaller rank, or a faster network",
    Piece.CHECKPOINT: "a higher save_steps",
}
"""What to change where a piece takes most of the time."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cards, and how they are connected."""

    card: Card
    cards_per_node: int
    network: Link


@dataclass(frozen=True, slots=True)
class Layout:
    """Who does what."""

    trainers: int
    """Processes that train, one for each card."""
    replicas: int
    """Servers that sample, on cards of their own; 0: the cards that train sample too."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A predicted update."""

    layout: Layout
    cards: int
    """Cards in use."""
    pieces: Mapping[Piece, float]
    """Seconds of each piece, per update."""
    step_s: float
    """Seconds of an update."""
    tokens_per_s: float
    """Sampled tokens per second, of all cards together."""
    overlaps: bool
    """Sampling and training run at the same time."""

    @property
    def sampling_s(self) -> float:
        """Seconds of sampling, per update."""
        return sum(seconds for piece, seconds in self.pieces.items() if piece in SAMPLING)

    @property
    def training_s(self) -> float:
        """Seconds of training, per update."""
        return sum(seconds for piece, seconds in self.pieces.items() if piece not in SAMPLING)

    @property
    def bottleneck(self) -> Piece:
        """The largest piece; of the slower side where both sides run at the same time."""
        sampling = self.sampling_s >= self.training_s
        side = [piece for piece in self.pieces if not self.overlaps or (piece in SAMPLING) == sampling]
        return max(side, key=lambda piece: self.pieces[piece])

    @property
    def limit(self) -> Piece:
        """The largest piece that more cards do not shorten: what saturation is due to."""
        return max((piece for piece in self.pieces if piece not in DIVIDED), key=lambda piece: self.pieces[piece])


@dataclass(frozen=True, slots=True)
class ScaleModel:
    """Predicts updates of a workload on a cluster."""

    work: Workload
    cluster: Cluster
    assumed: Assumed = Assumed()
    measured: Measured = Measured()
    sent_once: bool = False
    """One process sends the weights for all. Off: each process that trains sends them to every replica, as the engine does."""

    def forecast(self, layout: Layout) -> Forecast:
        """The time of an update.

        Raises:
            ConfigError: there cannot be such a layout.
        """
        self.check(layout)
        work = self.work
        sampled = self._sampling(layout)
        per_update = 1 / (work.rollout_updates * work.iterations)
        pieces = {piece: seconds * per_update for piece, seconds in sampled.items()} | self._training(layout)
        pieces = {piece: pieces[piece] for piece in Piece if pieces.get(piece)}
        sampling = sum(seconds for piece, seconds in pieces.items() if piece in SAMPLING)
        training = sum(pieces.values()) - sampling
        step, overlaps = sampling + training, work.max_staleness > 0 and layout.replicas > 0
        if overlaps:
            # No rollout is in flight at a checkpoint, so the first one after it does not overlap with training.
            step = max(sampling, training) + min(sampling, training) / max(1, work.save_steps)
        tokens = work.completions * work.completion_tokens / work.iterations
        return Forecast(layout, cards_of(layout, work), pieces, step, tokens / step, overlaps)

    def check(self, layout: Layout) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: says what would have to change.
        """
        work, card = self.work, self.cluster.card
        if layout.trainers > work.completions:
            raise ConfigError(
                f"{layout.trainers} processes cannot share the {work.completions} completions of an update",
                place="stages",
                fix="raise gradient_accumulation_steps, or use fewer cards for training (more --replicas)",
            )
        if work.tensor_parallel > self.cluster.cards_per_node:
            raise ConfigError(
                f"a replica needs {work.tensor_parallel} cards of one node, which has {self.cluster.cards_per_node}",
                place="rollout.vllm.tensor_parallel_size",
                fix=f"at most {self.cluster.cards_per_node}",
            )
        needed = self._trainer_bytes(layout) + (work.weight_bytes if not layout.replicas else 0.0)
        if needed > card.memory:
            raise ConfigError(
                f"a process that trains needs {needed / 1e9:.0f} GB on its card, and {card.name} has {card.memory / 1e9:.0f} GB",
                place="resources",
                fix="resources.fsdp: true with more cards, replicas on cards of their own, or a card with more memory",
            )
        if self._rows_in_memory(layout) < 1:
            raise ConfigError(
                "the model, an adapter for each process that trains, and the keys and values of one completion do not fit on "
                f"{work.tensor_parallel} x {card.name}",
                place="rollout.vllm",
                fix="a higher tensor_parallel_size or gpu_memory_utilization, a card with more memory, or fewer processes",
            )

    def _trainer_bytes(self, layout: Layout) -> float:
        frozen = 0.0 if self.work.full else self.work.weight_bytes
        shards = layout.trainers if self.work.fsdp else 1
        return RESERVE + (frozen + TRAINED_BYTES * self.work.trained) / shards

    def _rows_in_memory(self, layout: Layout) -> int:
        """Completions whose keys and values fit next to the weights of a sampler."""
        work, memory = self.work, self.cluster.card.memory
        if layout.replicas:
            # A server holds an adapter for each process that trains, for they send one each.
            adapters = 0 if work.merged else 1 if self.sent_once else layout.trainers
            room = memory * work.sampler_memory * work.tensor_parallel - work.weight_bytes - adapters * work.trained * work.width
        else:
            room = memory - self._trainer_bytes(layout) - work.weight_bytes
        prompt = work.prompt_tokens / work.group_size
        return int(room / (work.shape.cache(work.width) * (work.longest_tokens + prompt)))

    def _sampling(self, layout: Layout) -> dict[Piece, float]:
        """Seconds of a rollout."""
        work, assumed, shape = self.work, self.assumed, self.work.shape
        samplers = layout.replicas or layout.trainers
        cards = work.tensor_parallel if layout.replicas else 1
        # A group stays on one sampler; the slowest one has the most groups.
        groups = math.ceil(work.prompts / samplers)
        waves = math.ceil(groups * work.group_size / min(work.rows_at_once, self._rows_in_memory(layout)))
        flops = cards * self.cluster.card.flops * assumed.prefill_share
        prompt = 2 * (shape.body + self._adapter) * work.prompt_tokens + shape.attention * work.prompt_tokens**2 / 2
        pieces = self._decoding(groups * work.group_size / waves, waves, cards)
        pieces[Piece.PROMPTS] = max(groups * prompt / flops, waves * self._weights_s(cards))
        pieces[Piece.SYNC] = self._sync(layout)
        tokens = work.prompts * work.group_size * work.completion_tokens
        if layout.trainers > 1:
            pieces[Piece.EXCHANGE] = tokens * (self.measured.token_bytes / self._between(layout) + self.measured.token_s)
        return pieces

    def _decoding(self, rows: float, waves: int, cards: int) -> dict[Piece, float]:
        work, assumed, shape, card = self.work, self.assumed, self.work.shape, self.cluster.card
        steps = waves * work.longest_tokens
        # Rows end one after another: on average so many are left, with so many tokens before the present one.
        alive = rows * work.completion_tokens / work.longest_tokens
        before = work.prompt_tokens + work.completion_tokens / 2
        weights = self._weights_s(cards)
        cache = alive * before * shape.cache(work.width) / (cards * card.bandwidth * assumed.memory_share)
        operations = alive * (2 * (shape.body + shape.head + self._adapter) + shape.attention * before)
        arithmetic = operations / (cards * card.flops * assumed.prefill_share)
        pieces = {Piece.DECODE_STEPS: steps * assumed.step_s}
        if arithmetic > weights + cache:
            pieces[Piece.DECODE_ARITHMETIC] = steps * arithmetic
        else:
            pieces |= {Piece.DECODE_WEIGHTS: steps * weights, Piece.DECODE_CACHE: steps * cache}
        if cards > 1:
            # Two sums of the activations for each layer.
            message = ring_s(alive * shape.hidden * work.width, cards, card.link, assumed.link_share)
            pieces[Piece.DECODE_MESSAGES] = steps * 2 * shape.layers * message
        return pieces

    @property
    def _adapter(self) -> int:
        """Weights that are computed in addition to those of the model, while sampling and while training."""
        return 0 if self.work.full else self.work.trained

    def _weights_s(self, cards: int) -> float:
        """Seconds for reading all weights once."""
        read = (self.work.shape.body + self.work.shape.head + self._adapter) * self.work.width
        return read / (cards * self.cluster.card.bandwidth * self.assumed.memory_share)

    def _sync(self, layout: Layout) -> float:
        """Seconds for handing the policy to the samplers."""
        size, measured = self.work.sync_bytes, self.measured
        if not layout.replicas:
            # The copy with the adapter folded in: weights are read, added to, written.
            return 3 * self._weights_s(1)
        senders = 1 if self.sent_once else layout.trainers
        saved = size / measured.save_rate + measured.sync_s
        if self.nodes(layout) == 1:
            # Replicas read the files that are there.
            return saved + senders * size / measured.receive_rate
        network = self.cluster.network.bytes_per_s * self.assumed.link_share
        on_node = min(senders, self.cluster.cards_per_node)
        sending = max(size / measured.send_rate, on_node * size / network) * layout.replicas
        return saved + max(sending, senders * size * max(1 / measured.receive_rate, 1 / network))

    def _training(self, layout: Layout) -> dict[Piece, float]:
        """Seconds of the passes of an update, of the sum of its gradients, and of its share of a checkpoint."""
        work, assumed, measured, card = self.work, self.assumed, self.measured, self.cluster.card
        rows = math.ceil(work.completions / layout.trainers)
        passes = math.ceil(rows / work.pass_rows)
        arithmetic = self._pass_operations(rows) / (card.flops * assumed.train_share)
        reading = passes * (work.forwards + 1 + work.full) * self._weights_s(1)
        pieces = {Piece.TRAIN_ARITHMETIC: arithmetic} if arithmetic >= reading else {Piece.TRAIN_WEIGHTS: reading}
        if layout.trainers > 1:
            link = self._link(layout)
            pieces[Piece.GRADIENTS] = ring_s(work.gradient_bytes, layout.trainers, link, assumed.link_share)
            if work.fsdp:
                # Half a ring: shards are gathered for each forward and for the backward pass.
                gathered = ring_s(work.weight_bytes, layout.trainers, link, assumed.link_share) / 2
                pieces[Piece.SHARDS] = passes * (work.forwards + 1) * gathered
        checkpoint = measured.checkpoint_s + work.checkpoint_bytes / measured.receive_rate
        return pieces | {Piece.CHECKPOINT: checkpoint / work.save_steps + measured.journal_bytes / measured.receive_rate}

    def _pass_operations(self, rows: int) -> float:
        """Operations of all passes of one process; each pass computes a prompt once for all of its completions."""
        work, shape = self.work, self.work.shape
        full, rest = divmod(rows, work.pass_rows)
        prompts = full * math.ceil(work.pass_rows / work.group_size) + math.ceil(rest / work.group_size)
        tokens, prompt = work.completion_tokens, work.prompt_tokens
        pairs = rows * tokens * (prompt + tokens / 2) + prompts * prompt**2 / 2
        computed = rows * tokens + prompts * prompt
        # The gradient of an input costs as much as a forward pass, and so does that of trained weights.
        body = 2 * shape.body * computed * (work.forwards + 1 + work.full)
        adapter = 2 * self._adapter * computed * (work.forwards + 2)
        head = 2 * shape.head * rows * tokens * (work.forwards + 1 + work.full)
        return body + adapter + head + shape.attention * pairs * (work.forwards + 2)

    def nodes(self, layout: Layout) -> int:
        """Nodes in use."""
        return math.ceil(cards_of(layout, self.work) / self.cluster.cards_per_node)

    def _link(self, layout: Layout) -> Link:
        """What connects the processes that train."""
        return self.cluster.card.link if layout.trainers <= self.cluster.cards_per_node else self.cluster.network

    def _between(self, layout: Layout) -> float:
        return self._link(layout).bytes_per_s * self.assumed.link_share


def cards_of(layout: Layout, work: Workload) -> int:
    """Cards in use."""
    return layout.trainers + layout.replicas * work.tensor_parallel


def ring_s(size: float, members: int, link: Link, share: float) -> float:
    """Seconds in which members sum so many bytes: each sends all of them twice, but for its own part."""
    if members == 1:
        return 0.0
    latency = 2 * math.ceil(math.log2(members)) * link.latency_s
    return latency + 2 * size * (members - 1) / members / (link.bytes_per_s * share)
