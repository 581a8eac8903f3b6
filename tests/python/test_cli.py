"""The command `fulmen`: what it prints, its JSON, its exit codes."""

import json
import os
import subprocess
import sys

import pytest

import fulmen
from fulmen import cli

SPEC = "f32[1,2,8,16]"
SDPA = ["claims", "sdpa", "--q", SPEC, "--k", SPEC, "--v", SPEC]


def run(*arguments, capsys):
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_claims_json(capsys):
    code, out, _ = run(*SDPA, "--training", "--json", capsys=capsys)
    assert code == 0
    claims = json.loads(out)
    assert claims["op"] == "sdpa" and claims["target"] == "cpu" and claims["training"] is True
    names = [a["executor"] for a in claims["answers"]]
    assert names == [e.name for e in fulmen.default_executors()]
    claimed = [a["executor"] for a in claims["answers"] if a["claimed"]]
    assert claims["winner"] == (claimed[0] if claimed else None)
    for answer in claims["answers"]:
        assert {"executor", "claimed", "code", "reason", "forward", "backward"} <= set(answer)
        assert bool(answer["reason"]) == (not answer["claimed"]) and bool(answer["code"]) == (not answer["claimed"])


def test_claims_table_names_every_executor(capsys):
    code, out, _ = run(*SDPA, capsys=capsys)
    assert code == 0
    for executor in fulmen.default_executors():
        assert executor.name in out


def test_python_and_command_line_agree(capsys):
    _, out, _ = run(*SDPA, "--causal", "--dropout", "0.1", "--scale", "0.5", "--training", "--json", capsys=capsys)
    same = fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC, is_causal=True, dropout_p=0.1, scale=0.5, training=True)
    assert json.loads(out) == json.loads(same.to_json())


def test_require_of_a_refusal_is_1(capsys):
    # No executor of the default list claims attention for fp64 on a described H200 through cuDNN.
    spec = "f64[1,2,8,64]"
    code, _, err = run("claims", "sdpa", "--q", spec, "--k", spec, "--v", spec, "--target", "h200", "--require", "cudnn", capsys=capsys)
    assert code == 1 and "cudnn refuses" in err


def test_require_of_a_claim_is_0(capsys):
    winner = fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC).winner
    code, _, _ = run(*SDPA, "--require", winner, capsys=capsys)
    assert code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["claims"],
        ["claims", "no_such_op"],
        ["claims", "sdpa", "--q", SPEC],
        ["claims", "sdpa", "--q", "f31[1]", "--k", SPEC, "--v", SPEC],
        ["claims", "sdpa", "--q", "f32[1", "--k", SPEC, "--v", SPEC],
        [*SDPA, "--target", "no_such_device"],
        [*SDPA, "--executors", "abacus"],
        [*SDPA, "--require", "abacus"],
        [*SDPA, "--window", "3"],
        [*SDPA, "--executors", ""],
        [*SDPA, "--input", SPEC],
        [*SDPA[:2], "--q", "f32[1,2,8,16]\udcff", *SDPA[4:]],
        ["claims", "relu", "--input", "f32[2]{stride=-1}"],
        ["claims", "relu", "--input", "f32[2]{stride=4611686018427387904}"],
        ["claims", "relu", "--input", "f32[2]", "--causal"],
        ["claims", "matmul", "--input", "f32[2,3]", "--input", "f32[3,2]", "--input", "f32[3,2]"],
        ["bench", "attention", "--peers", "nobody"],
        ["bench", "attention", "--dtype", "f99"],
        ["bench", "claims", "--repeats", "0"],
        ["run", "/dev/null", "--repeats", "0"],
        ["explain", "/:f"],
        ["explain", "no_such_file.py:f"],
        ["explain", "nothing"],
        ["run", "no_such_file"],
        ["bench", "everything"],
    ],
    ids=lambda a: " ".join(a)[:60] or "nothing",
)
def test_usage_errors_are_2(arguments, capsys):
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2 and err


def test_heads_that_do_not_divide_are_1(capsys):
    code, _, err = run("claims", "sdpa", "--q", "f32[1,6,8,16]", "--k", "f32[1,4,8,16]", "--v", "f32[1,4,8,16]", "--gqa", capsys=capsys)
    assert code == 1 and "6" in err and "4" in err


TRACE = """trace program(x: f32[4,8], w: f32[8,8]) {
  y: f32[4,8] = matmul(x, w)
  z: f32[4,8] = tanh(y)
  return z
}
"""


def test_run(tmp_path, capsys):
    path = tmp_path / "program.trace"
    path.write_text(TRACE)
    code, out, _ = run("run", str(path), "--check", "--json", capsys=capsys)
    assert code == 0
    result = json.loads(out)
    assert result["outputs"][0]["type"] == "f32[4,8]" and result["outputs"][0]["nan_count"] == 0
    assert 0 < result["outputs"][0]["largest"] <= 1
    assert max(result["relative_difference"]) < 1e-5


def test_run_of_a_broken_trace_names_the_line(tmp_path, capsys):
    path = tmp_path / "broken.trace"
    path.write_text(TRACE.replace("tanh(y)", "tanh(nothing)"))
    code, _, err = run("run", str(path), capsys=capsys)
    assert code == 1 and "nothing" in err


def test_run_makes_the_backward_too(tmp_path, capsys):
    path = tmp_path / "training.trace"
    path.write_text("# a comment\n" + TRACE.replace("w: f32[8,8]", "w: f32[8,8]!"))
    code, out, _ = run("run", str(path), "--check", "--json", capsys=capsys)
    result = json.loads(out)
    assert code == 0 and result["training"] is True
    assert [o["name"] for o in result["outputs"]] == ["result 0", "gradient of w"]
    assert result["outputs"][1]["type"].startswith("f32[8,8]") and max(result["relative_difference"]) < 1e-5
    assert "gradient of w" in run("run", str(path), capsys=capsys)[1]


WRONG_TRACES = {
    "size": ("t1: f32[900] = neg(x)", "neg gives f32[2]"),
    "dtype": ("t1: i64[2] = neg(x)", "neg gives f32[2]"),
    "operands": ("t1: f32[2] = neg(x, x)", "got 2 operands"),
    "none": ("t1: f32[2] = neg(none)", "not given"),
    "shapes": ("t1: f32[2] = add(x, y)", "sizes must be equal"),
    "results": ("(t1: f32[2], t2: f32[2]) = neg(x)", "2 are declared"),
    "attribute": ("t1: f32[2] = softmax(x, dim=7, dtype=none)", "dim is 7"),
    "no_attribute": ("t1: f32[2] = softmax(x)", "'dim' is not given"),
    "kind": ('t1: f32[2] = softmax(x, dim="a", dtype=none)', "needed an integer"),
    "stride": ("t1: f32[2]{stride=-5} = neg(x)", "strides are 0 or more"),
    "body": ("t1: f32[2] = fusion(x) @cpu trace fusion(x: f32[2]) {\n t3: f32[5] = neg(x)\n return t3\n}", "another type"),
    "body_operand": ("t1: f32[7] = fusion(x) @cpu trace fusion(y: f32[7]) {\n t3: f32[7] = neg(y)\n return t3\n}", "x"),
    "index": ("i: i64[1] = full(shape=[1], value=5, dtype=i64, device=none)\n t1: f32[1] = index_select(x, i, dim=0)", "index has 5"),
}


@pytest.mark.parametrize("name", WRONG_TRACES)
def test_run_of_a_trace_that_does_not_hold(name, tmp_path, capsys):
    line, words = WRONG_TRACES[name]
    path = tmp_path / "wrong.trace"
    path.write_text(f"trace wrong(x: f32[2], y: f32[7]) {{\n  {line}\n  return t1\n}}\n")
    code, _, err = run("run", str(path), capsys=capsys)
    assert code == 1 and words in err and "internal" not in err, err


def test_run_takes_the_trace_of_every_stage():
    torch = pytest.importorskip("torch")
    core = fulmen._core
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    explanation = fulmen.explain(lambda a: torch.nn.functional.gelu((a @ a.transpose(-1, -2)).transpose(1, 2)).softmax(-1).square().sum(), x)
    assert len(explanation.traces) > 20
    for stage, text in explanation.traces.items():
        result = core.replay(core.parse_trace(text.replace("!", "")), None, 0, 1, True)  # without another backward
        assert max(result["relative_difference"], default=0.0) < 1e-4, stage


def test_an_internal_failure_leaves_a_file_that_run_takes(capsys):
    def raises(call):
        raise KeyError("of the checker")

    failing = fulmen.executor("failing")
    failing.implements("tanh", raises)(lambda x: x)
    tanh = fulmen.jit(lambda x: fulmen.ops.tanh(x), executors=[failing, *fulmen.default_executors()])
    numpy = pytest.importorskip("numpy")
    with pytest.raises(fulmen.InternalError, match="the trace is in (.*); `fulmen run` replays it") as caught:
        tanh(numpy.ones((2, 3), numpy.float32))
    path = str(caught.value).rpartition("the trace is in ")[2].partition(";")[0]
    try:
        with open(path) as file:
            text = file.read()
        assert "failing" in text and "KeyError" in text and "trace" in text
        assert run("run", path, capsys=capsys)[0] == 0
    finally:
        os.unlink(path)


BROKEN = {
    "syntax": ("def f(:", 2, "no Python"),
    "bytes": (b"x = '\xff'\ndef f(): pass", 2, "no Python"),
    "import": ("import nothing_of_that_name", 1, "line 1"),
    "exit": ("import sys\nsys.exit(5)", 2, "SystemExit"),
    "no_function": ("f = 3", 2, "of type int"),
    "other_name": ("g = 3", 2, "no function 'f'"),
    "raises": ("\ndef f():\n    raise ValueError('found 3')", 1, "ValueError: found 3"),
    "arguments": ("def f(x): return x", 2, "'x'"),
    "no_pair": ("def f(): return 3", 2, "(module, inputs)"),
    "no_module": ("def f(): return 3, (4,)", 1, "found int"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_explain_of_a_broken_file_says_where(name, tmp_path, capsys):
    text, expected, words = BROKEN[name]
    path = tmp_path / f"{name}.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("explain", f"{path}:f", "--json", capsys=capsys)
    assert code == expected and words in err and "Traceback" not in err, err
    assert words in json.loads(out)["error"]["message"]


def test_explain_of_a_model_that_fails_names_its_line(tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "wrong.py"
    path.write_text("import torch\n\ndef f():\n    return torch.nn.Linear(3, 2), (torch.ones(4, 5),)\n")
    code, _, err = run("explain", f"{path}:f", capsys=capsys)
    assert code == 1 and err.startswith("fulmen explain: ") and "Traceback" not in err and "(4, 5)" in err


def test_what_cannot_be_printed_is_escaped(tmp_path, capsys):
    path = tmp_path / "control"
    path.write_text("\x1b[31mred")
    code, _, err = run("run", str(path), capsys=capsys)
    assert code == 1 and "\x1b" not in err


def test_run_of_a_folder_and_of_what_is_too_large(tmp_path, capsys):
    assert run("run", str(tmp_path), capsys=capsys)[0] == 1
    path = tmp_path / "large.trace"
    path.write_text("trace large(x: f32[1000000000000]) {\n  y: f32[1000000000000] = tanh(x)\n  return y\n}\n")
    code, _, err = run("run", str(path), capsys=capsys)
    assert code == 1 and err


def test_run_of_a_binary_file_is_2(tmp_path, capsys):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))
    assert run("run", str(path), capsys=capsys)[0] == 2


def test_targets(capsys):
    code, out, _ = run("targets", "--json", capsys=capsys)
    names = [t["name"] for t in json.loads(out)["targets"]]
    assert code == 0 and "cpu" in names and "h200" in names


def test_a_saved_target_reads_back(tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert run("targets", "--save", "h200", str(path), capsys=capsys)[0] == 0
    assert fulmen.claims("sdpa", q=SPEC, k=SPEC, v=SPEC, target=str(path)).target == "mine"


def test_executors(capsys):
    code, out, _ = run("executors", "--json", capsys=capsys)
    rows = json.loads(out)["executors"]
    assert code == 0 and [r["name"] for r in rows] == [e.name for e in fulmen.default_executors()]
    for row in rows:
        assert row["available"] == (row["reason"] == "")


def test_claims_of_another_op(capsys):
    code, out, _ = run("claims", "matmul", "--input", "f32[4,8]", "--input", "f32[8,2]", "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["winner"]


def test_bench_of_claims(capsys):
    code, out, _ = run("bench", "claims", "--only", "cpu", "--repeats", "2", "--json", capsys=capsys)
    result = json.loads(out)
    assert code == 0 and {"rows", "geomean", "device", "versions"} <= set(result)
    for row in result["rows"]:
        assert {"name", "fulmen_ms", "peers", "ratio"} <= set(row) and row["fulmen_ms"] > 0


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m fulmen.cli targets | head -c 1", shell=True, capture_output=True, text=True, env=dict(os.environ)
    )
    assert "Traceback" not in done.stderr


def test_run_finds_a_number_where_an_infinity_should_be(tmp_path, capsys):
    numpy = pytest.importorskip("numpy")
    wrong = fulmen.executor("finite_log")

    @wrong.implements("log")
    def log(x):
        return numpy.zeros_like(numpy.asarray(x))

    (tmp_path / "t.trace").write_text(
        "trace t(x: f32[4]) {\n  zero: f32[4] = sub(x, x)\n  deep: f32[4] = log(zero)\n  return zero, deep\n}\n"
    )
    arguments = ["run", str(tmp_path / "t.trace"), "--check", "--json", "--executors"]
    code, out, err = run(*arguments, "finite_log,cpu,reference", capsys=capsys)
    assert code == 1 and "differs from the reference" in err
    assert json.loads(out, parse_constant=pytest.fail)["relative_difference"] == [0.0, None]
    code, out, _ = run(*arguments, "cpu,reference", capsys=capsys)
    assert code == 0 and json.loads(out, parse_constant=pytest.fail)["relative_difference"] == [0.0, 0.0]


def test_a_description_of_the_gpu_at_hand_needs_one(tmp_path, capsys):
    if any(target.kind == "cuda" and not target.described for target in fulmen.targets()):
        pytest.skip("a GPU is here")
    code, _, err = run("targets", "--save", str(tmp_path / "mine.json"), capsys=capsys)
    assert code == 1 and "no CUDA driver" in err
    assert run("targets", "--save", "h200", str(tmp_path / "h200.json"), capsys=capsys)[0] == 0
    assert run("targets", "--save", "a", "b", "c", capsys=capsys)[0] == 2
