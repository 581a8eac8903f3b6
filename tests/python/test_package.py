"""What `import fulmen` promises: it needs no PyTorch, costs little, and says its errors in Python's own classes."""

import builtins
import subprocess
import sys

import pytest

import fulmen


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_numpy():
    loaded = run("import fulmen, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])")
    assert loaded == "[]"


def test_import_takes_little_time():
    code = "import time; t = time.perf_counter(); import fulmen; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.15


@pytest.mark.parametrize(
    "kind, python_class",
    [
        (fulmen.ShapeError, builtins.ValueError),
        (fulmen.TypeError, builtins.TypeError),
        (fulmen.UnsupportedError, builtins.NotImplementedError),
        (fulmen.DeviceError, builtins.RuntimeError),
        (fulmen.InternalError, builtins.RuntimeError),
    ],
)
def test_error_classes(kind, python_class):
    assert issubclass(kind, fulmen.Error) and issubclass(kind, python_class)
    assert kind.__module__ == "fulmen"


def test_every_public_name_resolves():
    for name in fulmen.__all__:
        assert getattr(fulmen, name) is not None


def test_default_list_ends_in_one_that_takes_everything():
    names = [e.name for e in fulmen.default_executors()]
    assert "cpu" in names and names[-1] == "reference"


def test_claims_need_no_torch():
    out = run("import fulmen, sys; c = fulmen.claims('sdpa', q='f32[1,2,8,16]', k='f32[1,2,8,16]', v='f32[1,2,8,16]', training=True);"
              "print(c.winner, 'torch' in sys.modules)")
    assert out.endswith("False") and not out.startswith("None")


def test_a_spec_that_is_wrong_names_its_fault():
    with pytest.raises(fulmen.ShapeError, match="no '\\['"):
        fulmen.claims("sdpa", q="f32", k="f32[1,1,1,1]", v="f32[1,1,1,1]")
    with pytest.raises(fulmen.TypeError, match="'f31' is not a dtype"):
        fulmen.claims("sdpa", q="f31[1,1,1,1]", k="f32[1,1,1,1]", v="f32[1,1,1,1]")


def test_an_executor_that_is_not_there():
    with pytest.raises(fulmen.UnsupportedError, match="no executor 'abacus'"):
        fulmen.claims("sdpa", q="f32[1,1,1,1]", k="f32[1,1,1,1]", v="f32[1,1,1,1]", executors=["abacus"])


SPEC = "f32[1,2,8,16]"


@pytest.mark.parametrize(
    "positional, named, words",
    [
        ([SPEC] * 12, {}, "12 arguments"),
        ([SPEC], {"q": SPEC}, "q is given twice"),
        ([], {"mask": SPEC, "attn_mask": SPEC}, "mask and attn_mask are both given"),
        ([], {"dropout_p": "x"}, "dropout_p is 'x'"),
        ([], {"scale": "x"}, "scale is 'x'"),
        ([], {"window": "ab"}, "window is 'ab'"),
        ([], {"window": (1, 2, 3)}, "window is"),
        ([], {"causal_corner": 3}, "causal_corner is 3"),
        ([], {"softcap": []}, "softcap is"),
        ([], {"q": 3}, "query is of type int"),
        ([], {"q": [SPEC]}, "query is of type list"),
        ([], {"target": 3}, "target is of type int"),
        ([], {"colour": 3}, "no argument 'colour'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_claims_says_which_argument_is_wrong(positional, named, words):
    arguments = {} if positional else {"q": SPEC, "k": SPEC, "v": SPEC}
    with pytest.raises(fulmen.TypeError, match=words.replace("(", r"\(")):
        fulmen.claims("sdpa", *positional, **{**arguments, **named})


def test_claims_of_another_op_says_which_operand_is_wrong():
    with pytest.raises(fulmen.TypeError, match="takes 2 operands, 3 are given"):
        fulmen.claims("matmul", "f32[2,3]", "f32[3,4]", "f32[3,4]")
    with pytest.raises(fulmen.TypeError, match="a is given twice"):
        fulmen.claims("matmul", "f32[2,3]", "f32[3,4]", a="f32[2,3]")
    with pytest.raises(fulmen.TypeError, match="dim is 1000000.*needed an integer of 64 bits"):
        fulmen.claims("softmax", "f32[2,3]", dim=10**30)
    with pytest.raises(KeyError, match="no executor 'abacus' was asked"):
        fulmen.claims("matmul", "f32[2,3]", "f32[3,4]")["abacus"]


def test_claims_of_tensors_without_memory():
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        q = torch.empty(1, 2, 8, 16, requires_grad=True).transpose(1, 2).transpose(1, 2)
    assert fulmen.claims("sdpa", q=q, k=q, v=q, training=True).winner == fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC, training=True).winner


def test_an_unclaimed_call_carries_all_refusals():
    numpy = pytest.importorskip("numpy")
    only_onednn = fulmen.jit(lambda x: fulmen.ops.tanh(x), executors=["onednn"])
    with pytest.raises(fulmen.UnsupportedError, match="no executor claims it") as caught:
        only_onednn(numpy.ones((2, 3), numpy.float32))
    (refusal,) = caught.value.refusals
    assert refusal.executor == "onednn" and refusal.code and "tanh" in refusal.reason and not refusal.claimed
