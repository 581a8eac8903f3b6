"""Functions over NumPy arrays: fulmen.jit, fulmen.ops, fulmen.grad, and executors written in Python."""

import numpy as np
import pytest

import fulmen
from fulmen import ops


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_operators_and_functions():
    @fulmen.jit
    def f(x, y):
        return ops.tanh(x @ y) * 2.0 + 1, (x - 0.5).sum()

    x, y = random(3, 4), random(4, 5, seed=1)
    product, total = f(x, y)
    assert isinstance(product, np.ndarray)
    np.testing.assert_allclose(product, np.tanh(x @ y) * 2 + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, (x - 0.5).sum(), rtol=1e-4)


def test_standard_names():
    x = random(3, 4)
    f = fulmen.jit(lambda x: (ops.permute_dims(x, (1, 0)), ops.max(x, axis=1), ops.mean(x, axis=0, keepdims=True), ops.expand_dims(x, 0)))
    a, b, c, d = f(x)
    np.testing.assert_array_equal(a, x.T)
    np.testing.assert_array_equal(b, x.max(1))
    np.testing.assert_allclose(c, x.mean(0, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(d, x[None])


def test_indexing():
    x = random(4, 5, 6)
    for index in [(0,), (slice(1, 3),), (Ellipsis, -1), (slice(None), None, 2), (slice(0, 4, 2), slice(None), slice(1, None))]:
        np.testing.assert_array_equal(fulmen.jit(lambda x: x[index] + 0.0)(x), x[index])


def test_nested_arguments():
    f = fulmen.jit(lambda p, x: {"out": x @ p["w"] + p["b"][0]})
    w, b, x = random(3, 2), random(2, seed=1), random(4, 3, seed=2)
    np.testing.assert_allclose(f({"w": w, "b": [b]}, x)["out"], x @ w + b, rtol=1e-5, atol=1e-6)


def test_strided_arrays():
    x = random(6, 8)
    np.testing.assert_allclose(fulmen.jit(lambda x: ops.exp(x))(x[::2, 1:].T), np.exp(x[::2, 1:].T), rtol=1e-5)


def test_numbers_are_values_of_the_run():
    f = fulmen.jit(lambda x, s: x * s)
    x = random(3)
    for s in range(10):
        np.testing.assert_allclose(f(x, s), x * s, rtol=1e-6)
        np.testing.assert_allclose(f(x, s + 0.5), x * np.float32(s + 0.5), rtol=1e-6)
    assert f.array_form.builds == 2  # an int and a float


def test_a_number_used_as_an_axis_is_part_of_the_program():
    f = fulmen.jit(lambda x, axis: ops.sum(x, axis=axis))
    x = random(3, 4)
    np.testing.assert_allclose(f(x, 0), x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(f(x, 1), x.sum(1), rtol=1e-5)


def test_many_shapes_are_warned_about_with_the_reason():
    f = fulmen.jit(lambda x: x + 1.0)
    with pytest.warns(RuntimeWarning, match="compiled for 64 kinds"):
        for n in range(1, 70):
            np.testing.assert_array_equal(f(np.zeros(n, np.float32)), np.ones(n, np.float32))
    assert len(f.array_form.programs) <= 64


def test_a_branch_on_a_value_is_a_clear_error():
    with pytest.raises(fulmen.TypeError, match="branch"):
        fulmen.jit(lambda x: x if x.sum() > 0 else -x)(random(3))


def test_an_op_outside_a_traced_function():
    with pytest.raises(fulmen.Error, match="fulmen.jit"):
        ops.tanh(random(3))


def test_grad():
    def loss(w, x):
        return ops.mean(ops.square(ops.tanh(x @ w)))

    w, x = random(4, 2), random(5, 4, seed=1)
    value, gradient = fulmen.value_and_grad(loss)(w, x)
    h = np.tanh(x.astype(np.float64) @ w)
    np.testing.assert_allclose(value, (h**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient, x.T.astype(np.float64) @ (2 * h * (1 - h**2) / h.size), rtol=1e-4, atol=1e-6)
    first, second = fulmen.grad(loss, argnums=(0, 1))(w, x)
    np.testing.assert_allclose(first, gradient)
    assert second.shape == x.shape


def test_grad_of_nested_parameters_trains():
    def loss(p, x, y):
        return ops.mean(ops.square(ops.relu(x @ p["a"]) @ p["b"] - y))

    p = {"a": random(3, 16) * 0.5, "b": random(16, 1, seed=1) * 0.5}
    x = random(64, 3, seed=2)
    y = x[:, :1] * x[:, 1:2]
    step = fulmen.value_and_grad(loss)
    first, _ = step(p, x, y)
    for _ in range(200):
        value, g = step(p, x, y)
        p = {k: p[k] - 0.1 * g[k] for k in p}
    assert value < 0.5 * first


def test_grad_needs_one_result_without_dims():
    with pytest.raises(fulmen.ShapeError, match="one result without dims"):
        fulmen.grad(lambda x: x * 2.0)(random(3))


def test_explain_and_last_traces():
    f = fulmen.jit(lambda x: ops.tanh(x) + 1.0)
    f(random(3))
    assert "tanh" in fulmen.last_traces(f)["acquire"]
    explanation = fulmen.explain(f, random(3))
    assert explanation.coverage == 1.0 and explanation.claims and not explanation.fallbacks
    assert "tanh" in str(explanation) and "<html" in explanation.to_html()


# executors written in Python


def test_a_python_executor_runs_its_op():
    mine = fulmen.executor("doubling")
    calls = []

    @mine.implements("tanh", checker=lambda call: call.x.dtype == "f32" or "only f32")
    def tanh(x):
        calls.append(tuple(x.shape))
        return np.tanh(np.asarray(x))

    x = random(3, 4)
    out = fulmen.jit(lambda x: ops.tanh(x), executors=[mine, *fulmen.default_executors()])(x)
    np.testing.assert_allclose(out, np.tanh(x), rtol=1e-6)
    assert calls == [(3, 4)]
    refused = fulmen.claims("tanh", "f64[3]", executors=[mine])
    assert refused.winner is None and refused[0].reason == "tanh: only f32"


def test_a_python_executor_that_fails_is_revoked_and_the_result_is_right():
    broken = fulmen.executor("broken")

    @broken.implements("tanh")
    def tanh(x):
        raise ValueError("out of order")

    f = fulmen.jit(lambda x: ops.tanh(x), executors=[broken, *fulmen.default_executors()])
    x = random(5)
    with pytest.warns(RuntimeWarning, match="out of order"):
        np.testing.assert_allclose(f(x), np.tanh(x), rtol=1e-6)
    np.testing.assert_allclose(f(x), np.tanh(x), rtol=1e-6)
