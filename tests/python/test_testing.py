"""fulmen.testing: the conformance suite finds no fault in executors that keep their promises, and each kind of fault in
executors that break one."""

import importlib.util
import itertools
import json
import pathlib

import pytest

import fulmen
from fulmen.testing import check_executor

torch = pytest.importorskip("torch")
root = pathlib.Path(__file__).resolve().parents[2]


def made(function, checker=None, op="relu", **options):
    executor = fulmen.executor("tried")
    executor.implements(op, checker, **options)(function)
    return executor


def broken(report):
    return {fault.promise for fault in report.faults}


def relu(x):
    return x.clamp(min=0)


def test_an_executor_that_keeps_its_promises():
    report = check_executor(made(relu), ops=["relu", "tanh"])
    assert report.ok and report.claimed >= 10 and set(report.claimed_by_op) == {"relu"}, str(report)
    assert report.refusals == {"not_implemented": report.calls - report.claimed}
    report.require_no_faults()
    assert json.loads(report.to_json())["ok"] is True and "keeps its promises" in str(report)


def test_wrong_numbers():
    report = check_executor(made(lambda x: x.clamp(min=0) * 1.001), ops=["relu"])
    assert "numbers" in broken(report) and not report.ok
    fault = report.faults[0]
    assert fault.call.startswith("relu/") and "element" in fault.text and "trace" in fault.program
    assert str(fulmen._core.parse_trace(fault.program)) == fault.program
    with pytest.raises(AssertionError, match="numbers"):
        report.require_no_faults()


def test_wrong_in_one_layout_only():
    def by_memory_order(x):
        if x.is_contiguous() or x.numel() < 2:
            return x.clamp(min=0)
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).clamp(min=0)  # ignores the strides

    report = check_executor(made(by_memory_order), ops=["relu"])
    wrong = [f.call for f in report.faults if f.promise == "numbers"]
    assert any("row gaps" in call for call in wrong) and not any(call.startswith("relu/plain (bf16") for call in wrong)
    only = check_executor(made(by_memory_order, lambda call: call.x.strides == _contiguous(call.x.shape) or "relu: mine takes contiguous tensors"), ops=["relu"])
    assert only.ok, str(only)


def _contiguous(shape):
    return torch.empty(shape).stride()


def test_an_operand_that_is_written():
    assert "inputs" in broken(check_executor(made(lambda x: x.clamp_(min=0).clone()), ops=["relu"]))


def test_claiming_what_it_cannot_run():
    def no_bf16(x):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for bf16")
        return x.clamp(min=0)

    report = check_executor(made(no_bf16), ops=["relu"])
    assert broken(report) == {"run"} and all("bf16" in f.call for f in report.faults) and "no kernel for bf16" in report.faults[0].text


def test_a_result_of_another_shape():
    assert "run" in broken(check_executor(made(lambda x: x.clamp(min=0).reshape(-1)), ops=["relu"], layouts=False))


def test_other_bits_the_second_time():
    calls = itertools.count()  # the two runs of a call are on threads of their own: each takes one number

    def drifting(x):
        odd = next(calls) % 2
        return x.clamp(min=0) * (1 + odd * torch.finfo(x.dtype).eps) if x.is_floating_point() else x.clamp(min=0)

    report = check_executor(made(drifting), ops=["relu"], dtypes=[])
    assert "repeat" in broken(report)
    assert check_executor(made(drifting, deterministic=False), ops=["relu"], dtypes=[]).ok


@pytest.mark.parametrize("reason", ["", "no", "two\nlines"])
def test_a_refusal_without_a_sentence(reason):
    report = check_executor(made(relu, lambda call: call.x.dtype == "f32" or reason), ops=["relu"])
    assert broken(report) == {"refusal"}


def test_a_checker_that_raises():
    report = check_executor(made(relu, lambda call: call.x.shape[2] > 1), ops=["relu"])
    assert "claim" in broken(report) and "IndexError" in report.faults[0].text


def test_a_checker_that_changes_its_mind():
    answers = iter([True, False] * 10000)
    assert "claim" in broken(check_executor(made(relu, lambda call: next(answers) or "relu: not this time"), ops=["relu"]))


def test_claiming_nothing_is_no_pass():
    report = check_executor(made(relu), ops=["tanh"])
    assert broken(report) == {"result"} and not report.ok


def example():
    spec = importlib.util.spec_from_file_location("python_executor", root / "examples" / "python_executor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_with_a_backward():
    report = check_executor(example().mine, ops=["sdpa", "sdpa_forward"])
    assert report.ok and report.gradients > 3, str(report)


def test_attention_with_a_wrong_backward():
    module = example()
    wrong = fulmen.executor("wrong")

    def backward(*operands, **options):
        query, key, value, *rest = module.backward(*operands, **options)
        return query, key, value * 1.01, *rest

    wrong.implements("sdpa", module.checker, backward=backward)(module.attend)
    assert broken(check_executor(wrong, ops=["sdpa", "sdpa_forward"])) == {"gradient"}


def test_attention_without_a_backward_is_not_asked_for_one():
    module = example()
    forward_only = fulmen.executor("forward_only")
    forward_only.implements("sdpa", module.checker)(module.attend)
    report = check_executor(forward_only, ops=["sdpa", "sdpa_forward", "sdpa_backward"])
    assert report.ok and report.refusals["backward_unsupported"] > 0, str(report)


@pytest.mark.parametrize("name", ["cpu", "onednn", "reference"])
def test_the_default_list_keeps_its_promises(name):
    ops = {"cpu": ["matmul", "softmax", "sdpa", "sdpa_forward", "gelu"], "onednn": ["convolution"], "reference": ["add", "sum", "index_select"]}
    chosen = next(e for e in fulmen.default_executors() if e.name == name)
    if not chosen.available:
        pytest.skip(chosen.unavailable_reason)
    report = check_executor(name, ops=ops[name])
    assert report.ok, str(report)


def test_what_cannot_be_asked():
    with pytest.raises(fulmen.UnsupportedError, match="no executor 'abacus'"):
        check_executor("abacus")
    with pytest.raises(fulmen.UnsupportedError, match="'no_op' is not in the catalogue"):
        check_executor("cpu", ops=["no_op"])
    with pytest.raises(fulmen.TypeError, match="'i32' is no float dtype"):
        check_executor("cpu", ops=["relu"], dtypes=["i32"])
    with pytest.raises(fulmen.TypeError, match="ops is 'relu'; a list of names is needed"):
        check_executor("cpu", ops="relu")
