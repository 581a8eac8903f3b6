"""fulmen.attention: every feature, alone and together, forward and gradients, beside the formula in float64
(python/fulmen/_attention_composed.py run in double)."""

import math

import pytest
import torch

import fulmen
from fulmen._arguments import read_window
from fulmen._attention import _Options
from fulmen._attention_composed import composed_attention

FEATURES = {
    "window": dict(window=(3, 2)),
    "left window": dict(window=(4, None), is_causal=True),
    "lower right": dict(is_causal=True, causal_corner="lower_right"),
    "lower right window": dict(window=(2, 1), causal_corner="lower_right"),
    "softcap": dict(softcap=2.0),
    "sink": dict(sink=True),
    "alibi": dict(alibi_slopes=True, is_causal=True),
    "key lengths": dict(key_lengths=True),
    "bias": dict(mask=True),
    "grouped": dict(key_heads=2, enable_gqa=True, is_causal=True),
    "all": dict(mask=True, softcap=3.0, sink=True, alibi_slopes=True, window=(5, 3), key_heads=2, enable_gqa=True, key_lengths=True),
}


def make(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(case, query_len, key_len):
    case = dict(case)
    key_heads = case.pop("key_heads", 4)
    tensors = dict(q=make(2, 4, query_len, 16), k=make(2, key_heads, key_len, 16, seed=1), v=make(2, key_heads, key_len, 24, seed=2))
    if case.pop("mask", False):
        tensors["mask"] = make(1, 4, query_len, key_len, seed=3)
    if case.pop("sink", False):
        tensors["sink"] = make(4, seed=4)
    if case.pop("alibi_slopes", False):
        tensors["alibi_slopes"] = make(4, seed=5).abs()
    if case.pop("key_lengths", False):
        case["key_lengths"] = torch.tensor([key_len, 3], dtype=torch.int32)
    return tensors, case


def right(tensors, case, lse=False):
    left, right_ = read_window("attention", case.get("window"))
    options = _Options(case.get("is_causal", False), case.get("causal_corner") == "lower_right", case.get("enable_gqa", False), left, right_, case.get("softcap", 0.0), lse)
    t = tensors
    # The composed form works in float32 inside: here every tensor is double and .float() must not narrow it.
    original = torch.Tensor.float
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else original(self)
    try:
        return composed_attention(
            t["q"], t["k"], t["v"], t.get("mask"), t.get("sink"), t.get("alibi_slopes"), case.get("cu_seqlens_q"), case.get("cu_seqlens_k"),
            case.get("key_lengths"), 0.0, case.get("scale"), options,
        )
    finally:
        torch.Tensor.float = original


def compare(tensors, case, dtype=torch.float32):
    ours = {n: t.to(torch.float32 if n in ("sink", "alibi_slopes") else dtype).requires_grad_() for n, t in tensors.items()}
    double = {n: t.detach().double().requires_grad_() for n, t in ours.items()}
    out, expected = fulmen.attention(**ours, **case), right(double, case)
    limit = {torch.float32: 3e-5, torch.bfloat16: 5e-2}[dtype]
    grad = make(*out.shape, seed=9).to(dtype)
    found = torch.autograd.grad(out, list(ours.values()), grad)
    wanted = torch.autograd.grad(expected, list(double.values()), grad.double())
    for name, f, e in zip(("result", *ours), (out, *found), (expected, *wanted)):
        error = (f.double() - e).abs().max().item()
        assert error <= limit * max(1.0, e.abs().max().item()), f"{name}: off by {error:.3g}"


@pytest.mark.parametrize("lengths", [(7, 7), (5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, lengths):
    compare(*operands(FEATURES[name], *lengths))


@pytest.mark.parametrize("name", ["window", "softcap", "sink", "alibi", "all"])
def test_feature_in_bf16(name):
    compare(*operands(FEATURES[name], 33, 33), dtype=torch.bfloat16)


def test_packed_sequences_do_not_see_each_other():
    offsets = torch.tensor([0, 3, 3, 9, 14], dtype=torch.int32)
    tensors = dict(q=make(1, 2, 14, 16), k=make(1, 2, 14, 16, seed=1), v=make(1, 2, 14, 16, seed=2))
    case = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    compare(tensors, case)
    whole = fulmen.attention(**{n: t.float() for n, t in tensors.items()}, **case, is_causal=True)
    for begin, end in ((0, 3), (3, 9), (9, 14)):
        alone = fulmen.attention(*(tensors[n][:, :, begin:end].float() for n in "qkv"), is_causal=True)
        assert torch.allclose(whole[:, :, begin:end], alone, atol=1e-6)


CLOSED = {  # what closes keys -> (arguments, rows to which key 5 of 8 is closed)
    "causal": (dict(is_causal=True), lambda i: i < 5),
    "lower right": (dict(is_causal=True, causal_corner="lower_right"), lambda i: i < 5),
    "window": (dict(window=(1, 1)), lambda i: abs(i - 5) > 1),
    "key lengths": (dict(key_lengths=torch.tensor([5], dtype=torch.int32)), lambda i: True),
    "packed": (dict(cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 4, 8], dtype=torch.int32)), lambda i: i < 4),
    "bool mask": (dict(mask=torch.arange(8) != 5), lambda i: True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_closed_key_holds_reaches_no_row(name, dtype, bad):
    case, is_closed = CLOSED[name]
    rows = [i for i in range(8) if is_closed(i)]
    for group in (1, 6):  # few rows a key head take another kernel
        q = make(1, 2 * group, 8, 16).to(dtype)
        k, v = (make(1, 2, 8, 16, seed=s).to(dtype) for s in (1, 2))
        results = []
        for broken in (False, True):
            if broken:
                k[:, :, 5] = v[:, :, 5] = bad
            ours = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = fulmen.attention(*ours, **case, enable_gqa=True, softcap=0.0)
            grads = torch.autograd.grad(out[:, :, rows].float().sum(), ours)
            results.append((out[:, :, rows], grads[0][:, :, rows]))
            if broken and len(rows) == 8:  # nobody sees the key: all gradients are finite, its own are 0
                assert all(torch.isfinite(g).all() for g in grads) and (grads[1][:, :, 5] == 0).all() and (grads[2][:, :, 5] == 0).all()
        for found, right_ in zip(results[1], results[0]):
            assert torch.isfinite(found).all()
            assert torch.allclose(found.float(), right_.float(), atol=3e-2 if dtype != torch.float32 else 1e-5)


def test_one_query_ignores_what_closed_keys_hold():
    q, k, v = make(1, 4, 1, 16).float(), make(1, 4, 700, 16, seed=1).float(), make(1, 4, 700, 16, seed=2).float()
    expected = fulmen.attention(q, k[:, :, :300], v[:, :, :300])
    k[:, :, 300:] = v[:, :, 300:] = math.nan
    for case in (dict(key_lengths=torch.tensor([300], dtype=torch.int32)), dict(mask=torch.arange(700) < 300)):
        assert torch.allclose(fulmen.attention(q, k, v, **case), expected, atol=1e-5)


def test_an_open_key_that_is_nan_is_told():
    q = make(1, 1, 8, 16).float()
    v = q.clone()
    v[:, :, 5] = math.nan
    out = fulmen.attention(q, q, v, is_causal=True)
    assert torch.isfinite(out[:, :, :5]).all() and torch.isnan(out[:, :, 5:]).all()


def test_packed_sequences_take_the_gradient_of_a_mask():
    offsets = torch.tensor([0, 3, 3, 9, 14], dtype=torch.int32)
    for shape in ((14, 14), (2, 14, 14), (1, 14), (14, 1)):
        tensors = dict(q=make(1, 2, 14, 16), k=make(1, 2, 14, 16, seed=1), v=make(1, 2, 14, 16, seed=2), mask=make(*shape, seed=3))
        compare(tensors, dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets))


def test_log_sum_exp_is_a_second_result():
    tensors, case = operands({}, 6, 9)
    out, lse = fulmen.attention(**{n: t.float() for n, t in tensors.items()}, return_lse=True)
    expected, expected_lse = right(tensors, case, lse=True)
    assert lse.shape == (2, 4, 6) and lse.dtype == torch.float32
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5) and torch.allclose(out.double(), expected, atol=1e-5)


def test_two_halves_of_the_keys_join_by_their_log_sum_exp():
    q, k, v = (make(1, 2, 8, 16, seed=i).float() for i in range(3))
    (a, la), (b, lb) = (fulmen.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 5), slice(5, 8)))
    total = torch.logaddexp(la, lb)
    joined = a * (la - total).exp()[..., None] + b * (lb - total).exp()[..., None]
    assert torch.allclose(joined, fulmen.sdpa(q, k, v), atol=1e-5)


def test_a_row_that_a_window_closes_gives_zeros():
    q, k, v = make(1, 1, 4, 8).float(), make(1, 1, 2, 8, seed=1).float(), make(1, 1, 2, 8, seed=2).float()
    q.requires_grad_()
    out = fulmen.attention(q, k, v, window=(0, 0))
    out.sum().backward()
    assert (out[:, :, 2:] == 0).all() and (q.grad[:, :, 2:] == 0).all() and (out[:, :, :2] != 0).any()


def test_the_upper_left_corner_is_the_default():
    q, k, v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1), torch.arange(5.0).view(1, 1, 5, 1), torch.arange(5.0).view(1, 1, 5, 1)
    out = fulmen.attention(q, k, v, is_causal=True, scale=1.0).flatten()
    assert out[0] == 0 and math.isclose(out[1].item(), 0.8808, abs_tol=1e-4)


def test_deterministic_results_are_bitwise_equal():
    tensors, case = operands(FEATURES["all"], 64, 64)
    ours = {n: t.float().requires_grad_() for n, t in tensors.items()}
    results = [torch.autograd.grad(fulmen.attention(**ours, **case, deterministic=True).sum(), list(ours.values())) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(causal_corner="middle"), "causal_corner"),
        (dict(cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32)), "cu_seqlens_k"),
        (dict(sink=torch.zeros(3)), "sink"),
        (dict(alibi_slopes=torch.zeros(5)), "slopes"),
        (dict(key_lengths=torch.tensor([1, 2, 3], dtype=torch.int32)), "key_lengths"),
        (dict(mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True), "is_causal"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_errors_name_the_argument(arguments, words):
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(fulmen.Error, match=words):
        fulmen.attention(q, q, q, **arguments)


COMPILED = {
    **FEATURES,
    "packed": dict(packed=True, is_causal=True),
    "tensor scale": dict(scale=torch.tensor(0.4, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_one_node_inside_torch_compile(name):
    """Results and gradients of the eager call, by one node that the CPU executor claims for both directions."""
    case = dict(COMPILED[name])
    if case.pop("packed", False):
        offsets = torch.tensor([0, 3, 9, 14], dtype=torch.int32)
        tensors, case = {n: make(1, 2, 14, 16, seed=i) for i, n in enumerate("qkv")}, dict(case, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    else:
        tensors, case = operands(case, 7, 9)
    if isinstance(case.get("scale"), torch.Tensor):
        case["scale"] = case["scale"].float()
    ours = {n: t.float().requires_grad_() for n, t in tensors.items()}

    def step(**t):
        out, lse = fulmen.attention(**t, **case, return_lse=True)
        return (out * 1.5).square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="fulmen")
    loss, right_loss = compiled(**ours), step(**ours)
    assert torch.allclose(loss, right_loss, rtol=1e-5)
    found, expected = (torch.autograd.grad(x, list(ours.values())) for x in (loss, right_loss))
    for n, f, e in zip(ours, found, expected):
        assert torch.allclose(f, e, rtol=1e-4, atol=1e-5), n
    acquired = fulmen.last_traces(compiled)["acquire"]
    assert acquired.count("sdpa(") == 1 and "softmax" not in acquired and "exp(" not in acquired


def test_claimed_whole_inside_torch_compile():
    q = make(1, 2, 16, 8).float().requires_grad_()
    torch._dynamo.reset()
    explained = fulmen.explain(lambda q: fulmen.attention(q * 2, q, q, window=(3, 0), softcap=5.0).sum(), q)
    assert {c.executor for c in explained.claims if c.op.startswith("sdpa")} == {"cpu"}, str(explained)
    assert explained.coverage == 1.0 and not explained.fallbacks


def test_gradients_that_are_returned_are_written_where_they_stay():
    ours = [make(1, 2, 16, 8, seed=i).float().requires_grad_() for i in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: (fulmen.sdpa(q, k, v) * 2).sum(), backend="fulmen")
    found = torch.autograd.grad(compiled(*ours), ours)
    for f, e in zip(found, torch.autograd.grad((fulmen.sdpa(*ours) * 2).sum(), ours)):
        assert torch.allclose(f, e, atol=1e-6)
    backward = fulmen.last_traces(compiled)["program: backward"]
    assert "sdpa_backward(" in backward and "contiguous(" not in backward


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_of_torch_compile_run_it_too(backend):
    tensors, case = operands(FEATURES["all"], 6, 8)
    ours = {n: t.float().requires_grad_() for n, t in tensors.items()}
    torch._dynamo.reset()
    compiled = torch.compile(lambda **t: fulmen.attention(**t, **case), backend=backend, fullgraph=True)
    out, right_out = compiled(**ours), fulmen.attention(**ours, **case)
    assert torch.allclose(out, right_out, atol=1e-5)
    for f, e in zip(*(torch.autograd.grad(x.sum(), list(ours.values())) for x in (out, right_out))):
        assert torch.allclose(f, e, rtol=1e-4, atol=1e-5)


def test_autocast_inside_torch_compile():
    q, sink = make(1, 2, 8, 16).float(), make(2, seed=1).float()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: fulmen.attention(q, q, q, sink=sink), backend="fulmen")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, right_out = compiled(q), fulmen.attention(q, q, q, sink=sink)
    assert out.dtype == right_out.dtype == torch.bfloat16 and torch.equal(out, right_out)


def test_dropout_inside_torch_compile_follows_the_seed():
    q = make(1, 2, 32, 16).float()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: fulmen.attention(q, q, q, dropout_p=0.5), backend="fulmen")
    torch.manual_seed(1)
    first, second = compiled(q), compiled(q)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(q)) and not torch.equal(first, second)
