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
