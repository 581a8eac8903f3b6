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
