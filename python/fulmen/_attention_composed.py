"""`fulmen.attention` written with PyTorch's own operations, by the formula of src/ops/sdpa_call.h.

Used where a call is recorded and not run: inside torch.compile, where the compiler sees these operations and claims
them, and on fake tensors, where only shapes are wanted. Nothing is fused here: scores take query_len * key_len elements.
"""

import math

import torch
import torch.nn.functional as F


def composed_attention(q, k, v, mask, sink, slopes, cu_q, cu_k, key_lengths, dropout_p, scale, options):
    """Operands and options as in fulmen._attention; gives out, or (out, lse)."""
    if options.gqa and q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    query_len, key_len = q.shape[-2], k.shape[-2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q, k.transpose(-2, -1)).float() * scale
    if options.softcap > 0:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    shift = key_len - query_len if options.lower_right else 0
    diagonal = torch.arange(key_len, device=q.device)[None, :] - torch.arange(query_len, device=q.device)[:, None] - shift
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * diagonal.abs()
    open_ = None

    def close(where_open):
        nonlocal open_
        open_ = where_open if open_ is None else open_ & where_open

    if options.causal:
        close(diagonal <= 0)
    if options.left >= 0:
        close(diagonal >= -options.left)
    if options.right >= 0:
        close(diagonal <= options.right)
    if key_lengths is not None:
        close(torch.arange(key_len, device=q.device) < key_lengths[:, None, None, None])
    if cu_q is not None:
        query_sequence = torch.bucketize(torch.arange(query_len, device=q.device), cu_q, right=True)
        key_sequence = torch.bucketize(torch.arange(key_len, device=q.device), cu_k, right=True)
        close(query_sequence[:, None] == key_sequence[None, :])
    if mask is not None:
        if mask.dtype == torch.bool:
            close(mask)
        else:
            scores = scores + mask
    if open_ is not None:
        scores = scores.masked_fill(~open_, -math.inf)
    row_max = scores.amax(-1, keepdim=True).detach()
    if sink is not None:
        row_max = torch.maximum(row_max, sink.float()[:, None, None].detach())
    row_max = torch.where(torch.isfinite(row_max), row_max, torch.zeros_like(row_max))
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.float()[:, None, None] - row_max)
    empty = total == 0
    weights = (weights / torch.where(empty, torch.ones_like(total), total)).to(q.dtype)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    out = torch.matmul(weights, v)
    if not options.lse:
        return out
    return out, (row_max + torch.log(total)).squeeze(-1)
