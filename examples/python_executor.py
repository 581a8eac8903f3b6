"""An executor written in Python: it runs attention for short sequences, forward and backward, and refuses the rest.

    python examples/python_executor.py
"""

import math

import torch

import fulmen
from fulmen.testing import check_executor

mine = fulmen.executor("mine", "attention in plain PyTorch, for sequences up to 128")


def factor(query, scale):
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def backward(query, key, value, mask, sink, slopes, q_offsets, k_offsets, key_lengths, seed, out, lse, out_grad, *, scale, **options):
    weights = torch.exp(query @ key.transpose(-2, -1) * factor(query, scale) - lse[..., None])
    score_grad = weights * (out_grad @ value.transpose(-2, -1) - (out_grad * out).sum(-1, keepdim=True)) * factor(query, scale)
    return score_grad @ key, score_grad.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ out_grad, None, None, None


def checker(call):
    if call.query.shape[-2] > 128 or call.key.shape[-2] > 128:
        return f"sdpa: query_len is {call.query.shape[-2]}, mine takes up to 128"
    if call.mask or call.seed or call.key_offsets or call.is_causal or call.query.dtype != "f32" or call.query.shape[1] != call.key.shape[1]:
        return "sdpa: mine takes f32 without masks, dropout, packing and grouped heads"
    if call.window_left >= 0 or call.window_right >= 0 or call.softcap or call.sink or call.alibi_slopes or call.key_lengths:
        return "sdpa: mine takes no window, soft-cap, sink, slopes and key lengths"
    return True


@mine.implements("sdpa", checker, backward=backward)
def attend(query, key, value, *_, scale, **options):
    scores = query @ key.transpose(-2, -1) * factor(query, scale)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ value, lse


if __name__ == "__main__":
    for length in (64, 256):
        spec = f"f32[2,4,{length},32]"
        print(fulmen.claims("sdpa", q=spec, k=spec, v=spec, training=True, executors=[mine, *fulmen.default_executors()]))
    q = torch.randn(2, 4, 64, 32, requires_grad=True)
    out = fulmen.attention(q, q, q, executors=[mine, *fulmen.default_executors()])
    (found,) = torch.autograd.grad(out.sum(), q)
    (right,) = torch.autograd.grad(fulmen.sdpa(q, q, q).sum(), q)
    print("largest difference of the gradients:", (found - right).abs().max().item())
    print(check_executor(mine, ops=["sdpa", "sdpa_forward"]))
