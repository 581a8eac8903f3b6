"""fulmen.sdpa on a GPU: results and gradients beside a float64 reference, streams, graph capture, dropout, refusals.
Skipped where there is no GPU."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import fulmen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def reference(q, k, v, mask=None, causal=False, gqa=False):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=gqa)


CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "gqa": dict(key_heads=2, gqa=True, causal=True),
    "bool mask": dict(mask="bool"),
    "bias": dict(mask="bias"),
    "learned bias": dict(mask="learned"),
    "odd length": dict(length=197),
    "head dim 256": dict(dim=256),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name):
    case = dict(CASES[name])
    length, dim, key_heads = case.pop("length", 256), case.pop("dim", 64), case.pop("key_heads", 4)
    kind, causal, gqa = case.get("mask"), case.get("causal", False), case.get("gqa", False)
    inputs = [make(2, 4, length, dim), make(2, key_heads, length, dim, seed=1), make(2, key_heads, length, dim, seed=2)]
    mask = None
    if kind == "bool":
        mask = make(2, 1, length, length, seed=3) > 0
    elif kind:
        mask = make(1, 4, length, length, seed=3)
    ours = [t.detach().requires_grad_() for t in inputs]
    double = [t.detach().double().requires_grad_() for t in inputs]
    our_mask, double_mask = mask, mask.double() if kind in ("bias", "learned") else mask
    if kind == "learned":
        our_mask, double_mask = mask.detach().requires_grad_(), mask.detach().double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a call that is left to PyTorch would be no test of ours
        out = fulmen.sdpa(*ours, our_mask, 0.0, causal, enable_gqa=gqa)
    right = reference(*double, double_mask, causal, gqa)
    grad = make(*out.shape, seed=9)
    wanted = [*ours, our_mask] if kind == "learned" else ours
    expected_of = [*double, double_mask] if kind == "learned" else double
    found, expected = torch.autograd.grad(out, wanted, grad), torch.autograd.grad(right, expected_of, grad.double())
    for f, e in zip((out, *found), (right, *expected)):
        assert (f.double() - e).abs().max() <= 0.03 * e.abs().max()


def test_expanded_gradient():
    q = make(1, 2, 128, 64).requires_grad_()
    fulmen.sdpa(q, q, q).sum().backward()
    double = q.detach().double().requires_grad_()
    reference(double, double, double).sum().backward()
    assert (q.grad.double() - double.grad).abs().max() <= 0.03 * double.grad.abs().max()


def test_a_side_stream():
    q = make(2, 4, 512, 64)
    right = reference(q.double(), q.double(), q.double())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(stream):
            late = q * 1
            torch.cuda._sleep(1_000_000)
            late.copy_(q)
            out = fulmen.sdpa(late, late, late)
        stream.synchronize()
        assert (out.double() - right).abs().max() < 0.03


def test_graph_capture_replays_with_new_contents():
    q = make(2, 4, 256, 64)
    with torch.no_grad():
        fulmen.sdpa(q, q, q)  # warm: built outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fulmen.sdpa(q, q, q)
        q.copy_(make(2, 4, 256, 64, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, fulmen.sdpa(q, q, q))


def test_dropout_follows_the_seed():
    q = make(1, 2, 256, 64)
    torch.manual_seed(3)
    first, second = fulmen.sdpa(q, q, q, None, 0.3), fulmen.sdpa(q, q, q, None, 0.3)
    torch.manual_seed(3)
    assert torch.equal(first, fulmen.sdpa(q, q, q, None, 0.3)) and not torch.equal(first, second)


def test_what_nobody_claims_is_run_by_torch_with_a_warning_and_is_right():
    inputs = [make(1, 2, 64, 100, seed=i).requires_grad_() for i in range(3)]
    with pytest.warns(RuntimeWarning, match="head_dim"):
        out = fulmen.sdpa(*inputs)
    right = reference(*[t.double() for t in inputs])
    assert (out.double() - right).abs().max() < 0.03
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in inputs)


def test_claims_of_this_gpu_and_of_its_description_agree():
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip("the description shipped is an H200's")
    for spec, causal in (("bf16[2,16,1024,128]", True), ("bf16[2,16,1024,320]", False), ("f32[2,16,512,64]", False), ("bf16[2,16,512,100]", False)):
        here = fulmen.claims("sdpa", q=spec, k=spec, v=spec, is_causal=causal, training=True, target="cuda", executors=["cudnn"])
        there = fulmen.claims("sdpa", q=spec, k=spec, v=spec, is_causal=causal, training=True, target="h200", executors=["cudnn"])
        assert [a.code for a in here] == [a.code for a in there], (spec, str(here), str(there))


def test_tensors_on_two_devices_are_an_error():
    q = make(1, 2, 8, 64)
    with pytest.raises(fulmen.TypeError, match="on cpu"):
        fulmen.sdpa(q, q.cpu(), q)
