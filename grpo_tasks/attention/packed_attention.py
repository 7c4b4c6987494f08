"""Attention over one packed row of prompts and completions, without padding around it, without a cache and without a mask.

Three ways, by device and precision, of which tests compare each with single unpadded rows:

    CPU              the flash kernels of torch, called with a merged log-sum-exp (cpu_kernel.py)
    CUDA             one call of a varlen kernel, keys gathered as [prompt | own] for each completion (varlen.py), where torch
                     has one: in float32, and in 16 bits before compute capability 8.0, a window takes the way below
    everything else  scaled dot-product attention with a mask over [prompt | own] (masked.py)
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_tasks.attention.cpu_kernel import CpuAttention, Masks
from grpo_tasks.attention.masked import masked_attention
from grpo_tasks.attention.packed_row import PackedRow
from grpo_tasks.attention.varlen import Sequences, VarlenAttention, varlen_kernel


class PackedAttention:
    """What a forward pass over a packed row receives as `shared_prompt=`; see `SharedPrompt`.

    Args:
        row: what stands where in the row.
        predicting: places of the tokens whose hidden state is read after the last layer.
        last_layer: its index.
    """

    def __init__(self, row: PackedRow, predicting: Int[Tensor, " R"], last_layer: int) -> None:
        self.row, self.predicting, self.last_layer = row, predicting, last_layer
        # Made by the first layer, for all layers of the pass.
        self._masks: dict[tuple[int | None, bool], Masks] = {}
        self._sequences: Sequences | None = None

    # The compiler would follow the index tensors, which differ from pass to pass, and compile the layers anew each time.
    @torch.compiler.disable
    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H L D"],
        key: Float[Tensor, "1 K L D"],
        value: Float[Tensor, "1 K L _"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "1 H L _"]:
        """See `SharedPrompt`."""
        query, key, value = _in_one_dtype(query, key, value)
        depth = value.shape[-1]
        if depth < query.shape[-1]:
            # Multi-head latent attention (DeepSeek) has narrower values; the kernels want heads of one width.
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - depth))
        kernel = varlen_kernel(query, window)
        if kernel is not None:
            if self._sequences is None:
                self._sequences = Sequences.of(self.row)
            attended: Tensor = VarlenAttention.apply(query, key, value, self._sequences, kernel, scale, window)
        elif query.device.type == "cpu":
            last = layer == self.last_layer
            if (window, last) not in self._masks:
                self._masks[window, last] = Masks.of(self.row, window, query, tails=last)
            asking = self.row.tails if last else self.row.prompts
            attended = CpuAttention.apply(query, key, value, self.row, asking, self._masks[window, last], scale)
        else:
            attended = masked_attention(query, key, value, self.row, scale, window)
        return attended[..., :depth]


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors as a kernel needs them. Autocast casts for the kernels that it knows, and those here are called below it.

    With float32 weights under autocast the values have 16 bits, as linear layers return them, and queries and keys have 32 after
    their rotation.
    """
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    return list(tensors)
