"""Attention, forward plus backward, beside torch.nn.functional.scaled_dot_product_attention."""

import time

import torch

import fulmen
from fulmen._bench.measure import alternate, row, synchronise

# name, (batch, heads, key_heads, query_len, key_len, head_dim), options
_calls = [
    ("b1 h12 s1024 d64 causal", (1, 12, 12, 1024, 1024, 64), dict(is_causal=True)),
    ("b4 h8 s512 d64 causal", (4, 8, 8, 512, 512, 64), dict(is_causal=True)),
    ("b1 h2 s4096 d128 causal", (1, 2, 2, 4096, 4096, 128), dict(is_causal=True)),
    ("GQA 8/2 s1024 d128 causal", (1, 8, 2, 1024, 1024, 128), dict(is_causal=True, enable_gqa=True)),
    ("ViT b8 h12 s197 d64", (8, 12, 12, 197, 197, 64), {}),
    ("bool mask b2 h8 s512 d64", (2, 8, 8, 512, 512, 64), dict(mask="bool")),
    ("bias b2 h8 s512 d64", (2, 8, 8, 512, 512, 64), dict(mask="bias")),
    ("learned bias b2 h8 s512 d64", (2, 8, 8, 512, 512, 64), dict(mask="learned")),
    ("dropout 0.1 b2 h8 s512 d64 causal", (2, 8, 8, 512, 512, 64), dict(is_causal=True, dropout_p=0.1)),
    ("b8 h4 s64 d32 causal", (8, 4, 4, 64, 64, 32), dict(is_causal=True)),
    ("decode b1 h32 1x4096 d128", (1, 32, 32, 1, 4096, 128), {}),
]
_dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(shape, options, dtype, device):
    """(query, key, value, mask or None, gradient of the result, keyword arguments)"""
    batch, heads, key_heads, query_len, key_len, dim = shape
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*dims, grad=True):
        return torch.randn(dims, dtype=dtype, device=device, generator=generator).requires_grad_(grad)

    query, key, value = tensor(batch, heads, query_len, dim), tensor(batch, key_heads, key_len, dim), tensor(batch, key_heads, key_len, dim)
    options = dict(options)
    kind = options.pop("mask", None)
    mask = None
    if kind == "bool":
        mask = torch.rand((batch, 1, query_len, key_len), device=device, generator=generator) > 0.2
    elif kind is not None:
        mask = tensor(1, heads, query_len, key_len, grad=kind == "learned")
    return query, key, value, mask, tensor(batch, heads, query_len, dim, grad=False), options


def step(function, inputs, device):
    query, key, value, mask, out_grad, options = inputs
    wanted = [t for t in (query, key, value, mask) if t is not None and t.requires_grad]

    def run():
        start = time.perf_counter()
        out = function(query, key, value, mask, **options)
        synchronise(device)
        middle = time.perf_counter()
        torch.autograd.grad(out, wanted, out_grad)
        synchronise(device)
        end = time.perf_counter()
        return (end - start) * 1e3, (middle - start) * 1e3, (end - middle) * 1e3

    return run


def rows(device, peers, only, repeats, dtypes):
    for name, shape, options in _calls:
        for dtype in dtypes or ("fp32", "bf16"):
            label = f"{name} {dtype}"
            if only and only not in label:
                continue
            inputs = make(shape, options, _dtypes[dtype], device)
            ways = {"fulmen": step(fulmen.sdpa, inputs, device)}
            if "torch" in peers:
                ways["torch"] = step(torch.nn.functional.scaled_dot_product_attention, inputs, device)
            if "inductor" in peers:
                torch._dynamo.reset()
                ways["inductor"] = step(torch.compile(torch.nn.functional.scaled_dot_product_attention), inputs, device)
            times = alternate(ways, device, repeats)
            ours = times.pop("fulmen")
            yield row(
                label, ours[0], {peer: t[0] for peer, t in times.items()}, fulmen_forward_ms=ours[1], fulmen_backward_ms=ours[2],
                peers_forward={peer: t[1] for peer, t in times.items()}, peers_backward={peer: t[2] for peer, t in times.items()},
            )
