"""Log-probabilities and entropies of completion tokens under the policy. Two layouts give the same numbers and gradients:

    packed    one row [all stems | all own parts] (batch.py), without padding; own parts attend to their stem (attention/)
    plain     prompt and completion as one sequence, once per completion, padded on the right

The packed one computes what the completions of a group share once; the plain one is what every architecture can do. The head
works on chunks of tokens, so that the logits [tokens, vocabulary] of a batch never exist at once. A frozen head gives its
gradient at once; one that is trained is recomputed in the backward pass (gradient checkpointing, arXiv:1604.06174).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.attention.shared_prompt import PackedRow, no_mask
from grpo_tasks.kit.pinned import moved
from grpo_tasks.policy.batch import TokenBatch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model, decoder_of
from grpo_tasks.policy.recurrent_layers import share_prompts
from grpo_tasks.policy.sharded import forward_pass

Layout = Literal["packed", "plain"]

CHUNK_ELEMENTS = 16 * 2**20
"""Most logits that exist at once on a CPU (64 MiB in float32)."""
CHUNK_ELEMENTS_GPU = 160 * 2**20
"""On other devices (640 MiB in float32, and twice that at the peak): 1,024 rows of a vocabulary of 152k."""
CHUNK_ROWS_GPU = 2048
"""Most rows there; with more, a smaller vocabulary would take memory and gain nothing."""
TILE = 256
"""Rows of the largest tile in which a GPU computes a matrix product."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probability and entropy of each completion token, float32; 0 at padding."""

    logps: Float[Tensor, "N T"]
    """Log-probability (nats) at the sampling temperature, with gradients."""
    entropies: Float[Tensor, "N T"]
    """Entropy (nats) of the distribution the token was drawn from, with gradients only on request."""
    hits: Float[Tensor, "N T"] | None = None
    """1 where the model ranks the token first, else 0; only on request."""


def completion_logprobs(
    model: CausalLM,
    batch: TokenBatch,
    *,
    temperature: float,
    layout: Layout = "packed",
    entropy_gradients: bool = False,
    count_hits: bool = False,
) -> TokenScores:
    """Score every token of the completions, at the temperature at which they were sampled.

    UnsupportedError where the layout is "packed", and the model's attention has soft caps, sinks or dropout.
    """
    packed = batch.packed
    # The plain layout computes every completion token; the packed one may compute one for several completions.
    targets = packed.targets if layout == "packed" else batch.completion_ids[batch.completion_mask]
    hits = torch.zeros(len(targets), device=targets.device) if count_hits else None

    def scored() -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        # Only the tokens that predict something pass through the head, the most expensive layer of a small model: [M, H].
        hidden = _hidden_packed(model, batch) if layout == "packed" else _hidden_plain(model, batch)
        return score_tokens(OwnHead(model), hidden, targets, temperature, entropy_gradients=entropy_gradients, hits=hits)

    logps, entropies = forward_pass(model, scored)
    if layout == "packed" and packed.scores_of is not None:
        # [U] -> [M]; the backward pass adds up what the completions ask of a shared token.
        logps, entropies = logps.index_select(0, packed.scores_of), entropies.index_select(0, packed.scores_of)
        hits = None if hits is None else hits.index_select(0, packed.scores_of)
    return TokenScores(
        logps=_in_cells(logps, batch),
        entropies=_in_cells(entropies, batch),
        hits=None if hits is None else _in_cells(hits, batch),
    )


def _in_cells(scores: Float[Tensor, " M"], batch: TokenBatch) -> Float[Tensor, "N T"]:
    # Padding becomes exactly 0, so that sums over T need no mask.
    # Not masked_scatter: its backward pass reads by the mask, and the host waits for the number of tokens.
    mask = batch.completion_mask
    blank = torch.zeros(mask.numel(), dtype=torch.float32, device=mask.device)
    return blank.index_copy(0, batch.completion_cells, scores).view(mask.shape)


def encode_context(model: CausalLM, batch: TokenBatch) -> DynamicCache:
    """Keys and values [P, K, C, D] of each prompt without its last token, layer by layer; those at padding are meaningless."""
    cache = DynamicCache()
    # No attention mask: padding is on the right, so causal attention hides it from every real token.
    # No position ids: without padding on the left, a token's position is its column.
    decoder_of(model)(input_ids=batch.context_ids, past_key_values=cache, use_cache=True)
    return cache


def _hidden_packed(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "M H"]:
    packed = batch.packed
    row = PackedRow(packed.stem_lengths, packed.own_lengths, packed.stem_of, packed.ids.device, packed.tail_lengths)
    causal = causal_model(model)
    share_prompts(causal)
    out = decoder_of(model)(
        input_ids=packed.ids,
        position_ids=packed.positions,
        attention_mask=no_mask(packed.ids.device),
        use_cache=False,
        shared_prompt=PackedAttention(row, packed.predicting, causal.config.get_text_config().num_hidden_layers - 1),
    )
    # Row numbers instead of a boolean mask: the backward pass of index_select adds rows, that of a masked read scatters slowly.
    hidden: Tensor = out.last_hidden_state[0].index_select(0, packed.predictors)  # [1, L, H] -> [M, H]
    return hidden


def _hidden_plain(model: CausalLM, batch: TokenBatch) -> Float[Tensor, "M H"]:
    # Each completion stands right behind its prompt, so that all padding is on the right: causal attention hides it, and columns
    # are positions. A sliding window counts columns, and would be wrong with padding between the two.
    lengths = batch.prompt_mask.sum(1)[batch.prompt_of][:, None]  # [P] -> [N] -> [N, 1]
    steps = torch.arange(batch.completion_ids.shape[1], device=lengths.device)  # [T]
    ids = torch.nn.functional.pad(batch.prompt_ids[batch.prompt_of], (0, len(steps)))  # [N, S + T]
    ids = ids.scatter(1, lengths + steps, batch.completion_ids)
    out = decoder_of(model)(input_ids=ids, use_cache=False)
    # Token t of a completion is predicted one column before it. [N, T] -> [M], as rows of [N (S + T), H]
    columns = (lengths - 1 + steps) + torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
    rows = columns[batch.completion_mask]
    hidden: Tensor = out.last_hidden_state.flatten(0, 1).index_select(0, rows)
    return hidden


def score_tokens(
    head: nn.Module,
    hidden: Float[Tensor, "M H"],
    targets: Int[Tensor, " M"],
    temperature: float,
    *,
    entropy_gradients: bool = False,
    hits: Float[Tensor, " M"] | None = None,
    rows: int | None = None,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-probabilities of M tokens and entropies of their distributions (nats, float32), from the hidden states before them.

    The head makes logits [m, V] of hidden states [m, H], token by token; its `out_features` is V. `hits` gets 1 for each token
    that the head ranks first, and 0 for the others. The logits of at most `rows` tokens exist at once, in the backward pass too;
    by default as many as `chunk_rows` says.
    """
    rows = rows or chunk_rows(cast(int, head.out_features), hidden.device)
    frozen = not any(parameter.requires_grad for parameter in head.parameters())
    if frozen and not entropy_gradients:
        logps, entropies = _FrozenHead.apply(hidden, targets, head, temperature, rows, hits)
        return logps, entropies

    def score(
        chunk: Float[Tensor, "m H"], wanted: Int[Tensor, " m"]
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Bool[Tensor, " m"] | None]:
        logp = _at_temperature(head(chunk), temperature).log_softmax(-1)
        hit = logp.detach().argmax(-1) == wanted if hits is not None else None
        if entropy_gradients:
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with torch.no_grad():
                # mul_ works in place: exp() has just made a tensor that nothing else uses.
                entropy = -logp.exp().mul_(logp).sum(-1)
        return logp.gather(-1, wanted[:, None]).squeeze(-1), entropy, hit

    # A checkpointed chunk keeps its hidden states only, and computes its logits a second time in the backward pass. With a single
    # chunk that would save no memory.
    chunks = list(zip(hidden.split(rows), targets.split(rows), strict=True))
    run = partial(checkpoint, score, use_reentrant=False) if len(chunks) > 1 else score
    scored = [run(chunk, wanted) for chunk, wanted in chunks]
    if hits is not None:
        # Here, and not chunk by chunk: a checkpoint refuses inputs that something changes before it runs them again.
        hits.copy_(torch.cat([hit for _, _, hit in scored if hit is not None]))
    return torch.cat([logp for logp, _, _ in scored]), torch.cat([entropy for _, entropy, _ in scored])


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits exist at once.

    A GPU computes each tile of a matrix product on a processor of its own, and has a hundred of them. The way back through the
    head has few tiles, because its result [rows, H] is small; so 1,024 rows and more. A tile that is not full costs a whole one.
    """
    if device.type == "cpu":
        return max(1, CHUNK_ELEMENTS // vocabulary)
    rows = min(CHUNK_ROWS_GPU, CHUNK_ELEMENTS_GPU // vocabulary)
    return rows - rows % TILE if rows > TILE else max(1, rows)


def _split(hits: Float[Tensor, " M"] | None, targets: Int[Tensor, " M"], rows: int) -> "list[Tensor] | list[None]":
    return list(hits.split(rows)) if hits is not None else [None for _ in targets.split(rows)]


def _at_temperature(logits: Float[Tensor, "m V"], temperature: float) -> Float[Tensor, "m V"]:
    # In float32: a bfloat16 log-probability has 3 digits, and the loss takes the exp of a difference of two.
    if temperature == 1.0:
        return logits.float()
    # A [m, V] tensor takes as much memory as the logits themselves, so a copy is divided in place.
    return logits / temperature if logits.dtype == torch.float32 else logits.float().div_(temperature)


class _FrozenHead(torch.autograd.Function):
    """Scores of a head that is not trained. The gradient is made in the forward pass, while a chunk's logits exist.

    A log-probability is one number per token, so the loss changes its gradient by a factor only:

        d logp[target] / d logits = (onehot(target) - p) / temperature          [m, V], and through the head -> [m, H]

    The backward pass multiplies by that factor. Nothing is computed twice, and [M, H] is all that is kept. Entropies have no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: nn.Module, temperature: float, rows: int, hits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kept, logps, entropies = list[Tensor](), list[Tensor](), list[Tensor]()
        minus_one = torch.full((1, 1), -1.0, device=hidden.device)
        for chunk, wanted, found in zip(hidden.split(rows), targets.split(rows), _split(hits, targets, rows), strict=True):
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                given = chunk.detach().requires_grad_(ctx.needs_input_grad[0])
                logits = head(given)  # [m, V]
                # The way back through the head, which needs the logits themselves only where the model caps them.
                dtype, way_back = logits.dtype, get_gradient_edge(logits) if ctx.needs_input_grad[0] else None
            # Two [m, V] tensors in float32 at most from here on; the 16-bit ones are freed by this line.
            logits = _at_temperature(logits.detach(), temperature)
            logp = logits.log_softmax(-1)
            del logits
            logps.append(logp.gather(-1, wanted[:, None]).squeeze(-1))
            if found is not None:
                found.copy_(logp.argmax(-1) == wanted)
            probabilities = logp.exp()
            # In place, because nothing reads logp any more. Not a matrix product: autocast would round it to 16 bits, and rows
            # times columns of that length took 5 % of an update on an H100.
            entropies.append(logp.mul_(probabilities).sum(-1))
            del logp
            if way_back is not None:
                # p - onehot, in place: from here on nothing else reads the probabilities.
                probabilities.scatter_add_(1, wanted[:, None], minus_one.expand(len(wanted), 1))
                kept += torch.autograd.grad(way_back, given, probabilities.to(dtype))
            del probabilities  # before the logits of the next chunk are made
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(kept).mul_(-1.0 / temperature).to(hidden.dtype))
        entropy = -torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        # Not a view of them: FSDP hooks into what a pass returns.
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, " M"], _: Tensor) -> tuple[Any, ...]:
        (slope,) = ctx.saved_tensors
        return (grad[:, None] * slope).to(slope.dtype), None, None, None, None, None


class OwnHead(nn.Module):
    """What a causal language model computes from its decoder's output.

    Between hidden states and logits stands more than a linear layer: Granite and Cohere scale, Gemma caps, MiniCPM3 scales the
    hidden states. A copy of these formulas is wrong for the next model and says nothing about it, so there is none.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        causal, decoder = causal_model(model), decoder_of(model)
        children = dict(causal.named_children())
        [name] = [name for name, child in children.items() if child is decoder]
        self.rest = nn.ModuleDict({f"{key}_": child for key, child in children.items() if key != name})
        head: Any = causal.get_output_embeddings() or causal.get_input_embeddings()
        self.out_features: int = len((head.original_module if isinstance(head, TrainableTokensWrapper) else head).weight)
        """V, the number of logits of a token."""
        self._decoder = _Given(decoder)
        # The same model with another decoder. It shares all else: weights that FSDP gathers are there when they are gathered.
        self._twin = object.__new__(type(causal))
        self._twin.__dict__.update(causal.__dict__)
        self._twin.__dict__["_modules"] = children | {name: self._decoder}
        for key, child in children.items():
            if isinstance(child, TrainableTokensWrapper):
                self._twin.__dict__["_modules"][key] = _Rows(child)

    def forward(self, hidden: Float[Tensor, "m H"]) -> Float[Tensor, "m V"]:
        """The logits after these hidden states."""
        self._decoder.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)  # nothing reads them
        # Not `twin(...)`: hooks of the model, and what accelerate puts around its forward pass, belong to a whole pass.
        logits: Tensor = type(self._twin).forward(self._twin, input_ids=ids).logits
        self._decoder.hidden = None
        return logits[0]


class _Given(nn.Module):
    """A decoder whose output is known, with the attributes of the real one, such as Falcon H1's multiplier of the logits."""

    hidden: Tensor | None = None

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.__dict__["real"] = real  # not as a part: its weights are none of the head's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    @property
    def decoder(self) -> "_Given":
        """OPT and the decoders of encoder-decoder models are called by this name, one level below."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_Output":
        return _Output(self.hidden)


class _Output(tuple[Any, ...]):
    """A decoder's output of hidden states alone; read by name or by number, as models do."""

    __slots__ = ()

    def __new__(cls, hidden: Tensor | None) -> "_Output":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _Rows(nn.Module):
    """An output layer with trained rows of added tokens.

    peft's own forward pass copies the weight [V, H] for every chunk of tokens; here only the logits of the trained rows are
    computed twice.
    """

    def __init__(self, head: TrainableTokensWrapper) -> None:
        super().__init__()
        self.__dict__["head"] = head
        plain, adapter = head.original_module, head.token_adapter
        # Here and not in the forward pass, which runs for each chunk of tokens.
        self.indices = {name: moved(torch.tensor(ids), plain.weight.device) for name, ids in adapter.token_indices.items()}

    def forward(self, hidden: Tensor) -> Tensor:
        head: Any = self.__dict__["head"]
        plain, adapter, given = head.original_module, head.token_adapter, hidden.flatten(0, -2)  # [m, H]
        logits: Tensor = plain(given)  # [m, V]
        for name in () if head.disable_adapters else adapter.active_adapters:
            rows = adapter.trainable_tokens_delta[name].to(plain.weight.dtype)  # [R, H]
            logits = logits.index_copy(1, self.indices[name], torch.nn.functional.linear(given, rows).to(logits.dtype))
        return logits.view(*hidden.shape[:-1], -1)
