"""fulmen.audit: a claimed kernel that computes wrong numbers is found on first use, in either direction."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fulmen
from fulmen import ops


def attention_executor(name, forward_error=0.0, backward_error=0.0):
    """sdpa by PyTorch, off by so much in one element."""
    made = fulmen.executor(name)

    def scores(query, key, is_causal, scale):
        s = (query.float() @ key.float().transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return s

    def backward(query, key, value, *rest, is_causal=False, scale=None, **_):
        out_grad = [t for t in rest if t is not None][-1]
        with torch.enable_grad():
            q, k, v = (t.detach().clone().requires_grad_() for t in (query, key, value))
            F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).backward(out_grad.clone())
        q.grad[0, 0, 3, 1] += backward_error
        return q.grad, k.grad, v.grad, None, None, None

    @made.implements("sdpa", backward=backward)
    def forward(query, key, value, *_, is_causal=False, scale=None, **__):
        s = scores(query, key, is_causal, scale)
        out = (torch.softmax(s, -1) @ value.float()).to(query.dtype)
        out[0, 1, 2, 0] += forward_error
        return out, torch.logsumexp(s, -1)

    return made


def run(executor, dtype, training=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, 12, 16, generator=generator).to(dtype).requires_grad_(training) for _ in range(3))
    out = fulmen.attention(q, k, v, is_causal=True, executors=[executor, *fulmen.default_executors()])
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if not training:
        return [out], [right]
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)], [right, *torch.autograd.grad(right, (q, k, v), grad)]


def assert_close(found, right):
    tolerance = 0.04 if found[0].dtype is torch.bfloat16 else 1e-5
    for f, r in zip(found, right):
        assert (f - r).abs().max() <= tolerance * r.abs().max()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_right_executor_passes(dtype):
    executor = attention_executor(f"right_{str(dtype)[6:]}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fulmen.audit() as seen:
            assert_close(*run(executor, dtype))
            assert seen.checked >= 2 and seen.differing == 0
            before = seen.checked
            run(executor, dtype, seed=1)
            assert seen.checked == before, "only the first use is compared"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_a_wrong_executor_is_revoked_and_the_result_is_right(where, dtype):
    wrong = attention_executor(f"wrong_{where}_{str(dtype)[6:]}", **{where + "_error": 0.5 if dtype is torch.bfloat16 else 1e-3})
    with fulmen.audit() as seen, pytest.warns(RuntimeWarning, match="audit found it wrong") as said:
        assert_close(*run(wrong, dtype))
        assert seen.differing == 1
    assert len([w for w in said if "audit" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(*run(wrong, dtype, seed=2))  # revoked for good


def test_inference_and_other_ops_are_compared_too():
    off = fulmen.executor("tanh_off")

    @off.implements("tanh")
    def tanh(x):
        return np.tanh(np.asarray(x)) + np.float32(1e-3)

    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    f = fulmen.jit(lambda x: ops.tanh(x), executors=[off, *fulmen.default_executors()])
    np.testing.assert_allclose(f(x), np.tanh(x) + 1e-3, atol=1e-5)  # nobody looks
    with fulmen.audit() as seen, pytest.warns(RuntimeWarning, match="tanh_off.*audit found it wrong"):
        np.testing.assert_allclose(f(x), np.tanh(x), rtol=1e-6)
    assert seen.checked >= 1 and seen.differing == 1
    np.testing.assert_allclose(f(x), np.tanh(x), rtol=1e-6)


def test_the_executors_of_this_machine_pass():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 7))
    x, target = torch.randn(6, 24), torch.randint(0, 7, (6,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fulmen.audit() as seen:
            loss = fulmen.jit(lambda x, t: F.cross_entropy(model(x), t))(x, target)
            loss.backward()
            q = torch.randn(2, 2, 33, 16, dtype=torch.bfloat16).requires_grad_()
            fulmen.sdpa(q, q, q, is_causal=True).sum().backward()
    assert seen.checked > 3 and seen.differing == 0, str(seen)


def test_the_variable_switches_it_on():
    code = "import fulmen, torch; q = torch.randn(1, 1, 4, 8); fulmen.sdpa(q, q, q); print(fulmen._core.audit_counts())"
    for value, first in (("1", 1), ("0", 0)):
        done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, FULMEN_AUDIT=value), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("(")[1].startswith(str(first)), (value, done.stdout)
