"""fulmen.sdpa on a GPU: results and gradients beside a float64 reference, streams, graph capture, dropout, refusals.
Skipped where there is no GPU."""

import os
import random
import subprocess
import sys
import threading
import time
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


def test_an_executor_asked_for_by_name_and_refused_is_an_error():
    q = make(1, 2, 64, 100)
    with pytest.raises(fulmen.UnsupportedError, match="head_dim is 100"):
        fulmen.attention(q, q, q, executors=["cudnn"])


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


def close(found, expected):
    for f, e in zip(found, expected):
        assert (f.double() - e.double()).abs().max() <= 0.03 * e.abs().max()


def both_directions(q, k, v, grad_of, causal=False, mask=None, call=fulmen.sdpa):
    """(result, gradients) of fulmen.sdpa and of the float64 reference, of three tensors."""
    out = call(q, k, v, mask, 0.0, causal)
    double = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = reference(*double, mask.double() if mask is not None and mask.is_floating_point() else mask, causal)
    grad = grad_of(out)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)], [right, *torch.autograd.grad(right, double, grad.double())]


def cudnn_counts():
    return fulmen.cache_info()["executors"]["cudnn"]


@pytest.mark.parametrize("inputs", ("(batch, heads, length, dim)", "(batch, length, heads, dim)"))
def test_gradients_in_every_layout(inputs):
    q, k, v = (make(2, 4, 200, 64, seed=i) for i in range(3))
    if "length, heads" in inputs:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    incoming = {
        "contiguous": lambda out: make(*out.shape, seed=5),
        "(batch, length, heads, dim)": lambda out: make(2, 200, 4, 64, seed=5).transpose(1, 2),
        "all of stride 0": lambda out: torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape),
        "one row": lambda out: make(1, 1, 1, 64, seed=6).expand(out.shape),
        "last stride not 1": lambda out: make(2, 4, 64, 200, seed=7).transpose(2, 3),
        "rows of odd stride": lambda out: make(2, 4, 200, 67, seed=8)[..., :64],
        "an odd offset": lambda out: make(2 * 4 * 200 * 64 + 1, seed=9)[1:].view(2, 4, 200, 64),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, grad_of in incoming.items():
            close(*both_directions(q, k, v, grad_of))


def test_nothing_is_built_once_a_call_is_known():
    q = make(2, 4, 312, 64).requires_grad_()
    for _ in range(2):
        fulmen.sdpa(q, q, q, is_causal=True).sum().backward()
    before, programs = cudnn_counts(), fulmen.cache_info()["sdpa"]["builds"]
    for _ in range(100):
        fulmen.sdpa(q, q, q, is_causal=True).sum().backward()
    after = cudnn_counts()
    for name in ("builds_forward", "builds_backward", "proofs", "store_loads", "store_writes"):
        assert after[name] == before[name], name
    assert fulmen.cache_info()["sdpa"]["builds"] == programs


def test_lengths_from_1_to_512_build_few_plans():
    lengths = list(range(1, 513))
    random.Random(0).shuffle(lengths)
    q = make(1, 2, 512, 64)
    before, slowest = cudnn_counts(), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*s_q = s_kv = 1.*")  # length 1 has no backward
        for length in lengths:
            begin = time.perf_counter()
            x = q[:, :, :length].contiguous().requires_grad_()
            fulmen.sdpa(x, x, x, is_causal=True).sum().backward()
            torch.cuda.synchronize()
            slowest.append((time.perf_counter() - begin) * 1e3)
    after = cudnn_counts()
    builds = after["builds_forward"] + after["builds_backward"] - before["builds_forward"] - before["builds_backward"]
    print(f"lengths 1 to 512: {builds} plans built, {after['shared'] - before['shared']} calls on shared plans, {after['store_loads'] - before['store_loads']} plans loaded; "
          f"first ten steps {[round(t) for t in slowest[:10]]} ms, the slowest after them {max(slowest[10:]):.1f} ms, median {sorted(slowest)[256]:.1f} ms")
    assert builds <= 20
    x, y, z = (make(1, 2, 333, 64, seed=i).requires_grad_() for i in range(3))
    close(*both_directions(x, y, z, lambda out: make(*out.shape, seed=4), causal=True))


def test_a_cold_capture_is_a_clear_error_that_leaves_the_capture_whole():
    q, cold = make(2, 4, 128, 64), make(2, 4, 136, 64)
    with torch.no_grad():
        fulmen.sdpa(q, q, q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fulmen.sdpa(q, q, q)
            with pytest.raises(fulmen.DeviceError, match="captured"):
                fulmen.sdpa(cold, cold, cold)
            twice = out * 2
        q.copy_(make(2, 4, 128, 64, seed=4))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(twice, 2 * fulmen.sdpa(q, q, q))
        assert fulmen.sdpa(cold, cold, cold).isfinite().all()


def test_training_with_dropout_is_captured_and_draws_anew():
    q = make(2, 4, 256, 64).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fulmen.sdpa(q, q, q, None, 0.2).sum().backward()
            q.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fulmen.sdpa(q, q, q, None, 0.2)
        (grad,) = torch.autograd.grad(out.sum(), q)
    seen = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        seen.append((out.detach().clone(), grad.clone()))
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[0][1], seen[1][1])
    assert all(t.isfinite().all() for pair in seen for t in pair)


def test_threads_with_streams_of_their_own():
    troubles = []

    def work(number):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(5):
                    x, y, z = (make(1, 2, 64 + 8 * number, 64, seed=number * 30 + i + 10 * t).requires_grad_() for t in range(3))
                    close(*both_directions(x, y, z, lambda out: make(*out.shape, seed=i), causal=i % 2 == 1))
            stream.synchronize()
        except Exception as error:
            troubles.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not troubles


FAULTY = """
import sys, warnings, torch, fulmen, torch.nn.functional as F
mask = None
if len(sys.argv) > 1:
    mask = torch.randn(1, 1, 1, 256, device="cuda", dtype=torch.bfloat16)
said = []
for step in range(3):
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    double = [t.detach().double().requires_grad_() for t in (q, k, v)]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        out = fulmen.sdpa(q, k, v, mask)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), grad)
    said += [str(w.message) for w in heard if "fulmen" in str(w.message).lower() or "sdpa" in str(w.message)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = F.scaled_dot_product_attention(*double, None if mask is None else mask.double())
    wanted = torch.autograd.grad(right, double, grad.double())
    for f, e in zip((out, *found), (right, *wanted)):
        assert (f.double() - e).abs().max() <= 0.03 * e.abs().max(), (step, float((f.double() - e).abs().max()))
print(len(said), "warnings", said)
"""


# Once: the next plan runs, or, where the library has none that does, PyTorch. Always: PyTorch.
@pytest.mark.parametrize("fault, warned", (("build:1", (0, 1)), ("forward:1", (0, 1)), ("backward:1", (0, 1)), ("build", (1,)), ("forward", (1,)), ("backward", (1,))))
def test_a_plan_that_fails_gives_way_and_the_result_is_right(fault, warned, tmp_path):
    environment = dict(os.environ, FULMEN_CUDNN_FAULT=fault, FULMEN_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", FAULTY], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) in warned, done.stdout


def test_an_audit_finds_the_wrong_numbers_of_a_library(tmp_path):
    # A fault that cuDNN 9.19 really has (known_faults.cpp), with the table's row taken away.
    environment = dict(os.environ, FULMEN_CUDNN_IGNORE_FAULTS="mask-row-for-all-queries", FULMEN_AUDIT="1", FULMEN_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", FAULTY, "mask"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unaudited = subprocess.run([sys.executable, "-c", FAULTY, "mask"], env=dict(environment, FULMEN_AUDIT="0"), capture_output=True, text=True)
    if unaudited.returncode == 0:
        pytest.skip("this cuDNN computes the call right")
    assert "audit found it wrong" in done.stdout, done.stdout


def test_an_audit_passes_what_is_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fulmen.audit() as seen:
            for dtype in (torch.bfloat16, torch.float16):
                q, k, v = (make(2, 4, 130, 64, dtype=dtype, seed=i).requires_grad_() for i in range(3))
                close(*both_directions(q, k, v, lambda out: make(*out.shape, dtype=dtype, seed=5), causal=True))
                mask = make(2, 1, 130, 130, seed=3) > 0
                close(*both_directions(q, k, v, lambda out: make(*out.shape, dtype=dtype, seed=5), mask=mask))
    assert seen.checked == 8 and seen.differing == 0, str(seen)


def test_two_processes_share_a_plan_store(tmp_path):
    environment = dict(os.environ, FULMEN_CACHE_DIR=str(tmp_path))
    started = [subprocess.Popen([sys.executable, "-c", FAULTY], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and output.startswith("0 warnings"), output + errors
    assert not [name for name in os.listdir(tmp_path / "cudnn_plans") if "tmp" in name]


def test_a_store_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("no folder")
    done = subprocess.run([sys.executable, "-c", FAULTY], env=dict(os.environ, FULMEN_CACHE_DIR=str(tmp_path / "file")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning") <= 1, done.stderr


def test_a_compiled_model_with_dropout_trains():
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch._dynamo.reset()
    if "fulmen" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(fulmen.torch_backend.fulmen_backend, name="fulmen")
    config = GPT2Config(n_layer=2, n_head=4, n_embd=256, vocab_size=512, n_positions=128, attn_implementation="sdpa", use_cache=False)
    net = GPT2LMHeadModel(config).cuda().to(torch.bfloat16).train()
    run, optimizer = torch.compile(net, backend="fulmen"), torch.optim.SGD(net.parameters(), lr=0.3)
    tokens = torch.randint(0, 512, (4, 128), device="cuda")
    before, losses = cudnn_counts()["claims"], []
    for _ in range(10):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(loss == loss for loss in losses) and losses[-1] < losses[0] - 0.3, losses
    assert cudnn_counts()["claims"] > before
