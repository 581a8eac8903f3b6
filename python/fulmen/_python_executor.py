"""Executors written in Python: a checker and a function for each op, behind the same interface as the C++ ones.

    mine = fulmen.executor("mine")

    @mine.implements("sdpa", checker=lambda call: call.head_dim <= 64 or "head_dim is above 64")
    def attend(query, key, value, mask=None, *, is_causal=False, scale=None, **options):
        ...
        return out

The function gets tensors (PyTorch's if it is loaded, else NumPy's) for the op's operands, in order, and its attributes
by name, and returns the result, or a tuple of results. An error that it raises revokes the claim: the next executor
runs the call, with one warning.
"""

from fulmen import _core
from fulmen._core import TypeError, UnsupportedError


class Call:
    """One call as a checker sees it: `op`, `training`, `deterministic`, `attrs` (a dict), `target`, and each operand's
    TensorType (None if absent) by its name: `call.query.shape`, `call.x.dtype`."""

    def __init__(self, op, inputs, outputs, attrs, training, deterministic, target):
        self.op, self.inputs, self.outputs, self.attrs = op, inputs, outputs, attrs
        self.training, self.deterministic, self.target = training, deterministic, target

    def __getattr__(self, name):
        names = _operand_names(self.op)
        if name in names:
            at = names.index(name)
            return self.inputs[at] if at < len(self.inputs) else None
        attrs = self.__dict__.get("attrs", {})
        if name in attrs:
            return attrs[name]
        raise AttributeError(f"a call of {self.op} has no '{name}'; operands: {', '.join(names)}; attributes: {', '.join(attrs)}")


_names = {}


def _operand_names(op):
    if not _names:
        for entry in _core.ops():
            _names[entry["name"]] = [name for name, _ in entry["operands"]]
    return _names.get(op, [])


class _Rule:
    def __init__(self, function, checker, backward, deterministic):
        self.function, self.checker, self.backward, self.deterministic = function, checker, backward, deterministic


class PythonExecutor:
    """See the module. `handle` is what executor lists hold."""

    def __init__(self, name, doc=""):
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"executor: the name is {name!r}; a word of letters, digits and '_' is needed")
        if not isinstance(doc, str):
            raise TypeError(f"executor {name}: doc is a {type(doc).__name__}; a text is needed")
        self.name = name
        self._rules = {}
        self.handle = _core.make_python_executor(name, doc, self._claim, self._run)

    def implements(self, op, checker=None, *, backward=None, deterministic=True):
        """Decorates the function that runs `op`.

        checker(call) returns True (or None) to claim it; False, or a sentence that says why not, to refuse. `backward`,
        for sdpa only: a function of the operands, then out, lse and out_grad, that returns the gradients of query, key,
        value, mask, sink and alibi_slopes (None where none is wanted); without it training calls are refused, and the
        next executor runs them. The function of sdpa may return (out, lse); with `backward` it must.
        """
        if not isinstance(op, str) or not _operand_names(op):
            raise UnsupportedError(f"executor {self.name}: op {op!r} is not in the catalogue")
        if backward is not None and op != "sdpa":
            raise UnsupportedError(f"executor {self.name}: {op} has a backward; only sdpa's is the executor's own, other ops have a gradient rule")
        for argument, given in (("checker", checker), ("backward", backward)):
            if given is not None and not callable(given):
                raise TypeError(f"executor {self.name}: {argument} is a {type(given).__name__}; a function is needed")

        def decorate(function):
            if not callable(function):
                raise TypeError(f"executor {self.name}: {op} is run by a {type(function).__name__}; a function is needed")
            self._rules[op] = _Rule(function, checker, backward, deterministic)
            return function

        return decorate

    def _claim(self, op, inputs, outputs, attrs, training, deterministic, target):
        rule = self._rules.get("sdpa" if op.startswith("sdpa_") else op)
        if rule is None:
            return "not_implemented", f"{op}: {self.name} doesn't run it"
        if (training or op == "sdpa_backward") and rule.backward is None:
            return "backward_unsupported", f"{op}: {self.name} has no backward for it"
        if deterministic and not rule.deterministic:
            return "not_deterministic", f"{op}: {self.name} is not deterministic"
        if rule.checker is not None:
            answer = rule.checker(Call(op, inputs, outputs, attrs, training, deterministic, target))
            if isinstance(answer, str):
                family = "sdpa" if op.startswith("sdpa") else op
                return "unsupported_argument", answer if answer.startswith((f"{family}: ", f"{op}: ")) else f"{family}: {answer}"
            if answer is False:
                return "unsupported_argument", f"{op}: {self.name}'s checker refuses it"
        plan = {"forward": getattr(rule.function, "__name__", "function"), "deterministic": rule.deterministic}
        if training:
            plan["backward"] = getattr(rule.backward, "__name__", "function")
        return plan

    def _run(self, op, inputs, outputs, attrs):
        rule = self._rules["sdpa" if op.startswith("sdpa_") else op]
        results = (rule.backward if op == "sdpa_backward" else rule.function)(*inputs, **attrs)
        if not isinstance(results, (tuple, list)):
            results = (results,)
        for index, (into, result) in enumerate(zip(outputs, [*results, *[None] * len(outputs)])):
            if into is None:
                continue
            if result is None:
                if op.startswith("sdpa") and op != "sdpa_backward" and index == 1:
                    _fill_lse(self.name, rule)
                    continue
                raise TypeError(f"{self.name}: {op} gave no result {index}")
            if tuple(result.shape) != tuple(into.shape):
                raise TypeError(f"{self.name}: {op} gave shape {list(result.shape)} for result {index}; {list(into.shape)} is needed")
            into[...] = result if type(into).__module__ == "numpy" else _as_like(into, result)


def _as_like(into, result):
    """A result as a tensor of `into`'s framework: functions may answer a PyTorch tensor with a NumPy array."""
    if hasattr(into, "new_tensor") and not hasattr(result, "new_tensor"):
        import torch

        return torch.as_tensor(result)
    return result


def _fill_lse(name, rule):
    if rule.backward is not None:
        raise TypeError(f"{name}: sdpa has a backward, so its function must return (out, lse)")
