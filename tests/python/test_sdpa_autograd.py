"""How fulmen.sdpa stands in PyTorch's autograd: version counters, hooks on saved tensors, checkpointing, second
derivatives, graphs that are kept, torch.func, forward mode. The reference is PyTorch's own attention."""

import contextlib
import gc

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fulmen


def make(*shape, seed=0, wants_grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(wants_grad)


def three(*shape, wants_grad=False):
    return [make(*shape, seed=i, wants_grad=wants_grad) for i in range(3)]


def gradients(attention, *tensors, **options):
    tensors = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(attention(*tensors, **options).square().sum(), tensors)


def same(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", range(3))
def test_a_saved_tensor_that_was_changed_is_an_error(place):
    tensors = three(1, 2, 5, 8, wants_grad=True)
    leaves = [t * 1.0 for t in tensors]
    out = fulmen.sdpa(*leaves)
    leaves[place].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_result_that_was_changed_is_an_error():
    out = fulmen.sdpa(*three(1, 2, 5, 8, wants_grad=True))
    with torch.no_grad():
        out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_only_what_wants_a_gradient_gets_one(needs):
    tensors = [t.detach().requires_grad_(need) for t, need in zip(three(2, 2, 5, 8), needs)]
    double = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]
    fulmen.sdpa(*tensors).square().sum().backward()
    F.scaled_dot_product_attention(*double).square().sum().backward()
    for ours, theirs in zip(tensors, double):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-5, atol=2e-5)


def test_a_graph_may_be_kept_and_a_freed_one_is_an_error():
    tensors = three(1, 2, 5, 8, wants_grad=True)
    out = fulmen.sdpa(*tensors).sum()
    first = torch.autograd.grad(out, tensors, retain_graph=True)
    same(torch.autograd.grad(out, tensors), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, tensors)


def test_second_derivatives_are_an_error_and_first_ones_with_a_graph_are_not():
    tensors = three(1, 2, 5, 8)
    expected = gradients(F.scaled_dot_product_attention, *tensors)
    tensors = [t.requires_grad_() for t in tensors]
    made = torch.autograd.grad(fulmen.sdpa(*tensors).square().sum(), tensors, create_graph=True)
    same([m.detach() for m in made], expected)
    with pytest.raises(fulmen.UnsupportedError, match="second derivatives are not supported"):
        torch.autograd.grad(made[0].sum(), tensors[0])


def test_names_and_hooks_of_the_node():
    q, k, v = three(1, 2, 5, 8, wants_grad=True)
    out = fulmen.sdpa(q, k, v)
    assert out.grad_fn.name() == "SdpaBackward"
    seen = []
    out.grad_fn.register_hook(lambda made, given: seen.append([m.shape for m in made]))
    out.sum().backward()
    assert seen == [[q.shape, k.shape, v.shape]]


def test_log_sum_exp_has_gradients_and_may_go_unused():
    def ours(q, k, v):
        out, lse = fulmen.attention(q, k, v, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    def theirs(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (scores.softmax(-1) @ v).square().sum() + scores.logsumexp(-1).sin().sum()

    tensors = three(1, 2, 5, 8, wants_grad=True)
    same(torch.autograd.grad(ours(*tensors), tensors), torch.autograd.grad(theirs(*tensors), tensors))
    out, lse = fulmen.attention(*tensors, return_lse=True)
    torch.autograd.grad(out.sum(), tensors)
    out, lse = fulmen.attention(*tensors, return_lse=True)
    torch.autograd.grad(lse.sum(), tensors[:2])


def test_saved_tensors_hooks_see_every_saved_tensor():
    tensors = three(1, 2, 5, 8, wants_grad=True)
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.to(torch.float64)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda stored: stored.to(torch.float32)):
        out = fulmen.sdpa(*tensors)
    assert packed == [(1, 2, 5, 8)] * 4  # query, key, value and the result
    same(torch.autograd.grad(out.square().sum(), tensors), gradients(F.scaled_dot_product_attention, *tensors))
    with torch.autograd.graph.save_on_cpu():
        out = fulmen.sdpa(*tensors)
    same(torch.autograd.grad(out.square().sum(), tensors), gradients(F.scaled_dot_product_attention, *tensors))


def test_a_hook_that_gives_back_something_else_is_an_error():
    tensors = three(1, 2, 5, 8, wants_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[..., :4]):
        out = fulmen.sdpa(*tensors)
    with pytest.raises(fulmen.ShapeError, match="was compiled for"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpointing(reentrant, dropout_p):
    tensors = three(1, 2, 9, 8, wants_grad=True)

    def attend(q, k, v):
        return fulmen.sdpa(q * 2.0, k, v, dropout_p=dropout_p).sin()

    torch.manual_seed(5)
    plain = attend(*tensors)
    expected = torch.autograd.grad(plain.square().sum(), tensors)
    torch.manual_seed(5)
    out = checkpoint(attend, *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    torch.testing.assert_close(out, plain)
    same([t.grad for t in tensors], expected)


TRANSFORMS = {
    "vmap": lambda f, q, k, v: vmap(f)(q, k, v),
    "vmap of other dims": lambda f, q, k, v: vmap(f, in_dims=(1, 0, 2), out_dims=1)(q.transpose(0, 1), k, v.movedim(0, 2)),
    "vmap of the query": lambda f, q, k, v: vmap(f, in_dims=(0, None, None))(q, k[0], v[0]),
    "vmap over fewer dims": lambda f, q, k, v: vmap(f, in_dims=(0, None, None))(q, k[0, 0], v[0, 0]),
    "vmap of vmap": lambda f, q, k, v: vmap(vmap(f))(q, k, v),
    "grad": lambda f, q, k, v: grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2))(q, k, v),
    "grad of one": lambda f, q, k, v: grad(lambda q: f(q, k, v).square().sum())(q),
    "vjp": lambda f, q, k, v: vjp(f, q, k, v)[1](torch.ones_like(q)),
    "jacrev": lambda f, q, k, v: jacrev(lambda q: f(q, k[0], v[0]))(q[0]),
    "grad of each example": lambda f, q, k, v: vmap(grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2)))(q, k, v),
    "grad of each example, shared": lambda f, q, k, v: vmap(
        grad(lambda *a: f(*a).square().sum(), argnums=(0, 1, 2)), in_dims=(0, None, None)
    )(q, k[0, 0], v[0, 0]),
    "grad through vmap": lambda f, q, k, v: grad(lambda q: vmap(f)(q, k, v).square().sum())(q),
    "mask": lambda f, q, k, v: vmap(f)(q, k, v, make(3, 5, 5, seed=9)),
    "causal": lambda f, q, k, v: vmap(lambda *a: f(*a, is_causal=True))(q, k, v),
}


@pytest.mark.parametrize("transform", list(TRANSFORMS.values()), ids=list(TRANSFORMS))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func(transform):
    tensors = three(3, 2, 5, 8)
    found, expected = transform(fulmen.sdpa, *tensors), transform(F.scaled_dot_product_attention, *tensors)
    same(*([x] if isinstance(x, torch.Tensor) else x for x in (found, expected)))


def dual_forward(q, k, v):
    with forward_ad.dual_level():
        return fulmen.sdpa(forward_ad.make_dual(q, q), k, v)


NO_RULE = {
    "jvp": lambda q, k, v: jvp(lambda q: fulmen.sdpa(q, k, v), (q,), (q,)),
    "jacfwd": lambda q, k, v: jacfwd(lambda q: fulmen.sdpa(q, k, v).sum())(q),
    "hessian": lambda q, k, v: hessian(lambda q: fulmen.sdpa(q, k, v).square().sum())(q),
    "grad of grad": lambda q, k, v: grad(lambda q: grad(lambda q: fulmen.sdpa(q, k, v).square().sum())(q).sum())(q),
    "dual tensors": dual_forward,
    "dropout": lambda q, k, v: vmap(lambda q: fulmen.sdpa(q, k, v, dropout_p=0.1))(q),
    "sink": lambda q, k, v: vmap(lambda q, s: fulmen.attention(q, k[0], v[0], sink=s))(q, make(3, 2)),
}


@pytest.mark.parametrize("call", list(NO_RULE.values()), ids=list(NO_RULE))
@pytest.mark.filterwarnings("ignore")
def test_derivatives_that_have_no_rule_are_an_error(call):
    with pytest.raises(fulmen.UnsupportedError, match="not supported|under a transform|only q, k, v and the mask"):
        call(*three(3, 2, 5, 8))


def test_tensors_without_tangents_run_in_a_dual_level():
    tensors = three(1, 2, 5, 8)
    with forward_ad.dual_level():
        out = fulmen.sdpa(*tensors)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors))


def test_a_failed_forward_leaves_nothing_behind():
    q, k, v = three(1, 2, 5, 8, wants_grad=True)
    with pytest.raises(fulmen.ShapeError):
        fulmen.sdpa(q, k[..., :4], v)
    out = fulmen.sdpa(q, k, v)
    out.sum().backward()
    assert q.grad is not None


def test_inference_mode_and_no_grad_record_nothing():
    tensors = three(1, 2, 5, 8, wants_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert fulmen.sdpa(*tensors).grad_fn is None
    assert fulmen.sdpa(*tensors).grad_fn is not None


def test_executor_lists_are_compiled_once():
    tensors = three(1, 2, 5, 8)
    fulmen.clear_caches()
    for _ in range(3):
        for executors in (["cpu"], ["reference"], ["reference", "cpu"], None):
            fulmen.attention(*tensors, executors=executors)
    info = fulmen.cache_info()["sdpa"]
    assert (info["programs"], info["hits"] >= 8) == (4, True)
    before = info["builds"]
    with contextlib.suppress(fulmen.UnsupportedError):
        fulmen.attention(*tensors, executors=["cudnn"])
    refused = fulmen.cache_info()["sdpa"]["builds"]
    with pytest.raises(fulmen.UnsupportedError, match="cudnn"):
        fulmen.attention(*tensors, executors=["cudnn"])
    assert refused == before + 1 and fulmen.cache_info()["sdpa"]["builds"] <= refused + 1


def test_nothing_of_a_graph_outlives_it():
    gc.collect()
    live = fulmen.cache_info()["memory"]["live_bytes"]
    for _ in range(3):
        tensors = three(4, 4, 256, 64, wants_grad=True)
        fulmen.sdpa(*tensors).sum().backward()
        fulmen.sdpa(*tensors)  # a graph that never runs backward
        del tensors
    gc.collect()
    assert fulmen.cache_info()["memory"]["live_bytes"] == live
