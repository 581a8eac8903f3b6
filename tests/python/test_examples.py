"""The examples over Hugging Face models run: Llama with eager's losses, a ViT that learns digits."""

import pathlib
import runpy
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(name, *arguments, monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_llama(monkeypatch, capsys):
    _, *rows = run("llama.py", "--steps", "3", monkeypatch=monkeypatch, capsys=capsys)
    losses = [(float(ours), float(eager)) for _, ours, eager in map(str.split, rows)]
    assert len(losses) == 3 and losses[-1][0] < losses[0][0]
    assert all(ours == pytest.approx(eager, rel=1e-5) for ours, eager in losses)


def test_vit(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    rows = [line.split() for line in run("vit.py", "--epochs", "2", monkeypatch=monkeypatch, capsys=capsys)]
    assert [row[:2] for row in rows] == [["epoch", "0"], ["epoch", "1"]]
    losses, accuracy = [float(row[3]) for row in rows], float(rows[-1][5])
    assert losses[1] < losses[0] - 0.05 and accuracy > 0.2  # guessing gives 0.1
