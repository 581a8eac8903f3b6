"""Every sample of the op table gives in the evaluator what PyTorch gives; see torch_oracle.py."""

import json
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch")

from torch_oracle import KNOWN, differences  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Random numbers, saved statistics and what only a backward pass calls: PyTorch has no function for them.
NO_FORM = {"attention_dropout_mask", "bernoulli", "cross_entropy_grad", "dropout", "dropout_mask", "max_pool2d_grad", "normal",
           "sdpa_backward", "uniform"}


def find_binary():
    named = os.environ.get("FULMEN_TESTS")
    if named:
        return pathlib.Path(named)
    found = sorted(ROOT.glob("build*/fulmen_tests"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    binary = find_binary()
    if binary is None:
        pytest.skip("the C++ tests aren't built: no build*/fulmen_tests, and FULMEN_TESTS isn't set")
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    subprocess.run([binary, "--gtest_filter=OpTable.WritesSamplesForTheTorchOracle"], check=True, capture_output=True,
                   env={**os.environ, "FULMEN_SAMPLE_FILE": str(path)})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluator_agrees_with_torch(samples):
    faults, without = [], set()
    for row in samples:
        name = (row["op"], row["sample"])
        if name in KNOWN:
            continue
        found = differences(row)
        if found is None:
            without.add(row["op"])  # PyTorch has no function for it
        elif found:
            faults.append(f"{row['op']}_{row['sample']}: " + "; ".join(found))
    assert not faults, "\n".join(faults)
    assert without <= NO_FORM, f"no PyTorch form for {sorted(without - NO_FORM)}: add a line to BY_HAND"


def test_a_wrong_result_is_seen(samples):
    row = next(row for row in samples if row["op"] == "tanh" and row["sample"] == "plain")
    assert not differences(row)
    row["outputs"][0]["data"][3] += 1e-6
    assert differences(row)
