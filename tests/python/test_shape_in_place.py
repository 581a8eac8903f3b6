"""Calls that change a tensor's own shape in place (squeeze_, t_, ...) through torch.compile, beside eager."""

import pytest

torch = pytest.importorskip("torch")

import fulmen  # noqa: E402, F401  registers the backend


def squeezed(x):
    y = x * 2
    y.squeeze_()
    return y + 1, y


def squeezed_at(x):
    y = x * 2
    z = y.squeeze_(0)
    z.add_(1)
    return y, z


def unsqueezed(x):
    y = x * 2
    y.unsqueeze_(-1)
    return y + 1, y


def transposed(x):
    y = x * 2
    y.t_()
    y.mul_(torch.arange(1.0, y.shape[-1] + 1))
    return y.sum(0), y


def transposed_dims(x):
    y = x * 2
    y.transpose_(0, 1).swapaxes_(0, 1)
    return y, y.swapdims_(0, 1) @ x


def older_view_keeps_its_shape(x):
    y = x * 2
    row = y.view(-1)
    y.squeeze_()
    row.add_(1)
    return y, row


def argument_itself(x):
    x = x.clone() if x.requires_grad else x
    x.unsqueeze_(0)
    return x * 2


FUNCTIONS = [squeezed, squeezed_at, unsqueezed, transposed, transposed_dims, older_view_keeps_its_shape, argument_itself]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_shape_in_place(function, requires_grad):
    def run(f):
        x = torch.arange(6.0).reshape(1, 6).requires_grad_(requires_grad)
        results = f(x)
        results = results if isinstance(results, tuple) else (results,)
        if requires_grad:
            sum((r * r).sum() for r in results).backward()
        return [r.detach() for r in results], x.grad, x.detach()

    torch._dynamo.reset()
    eager, compiled = run(function), run(torch.compile(function, backend="fulmen"))
    for ours, theirs in zip(compiled[0], eager[0]):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(compiled[1:], eager[1:])
