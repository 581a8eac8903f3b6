"""Attention beside two suites of others: PyTorch's own samples of scaled_dot_product_attention (its op_db), and a grid
over shapes, masks, causality and scale remade from the description of Lightning Thunder's reference inputs. Forward and
backward; what is right is the formula in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import fulmen

from test_sdpa import make, oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def limit(dtype):
    return {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}[dtype]


def off(found, right):
    return (found.double() - right).abs().max().item() if right.numel() else 0.0


def near(found, right, theirs, what):
    """Within a few roundings of the largest, or twice the error of PyTorch in the same dtype. PyTorch chooses its fused
    kernel where it can: like ours it takes sum(out * out_grad) over the rounded result, which shows where logits are
    large and hardly any gradient is left."""
    assert found.shape == right.shape and torch.isfinite(found).all(), what
    size = right.abs().max().item() if right.numel() else 0.0
    allowed = max(limit(found.dtype) * max(size, 0.1), 2 * off(theirs, right))
    assert off(found, right) <= allowed, f"{what}: off by {off(found, right):.3g}, allowed {allowed:.3g}, largest is {size:.3g}"


def compare(q, k, v, mask=None, causal=False, scale=None, gqa=False):
    named = {"query": q, "key": k, "value": v, "mask": mask}
    ours = {n: None if t is None else t.detach().requires_grad_(t.is_floating_point()) for n, t in named.items()}
    double = {n: t if t is None or t.dtype == torch.bool else t.detach().double().requires_grad_() for n, t in named.items()}
    out = fulmen.sdpa(*ours.values(), 0.0, causal, scale=scale, enable_gqa=gqa)
    right = oracle(*double.values(), causal, scale, gqa)
    theirs = F.scaled_dot_product_attention(*ours.values(), 0.0, causal, scale=scale, enable_gqa=gqa)
    near(out, right, theirs, "result")
    grad = make(*out.shape, seed=9).to(out.dtype)
    wanted = [n for n, t in ours.items() if t is not None and t.requires_grad]
    results = (out, grad, ours), (right, grad.double(), double), (theirs, grad, ours)
    found, expected, torchs = (torch.autograd.grad(r, [t[n] for n in wanted], g) for r, g, t in results)
    for name, f, e, p in zip(wanted, found, expected, torchs):
        near(f, e, p, f"gradient of {name}")


def samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    (entry,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    return list(entry.sample_inputs("cpu", dtype, requires_grad=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_pytorch(dtype):
    found = samples(dtype)
    assert len(found) >= 20
    compared = 0
    for number, sample in enumerate(found):
        options = dict(sample.kwargs)
        mask = sample.args[2] if len(sample.args) > 2 else options.pop("attn_mask", None)
        causal, p = options.pop("is_causal", False), options.pop("dropout_p", 0.0)
        scale, gqa = options.pop("scale", None), options.pop("enable_gqa", False)
        assert not options, options
        q, (k, v) = sample.input, sample.args[:2]
        if p > 0:  # what is dropped differs from PyTorch's, what is kept is scaled alike: over many draws the mean is right
            draws = torch.stack([fulmen.sdpa(q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa).double() for _ in range(60)])
            right = oracle(q, k, v, mask, causal, scale, gqa)
            assert draws.shape[1:] == right.shape and (draws.mean(0) - right).abs().max() <= 1.5 * right.abs().max() * math.sqrt(p) + 1e-6, number
            continue
        compare(q, k, v, mask, causal, scale, gqa)
        compared += 1
    assert compared >= 10


LEADING = [(8, 16, 4), (4, 2, 8), (1, 1, 1)]  # batch, heads, query length
KEY_LENGTHS = [4, 13]
HEAD_DIMS = [(8, 8), (32, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float", "causal"])
def test_grid_of_reference_inputs(dtype, mask_kind):
    for (batch, heads, length), keys, (dim, value_dim), scale in itertools.product(LEADING, KEY_LENGTHS, HEAD_DIMS, (None, 0.125)):
        q = make(batch, heads, length, dim, dtype=dtype)
        k, v = make(batch, heads, keys, dim, dtype=dtype, seed=1), make(batch, heads, keys, value_dim, dtype=dtype, seed=2)
        mask = None
        if mask_kind == "bool":
            mask = torch.ones(length, keys, dtype=torch.bool).tril()
        elif mask_kind == "float":
            mask = make(length, keys, dtype=dtype, seed=3)
        compare(q, k, v, mask, mask_kind == "causal", scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries, keys", [(8, 8), (1, 40), (50, 64)])
def test_a_row_that_sees_one_key_alone_has_no_gradient(dtype, queries, keys):
    """Where one key takes all the weight, dS = p (dP - delta) is 0: the rounding of the result must not be left of it."""
    q = torch.zeros(2, 3, queries, 64, dtype=dtype)
    k = torch.zeros(2, 3, keys, 64, dtype=dtype)
    k[..., range(keys), range(keys)] = 30.0
    q[..., range(queries), range(queries)] = 30.0
    v = make(2, 3, keys, 64, dtype=dtype, seed=2)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    gradients = torch.autograd.grad(fulmen.sdpa(q, k, v), (q, k), make(2, 3, queries, 64, seed=3).to(dtype))
    assert all(g.abs().max() < 1e-5 for g in gradients)
