"""What surrounds the kernels: calls from several threads, processes made by fork, changed thread counts, memory that
must not grow, errors in the middle of a call, gradients of compiled graphs as autograd sees them."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import fulmen


def run_python(code, timeout=120, **environment):
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(call, times):
    """Resident bytes gained by `times` calls, after as many that may fill caches."""
    for _ in range(times // 4):
        call()
    gc.collect()
    before = resident_bytes()
    for _ in range(times):
        call()
    gc.collect()
    return resident_bytes() - before


def test_threads_call_at_once_and_get_the_same():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 16 + i, 8) for i in range(6)]
    compiled = fulmen.jit(lambda x: (x * 2.0).tanh().sum())
    expected = []
    for x in inputs:
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(fulmen.sdpa(y, y, y).square().sum(), y)
        expected.append(g)
    compiled(inputs[0])
    faults = []

    def work(place):
        try:
            for turn in range(30):
                x = inputs[(place + turn) % len(inputs)]
                y = x.clone().requires_grad_()
                (g,) = torch.autograd.grad(fulmen.sdpa(y, y, y).square().sum(), y)
                if not torch.equal(g, expected[(place + turn) % len(inputs)]):
                    faults.append(f"thread {place}, turn {turn}: another gradient")
                compiled(inputs[0])
                fulmen.attention(x, x, x, executors=["cpu"])
                if turn % 10 == 0:
                    fulmen.clear_caches()
        except BaseException as error:  # noqa: BLE001
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults, faults


def test_thread_counts_may_change_between_calls():
    x = torch.randn(1, 4, 200, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            assert fulmen._core.thread_count() == count
            results.append(fulmen.sdpa(x, x, x))
        assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.set_num_threads(before)


def test_a_forked_child_computes():
    # The parent has used its threads before: a child that waited for them would wait for ever.
    out = run_python(
        """
        import os, signal, sys
        import numpy as np, torch, fulmen
        torch.set_num_threads(2)
        q = torch.randn(1, 4, 256, 64)
        net = torch.nn.Linear(256, 256)
        compiled = torch.compile(net, backend="fulmen")
        x = torch.randn(512, 256)
        with torch.no_grad():
            a, b = fulmen.sdpa(q, q, q), compiled(x)
        for _ in range(2):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                with torch.no_grad():
                    same = np.array_equal(fulmen.sdpa(q, q, q).numpy(), a.numpy()) and np.array_equal(compiled(x).numpy(), b.numpy())
                os._exit(0 if same and fulmen._core.thread_backend() == "own pool" else 1)
            assert os.waitpid(child, 0)[1] == 0
        loader = torch.utils.data.DataLoader(range(4), num_workers=2, collate_fn=lambda i: fulmen.sdpa(q, q, q).sum().item())
        sums = list(loader)
        assert len(sums) == 4 and max(sums) == min(sums), sums
        assert np.array_equal(fulmen.sdpa(q, q, q).numpy(), a.numpy())
        print("done")
        """
    )
    assert out.strip().endswith("done")


@pytest.mark.parametrize("threads", [1, 2])
def test_without_pytorch_forks_and_exits_cleanly(threads):
    out = run_python(
        """
        import os, signal, threading
        import numpy as np, fulmen
        from fulmen import ops
        f = fulmen.jit(lambda a: ops.matmul(ops.exp(a), a))
        a = np.random.default_rng(0).standard_normal((384, 384), dtype=np.float32)
        r = f(a)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if np.array_equal(f(a), r) else 1)
        assert os.waitpid(child, 0)[1] == 0
        kept = f(a)  # lives until the interpreter ends
        print(fulmen._core.thread_count())
        """,
        OMP_NUM_THREADS=str(threads),
    )
    assert out.strip() == str(threads)


def test_memory_stays_flat():
    x = torch.randn(1, 2, 16, 16)
    y = x.clone().requires_grad_()
    numbers = [torch.randn(16) for _ in range(4)]
    wanted = [n.clone().requires_grad_() for n in numbers]
    compiled = fulmen.jit(lambda a, b, c, d: (a * b + c).sin() * d)

    def training():
        fulmen.sdpa(y, y, y).sum().backward()
        y.grad = None

    def compiled_training():
        torch.autograd.grad(compiled(*wanted).sum(), wanted)

    def wrong_shape():
        with pytest.raises(fulmen.ShapeError):
            fulmen.sdpa(y, y[..., :3], y)

    def changed_in_place():
        z = y * 1.0
        out = fulmen.sdpa(z, z, z).sum()
        z.add_(1.0)
        with pytest.raises(RuntimeError, match="inplace"):
            out.backward()

    def unclaimed():
        with pytest.raises(fulmen.UnsupportedError):
            fulmen.attention(x, x, x, executors=["cudnn"])

    cases = {
        "forward": (lambda: fulmen.sdpa(x, x, x), 8_000), "training": (training, 1_200),
        "compiled": (lambda: compiled(*numbers), 3_000), "compiled training": (compiled_training, 600),
        "wrong shape": (wrong_shape, 300), "changed in place": (changed_in_place, 300), "unclaimed": (unclaimed, 300),
    }  # fmt: skip
    grown = {name: growth(call, times) for name, (call, times) in cases.items()}
    assert max(grown.values()) < 1 << 19, grown  # a leak of 64 bytes a call in the longest loop


def test_compiled_gradients_keep_autograds_rules():
    compiled = fulmen.jit(lambda a, b: ((a * b).sin(), (a > b).to(torch.int64)))
    a, b = (torch.randn(5, requires_grad=True) for _ in range(2))
    out, whole = compiled(a, b)
    assert out.grad_fn.name() == "FulmenProgramBackward" and not whole.requires_grad
    first = torch.autograd.grad(out.sum(), (a, b), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (a, b))
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first[0], (a * b).cos() * b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), (a, b))

    changed = [t * 1.0 for t in (a, b)]
    out, _ = compiled(*changed)
    changed[1].add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()

    made = torch.autograd.grad(compiled(a, b)[0].sum(), a, create_graph=True)[0]
    torch.testing.assert_close(made.detach(), first[0].detach())
    with pytest.raises(fulmen.UnsupportedError, match="first derivatives only"):
        made.sum().backward()


def test_a_function_of_jit_takes_arrays_after_tensors():
    f = fulmen.jit(lambda x: x * 2.0)
    import numpy as np

    assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
    assert np.array_equal(f(np.ones(3, np.float32)), np.full(3, 2.0, np.float32))
    assert torch.equal(f(torch.nn.Parameter(torch.ones(3))), torch.full((3,), 2.0))


def test_a_claim_asked_before_is_kept_and_others_are_not_mistaken_for_it():
    def ask(**more):
        return fulmen.claims("sdpa", q="f32[1,2,8,16]", k="f32[1,2,8,16]", v="f32[1,2,8,16]", target="cpu", **more)

    fulmen.clear_caches()
    first, again = ask(training=True), ask(training=True)
    assert first.to_dict() == again.to_dict() and first[0] is again[0]
    again.answers.clear()
    assert len(ask(training=True)) == len(first)
    assert ask(training=False).training is False
    assert len(ask(training=True, executors=["cpu"])) == 1
    with pytest.raises(fulmen.Error):
        ask(training=True, dropout_p=2.0)
    fulmen.clear_caches()
    assert ask(training=True)[0] is not first[0]
