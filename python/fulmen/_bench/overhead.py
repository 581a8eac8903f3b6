"""What a call costs above its kernels: small attention calls, and a compiled call with 16 small inputs."""

import time

import torch

import fulmen
from fulmen._bench.measure import alternate, row

_times = 200  # calls in one measurement


def many(function):
    def run():
        for _ in range(20):
            function()
        start = time.perf_counter()
        for _ in range(_times):
            function()
        return ((time.perf_counter() - start) * 1e3 / _times,)

    return run


def _sum_of_all(*tensors):
    total = tensors[0]
    for t in tensors[1:]:
        total = total + t
    return total


def _program(device, inputs):
    """The compiled graph itself, as Dynamo's generated code calls it once its guards have held."""
    from fulmen.torch_backend import fulmen_backend

    made = []

    def backend(module, examples):
        made.append(fulmen_backend(module, examples))
        return made[-1]

    with torch.no_grad():
        torch.compile(lambda *tensors: _sum_of_all(*tensors), backend=backend)(*inputs)
    return lambda: made[0](*inputs)


def rows(device, peers, only, repeats, dtypes):
    attention = torch.nn.functional.scaled_dot_product_attention
    x = torch.randn(1, 1, 8, 16, device=device)
    sixteen = [torch.randn(16, device=device) for _ in range(16)]
    compiled = fulmen.jit(_sum_of_all)

    def without_grad(function):
        def call():
            with torch.no_grad():
                function()

        return call

    y = x.clone().requires_grad_()

    def training(function):
        def call():
            function(y, y, y).sum().backward()
            y.grad = None

        return call

    cases = [
        ("sdpa (1,1,8,16), no gradient", lambda: fulmen.sdpa(x, x, x), {"torch": lambda: attention(x, x, x)}),
        ("sdpa (1,1,8,16), forward and backward", training(fulmen.sdpa), {"torch": training(attention)}),
        ("sum of 16 small tensors, compiled", without_grad(lambda: compiled(*sixteen)), {"torch": without_grad(lambda: _sum_of_all(*sixteen))}),
    ]
    if device == "cpu":
        cases.append(("sum of 16 small tensors, the program alone", without_grad(_program(device, sixteen)), {}))
    if "inductor" in peers:
        inductor = torch.compile(_sum_of_all)
        cases[2][2]["inductor"] = without_grad(lambda: inductor(*sixteen))
    for name, ours, others in cases:
        if only and only not in name:
            continue
        ways = {"fulmen": many(ours), **{peer: many(f) for peer, f in others.items() if peer in peers}}
        times = alternate(ways, device, repeats)
        fulmen_ms = times.pop("fulmen")[0]
        yield row(name, fulmen_ms, {peer: t[0] for peer, t in times.items()})
