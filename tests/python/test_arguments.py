"""Wrong arguments of the public functions: each is an error that names the argument, what was found and what is needed;
none is taken for something else, and none ends the process."""

import math
import warnings

import numpy as np
import pytest
import torch

import fulmen
from fulmen import ops

Q = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(1))
SPEC = "f32[1,2,8,16]"
oracle = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("function", [fulmen.sdpa, fulmen.attention], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "named, kind, words",
    [
        (dict(dropout_p=None), fulmen.TypeError, "dropout_p is None"),
        (dict(dropout_p="0.1"), fulmen.TypeError, "dropout_p is '0.1'"),
        (dict(dropout_p=1j), fulmen.TypeError, "dropout_p is 1j"),
        (dict(dropout_p=torch.ones(2)), fulmen.TypeError, "dropout_p is tensor"),
        (dict(dropout_p=10**400), fulmen.ShapeError, "dropout_p is 10000"),
        (dict(is_causal="no"), fulmen.TypeError, "is_causal is 'no'; True or False"),
        (dict(is_causal=None), fulmen.TypeError, "is_causal is None"),
        (dict(is_causal=torch.tensor(True)), fulmen.TypeError, r"is_causal is tensor\(True\)"),
        (dict(enable_gqa=2), fulmen.TypeError, "enable_gqa is 2"),
        (dict(enable_gqa=torch.ones(2)), fulmen.TypeError, "enable_gqa is tensor"),
        (dict(scale="1"), fulmen.TypeError, "scale is '1'"),
        (dict(scale=[1.0]), fulmen.TypeError, r"scale is \[1.0\]"),
        (dict(scale=10**400), fulmen.ShapeError, "scale is 10000"),
        (dict(scale=math.nan), fulmen.ShapeError, "scale is NaN"),
        (dict(scale=torch.tensor(1j)), fulmen.TypeError, "scale has .*complex64"),
        (dict(scale=torch.empty((), device="meta")), fulmen.TypeError, "scale is on meta, q is on cpu"),
        (dict(scale=torch.tensor([1.0]).to_sparse()), fulmen.TypeError, "scale has layout torch.sparse_coo"),
    ],
    ids=str,
)
def test_numbers_and_flags_of_attention(function, named, kind, words):
    with pytest.raises(kind, match=words):
        function(Q, Q, Q, **named)


@pytest.mark.parametrize(
    "named, kind, words",
    [
        (dict(window="ab"), fulmen.TypeError, "window is 'ab'"),
        (dict(window=1.5), fulmen.TypeError, "window is 1.5"),
        (dict(window=(1.5, 2)), fulmen.TypeError, r"window is \(1.5, 2\)"),
        (dict(window=(1, 2, 3)), fulmen.TypeError, "window is"),
        (dict(window={}), fulmen.TypeError, "window is {}"),
        (dict(causal_corner=3), fulmen.TypeError, "causal_corner is 3"),
        (dict(softcap=None), fulmen.TypeError, "softcap is None"),
        (dict(softcap=math.inf), fulmen.ShapeError, "softcap is inf"),
        (dict(return_lse="x"), fulmen.TypeError, "return_lse is 'x'"),
        (dict(deterministic=torch.ones(2)), fulmen.TypeError, "deterministic is tensor"),
        (dict(sink=torch.empty(4, device="meta")), fulmen.TypeError, "sink is on meta, q is on cpu"),
        (dict(cu_seqlens_q=torch.empty(3, device="meta"), cu_seqlens_k=torch.empty(3, device="meta")), fulmen.TypeError, "cu_seqlens_q is on meta"),
    ],
    ids=str,
)
def test_options_of_attention(named, kind, words):
    with pytest.raises(kind, match=words):
        fulmen.attention(Q, Q, Q, **named)


def test_numbers_that_mean_the_same_are_taken():
    plain = fulmen.sdpa(Q, Q, Q, is_causal=True)
    for yes in (1, np.True_):
        assert torch.equal(fulmen.sdpa(Q, Q, Q, is_causal=yes), plain)
    assert torch.equal(fulmen.attention(Q, Q, Q, window=np.int64(3)), fulmen.attention(Q, Q, Q, window=(3, 3)))
    for wide in (2**31, 2**63, 2**80):
        assert torch.equal(fulmen.attention(Q, Q, Q, window=wide), fulmen.sdpa(Q, Q, Q))
    assert torch.equal(fulmen.sdpa(Q, Q, Q, dropout_p=np.float32(0)), fulmen.sdpa(Q, Q, Q))


def test_tensors_without_memory_beside_others():
    meta = torch.empty(2, 4, 16, 8, device="meta")
    for arguments, word in (((meta, Q, Q), "k is on cpu, q is on meta"), ((Q, Q, meta), "v is on meta"), ((Q, Q, Q, meta[:, :, :, :1]), "attn_mask is on meta")):
        with pytest.raises(fulmen.TypeError, match=word):
            fulmen.sdpa(*arguments)
    assert fulmen.sdpa(meta, meta, meta).shape == (2, 4, 16, 8)
    with pytest.raises(fulmen.ShapeError, match="head_dim"):
        fulmen.sdpa(meta, meta[..., :4], meta)


def test_memory_that_cannot_be_had_is_named():
    wide = torch.empty(1).expand(2**20, 2**10, 2**10, 8)
    with pytest.raises(MemoryError, match="bytes of memory can't be had"):
        fulmen.sdpa(wide, wide, wide)


def test_subclasses_of_tensors_run_with_pytorch_and_it_is_said():
    class Own(torch.Tensor):
        pass

    with pytest.warns(RuntimeWarning, match="attn_mask is a Own, a subclass of torch.Tensor"):
        found = fulmen.sdpa(Q, Q, Q, torch.zeros(16, 16).as_subclass(Own))
    assert type(found) is Own


def test_vmap_over_the_mask_alone():
    masks = torch.randn(3, 16, 16)
    found = torch.vmap(lambda mask: fulmen.sdpa(Q, Q, Q, mask))(masks)
    torch.testing.assert_close(found, torch.stack([oracle(Q, Q, Q, mask) for mask in masks]))


def test_claims_takes_what_sdpa_takes():
    by_position = fulmen.claims("sdpa", SPEC, SPEC, SPEC, None, 0.1, True, training=True)
    assert by_position.to_json() == fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC, dropout_p=0.1, is_causal=True, training=True).to_json()
    for named, kind, words in (
        (dict(training="x"), fulmen.TypeError, "training is 'x'"),
        (dict(is_causal=None), fulmen.TypeError, "is_causal is None"),
        (dict(deterministic=2), fulmen.TypeError, "deterministic is 2"),
        (dict(dropout_p=2), fulmen.ShapeError, "dropout_p is 2"),
        (dict(scale=math.nan), fulmen.ShapeError, "scale is NaN"),
        (dict(causal_corner="middle"), fulmen.ShapeError, "causal_corner is 'middle'"),
        (dict(q=None), fulmen.TypeError, "q="),
    ):
        with pytest.raises(kind, match=words):
            fulmen.claims("sdpa", **{"q": SPEC, "k": SPEC, "v": SPEC, **named})
    with pytest.raises(fulmen.TypeError, match="op is 3"):
        fulmen.claims(3)
    with pytest.raises(fulmen.TypeError, match="tensors is of type list"):
        fulmen.claims("cat", [None], dim=0)


def test_targets_that_are_no_descriptions(tmp_path):
    (tmp_path / "text.json").write_text("hello")
    for target, words in ((tmp_path / "text.json", "text is no JSON object"), (tmp_path, "is no JSON object"), ("cuda:-1", "is no device")):
        with pytest.raises((fulmen.TypeError, fulmen.UnsupportedError), match=words):
            fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC, target=str(target))


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda x: ops.sum(x, 1.5), fulmen.TypeError, "sum: dims is 1.5; an integer or a tuple"),
        (lambda x: ops.sum(x, "x"), fulmen.TypeError, "sum: dims is 'x'"),
        (lambda x: ops.softmax(x, x), fulmen.TypeError, "softmax: dim is an array"),
        (lambda x: ops.full(x, 1.0), fulmen.TypeError, "full: shape is an array"),
        (lambda x: ops.cat(x, None), fulmen.TypeError, "cat: entry 1 of .* is not given"),
        (lambda x: ops.cat([None, x]), fulmen.TypeError, "cat: entry 0 of .* is not given"),
        (lambda x: x[1.5], fulmen.TypeError, "an index is 1.5"),
        (lambda x: x[True], fulmen.UnsupportedError, "indexing with a bool"),
        (lambda x: x["a"], fulmen.TypeError, "an index is 'a'"),
        (lambda x: x + 2**63, fulmen.TypeError, "needed an integer of 64 bits"),
    ],
    ids=["float axis", "text axis", "array axis", "array shape", "absent entry", "absent entry in a list", "float index", "bool index", "text index", "wide number"],
)
def test_calls_of_ops(call, kind, words):
    with pytest.raises(kind, match=words):
        fulmen.jit(call)(np.ones((3, 4), np.float32))


def test_functions_of_jit():
    x = np.ones(3, np.float32)
    assert fulmen.jit(lambda a: None)(x) is None
    assert fulmen.jit(lambda a: (None, ops.sin(a), 3))(x)[::2] == (None, 3)
    assert fulmen.jit(lambda a, b: ops.sin(a))(x, None).shape == (3,)
    for named, words in ((dict(autocast=3), "autocast is 3"), (dict(autocast="f32"), "autocast is 'f32'"), (dict(dynamic="yes"), "dynamic is 'yes'")):
        with pytest.raises(fulmen.TypeError, match=words):
            fulmen.jit(lambda a: a, **named)


def test_autocast_holds_for_functions_over_arrays():
    x = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    assert str(fulmen.jit(lambda a: a @ a, autocast=torch.bfloat16)(torch.from_numpy(x)).dtype) == "torch.bfloat16"
    made = fulmen.jit(lambda a: ops.sum(a @ a), autocast="f16")
    assert "f16[32,32]" in str(fulmen.explain(made, x))
    gradient = fulmen.grad(fulmen.jit(lambda a: ops.sum(a @ a), autocast="f16", executors=["reference"]))
    assert gradient(x).dtype == np.float32
    assert {claim.executor for claim in fulmen.explain(gradient, x).claims} <= {"reference", "view", ""}


def test_explain_keeps_what_jit_was_given():
    torch._dynamo.reset()
    linear = torch.nn.Linear(8, 8)
    for made in (fulmen.jit(linear, executors=["reference"], autocast="bf16"), fulmen.jit(lambda x: linear(x), executors=["reference"], autocast="bf16")):
        explanation = fulmen.explain(made, torch.ones(2, 8))
        assert {claim.executor for claim in explanation.claims} <= {"reference", "view", ""}
        assert "bf16[2,8]" in explanation.traces["acquire"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 4, dtype=torch.complex64),
        lambda: torch.ones(4, 4, dtype=torch.uint16),
        lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
        lambda: torch.randn(4, 4).relu().to_sparse(),
    ],
    ids=["complex", "uint16", "float8", "sparse"],
)
def test_what_takes_an_unreadable_argument_stays_with_pytorch(make):
    torch._dynamo.reset()
    other, x = make(), torch.randn(4, 4, requires_grad=True)

    def function(x, other):
        wide = other.to_dense() if other.is_sparse else other
        return torch.sin(x * 2).sum() + (wide.abs() if wide.is_complex() else wide.to(torch.float32)).sum(), other

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, same = torch.compile(function, backend="fulmen")(x, other)
        only = torch.compile(lambda x, other: (torch.sin(x), other), backend="fulmen")(x, other)
        explanation = fulmen.explain(function, x, other)
    torch.testing.assert_close(found, function(x, other)[0])
    torch.testing.assert_close(only[0], torch.sin(x))
    assert same is other and only[1] is other
    assert other.is_sparse or explanation.coverage < 1 and any("other" in reason or "dtype" in reason for _, _, reason in explanation.fallbacks)
    torch._dynamo.reset()


def test_arguments_of_grad():
    x = np.ones(3, np.float32)
    for function, argnums, kind, words in (
        (3, 0, fulmen.TypeError, "a function is needed, found int"),
        (lambda a: a, None, fulmen.TypeError, "argnums is None"),
        (lambda a: a, 1.5, fulmen.TypeError, "argnums is 1.5"),
        (lambda a: a, -1, fulmen.ShapeError, "argnums is -1"),
        (lambda a: a, (0, 0), fulmen.ShapeError, r"argnums is \(0, 0\)"),
        (lambda a: a, (), fulmen.ShapeError, r"argnums is \(\)"),
    ):
        with pytest.raises(kind, match=words):
            fulmen.grad(function, argnums)
    with pytest.raises(fulmen.TypeError, match="argument 0 is asked for, it has no array"):
        fulmen.grad(lambda a, b: ops.sum(b))({}, x)


def test_executors_in_python():
    with pytest.raises(fulmen.TypeError, match="doc is a int"):
        fulmen.executor("mine", 3)
    mine = fulmen.executor("mine")
    for arguments, kind, words in (
        (dict(op="sin", checker=3), fulmen.TypeError, "checker is a int"),
        (dict(op="sin", backward=lambda *a: a), fulmen.UnsupportedError, "sin has a backward"),
        (dict(op=None), fulmen.UnsupportedError, "op None"),
    ):
        with pytest.raises(kind, match=words):
            mine.implements(**arguments)
    with pytest.raises(fulmen.TypeError, match="sin is run by a int"):
        mine.implements("sin")(3)


def test_a_list_that_refuses_is_an_unsupported_error_in_compiled_functions_too():
    torch._dynamo.reset()
    for executors in (["cudnn"], []):
        ran = []

        def function(x):
            return torch.sin(x)

        compiled = fulmen.jit(function, executors=executors)
        for _ in range(2):
            with pytest.raises(fulmen.UnsupportedError, match="sin: no executor claims it"):
                ran.append(compiled(Q))
        assert not ran
    torch._dynamo.reset()
