"""Calls that are taken apart, calls with graphs of their own, torch.func, optimizers, arguments that share memory."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from test_acquire import close, compare, compiled, fresh_dynamo, leaf  # noqa: E402, F401  the fixture is used by its name
from fulmen import torch_backend  # noqa: E402


def train(model, *inputs, coverage=1.0, tolerance=1e-4):
    """A module compiled and eager: results, gradients of parameters and inputs, buffers, over two calls."""
    eager = copy.deepcopy(model)
    ours, theirs = ([x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in range(2))
    with torch_backend.listen() as reports, warnings.catch_warnings():
        if coverage < 1:
            warnings.simplefilter("ignore")
        call = compiled(model)
        for _ in range(2):
            a, b = (torch.utils._pytree.tree_leaves(f(*x)) for f, x in ((call, ours), (eager, theirs)))
            close(a, b, tolerance)
            sum(t.sin().sum() for t in a if t.requires_grad).backward()
            sum(t.sin().sum() for t in b if t.requires_grad).backward()
    found = min(r.recorded.coverage for r in reports)
    assert (found == 1.0) == (coverage == 1.0), [f for r in reports for f in r.fallbacks]
    for (name, a), (_, b) in zip([*model.named_parameters(), *model.named_buffers()], [*eager.named_parameters(), *eager.named_buffers()]):
        close(a.detach(), b.detach(), tolerance)
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            close(a.grad, b.grad, 10 * tolerance)
    for a, b in zip(ours, theirs):
        if b.grad is not None:
            close(a.grad, b.grad, 10 * tolerance)
    return reports


# Functions of torch.nn.functional and ATen calls that have no entry of their own: taken apart by PyTorch (expand.py).
TAKEN_APART = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0) + 1, dim=1),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.flip(0), torch.ones(4)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], torch.ones(4)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x * 2, x.flip(0)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(4, 6)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, (x > 0).float()),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x.detach().abs()),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x.detach() * 2, x.detach().abs() + 1),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).float()),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "interpolate_nearest": lambda x: F.interpolate(x[None, None], size=(8, 9), mode="nearest"),
    "interpolate_bicubic": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bicubic"),
    "pad_reflect": lambda x: F.pad(x[None], (1, 2), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x[None], (1, 2), mode="replicate"),
    "pad_circular": lambda x: F.pad(x[None], (1, 2), mode="circular"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[None], 3),
    "prelu": lambda x: F.prelu(x, torch.full((6,), 0.2)),
    "hardshrink": lambda x: F.hardshrink(x) + F.softshrink(x) + F.threshold(x, 0.1, 0.0),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "var_mean": lambda x: torch.var_mean(x, 0, keepdim=True),
    "fmax": lambda x: torch.fmax(x, torch.tensor(float("nan"))) + torch.fmin(x, x.flip(0)),
    "xlogy": lambda x: torch.xlogy(x.abs(), x.abs() + 1),
    "select_scatter": lambda x: x.select_scatter(torch.ones(6), 0, 1) + x.slice_scatter(torch.ones(2, 6), 0, 1, 3),
    "unfold": lambda x: F.unfold(x[None, None], (2, 2)),
    "diff": lambda x: torch.diff(x, dim=1),
    "tensor_split": lambda x: torch.hsplit(x, 2) + torch.vsplit(x, 2),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 6, 6) / 6, torch.ones(2)),
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_calls_that_are_taken_apart(name):
    compare(TAKEN_APART[name], leaf(4, 6), tolerance=1e-4)


def test_a_call_that_cannot_be_taken_apart_names_the_part():
    with pytest.warns(UserWarning):
        compiled(lambda x: torch.lgamma(x).sum())(torch.rand(3))
    (fallback,) = torch_backend.last_report().fallbacks
    assert "lgamma" in fallback.call and "table of calls" in fallback.reason


def test_what_is_no_part_of_the_result_is_not_taken_apart():
    train(nn.Embedding(9, 4, scale_grad_by_freq=True), torch.tensor([[1, 1, 2]]), coverage=0.0)


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 5), nn.GRUCell(6, 5), nn.RNNCell(6, 5)

    def forward(self, x):
        h = c = g = r = x.new_zeros(x.shape[1], 5)
        for step in x:
            h, c = self.lstm(step, (h, c))
            g, r = self.gru(step, g), self.rnn(step, r)
        return h, c, g, r


def test_torch_layers():
    train(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0), leaf(5, 2, 16))
    train(nn.TransformerDecoderLayer(16, 2, 24, dropout=0.0, norm_first=True), leaf(5, 2, 16), leaf(3, 2, 16))
    train(Attention(add_bias_kv=True), leaf(2, 5, 16))
    train(Cells(), leaf(3, 2, 6))


class Square(torch.autograd.Function):
    """x * x, with a gradient of its own that is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0]


def test_custom_function_keeps_its_backward():
    _, reports = compare(lambda x: Square.apply(Square.apply(x.sin()).cos() * 2).sum() * x, leaf(3))
    assert sum(len(r.programs) for r in reports) >= 6


def test_autocast_of_what_is_taken_apart():
    x, y, h = torch.randn(4, 6), torch.randn(5, 6), torch.randn(4, 5)
    cell = nn.GRUCell(6, 5)
    for f in (lambda: cell(x, h), lambda: F.bilinear(x, x, torch.ones(2, 6, 6) / 6), lambda: F.cosine_similarity(x, y[:4])):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, eager = compiled(f)(), f()
        assert ours.dtype == eager.dtype
        close(ours, eager, 5e-2)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(checkpoint(lambda y: torch.special.i0e(torch.tanh(self.first(y))), x, use_reentrant=False))


def test_checkpoint_inside():
    reports = train(Checkpointed(), leaf(2, 4), coverage=0.5)
    (fallback,) = [f for r in reports for f in r.fallbacks]
    assert "i0e" in fallback.call


def test_torch_func():
    model = nn.Linear(3, 2)
    parameters, x = dict(model.named_parameters()), torch.randn(4, 3)

    def gradients(parameters, x):
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(parameters)

    def rows(x):
        twice = torch.func.vmap(lambda row: (row * 2).sum() / row.norm())(x) + 1
        return torch.func.vmap(lambda row: row.sin())(torch.ops.aten.slice(x * twice[:, None], 1, 0, 2))

    with warnings.catch_warnings(), torch_backend.listen() as reports:
        warnings.simplefilter("ignore")
        close(compiled(gradients)(parameters, x), gradients(parameters, x))
        close(compiled(rows)(x), rows(x))
    assert all("torch.func" in f.reason for r in reports for f in r.fallbacks) and reports[0].fallbacks
    assert reports[1].programs  # between the two transforms


def test_torch_func_over_compiled():
    def f(x):
        return x.sin().sum()

    x = torch.randn(4)
    call = compiled(f)
    call(x)
    close(torch.func.grad(call)(x), x.cos())
    close(torch.func.vmap(call)(torch.stack([x, x])), torch.stack([f(x), f(x)]))
    close(torch.func.hessian(call)(x), torch.diag(-x.sin()))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizer_inside(kind):
    """A step that is compiled with its optimizer: parameters and state are tensors of the graph that it writes to."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    models = [nn.Linear(3, 3)]
    models.append(copy.deepcopy(models[0]))

    def step_of(model):
        optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1, **options)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    x = torch.randn(2, 3)
    ours, eager = step_of(models[0]), step_of(models[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = compiled(ours)
        for _ in range(4):
            close(ours(x), eager(x))
    close(models[0].weight, models[1].weight)


def test_constants_are_not_written_to():
    def f(x):
        y = torch.linspace(0, 1, 5)
        y.add_(x)
        return y

    call = compiled(f)
    for _ in range(3):
        close(call(torch.ones(5)), f(torch.ones(5)))


def write_first(x, y):
    x.add_(1)
    return x * y


def pairs(base):
    return {"apart": (base[:3], base[3:]), "overlap": (base[:3], base[1:4]), "same": (base[:3], base[:3])}


@pytest.mark.parametrize("order", [("apart", "overlap", "same", "apart"), ("overlap", "apart", "same"), ("same", "apart", "overlap")])
def test_arguments_that_share_memory(order):
    with torch_backend.listen() as reports, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = compiled(write_first)
        for name in order:
            ours, eager = torch.arange(6.0), torch.arange(6.0)
            close(call(*pairs(ours)[name]), write_first(*pairs(eager)[name]))
            close(ours, eager)
    assert any("shares memory" in f.reason for r in reports for f in r.fallbacks)


def test_views_of_an_argument_that_is_written_to():
    def f(base):
        x, y = base[:3], base[1:4]
        x.add_(1)
        return x * y

    compare(f, torch.arange(6.0))


def test_write_to_a_view_whose_base_is_outside_of_the_part():
    def f(x):
        y = x * 2
        row = y[0]
        z = torch.special.i0e(y.detach().clone())
        row.mul_(3)
        y.add_(1)
        return y + z, row

    _, reports = compare(f, leaf(3, 3), coverage=0.5)
    assert all(f.reason for r in reports for f in r.fallbacks)


def test_classes_that_lie_apart():
    """A composite that was claimed whole and whose operand turns out to be a view that its kernel can't read."""
    target = torch.tensor([1, 0, 1])
    compare(lambda x: F.cross_entropy(x.t(), target), leaf(2, 3))
    compare(lambda x: F.cross_entropy(x.split(1, dim=-1)[1].squeeze(-1), target), leaf(3, 2, 2))
    compare(lambda x: F.layer_norm(x.t(), (2,)).softmax(-1).log_softmax(0), leaf(2, 3))
