"""PyTorch graphs through torch.compile(backend="fulmen"): views, writes, modes, borders, gradients, specialisation."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fulmen import UnsupportedError, torch_backend  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(fn, **options):
    return torch.compile(fn, backend=torch_backend.fulmen_backend, options=options or None)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare(fn, *inputs, coverage=1.0, tolerance=1e-5):
    """fn compiled and eager on copies of the inputs: results, input contents afterwards, gradients."""
    eager_inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    our_inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch_backend.listen() as reports, warnings.catch_warnings():
        if coverage < 1:
            warnings.simplefilter("ignore")
        ours = compiled(fn)(*our_inputs)
    eager = fn(*eager_inputs)
    assert reports, "no graph reached the backend"
    found = min(r.recorded.coverage for r in reports)
    assert (found == 1.0) == (coverage == 1.0), [f for r in reports for f in r.fallbacks]
    ours_flat, eager_flat = ([t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (ours, eager))
    assert len(ours_flat) == len(eager_flat)
    for a, b in zip(ours_flat, eager_flat):
        assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        close(a, b, tolerance)
    for results in (ours_flat, eager_flat):
        losses = [t.double().square().sum() for t in results if t.requires_grad]
        if losses:
            sum(losses).backward()
    for a, b in zip(our_inputs, eager_inputs):
        if isinstance(a, torch.Tensor):
            close(a.detach(), b.detach(), tolerance)
            if not (a.is_leaf and b.is_leaf):  # written to: it is no leaf any more
                continue
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                close(a.grad, b.grad, tolerance)
    return ours, reports


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


VIEWS = {
    "view": lambda x: x.view(4, -1) * 2,
    "transpose_reshape": lambda x: x.transpose(0, 1).reshape(-1) + 1,
    "permute": lambda x: x.permute(2, 0, 1).contiguous().flatten(1).sin(),
    "getitem": lambda x: x[1:, ..., None, ::2].cos() + x[0, 1, 2],
    "negative": lambda x: x[..., -2:].exp(),
    "split": lambda x: torch.cat([p * i for i, p in enumerate(x.split([1, 3], dim=1))], 1),
    "chunk": lambda x: sum(x.chunk(2, dim=-1)),
    "unbind": lambda x: torch.stack([t.tanh() for t in x.unbind(1)], 0),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1) * 3,
    "squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze() + x[:, :1].squeeze(1).unsqueeze(1),
    "index": lambda x: x[:, torch.tensor([0, 2, 0])] * 2,
    "index_two": lambda x: x[torch.tensor([0, 1, 1]), torch.tensor([3, 0, 0])] * 2,
    "gather": lambda x: x.gather(1, torch.zeros(2, 2, 6, dtype=torch.long)) * 2,
    "repeat": lambda x: x.repeat(2, 1, 1).square(),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1).square(),
    "roll": lambda x: x.roll(2, 1) * x.roll((1, 1), (0, 2)),
    "flip": lambda x: x.flip(1) * x,
    "unflatten": lambda x: x.unflatten(-1, (2, 3)).sum(-2),
    "movedim": lambda x: x.movedim(0, -1).sin(),
    "swapaxes": lambda x: x.swapaxes(0, 2).mT.sin(),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5) * F.pad(x, (1, 2, 0, 1)),
    "narrow": lambda x: x.narrow(1, 1, 2) * 2,
    "tril": lambda x: x.tril(1) + x.triu(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    compare(VIEWS[name], leaf(2, 4, 6))


def add_in_place(x):
    y = x + 2
    y += 1
    y.mul_(3).sub_(x)
    return y


def write_row(x):
    y = x.clone()
    y[1] = y[0] * 2
    y[:, 0] = 3.0
    return y * x


def write_through_view(x):
    y = x * 1
    v = y.view(-1)[2:5]
    v.mul_(10)
    w = y.transpose(0, 1)[1]
    w += 1
    return y, v.sum()


def view_after_write(x):
    y = x - 1
    row = y[0]
    y.add_(1)
    return row * 2, y


def copy_is_no_view(x):
    y = x.transpose(0, 1).reshape(-1)
    z = y * 1
    z[0] = 7
    return z, y


def masked(x):
    y = x.clone()
    y.masked_fill_(y > 0, 0.25)
    y[y < -1] = -1.0
    return y


def index_write(x):
    y = x.clone()
    y[torch.tensor([0, 2])] = torch.ones(2, 4)
    return y.scatter(1, torch.zeros(3, 1, dtype=torch.long), 5.0)


def activation_in_place(x):
    y = x * 3
    F.relu(y, inplace=True)
    return F.silu(y + 1, inplace=True) + torch.relu_(y * 2)


@pytest.mark.parametrize(
    "fn",
    [add_in_place, write_row, write_through_view, view_after_write, copy_is_no_view, masked, index_write, activation_in_place],
    ids=lambda f: f.__name__,
)
def test_writes(fn):
    compare(fn, leaf(3, 4))


def test_mutated_input_gets_new_contents():
    def step(buffer, x):
        buffer.mul_(0.5).add_(x.detach().mean(0))
        return (buffer * x).sum()

    compare(step, torch.ones(4), leaf(3, 4))


def test_mutated_input_through_view():
    def step(cache, x):
        cache[:, 1:3] = x
        return cache.sum() + cache[0, 0]

    compare(step, torch.zeros(3, 4), torch.randn(3, 2))


def test_mutated_input_with_gradient():
    def step(buffer, x):
        y = buffer + x
        buffer.copy_(x * 2)
        return y + buffer

    compare(step, torch.ones(3), leaf(3))


def test_output_that_is_an_input_or_its_view():
    def f(x, y):
        return x, y.view(-1), y * 2, x.detach()

    x, y = leaf(2, 3), torch.randn(2, 3)
    ours = compiled(f)(x, y)
    assert ours[0] is x
    assert ours[1].data_ptr() == y.data_ptr()
    assert not ours[3].requires_grad


def test_outputs_share_memory_as_in_eager_mode():
    def f(x):
        y = x * 2
        return y, y[0], y.t()

    a, b, c = compiled(f)(torch.randn(3, 4))
    assert a.data_ptr() == b.data_ptr() == c.data_ptr() and c.stride() == (1, 4)
    a[0, 0] = 9
    assert b[0] == 9 and c[0, 0] == 9


def test_no_grad_region_and_detach():
    def f(x, w):
        with torch.no_grad():
            scale = (x * w).abs().max()
        return (x * w).sum() / scale + (w.detach() * x).sum()

    compare(f, leaf(3, 4), leaf(4))


def test_under_no_grad():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with torch.no_grad():
        out = compiled(model)(x)
        close(out, model(x))
    assert not out.requires_grad
    assert not torch_backend.last_report().programs[-1].compiled.has_backward


def test_autocast_around_and_inside():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model(x)
        return h.float() * 2 + model[3].weight.sum()

    x = torch.randn(5, 8)
    ours, eager = compiled(inside)(x), inside(x)
    close(ours, eager, 2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = compiled(model)(x), model(x)
    assert ours.dtype == eager.dtype == torch.bfloat16
    close(ours, eager, 2e-2)


def test_batch_norm_updates_its_buffers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    other = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(compiled(model)(x), other(x), 1e-4)
    close(model[1].running_mean, other[1].running_mean)
    close(model[1].running_var, other[1].running_var)
    assert model[1].num_batches_tracked == 1


def test_border_with_gradients():
    def f(x, w):
        h = (x @ w).tanh()
        h = torch.special.bessel_j0(h.detach()) + torch.special.i0e(h)
        return (h * w.sum()).sum()

    _, reports = compare(f, leaf(3, 3), leaf(3, 3), coverage=0.5)
    calls = [fallback.call for report in reports for fallback in report.fallbacks]
    assert any("bessel_j0" in call for call in calls) and all(fallback.reason for r in reports for fallback in r.fallbacks)


def test_border_between_views_and_writes():
    def f(x):
        y = x * 2
        v = y[0]
        z = torch.special.i0e(y.detach())
        v.add_(1)
        return y + z, v

    compare(f, leaf(3, 3), coverage=0.5)


def test_unknown_calls_are_told():
    with pytest.warns(UserWarning, match="stay with PyTorch: .*i0e"):
        compiled(lambda x: torch.special.i0e(x) + 1)(torch.randn(3))


def test_second_derivative_is_a_clear_error():
    x = leaf(3)
    y = compiled(lambda x: (x**3).sum())(x)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    close(grad.detach(), 3 * x.detach() ** 2)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


def test_backward_twice_with_retain_graph():
    x = leaf(3)
    y = compiled(lambda x: x.exp().sin().sum())(x)
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time|retain_graph"):
        y.backward()


def test_missing_and_expanded_gradients():
    def f(x):
        return x.sin(), x.exp(), x.long()

    x = leaf(3, 4)
    a, b, c = compiled(f)(x)
    assert not c.requires_grad
    b.sum().backward()  # the gradient of b has strides 0, that of a is missing
    close(x.grad, x.detach().exp())


def test_dropout_follows_the_generator():
    f = compiled(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(1)
    a, b = f(x), f(x)
    torch.manual_seed(1)
    c = f(x)
    assert torch.equal(a, c) and not torch.equal(a, b)
    assert 0.4 < (a == 0).float().mean() < 0.6
    a.sum().backward()
    close(x.grad, a.detach())


def test_two_dropouts_differ():
    f = compiled(lambda x: (F.dropout(x, 0.5, True), F.dropout(x, 0.5, True)))
    a, b = f(torch.ones(64, 64))
    assert not torch.equal(a, b)


def test_checkpoint_recomputes():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 8))
    ours = compiled(layer)
    x = leaf(4, 8)
    torch.manual_seed(3)
    checkpoint(ours, x, use_reentrant=False).sum().backward()
    recomputed = x.grad.clone()
    x.grad = None
    torch.manual_seed(3)
    ours(x).sum().backward()
    close(recomputed, x.grad)


def test_saved_values_survive_moving_hooks():
    f = compiled(lambda x: x.exp().sin().sum())
    x = leaf(5)
    with torch.autograd.graph.save_on_cpu():
        y = f(x)
    y.backward()
    close(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_dynamic_sizes_are_specialised_a_bounded_number_of_times():
    f = torch.compile(lambda x: x.sin() * x.shape[0], backend=torch_backend.fulmen_backend, dynamic=True, options={"specialisations": 3})
    with torch_backend.listen() as reports:
        for n in (3, 4, 5, 4, 3):
            x = torch.randn(n, 2)
            close(f(x), x.sin() * n)
        assert sum(len(r.programs) for r in reports) == 3
        with pytest.warns(UserWarning, match="specialisations"):
            x = torch.randn(9, 2)
            close(f(x), x.sin() * 9)
        x = torch.randn(10, 2)
        close(f(x), x.sin() * 10)
        assert sum(len(r.programs) for r in reports) == 3


def test_one_program_for_repeated_calls():
    f = compiled(lambda x: x.sin())
    with torch_backend.listen() as reports:
        for _ in range(5):
            f(torch.randn(3))
    assert len(reports) == 1 and len(reports[0].programs) == 1


def test_numbers_follow_promotion():
    def f(i, x, h, d):
        return i * 2, i / 2, i * 0.5, x * 2, h * 0.1, d * 0.1, i + x, h + x, h[0] * d, i > 1, (i > 1) + 1, 2**i, i // 2, -i % 3

    compare(f, torch.arange(4), torch.randn(4), torch.randn(4).bfloat16(), torch.randn(4).double())


def test_constants_of_the_graph():
    table = torch.randn(5)

    def f(x):
        return x + table + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + torch.tensor(2)

    compare(f, leaf(5))


def test_max_with_indices_and_sort():
    def f(x):
        values, indices = x.max(dim=1)
        top, where = x.topk(2, dim=-1)
        return values * 2, indices, top, where, x.argmin(0), x.max(), torch.max(x, x * 2)

    compare(f, leaf(4, 5))


LOSSES = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "ignore": lambda x, t: F.cross_entropy(x, t, ignore_index=1, label_smoothing=0.1),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum", weight=torch.arange(1.0, 6.0)),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "probabilities": lambda x, t: F.cross_entropy(x, F.one_hot(t, 5).float()),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
    "mse": lambda x, t: F.mse_loss(x, t[:, None].float() + x.detach()),
    "bce": lambda x, t: F.binary_cross_entropy_with_logits(x[:, 0], (t > 1).float()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    compare(lambda x: LOSSES[name](x, torch.tensor([0, 1, 2, 1])), leaf(4, 5))


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool_mask": {"attn_mask": "bool"},
    "float_mask": {"attn_mask": "float"},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    kwargs = dict(ATTENTION[name])
    if kwargs.get("attn_mask") == "bool":
        kwargs["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).tril()
    if kwargs.get("attn_mask") == "float":
        kwargs["attn_mask"] = torch.randn(2, 1, 6, 6)
    compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs), leaf(2, 3, 6, 8), leaf(2, 3, 6, 8), leaf(2, 3, 6, 8))


def test_grouped_attention():
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    compare(f, leaf(2, 4, 6, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 8))
