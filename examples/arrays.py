"""NumPy arrays through fulmen.jit and fulmen.value_and_grad: a small network learns a function, with no PyTorch.

    python examples/arrays.py
"""

import numpy as np

import fulmen
from fulmen import ops


def predict(p, x):
    hidden = ops.tanh(x @ p["w1"] + p["b1"])
    return hidden @ p["w2"] + p["b2"]


def loss(p, x, y):
    return ops.mean(ops.square(predict(p, x) - y))


def main(steps=500):
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    p = {"w1": normal(1, 32), "b1": normal(32), "w2": normal(32, 1) / 6, "b2": np.zeros(1, np.float32)}
    x = np.linspace(-3, 3, 256, dtype=np.float32)[:, None]
    y = np.sin(2 * x)
    step = fulmen.value_and_grad(loss)
    for i in range(steps):
        value, gradient = step(p, x, y)
        p = {name: p[name] - 0.05 * gradient[name] for name in p}
        if i % 100 == 0:
            print(f"step {i}: loss {value:.4f}")
    run = fulmen.jit(predict)
    error = float(np.abs(run(p, x) - y).mean())
    print(f"mean error after training: {error:.4f}")
    print(fulmen.explain(run, p, x))
    return error


if __name__ == "__main__":
    main()
