"""The ways of attention that other devices take, made to run on a CPU."""

import torch

from grpo_tasks.attention import packed_attention
from grpo_tasks.attention.packed_attention import PackedAttention, masked_attention
from grpo_tasks.attention.varlen import Kernel


def attention(q, k, v, sequences, scale, window):
    """Causal attention sequence by sequence, aligned to the end of the keys: what the kernels of CUDA compute."""
    out = []
    queries, keys = sequences.query_ends.tolist(), sequences.key_ends.tolist()
    for row in range(len(queries) - 1):
        query, key, value = q[queries[row] : queries[row + 1]], k[keys[row] : keys[row + 1]], v[keys[row] : keys[row + 1]]
        times = q.shape[1] // k.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        at = torch.arange(len(query), device=q.device)[:, None] + len(key) - len(query)
        distance = at - torch.arange(len(key), device=q.device)
        seen = (distance >= 0) & (distance < (window or len(key)))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
    return torch.cat(out)


def forward(q, k, v, sequences, scale, window):
    return attention(q, k, v, sequences, scale, window), ()


def backward(grad, q, k, v, _out, _kept, sequences, scale, window):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*inputs, sequences, scale, window), inputs, grad)


REFERENCE = Kernel(forward, backward)


def varlen_way(monkeypatch):
    """Attention as on CUDA, with a slow kernel in the place of CUDA's."""
    monkeypatch.setattr(packed_attention, "varlen_kernel", lambda *_: REFERENCE)


def masked_way(monkeypatch):
    """Attention as on devices that have no kernel for packed rows."""

    def attend(self, layer, query, key, value, scale, window=None):
        return masked_attention(query, key, value, self.row, scale, window)

    monkeypatch.setattr(PackedAttention, "attend", attend)
