"""fulmen.explain, fulmen.jit and the installed entry points, on small PyTorch models."""

import importlib.metadata
import json
import re

import pytest
import torch

import fulmen
from fulmen import cli


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()


def test_an_explanation_of_nothing_says_so():
    explanation = fulmen.explain(lambda x: x, torch.randn(3))
    assert not explanation.traces and "no graph" in str(explanation)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def test_explanation_of_a_module():
    x = torch.randn(5, 8)
    explanation = fulmen.explain(model(), x)
    assert explanation.coverage == 1.0 and not explanation.fallbacks
    data = json.loads(explanation.to_json())
    assert {"coverage", "claims", "fallbacks", "traces", "saved_bytes", "arena_bytes"} <= set(data)
    ops = {(c["op"], c["direction"]) for c in data["claims"]}
    assert ("linear", "forward") in ops and any(direction == "backward" for _, direction in ops)
    assert all(c["executor"] for c in data["claims"] if c["op"] == "linear" and c["direction"] == "forward")
    assert data["saved_bytes"] > 0
    text = str(explanation)
    assert "coverage 1.000" in text and "linear" in text


def test_traces_parse_back():
    explanation = fulmen.explain(model(), torch.randn(5, 8))
    text = explanation.traces["acquire"]
    assert str(fulmen._core.parse_trace(text)) == text


def test_inference_saves_nothing():
    with torch.no_grad():
        explanation = fulmen.explain(model(), torch.randn(5, 8))
    assert explanation.saved_bytes == 0 and all(c.direction == "forward" for c in explanation.claims)


def test_what_stays_with_torch_has_its_reason():
    def f(x):
        return torch.special.bessel_j0(x) + x

    explanation = fulmen.explain(f, torch.randn(4))
    assert explanation.coverage < 1.0
    node, call, reason = explanation.fallbacks[0]
    assert "bessel_j0" in call and reason
    assert "bessel_j0" in str(explanation)


def test_html_is_one_file_with_nothing_from_outside(tmp_path):
    path = tmp_path / "report.html"
    fulmen.explain(model(), torch.randn(5, 8)).save_html(path)
    text = path.read_text()
    assert "<details>" in text and "linear" in text
    assert not re.search(r"(src|href)\s*=", text)


def test_html_that_cannot_be_written_leaves_the_old_file(tmp_path, capsys):
    made = tmp_path / "made.py"
    made.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(3, 2), (torch.ones(4, 3),)\n")
    report = tmp_path / "report.html"
    report.write_text("old")
    (tmp_path / "report.html.part").mkdir()  # nothing can be written there, as on a full disk
    assert cli.main(["explain", f"{made}:make", "--html", str(report)]) == 1
    assert report.read_text() == "old" and "report.html" in capsys.readouterr().err


def test_explaining_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fulmen.explain(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), torch.ones(2, 4))
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


def test_jit_of_a_module_and_of_a_function():
    net, x = model(), torch.randn(5, 8)
    assert torch.allclose(fulmen.jit(net)(x), net(x), atol=1e-6)

    @fulmen.jit
    def f(x, y):
        return (x * y).sum()

    y = torch.randn(5, 8, requires_grad=True)
    f(x, y).backward()
    assert torch.allclose(y.grad, x)


def test_jit_with_autocast():
    out = fulmen.jit(model(), autocast="bf16")(torch.randn(5, 8))
    assert out.dtype == torch.bfloat16
    with pytest.raises(fulmen.TypeError, match="autocast"):
        fulmen.jit(model(), autocast="f8")


def test_last_traces_of_a_module():
    compiled = fulmen.jit(model())
    assert fulmen.last_traces(compiled) == {}
    compiled(torch.randn(5, 8))
    assert "linear" in fulmen.last_traces(compiled)["acquire"]


def test_last_traces_are_of_this_function_and_its_executors():
    by_reference = torch.compile(lambda x: x.sin() + 1, backend="fulmen", options={"executors": ["reference"]})
    of_module = torch.compile(model(), backend="fulmen")
    later = torch.compile(lambda x: x.cos() + 1, backend="fulmen")
    for call in (by_reference, of_module, later):
        assert fulmen.last_traces(call) == {}
        call(torch.randn(5, 8))
    program = fulmen.last_traces(by_reference)["program: forward"]
    assert "sin" in program and "@reference" in program and "@cpu" not in program
    assert "linear" in fulmen.last_traces(of_module)["acquire"]
    assert "cos" in fulmen.last_traces(later)["acquire"] and fulmen.last_traces() == fulmen.last_traces(later)
    by_jit = fulmen.jit(lambda x: x.exp(), executors=["reference"])
    by_jit(torch.randn(3))
    assert "@reference" in fulmen.last_traces(by_jit)["program: forward"]
    for wrong in (model(), 3, len):
        with pytest.raises(fulmen.TypeError, match="that isn't compiled"):
            fulmen.last_traces(wrong)


def test_every_stage_has_a_name_of_its_own():
    explanation = fulmen.explain(model(), torch.randn(5, 8))
    names = list(explanation.traces)
    for pass_name in ("decompose", "claim_nodes", "fuse"):
        assert f"{pass_name} (forward)" in names and f"{pass_name} (backward)" in names
    assert "remove_dead_nodes (forward, 2)" in names and "decompose (joint)" in names
    assert names[0] == "acquire" and names.index("split: forward") < names.index("fuse (forward)") < names.index("fuse (backward)")
    assert names == list(explanation.stage_ms)
    forward, backward = explanation.traces["fuse (forward)"], explanation.traces["fuse (backward)"]
    assert forward != backward and "linear" in forward


def test_explain_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "made.py"
    path.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(3, 2), (torch.ones(4, 3),)\n")
    assert cli.main(["explain", f"{path}:make", "--json", "--html", str(tmp_path / "report.html")]) == 0
    assert json.loads(capsys.readouterr().out)["coverage"] == 1.0
    assert (tmp_path / "report.html").exists()
    assert cli.main(["explain", f"{path}:make", "--stage", "acquire"]) == 0
    assert "trace program" in capsys.readouterr().out


def test_entry_points_are_installed():
    points = importlib.metadata.entry_points()
    assert [p.value for p in points.select(group="torch_dynamo_backends", name="fulmen")] == ["fulmen.torch_backend:fulmen_backend"]
    assert [p.value for p in points.select(group="console_scripts", name="fulmen")] == ["fulmen.cli:main"]
    assert "fulmen" in torch._dynamo.list_backends()


def test_backend_options_take_names_of_executors():
    def double(x):
        return torch.tanh(x) * 2

    x = torch.randn(5)
    compiled = torch.compile(double, backend="fulmen", options={"executors": ["reference"]})
    torch.testing.assert_close(compiled(x), double(x))
    with pytest.raises(Exception, match="there is no executor 'nobody'"):
        torch.compile(lambda x: torch.tanh(x) + 3, backend="fulmen", options={"executors": ["nobody"]})(x)
