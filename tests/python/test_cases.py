"""Attention's public fault cases on the CPU, one test an id, on each executor that can run it: the CPU kernels, the
decomposition into plain operations on the same executor, and the reference. What is right: the values that the cases give
by hand, else the formula in float64 (test_sdpa.py's oracle), forward and every gradient.

A case about claims, keys or GPUs has its test where those are tested; `ELSEWHERE` says where, and is itself checked.
"""

import math
import pathlib
import warnings

import pytest
import torch
import torch.nn.functional as F

import fulmen
from fulmen import _core
from fulmen.torch_backend.recording import dtype_name

from test_sdpa import make, oracle

ROOT = pathlib.Path(__file__).parents[2]
IDS = (
    "C01 C02 C03 C05 C06 C07 C09 C10 C11 C13 C15 C17 C18 C19 C22 C23 C25 C26 C27 C28 C29 C31 C32 C34 C35 C36 C38 C40 C41 C43 "
    "C45 C46 C49 C51 C53 C55 C56 C57 C60 C61 C63 C64 C66 C68 C69 C70 C72 C73 C74 C76"
).split()  # fmt: skip
RUNNERS = ("kernels", "decomposition", "reference")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Cases that no CPU can run, and those whose decision half is tested with the executor that decides: id -> (file, words in it).
ELSEWHERE = {
    "C01": ("tests/golden/cudnn_claims_9.19.txt", "C01 h200=backward_unsupported"),
    "C02": ("tests/golden/cudnn_claims_9.19.txt", "C02a h200=claimed"),
    "C05": ("tests/golden/cudnn_claims_9.19.txt", "C05a h200=backward_unsupported"),
    "C60": ("tests/python/test_sdpa.py", "test_overhead_of_a_small_call"),
    "C61": ("tests/gpu/attention_gpu.cpp", "device"),
    "C63": ("tests/python/test_sdpa_cuda.py", "graph"),
    "C70": ("tests/python/test_package.py", "test_import_loads_neither_torch_nor_numpy"),
    "C72": ("src/executors/cudnn/proof.cpp", "prerequisite_missing"),
    "C73": ("src/executors/default_list.cpp", "default_executors"),  # no executor of the list calls cuBLASLt
    "C74": ("tests/unit/executors/cudnn_plan_store.cpp", "ItsKernelsCompile"),
}


class Composed:
    """The call's decomposition on the default list: the trace of one node, its claim as a pair left out."""

    def __init__(self, tensors, **attributes):
        recorder = _core.Recorder("sdpa")
        values = []
        for number, tensor in enumerate(tensors):
            values.append(
                None
                if tensor is None
                else recorder.input(f"x{number}", dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), "cpu", tensor.requires_grad)
            )
        recorder.output([recorder.emit("sdpa", values, {k: v for k, v in attributes.items() if v is not None})[0]])
        self.given = [t for t in tensors if t is not None]
        self.compiled = _core.compile(recorder.finish(), training=True, skip_passes=["claim_pairs"])
        assert not any(c.op.startswith("sdpa_") for c in self.compiled.claims)

    def __call__(self, grad):
        (out,), saved = self.compiled.forward([t.detach() for t in self.given])
        found = self.compiled.backward(saved, [grad]) if saved is not None else []
        return out, {id(t): g for t, g in zip(self.given, found) if g is not None}


def run(runner, q, k, v, mask=None, grad=None, *, causal=False, scale=None, gqa=False, corner="upper_left"):
    """(out, gradients of those of q, k, v, mask that want one), on one runner."""
    wanted = [t for t in (q, k, v, mask) if t is not None and t.requires_grad]
    if runner == "decomposition":
        call = Composed(
            [q, k, v, mask, *[None] * 6], is_causal=causal, scale=scale, enable_gqa=gqa, lower_right=True if corner == "lower_right" else None
        )
        heads = q.shape[:-1]
        out, found = call(torch.ones(*heads, v.shape[-1], dtype=q.dtype) if grad is None else grad.contiguous())
        return out, [found[id(t)] for t in wanted]
    out = fulmen.attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa, causal_corner=corner, executors=["reference"] if runner == "reference" else None
    )
    if not wanted:
        return out, []
    return out, torch.autograd.grad(out, wanted, torch.ones_like(out) if grad is None else grad)


def limit(dtype):
    return {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}[dtype]


def near(found, right, dtype, what, terms=0.0):
    """`terms`: the size of what cancels in the sums, if that is larger than the result."""
    assert found.shape == right.shape, what
    assert torch.isfinite(found).all(), f"{what} isn't finite"
    size = max(terms, right.abs().max().item()) if right.numel() else 0.0
    error = (found.double() - right).abs().max().item() if right.numel() else 0.0
    assert error <= limit(dtype) * max(size, 1e-30), f"{what}: off by {error:.3g}, largest is {size:.3g}"


def check(runner, q, k, v, mask=None, grad=None, needs="qkv", terms=0.0, **options):
    """Against float64. `needs`: whose gradients are wanted; `terms`: as in near, of the gradients."""
    named = {"q": q, "k": k, "v": v, "m": mask}
    ours = {n: None if t is None else t.detach().requires_grad_(n in needs) for n, t in named.items()}
    double = {n: t if t is None or t.dtype == torch.bool else t.detach().double().requires_grad_(n in needs) for n, t in named.items()}
    out, found = run(runner, *ours.values(), grad, **options)
    causal, corner = options.get("causal", False), options.get("corner")
    dense = double["m"]
    if corner == "lower_right":
        rows, keys = q.shape[-2], k.shape[-2]
        dense, causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), False
    right = oracle(double["q"], double["k"], double["v"], dense, causal, options.get("scale"), options.get("gqa", False))
    near(out, right, q.dtype, "result")
    wanted = [t for t in double.values() if t is not None and t.requires_grad]
    if wanted:
        expected = torch.autograd.grad(right, wanted, torch.ones_like(right) if grad is None else grad.double())
        for name, f, e in zip([n for n in "qkvm" if n in needs], found, expected):
            near(f, e, ours[name].dtype, f"gradient of {name}", terms)
    return out


def three(*shape, dtype=torch.float32, keys=None, value_dim=None, key_heads=None):
    batch, heads, length, dim = shape
    key_shape = (batch, key_heads or heads, keys or length, dim)
    return make(*shape, dtype=dtype), make(*key_shape, dtype=dtype, seed=1), make(*key_shape[:3], value_dim or dim, dtype=dtype, seed=2)


each_runner = pytest.mark.parametrize("runner", RUNNERS)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))


# backward missing


@each_runner
@pytest.mark.parametrize("dims", [(320, 320), (512, 512)], ids=str)
def test_C01_head_dims_above_256_train(runner, dims):
    length = 16 if runner == "reference" else 64
    check(runner, *three(1, 2, length, dims[0], dtype=torch.bfloat16, value_dim=dims[1]))


@each_runner
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (192, 192), (160, 160)], ids=str)
def test_C02_wide_head_dims_train(runner, dims):
    length = 12 if runner == "reference" else 70
    check(runner, *three(1, 2, length, dims[0], dtype=torch.float16, value_dim=dims[1]), causal=True)


@each_runner
def test_C03_one_query_over_many_keys(runner):
    heads, keys = (16, 4096) if runner == "kernels" else (2, 300)
    check(runner, *three(1, heads, 1, 64, dtype=torch.bfloat16, keys=keys))


@each_runner
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("needs", ["qkv", ""], ids=["training", "inference"])
def test_C05_full_precision_is_kept(runner, dtype, needs):
    check(runner, *three(1, 2, 16 if runner == "reference" else 128, 64, dtype=dtype), needs=needs, causal=True)


@each_runner
def test_C06_a_plan_that_fails_at_first_use_is_revoked(runner):
    """The executor claims and then fails; the same call runs on the next one, and the reason is told."""
    made = fulmen.executor(f"fails_at_first_use_{runner}")

    @made.implements("sdpa_forward")
    def attend(*operands, **options):
        raise RuntimeError("the kernel doesn't build")

    q, k, v = three(1, 8, 1, 16, keys=300, key_heads=2)
    rest = {"kernels": ["cpu"], "decomposition": ["onednn", "reference"], "reference": ["reference"]}[runner]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = fulmen.attention(q, k, v, enable_gqa=True, executors=[made, *rest])
    near(out, oracle(q, k, v, gqa=True), torch.float32, "result")
    check(runner, *three(1, 8, 1, 128, dtype=torch.bfloat16, keys=300, key_heads=2), gqa=True)


# accepted, wrong numbers


@each_runner
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_C07_logits_far_below_zero(runner, dtype):
    length = 60 if runner == "reference" else 704
    q, k, v = three(1, 1, length, 64, dtype=dtype)
    q[..., 0], k[..., 0] = 1, -960
    causal = torch.zeros(length, length, dtype=dtype).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    # Of dQ's channel 0 nothing is left: 960 / 8 times the score gradients' sum, which is 0.
    with_tensor = check(runner, q, k, v, causal, grad=make(1, 1, length, 64, dtype=dtype, seed=4), needs="qkv", terms=120.0)
    near(run(runner, q, k, v, causal=True)[0], with_tensor.double(), dtype, "is_causal beside the mask")


@each_runner
def test_C09_a_length_of_two_with_gaps_and_tiny_gradients(runner):
    tensors = []
    for seed in range(3):
        base = make(16, dtype=torch.bfloat16, seed=seed)
        tensors.append(torch.as_strided(base, (1, 1, 2, 8), (16, 8, 8, 1)))
    tensors[1][..., 3] = 70
    check(runner, *tensors, grad=make(1, 1, 2, 8, seed=5).mul(1e-8).bfloat16(), needs="v")
    _, (dq, dk) = run(runner, *(t.detach().requires_grad_(n < 2) for n, t in enumerate(tensors)), grad=torch.full((1, 1, 2, 8), 1e-8).bfloat16())
    assert torch.isfinite(dq).all() and torch.isfinite(dk).all()


@each_runner
def test_C10_a_wider_bias_gets_its_gradient_in_its_dtype(runner):
    batch, length = (2, 12) if runner == "reference" else (8, 128)
    q, k, v = three(batch, 4, length, 32, dtype=torch.bfloat16)
    bias = make(1, 4, length, length, seed=3).requires_grad_()
    grad = make(batch, 4, length, 32, dtype=torch.bfloat16, seed=4)
    out, (found,) = run(runner, q, k, v, bias, grad)
    double = bias.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(oracle(q, k, v, double), double, grad.double())
    assert found.dtype == torch.float32
    near(found, right, torch.bfloat16, "gradient of the bias")


# masked rows and NaN


@each_runner
@each_dtype
def test_C11_a_row_with_no_open_key(runner, dtype):
    q, k, v = three(1, 2, 6, 8, dtype=dtype, keys=10)
    mask = torch.ones(6, 10, dtype=torch.bool).tril()
    mask[5] = False
    check(runner, q, k, v, mask, grad=make(1, 2, 6, 8, dtype=dtype, seed=4))
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out, (dq, dk, dv) = run(runner, *inputs, mask)
    assert (out[:, :, 5] == 0).all() and (dq[:, :, 5] == 0).all()
    assert (dk[:, :, 5:] == 0).all() and (dv[:, :, 5:] == 0).all()


@each_runner
@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min], ids=["-inf", "lowest"])
def test_C13_only_the_last_keys_open(runner, low):
    length = 80 if runner == "reference" else 640
    mask = torch.full((length, length), low)
    mask[:, -10:] = 0
    check(runner, *three(1, 1, length, 4), mask, grad=make(1, 1, length, 4, seed=4))


# strides, layout


@each_runner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C15_a_gradient_with_stride_zero(runner, dtype):
    inputs = [t.requires_grad_() for t in three(1, 2, 20, 16, dtype=dtype)]
    if runner == "decomposition":
        q = make(1, 2, 20, 16, dtype=dtype)
        expanded, plain = torch.ones((), dtype=dtype).expand(1, 2, 20, 16), torch.ones(1, 2, 20, 16, dtype=dtype)
        call = Composed([*inputs, None, *[None] * 6])
        a, b = call(expanded)[1], call(plain)[1]
        assert q is not None and all(torch.equal(a[n], b[n]) for n in a)
        return
    out = fulmen.attention(*inputs, executors=["reference"] if runner == "reference" else None)
    expanded = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    plain = torch.autograd.grad(out, inputs, torch.ones(1, 2, 20, 16, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain))


def strided(shape, strides, dtype, seed):
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    return torch.as_strided(make(span, dtype=dtype, seed=seed), shape, strides)


@each_runner
def test_C17_packed_projections(runner):
    heads, length = (2, 9) if runner == "reference" else (24 if runner == "kernels" else 2, 261)
    shape = (1, heads, length, 64)
    q, k = (strided(shape, (heads * length * 64, length * 64, 64, 1), torch.bfloat16, s) for s in (0, 1))
    v = strided(shape, (3 * heads * length * 64, 64, 3 * heads * 64, 1), torch.bfloat16, 2)
    grad = strided(shape, (heads * length * 64, 64, heads * 64, 1), torch.bfloat16, 3)
    for _ in range(2 if runner == "kernels" else 1):
        check(runner, q, k, v, grad=grad)


@each_runner
@pytest.mark.parametrize(
    "shape, strides", [((2, 1, 5, 8), (40, 7, 8, 1)), ((1, 2, 5, 8), (0, 40, 8, 1)), ((1, 2, 5, 8), (1, 40, 8, 1)), ((1, 1, 2, 1), (2, 2, 1, 2))], ids=str
)
def test_C18_strides_of_size_one_dims(runner, shape, strides):
    tensors = [strided(shape, strides, torch.float32, seed) for seed in range(3)]
    out = check(runner, *tensors)
    near(out, run(runner, *(t.contiguous() for t in tensors))[0].double(), torch.float32, "result of contiguous tensors")
    if runner == "kernels":
        assert torch.equal(out, fulmen.sdpa(*(t.contiguous() for t in tensors)))
        fulmen.sdpa(*(t.contiguous() for t in tensors))
        builds = fulmen.cache_info()["sdpa"]["builds"]
        fulmen.sdpa(*tensors)
        assert fulmen.cache_info()["sdpa"]["builds"] == builds


@each_runner
@pytest.mark.parametrize("dim", [64, 512])
def test_C19_heads_by_expand(runner, dim):
    heads, length = (2, 9) if runner == "reference" else (16, 33)
    q = make(1, heads, length, dim, dtype=torch.bfloat16)
    k, v = (make(1, 1, length, dim, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (1, 2))
    mask = make(length, length, seed=3) > -0.5
    grad = make(1, heads, length, dim, dtype=torch.bfloat16, seed=4)
    wide = [t.expand(1, heads, length, dim) for t in (k, v)]
    out, (dk, dv) = run(runner, q, *(t.detach().requires_grad_() for t in wide), mask, grad)
    double = [t.detach().double().requires_grad_() for t in (k, v)]
    right = oracle(q, *(t.expand(1, heads, length, dim) for t in double), mask)
    near(out, right, torch.bfloat16, "result")
    for name, f, e in zip("kv", (dk, dv), torch.autograd.grad(right, double, grad.double())):
        near(f.float().sum(1, keepdim=True), e, torch.bfloat16, f"gradient of the unexpanded {name}")
    if runner == "kernels":
        found = torch.autograd.grad(fulmen.sdpa(q, *wide, mask), (k, v), grad)
        assert all(f.shape == t.shape for f, t in zip(found, (k, v)))


# masks


@each_runner
@each_dtype
def test_C22_an_added_mask_for_packed_sequences(runner, dtype):
    length = 16 if runner == "reference" else 96
    blocks = torch.arange(length) // (length // 3)
    mask = torch.zeros(2, 1, length, length, dtype=dtype).masked_fill(blocks[:, None] != blocks, -math.inf)
    check(runner, *three(2, 2, length, 16, dtype=dtype), mask)


@each_runner
@each_dtype
def test_C23_key_padding(runner, dtype):
    mask = torch.arange(32) < torch.tensor([32, 20, 7, 0])[:, None, None, None]
    check(runner, *three(4, 4, 32, 16, dtype=dtype), mask)


@each_runner
def test_C25_a_mask_of_another_dtype(runner):
    q, k, v = three(1, 8, 64, 32, dtype=torch.float16)
    check(runner, q, k, v, make(64, 64, seed=3, dtype=torch.bfloat16))
    if runner == "kernels":
        q, k, v = three(1, 8, 64, 32)
        mask = make(64, 64, seed=3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fulmen.sdpa(q, k, v, mask)
        assert out.dtype == torch.bfloat16
        near(out, oracle(q, k, v, mask), torch.bfloat16, "result under autocast")


@each_runner
def test_C26_a_bool_mask_closes(runner):
    q, k, v = three(1, 2, 16, 64, dtype=torch.bfloat16)
    mask = make(16, 16, seed=3) > 0
    mask[3] = False
    out = check(runner, q, k, v, mask)
    added_as_numbers = oracle(q, k, v, mask.double())
    assert (out.double() - added_as_numbers).abs().max() > 0.1


@each_runner
def test_C27_no_argument_is_dropped(runner):
    q, k, v = three(1, 8, 10, 64, dtype=torch.bfloat16)
    masked, plain = run(runner, q, k, v, torch.zeros(1, 1, 10, 10, dtype=torch.bool))[0], run(runner, q, k, v)[0]
    assert (masked == 0).all() and (plain != 0).any()
    differs = lambda **options: not torch.equal(run(runner, q, k, v, **options)[0], plain)  # noqa: E731
    assert differs(causal=True) and differs(scale=0.3) and differs(mask=make(10, 10, dtype=torch.bfloat16))
    if runner != "decomposition":
        only = None if runner == "kernels" else ["reference"]
        for more in (
            dict(window=(1, 1)), dict(softcap=0.5), dict(sink=torch.ones(8)), dict(alibi_slopes=torch.ones(8)),
            dict(key_lengths=torch.tensor([4], dtype=torch.int32)), dict(dropout_p=0.5),
            dict(cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 4, 10], dtype=torch.int32)),
        ):  # fmt: skip
            assert not torch.equal(fulmen.attention(q, k, v, executors=only, **more), plain), more


@each_runner
@each_dtype
def test_C28_the_mask_alone_wants_a_gradient(runner, dtype):
    length = 16 if runner == "reference" else 64
    check(runner, *three(1, 1, length, 16, dtype=dtype), make(1, 1, length, length, dtype=dtype, seed=3), needs="m")


@each_runner
def test_C29_a_bias_of_its_own_for_each_batch_entry(runner):
    batch, heads, length = (2, 2, 9) if runner == "reference" else (3, 4, 70)
    check(runner, *three(batch, heads, length, 48, dtype=torch.bfloat16), make(batch, heads, length, length, dtype=torch.bfloat16, seed=3), needs="qkvm")


@each_runner
def test_C31_mask_and_is_causal(runner):
    with pytest.raises(fulmen.TypeError, match="mask and is_causal are both given"):
        run(runner, *three(1, 1, 4, 8), torch.ones(4, 4, dtype=torch.bool), causal=True)


# the causal corner


@each_runner
@each_dtype
def test_C32_the_upper_left_corner(runner, dtype):
    line = lambda *values: torch.tensor(values, dtype=dtype).view(1, 1, -1, 1)  # noqa: E731
    out = run(runner, line(1, 2), line(0, 1, 2, 3, 4), line(0, 1, 2, 3, 4), causal=True, scale=1.0)[0].flatten()
    assert out[0] == 0 and math.isclose(out[1].item(), 0.8808, abs_tol=limit(dtype) + 1e-4)
    for query_len, keys, opened in ((2, 5, [1, 2]), (5, 2, [1, 2, 2, 2, 2])):
        q, k = torch.zeros(1, 1, query_len, 4, dtype=dtype), torch.zeros(1, 1, keys, 4, dtype=dtype)
        weights = run(runner, q, k, torch.eye(keys, dtype=dtype)[None, None], causal=True)[0]
        assert (weights != 0).sum(-1).flatten().tolist() == opened
        check(runner, *three(1, 2, query_len, 8, dtype=dtype, keys=keys), causal=True)


@each_runner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C34_the_lower_right_corner_with_more_queries_than_keys(runner, dtype):
    queries, keys = (12, 6) if runner == "reference" else (256, 128)
    q, k, v = three(1, 2, queries, 16, dtype=dtype, keys=keys)
    out = check(runner, q, k, v, corner="lower_right", causal=True)
    assert (out[:, :, : queries - keys] == 0).all()
    _, (dq,) = run(runner, q.detach().requires_grad_(), k, v, corner="lower_right", causal=True)
    assert (dq[:, :, : queries - keys] == 0).all()


# heads, head dims


@each_runner
def test_C35_head_counts_that_do_not_divide(runner):
    with pytest.raises(fulmen.ShapeError, match="key has 4 heads, query has 3"):
        run(runner, torch.zeros(1, 3, 5, 7), torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8))
    with pytest.raises(fulmen.ShapeError, match="key has 4 heads, query has 6; query heads must be a multiple"):
        run(runner, torch.zeros(1, 6, 5, 8), torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8), gqa=True)


@each_runner
@each_dtype
def test_C36_one_key_head_without_the_flag(runner, dtype):
    check(runner, *three(1, 16, 8, 16, dtype=dtype, key_heads=1))


@each_runner
@pytest.mark.parametrize("dims", [(2, 1), (96, 96)], ids=str)
def test_C38_padding_keeps_the_scale_of_the_head_dim(runner, dims):
    for dtype in (torch.bfloat16, torch.float32):
        check(runner, *three(1, 4 if runner == "reference" else 28, 32 if dims[0] < 8 else 12, dims[0], dtype=dtype, value_dim=dims[1]))


# dropout, random numbers


def dropped(runner, q, p, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return fulmen.attention(q, q, q, dropout_p=p, executors=["reference"] if runner == "reference" else None)


@pytest.mark.parametrize("runner", ["kernels", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C40_dropout_follows_the_frameworks_seed(runner, dtype):
    q = make(1, 2, 24, 8, dtype=dtype)
    first, second = dropped(runner, q, 0.1, seed=3), dropped(runner, q, 0.1)
    assert torch.equal(first, dropped(runner, q, 0.1, seed=3)) and not torch.equal(first, second)
    # The backward drops what the forward dropped: with the identity for values the result is the weights themselves.
    x, v = make(1, 1, 24, 8, dtype=dtype).requires_grad_(), torch.eye(24, dtype=dtype)[None, None].requires_grad_()
    weights = fulmen.attention(x, x, v, dropout_p=0.3, executors=["reference"] if runner == "reference" else None)
    grad = make(1, 1, 24, 24, dtype=dtype, seed=5)
    (dv,) = torch.autograd.grad(weights, v, grad)
    near(dv, weights.detach().double().transpose(-2, -1) @ grad.double(), dtype, "gradient of value")


@pytest.mark.parametrize("runner", ["kernels", "reference"])
@each_dtype
def test_C41_dropout_of_everything(runner, dtype):
    q = make(1, 2, 8, 8, dtype=dtype).requires_grad_()
    out = dropped(runner, q, 1.0)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert (out == 0).all() and (grad == 0).all()
    assert (dropped(runner, q.detach(), 0.5) != dropped(runner, q.detach(), 0.5)).any()  # always, whatever a module's mode


# scale


@each_runner
@each_dtype
def test_C43_negative_and_zero_scale(runner, dtype):
    line = lambda *values: torch.tensor(values, dtype=dtype).view(1, 1, -1, 1)  # noqa: E731
    q, k, v = line(1), line(0, 2), line(0, 1)
    assert math.isclose(run(runner, q, k, v, scale=-0.5)[0].item(), 0.2689, abs_tol=limit(dtype) + 1e-4)
    out, (dq, dk) = run(runner, q.requires_grad_(), k.requires_grad_(), v, scale=0.0)
    assert out.item() == 0.5 and (dq == 0).all() and (dk == 0).all()
    check(runner, *three(1, 2, 5, 8, dtype=dtype), scale=-0.5)


@pytest.mark.parametrize("how", ["alone", "compiled"])
def test_C43_a_tensor_as_scale_gets_its_gradient(how):
    q, k, v = three(1, 2, 5, 8)
    scale, double = torch.tensor(0.3, requires_grad=True), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    call = lambda s: fulmen.sdpa(q, k, v, scale=s)  # noqa: E731
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="fulmen")
    call(scale).sum().backward()
    oracle(q, k, v, scale=double).sum().backward()
    assert math.isclose(scale.grad.item(), double.grad.item(), rel_tol=1e-4)


@each_runner
def test_C45_another_scale_is_another_program(runner):
    q, k, v = three(1, 1, 16, 128)
    first = check(runner, q, k, v, scale=1 / math.sqrt(128))
    second = check(runner, q, k, v, scale=3 / math.sqrt(128))
    assert not torch.equal(first, second)


# sizes


@each_runner
@each_dtype
@pytest.mark.parametrize("shape", [(0, 0, 2, 0), (0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8)], ids=str)
def test_C46_empty(runner, dtype, shape):
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    out, grads = run(runner, *inputs)
    assert out.shape == shape and out.dtype == dtype and [g.shape for g in grads] == [torch.Size(shape)] * 3
    keys = torch.zeros(1, 2, 0, 8, dtype=dtype)
    assert (run(runner, torch.ones(1, 2, 4, 8, dtype=dtype), keys, keys)[0] == 0).all()


@pytest.mark.parametrize("length, training", [(49_999, True), (73_728, False), (1 << 24, True)])
def test_C49_very_large_calls_are_claimed_by_a_stated_rule(length, training):
    spec = f"bf16[1,8,{length},64]"
    answer = fulmen.claims("sdpa", q=spec, k=spec, v=spec, attn_mask=f"bf16[1,1,{length},{length}]", training=training, target="cpu")
    assert answer.winner == "cpu"
    longest = (1 << 31) - 1024
    too_long = f"bf16[1,1,{longest + 1},64]"
    answer = fulmen.claims("sdpa", q=too_long, k=too_long, v=too_long, training=training, target="cpu")
    assert answer["cpu"].code == "too_large" and str(longest) in answer["cpu"].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C49_elements_past_2_to_31(dtype):
    """Offsets of more than 2^31 elements, in memory of which only a few pages are ever touched."""
    far = (1 << 31) + 64
    k, v = (torch.empty(far + 512, dtype=dtype).as_strided((1, 2, 16, 8), (0, far, 8, 1)) for _ in range(2))
    for seed, t in enumerate((k, v), 1):
        t.copy_(make(1, 2, 16, 8, dtype=dtype, seed=seed))
    mask = torch.empty(far + 512, dtype=dtype).as_strided((1, 2, 16, 16), (0, far, 16, 1))
    mask.copy_(make(1, 2, 16, 16, dtype=dtype, seed=3))
    q = make(1, 2, 16, 8, dtype=dtype)
    out = fulmen.sdpa(q.requires_grad_(), k, v, mask)
    near(out, oracle(q, k, v, mask), dtype, "result")
    (dq,) = torch.autograd.grad(out.sum(), q)
    double = q.detach().double().requires_grad_()
    near(dq, torch.autograd.grad(oracle(double, k, v, mask).sum(), double)[0], dtype, "gradient")


# device, dtype


def test_C51_cudnn_first_in_the_list():
    q, k, v = three(2, 4, 64, 64, dtype=torch.bfloat16)
    answer = fulmen.claims("sdpa", q=q, k=k, v=v, executors=["cudnn", "cpu"], training=True)
    assert answer.winner == "cpu" and answer["cudnn"].code in ("wrong_device", "unavailable")
    assert torch.equal(fulmen.attention(q, k, v, executors=["cudnn", "cpu"]), fulmen.attention(q, k, v, executors=["cpu"]))


def test_C53_autocast_before_the_checks():
    q, k, v = three(1, 2, 8, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = fulmen.sdpa(q, k.half(), v.half())
    assert out.dtype == torch.float16
    near(out, oracle(q, k, v), torch.float16, "result")
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: torch.matmul(a, b), backend="fulmen")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(make(3, 1, 2), make(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
        torch._dynamo.reset()
        mixed = torch.compile(lambda q, k, v: fulmen.sdpa(q, k, v), backend="fulmen")
        near(mixed(q, k.bfloat16(), v.bfloat16()), oracle(q, k, v), torch.bfloat16, "compiled result")


# caches


@each_runner
def test_C55_strides_and_dtypes_are_part_of_the_key(runner):
    q, k, v = three(1, 2, 8, 16, dtype=torch.float16)
    check(runner, q, k, v)
    wide = make(1, 2, 16, 16, dtype=torch.float16, seed=7)[:, :, ::2]
    assert wide.shape == k.shape and wide.stride() != k.stride()
    check(runner, q, wide, v)
    check(runner, *(t.bfloat16() for t in (q, k, v)))


def test_C56_the_same_call_is_built_once():
    inputs = [t.requires_grad_() for t in three(1, 2, 8, 16)]
    fulmen.sdpa(*inputs).sum().backward()
    before = fulmen.cache_info()["sdpa"]
    for _ in range(100):
        fulmen.sdpa(*inputs).sum().backward()
    after = fulmen.cache_info()["sdpa"]
    assert after["builds"] == before["builds"] and after["hits"] - before["hits"] == 100


def test_C57_many_lengths_and_numbers():
    fulmen.clear_caches()
    before = fulmen.cache_info()["sdpa"]["builds"]
    q = make(1, 1, 512, 8)
    for length in range(1, 513):
        fulmen.sdpa(q[:, :, :length], q[:, :, :length], q[:, :, :length])
    info = fulmen.cache_info()["sdpa"]
    assert info["builds"] - before == 512 and info["programs"] <= 1024
    torch._dynamo.reset()
    with fulmen.torch_backend.listen() as reports:
        compiled = torch.compile(lambda x, i: x * i, backend="fulmen")
        for i in range(10):
            assert torch.equal(compiled(q, i), q * i)
    assert len(reports) <= 4  # 0 and 1, and one for all other numbers


# determinism, recompute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C64_deterministic_gradients(dtype):
    inputs = [t.requires_grad_() for t in three(2, 4, 200, 64, dtype=dtype)]
    bias = make(1, 4, 200, 200, dtype=dtype, seed=3).requires_grad_()
    grad = make(2, 4, 200, 64, dtype=dtype, seed=4)
    torch.use_deterministic_algorithms(True)
    try:
        results = [torch.autograd.grad(fulmen.sdpa(*inputs, bias), [*inputs, bias], grad) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    assert fulmen.claims("sdpa", q="bf16[8,16,32768,64]", k="bf16[8,16,32768,64]", v="bf16[8,16,32768,64]", training=True, deterministic=True, target="cpu")["cpu"].deterministic


def test_C66_recompute_runs_what_the_forward_ran():
    inputs = [t.requires_grad_() for t in three(1, 2, 16, 16)]
    right = torch.autograd.grad(fulmen.sdpa(*inputs).square().sum(), inputs)
    kept = torch.utils.checkpoint.checkpoint(lambda q, k, v: fulmen.sdpa(q, k, v).square().sum(), *inputs, use_reentrant=False)
    builds = fulmen.cache_info()["sdpa"]["builds"]
    found = torch.autograd.grad(kept, inputs)
    assert fulmen.cache_info()["sdpa"]["builds"] == builds
    assert all(torch.equal(f, r) for f, r in zip(found, right))


# traces


def compiled_attention(x, w):
    return F.scaled_dot_product_attention(x, x, x @ w, is_causal=True)


def test_C68_gradients_have_the_shape_of_their_inputs():
    x, w = make(1, 2, 4, 8).requires_grad_(), make(8, 16, seed=1).requires_grad_()
    torch._dynamo.reset()
    out = torch.compile(compiled_attention, backend="fulmen")(x, w)
    double = [t.detach().double().requires_grad_() for t in (x, w)]
    right = oracle(double[0], double[0], double[0] @ double[1], causal=True)
    near(out, right, torch.float32, "result")
    for f, e, t in zip(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(right.sum(), double), (x, w)):
        assert f.shape == t.shape
        near(f, e, torch.float32, "gradient")


def test_C69_symbolic_sizes_and_declared_strides():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: fulmen.attention(q, k, v, window=(3, None)), backend="fulmen", dynamic=True)
    for length, dim in ((5, 8), (6, 16), (9, 24)):
        q, k, v = three(1, 2, length, dim)
        out = compiled(q, k, v)
        near(out, fulmen.attention(q, k, v, window=(3, None)).double(), torch.float32, "result")
        assert out.stride() == out.contiguous().stride()


# dependencies, other executors


def test_C70_an_executor_that_is_not_there_says_why():
    named = {e.name: e for e in fulmen.executors()}
    if named["cudnn"].available:
        pytest.skip("there is a cuDNN device here")
    assert named["cudnn"].reason
    with pytest.raises(fulmen.UnsupportedError, match="cudnn"):
        fulmen.attention(*three(1, 1, 4, 8), executors=["cudnn"])


def test_C76_dlpack_corner_cases():
    q = torch.as_strided(make(64), (1, 1, 4, 8), (77, 13, 8, 1))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    near(fulmen.sdpa(q, q, q, mask), oracle(q, q, q, mask), torch.float32, "result")
    column = torch.as_strided(torch.ones(64, dtype=torch.bool), (1, 1, 4, 1), (3, 5, 2, 9))
    near(fulmen.sdpa(q, q, q, column), oracle(q, q, q), torch.float32, "result")


def test_every_case_has_its_test():
    tests = " ".join(name for name in globals() if name.startswith("test_C"))
    missing = [case for case in IDS if f"test_{case}_" not in tests and case not in ELSEWHERE]
    assert not missing, missing
    for case, (path, words) in ELSEWHERE.items():
        assert words in (ROOT / path).read_text(), f"{case}: {path} doesn't say {words!r}"
