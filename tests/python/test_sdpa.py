"""fulmen.sdpa and fulmen.attention as PyTorch users call them: results and gradients against float64, errors, autograd,
autocast, dropout's seed, layouts, caches. The oracle is the formula written out below in float64."""

import math
import timeit
import warnings

import pytest
import torch
import torch.nn.functional as F

import fulmen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def oracle(q, k, v, mask=None, causal=False, scale=None, gqa=False):
    """float64 attention: rows with no open key give 0."""
    q, k, v = q.double(), k.double(), v.double()
    if gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    top = scores.amax(-1, keepdim=True).detach().nan_to_num(neginf=0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, torch.ones_like(total), total)) @ v


def tolerance(dtype):
    return {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]


def close(found, right, dtype, what):
    error = (found.double() - right).abs().max().item() if right.numel() else 0.0
    limit = tolerance(dtype) * max(1.0, right.abs().max().item() if right.numel() else 0.0)
    assert error <= limit, f"{what}: off by {error:.3g}, {limit:.3g} is allowed"


def check(q, k, v, mask=None, causal=False, scale=None, gqa=False, mask_grad=False):
    inputs = [t.detach() for t in (q, k, v)]
    ours = [t.requires_grad_() for t in inputs]
    double = [t.detach().double().requires_grad_() for t in inputs]
    our_mask, double_mask = mask, mask
    if mask is not None and mask_grad:
        our_mask = mask.detach().requires_grad_()
        double_mask = mask.detach().double().requires_grad_()
    out = fulmen.sdpa(*ours, our_mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    right = oracle(*double, double_mask, causal, scale, gqa)
    assert out.shape == right.shape and out.dtype == q.dtype
    close(out, right, q.dtype, "result")
    grad = torch.randn(out.shape).to(out.dtype)
    wanted = ours + ([our_mask] if mask_grad else [])
    found = torch.autograd.grad(out, wanted, grad)
    expected = torch.autograd.grad(right, double + ([double_mask] if mask_grad else []), grad.double())
    for name, f, e in zip(("query", "key", "value", "mask"), found, expected):
        assert f.shape == e.shape
        close(f, e, q.dtype, f"gradient of {name}")


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_plain(dtype, causal):
    check(make(2, 3, 17, 16, dtype=dtype), make(2, 3, 17, 16, dtype=dtype, seed=1), make(2, 3, 17, 16, dtype=dtype, seed=2), causal=causal)


@pytest.mark.parametrize("query_len, key_len", [(1, 1), (1, 33), (5, 2), (2, 5), (64, 130)])
def test_lengths(query_len, key_len):
    for causal in (False, True):
        check(make(1, 2, query_len, 8), make(1, 2, key_len, 8, seed=1), make(1, 2, key_len, 8, seed=2), causal=causal)


def test_head_dims_that_differ():
    check(make(1, 2, 9, 24), make(1, 2, 11, 24, seed=1), make(1, 2, 11, 40, seed=2))


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 2, 3, 4, 8)], ids=str)
def test_leading_dims(shape):
    check(make(*shape), make(*shape, seed=1), make(*shape, seed=2), causal=True)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads(key_heads):
    check(make(2, 4, 7, 8), make(2, key_heads, 9, 8, seed=1), make(2, key_heads, 9, 8, seed=2), gqa=True)


def test_heads_that_broadcast_without_the_flag():
    q, k = make(1, 4, 6, 8), make(1, 1, 6, 8, seed=1)
    close(fulmen.sdpa(q, k, k), oracle(q, k, k), torch.float32, "result")


@pytest.mark.parametrize("shape", [(6, 10), (1, 1, 6, 10), (2, 1, 1, 10), (1, 3, 6, 10), (2, 3, 6, 10), (2, 1, 6, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "added", "learned"])
def test_masks(shape, kind):
    q, k, v = make(2, 3, 6, 8), make(2, 3, 10, 8, seed=1), make(2, 3, 10, 8, seed=2)
    mask = make(*shape, seed=3)
    if kind == "bool":
        check(q, k, v, mask > 0)
    else:
        check(q, k, v, mask, mask_grad=kind == "learned")


def test_rows_with_no_open_key_give_zeros_and_zero_gradients():
    q, k = make(1, 2, 6, 8).requires_grad_(), make(1, 2, 10, 8, seed=1).requires_grad_()
    mask = torch.ones(6, 10, dtype=torch.bool)
    mask[5] = False
    out = fulmen.sdpa(q, k, k, mask)
    out.sum().backward()
    assert (out[:, :, 5] == 0).all() and (q.grad[:, :, 5] == 0).all()
    assert torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0, 3])
def test_scale(scale):
    check(make(1, 2, 5, 8), make(1, 2, 5, 8, seed=1), make(1, 2, 5, 8, seed=2), scale=scale)


def test_scale_as_a_tensor_gets_its_gradient():
    q, k = make(1, 1, 4, 8), make(1, 1, 4, 8, seed=1)
    scale = torch.tensor(0.3, requires_grad=True)
    fulmen.sdpa(q, k, k, scale=scale).sum().backward()
    double = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    oracle(q, k, k, scale=double).sum().backward()
    assert abs(scale.grad.item() - double.grad.item()) < 1e-5


def test_same_shapes_with_another_scale_are_another_program():
    q = make(1, 1, 4, 8)
    first, second = fulmen.sdpa(q, q, q, scale=0.1), fulmen.sdpa(q, q, q, scale=3.0)
    assert not torch.equal(first, second)
    close(second, oracle(q, q, q, scale=3.0), torch.float32, "result")


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8), (0, 0, 2, 0)], ids=str)
def test_empty(shape):
    q = torch.zeros(shape, requires_grad=True)
    out = fulmen.sdpa(q, q, q)
    assert out.shape == shape
    out.sum().backward()
    assert q.grad.shape == shape


def test_no_keys_give_zeros():
    q, k = make(1, 2, 4, 8).requires_grad_(), torch.zeros(1, 2, 0, 8, requires_grad=True)
    out = fulmen.sdpa(q, k, k)
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all()


def test_layouts():
    base = make(2, 9, 3, 3, 16)  # batch, length, (q k v), heads, dim
    q, k, v = (base[:, :, i].transpose(1, 2) for i in range(3))
    check(q, k, v, causal=True)
    wide = make(2, 3, 20, 16)
    check(wide[:, :, 1:19:2], wide[:, :, 2:20:2], wide[:, :, :9])
    expanded = make(1, 1, 9, 16).expand(2, 3, 9, 16)
    close(fulmen.sdpa(expanded, expanded, expanded), oracle(expanded, expanded, expanded), torch.float32, "result")
    check(make(2, 3, 16, 9).transpose(2, 3), make(2, 3, 16, 9, seed=1).transpose(2, 3), make(2, 3, 16, 9, seed=2).transpose(2, 3))


def test_strides_of_size_one_dims_make_no_new_program():
    fulmen.clear_caches()
    a = make(1, 1, 4, 8)
    b = torch.as_strided(a, (1, 1, 4, 8), (7, 3, 8, 1))
    fulmen.sdpa(a, a, a)
    builds = fulmen.cache_info()["sdpa"]["builds"]
    assert torch.equal(fulmen.sdpa(b, b, b), fulmen.sdpa(a, a, a))
    assert fulmen.cache_info()["sdpa"]["builds"] == builds


def test_a_gradient_with_stride_zero():
    q = make(1, 2, 5, 8).requires_grad_()
    fulmen.sdpa(q, q, q).sum().backward()
    first, q.grad = q.grad, None
    fulmen.sdpa(q, q, q).backward(torch.ones(1, 2, 5, 8))
    assert torch.equal(first, q.grad)


def test_the_same_call_is_built_once():
    fulmen.clear_caches()
    q = make(1, 2, 8, 16).requires_grad_()
    for _ in range(3):
        fulmen.sdpa(q, q, q).sum().backward()
    before = fulmen.cache_info()["sdpa"]["builds"]
    for _ in range(100):
        fulmen.sdpa(q, q, q).sum().backward()
    assert fulmen.cache_info()["sdpa"]["builds"] == before


def test_a_changed_dtype_is_another_program():
    a = make(1, 1, 8, 16, dtype=torch.float16)
    fulmen.sdpa(a, a, a)
    b = make(1, 1, 8, 16, dtype=torch.bfloat16)
    close(fulmen.sdpa(b, b, b), oracle(b, b, b), torch.bfloat16, "result")


# dropout


def test_dropout_follows_the_seed():
    q = make(1, 2, 16, 8)
    torch.manual_seed(3)
    first, second = fulmen.sdpa(q, q, q, None, 0.5), fulmen.sdpa(q, q, q, None, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, fulmen.sdpa(q, q, q, None, 0.5))
    assert not torch.equal(first, second)


def test_dropout_keeps_the_mean_and_its_gradient_uses_the_same_mask():
    q, k, v = make(1, 1, 64, 8), make(1, 1, 64, 8, seed=1), torch.eye(64)[None, None].requires_grad_()
    torch.manual_seed(0)
    dropped = fulmen.sdpa(q, k, v, None, 0.25)  # the value is the identity: these are the weights
    weights = oracle(q, k, v).float()
    kept = dropped != 0
    assert 0.65 < kept.float().mean() < 0.85
    assert torch.allclose(dropped[kept], (weights / 0.75)[kept], atol=1e-5)
    grad = make(1, 1, 64, 64, seed=5)
    (found,) = torch.autograd.grad(dropped, v, grad)
    assert torch.allclose(found, dropped.detach().transpose(-2, -1) @ grad, atol=1e-4)


@pytest.mark.parametrize("p", [1.0])
def test_dropout_of_everything(p):
    q = make(1, 1, 8, 8).requires_grad_()
    out = fulmen.sdpa(q, q, q, None, p)
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all()


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_dropout_that_is_no_probability(p):
    q = make(1, 1, 4, 8)
    with pytest.raises(fulmen.ShapeError, match="dropout_p"):
        fulmen.sdpa(q, q, q, None, p)


# autograd and modes


def test_mask_alone_wants_a_gradient():
    q, mask = make(1, 1, 8, 16), make(1, 1, 8, 8, seed=1).requires_grad_()
    fulmen.sdpa(q, q, q, mask).sum().backward()
    double = mask.detach().double().requires_grad_()
    oracle(q, q, q, double).sum().backward()
    close(mask.grad, double.grad, torch.float32, "gradient of mask")


def test_one_tensor_in_all_places():
    x = make(1, 2, 5, 8).requires_grad_()
    double = x.detach().double().requires_grad_()
    grad = make(1, 2, 5, 8, seed=1)
    fulmen.sdpa(x, x, x, is_causal=True).backward(grad)
    oracle(double, double, double, causal=True).backward(grad.double())
    close(x.grad, double.grad, torch.float32, "gradient")


def test_retain_graph():
    q = make(1, 1, 4, 8).requires_grad_()
    out = fulmen.sdpa(q, q, q)
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(first, second)


def test_an_input_changed_after_the_forward_is_an_error():
    q = make(1, 1, 4, 8).requires_grad_()
    k = q * 1
    out = fulmen.sdpa(q, k, k)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_a_clear_error():
    q = make(1, 1, 4, 8).requires_grad_()
    (first,) = torch.autograd.grad(fulmen.sdpa(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        first.sum().backward()


def test_autocast():
    q, mask = make(1, 2, 8, 16).requires_grad_(), make(8, 8, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fulmen.sdpa(q, q, q, mask)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    close(out, oracle(q, q, q, mask), torch.bfloat16, "result")


def test_fake_tensors_give_the_type_of_the_result():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 3, 4, 8, dtype=torch.bfloat16)
        out = fulmen.sdpa(q, q, q, is_causal=True)
    assert out.shape == (2, 3, 4, 8) and out.dtype == torch.bfloat16


def test_result_is_laid_out_as_the_query():
    q = make(2, 9, 3, 16).transpose(1, 2)
    out = fulmen.sdpa(q, q, q)
    assert out.transpose(1, 2).is_contiguous()


# errors, before any executor is asked


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((1, 3, 4, 7), (1, 4, 4, 7), (1, 4, 4, 7)), "3.*4|4.*3"),
        (((1, 2, 4, 8), (1, 2, 4, 16), (1, 2, 4, 16)), "8.*16|16.*8"),
        (((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 6, 8)), "5.*6|6.*5"),
        (((8,), (8,), (8,)), "dim"),
    ],
    ids=["heads", "head_dim", "key_len", "rank"],
)
def test_shape_errors(shapes, words):
    with pytest.raises(fulmen.ShapeError, match=words):
        fulmen.sdpa(*(torch.zeros(s) for s in shapes))


def test_grouped_heads_that_do_not_divide():
    with pytest.raises(fulmen.ShapeError, match="6.*4|4.*6"):
        fulmen.sdpa(torch.zeros(1, 6, 4, 8), torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 4, 8), enable_gqa=True)


def test_mask_and_causal_together():
    q = make(1, 1, 4, 8)
    with pytest.raises(fulmen.Error, match="is_causal"):
        fulmen.sdpa(q, q, q, torch.ones(4, 4, dtype=torch.bool), 0.0, True)


def test_dtype_errors():
    q = make(1, 1, 4, 8)
    with pytest.raises(fulmen.TypeError, match="f16|key"):
        fulmen.sdpa(q, q.half(), q.half())
    with pytest.raises(fulmen.TypeError):
        fulmen.sdpa(q.int(), q.int(), q.int())


def test_a_mask_that_does_not_broadcast():
    q = make(1, 2, 4, 8)
    with pytest.raises(fulmen.ShapeError, match="mask"):
        fulmen.sdpa(q, q, q, torch.zeros(3, 4, 4))


def test_other_arguments():
    q = make(1, 1, 4, 8)
    with pytest.raises(fulmen.TypeError, match="k is a list"):
        fulmen.sdpa(q, [1.0], q)
    with pytest.raises(fulmen.UnsupportedError, match="nested"):
        nested = torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)])
        fulmen.sdpa(nested, nested, nested)


def test_threads():
    import threading

    fulmen.clear_caches()
    failures = []

    def work(number):
        q = make(1, 2, 5 + number % 3, 8, seed=number)
        right = oracle(q, q, q)
        for _ in range(50):
            x = q.detach().requires_grad_()
            out = fulmen.sdpa(x, x, x)
            out.sum().backward()
            if (out.double() - right).abs().max() > 1e-5:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# PyTorch's own function replaced


def test_attention_for_torch():
    q = make(1, 2, 8, 16)
    original = F.scaled_dot_product_attention
    with fulmen.attention_for_torch():
        assert F.scaled_dot_product_attention is not original
        builds = fulmen.cache_info()["sdpa"]
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        after = fulmen.cache_info()["sdpa"]
    assert F.scaled_dot_product_attention is original
    assert after["hits"] + after["builds"] > builds["hits"] + builds["builds"]
    close(out, oracle(q, q, q, causal=True), torch.float32, "result")


def test_what_cannot_be_claimed_stays_with_torch_and_is_said():
    nested = torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2) if nested.dim() == 4 else nested
    with fulmen.attention_for_torch(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(nested, nested, nested)
        except RuntimeError:
            pass  # PyTorch's own answer to this call is not ours to judge
    assert any("leaves this attention call to PyTorch" in str(w.message) for w in said)


def test_overhead_of_a_small_call():
    q = make(1, 1, 8, 16)
    ours = theirs = math.inf
    for _ in range(15):
        ours = min(ours, timeit.timeit(lambda: fulmen.sdpa(q, q, q), number=500) / 500)
        theirs = min(theirs, timeit.timeit(lambda: F.scaled_dot_product_attention(q, q, q), number=500) / 500)
    # The limit is PyTorch's own time beside us, so that a slow machine doesn't fail it; noise gets a quarter.
    assert ours <= 1.25 * theirs, f"{ours * 1e6:.2f} us a call, PyTorch takes {theirs * 1e6:.2f}"
