"""From the last hidden states to the logits, by the model's own code.

    hidden states [M, H]  --the causal model's forward pass, its decoder replaced by them-->  logits [M, V]

Between the two stand more than a linear layer: Granite and Cohere scale the logits, Gemma caps them, MiniCPM3 scales the hidden
states, others add a bias or a transform. A copy of these formulas is wrong for the next model and says nothing about it, so there
is none.
"""

from typing import Any

import torch
from jaxtyping import Float
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from grpo_tasks.policy.folded_adapter import CausalLM, causal_model, decoder_of
from grpo_tasks.policy.token_rows import logits_of, plain_layer


class OwnHead(nn.Module):
    """What a causal language model computes from its decoder's output; has the parameters of all but the decoder."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        causal, decoder = causal_model(model), decoder_of(model)
        children = dict(causal.named_children())
        [name] = [name for name, child in children.items() if child is decoder]
        self.rest = nn.ModuleDict({f"{key}_": child for key, child in children.items() if key != name})
        head: Any = plain_layer(causal.get_output_embeddings() or causal.get_input_embeddings())
        self.out_features: int = len(head.weight)
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
    """A decoder whose output is known; it has the attributes of the real one, such as Falcon H1's multiplier of the logits."""

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
    """The output of a decoder that computed nothing but hidden states; read by name or by number, as models do."""

    __slots__ = ()

    def __new__(cls, hidden: Tensor | None) -> "_Output":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _Rows(nn.Module):
    """An output layer with trained rows of added tokens, without peft's copy of its weight."""

    def __init__(self, head: TrainableTokensWrapper) -> None:
        super().__init__()
        self.__dict__["head"] = head

    def forward(self, hidden: Tensor) -> Tensor:
        return logits_of(self.__dict__["head"], hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
