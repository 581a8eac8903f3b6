"""The op catalogue as Python functions, for functions compiled by fulmen.jit.

Every op of the catalogue is here under its own name, and under the Python array API standard's name where that differs.
Operands come first, then attributes; `axis=` and `keepdims=` are taken for the catalogue's `dim`, `dims` and `keepdim`.
`help(fulmen.ops.softmax)` shows an op's formula.
"""

import builtins
import operator

from fulmen import _core
from fulmen._arguments import describe
from fulmen._core import TypeError

# The standard's name -> the catalogue's.
_standard = {
    "acos": "acos", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "power": "pow",
    "permute_dims": "permute", "expand_dims": "unsqueeze", "max": "amax", "min": "amin", "less": "lt", "greater": "gt",
    "less_equal": "le", "greater_equal": "ge", "equal": "eq", "not_equal": "ne", "cumulative_sum": "cumsum",
    "cumulative_prod": "cumprod", "absolute": "abs", "bitwise_invert": "bitwise_not", "concat": "cat", "take": "index_select",
    "take_along_axis": "gather", "remainder": "remainder", "clip": "clamp",
}
_hidden = ("fusion",)
_functions = {}
_entries = {}


def _load():
    if not _entries:
        for entry in _core.ops():
            name = entry["name"]
            if name not in _hidden and not name.endswith(("_backward", "_forward")):
                _entries[name] = entry


def _catalogue_name(name):
    _load()
    if name in _entries:
        return name
    other = _standard.get(name)
    return other if other in _entries else None


def _make(name, entry):
    from fulmen._arrays import Array, emit

    op = entry["name"]
    operands, attributes = entry["operands"], entry["attributes"]
    seeded = any(n == "seed" for n, _ in operands)
    operands = [(n, need) for n, need in operands if n != "seed"]
    names = [n for n, *_ in attributes if not (seeded and n == "offset")]
    kinds = {n: kind for n, kind, *_ in attributes}

    def function(*args, **kwargs):
        args = list(args)
        given = []
        for operand, need in operands:
            if need == "variadic":
                items = args.pop(0) if args else kwargs.pop(operand)
                if isinstance(items, Array):
                    items, args = [items, *args], []
                given += list(items)
            elif operand in kwargs:
                given.append(kwargs.pop(operand))
            elif args and (need == "required" or _is_operand(args[0])):
                given.append(args.pop(0))
            elif need == "optional":
                given.append(None)
            else:
                raise TypeError(f"{name}: operand '{operand}' is missing")
        values = dict(zip(names, args))
        if len(args) > len(names):
            raise TypeError(f"{name}: {len(args)} attributes given by position, it has {len(names)}")
        for key, value in kwargs.items():
            key = _attribute_name(key, kinds)
            if key is None:
                raise TypeError(f"{name}: there is no argument '{key}'; arguments: {', '.join([n for n, _ in operands] + names)}")
            values[key] = value
        attrs = {k: _attribute(name, k, v, kinds[k]) for k, v in values.items()}
        if seeded:
            return _emit_seeded(op, operands, entry, given, attrs)
        return emit(op, given, **attrs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name}({', '.join([n for n, _ in operands] + names)})\n\n{entry['doc']}"
    return function


def _is_operand(value):
    from fulmen._arrays import Array

    return value is None or isinstance(value, (Array, bool, int, float)) or _core.is_tensor(value)


def _attribute_name(key, kinds):
    if key in kinds:
        return key
    for other in {"axis": ("dim", "dims"), "axes": ("dims",), "keepdims": ("keepdim",)}.get(key, ()):
        if other in kinds:
            return other
    return None


def _attribute(op, name, value, kind):
    from fulmen._arrays import Array, Number

    if isinstance(value, Array) and not isinstance(value, Number):
        raise TypeError(f"{op}: {name} is an array; it is part of the program, so a plain value is needed")
    try:
        if kind == "dims" and value is not None:
            if hasattr(value, "__index__") and not getattr(value, "shape", None):
                return (operator.index(value),)
            if isinstance(value, (str, bytes, dict)):
                raise TypeError
            return tuple(map(operator.index, value))
        if kind == "integer" and value is not None and not isinstance(value, bool):
            return operator.index(value)
    except builtins.TypeError:
        needed = "an integer or a tuple of them" if kind == "dims" else "an integer"
        raise TypeError(f"{op}: {name} is {describe(value)}; {needed} is needed") from None
    if kind == "number" and hasattr(value, "_fixed"):
        return float(value)
    if kind == "dtype" and value is not None:
        return str(value).rpartition(".")[2].replace("<class '", "").strip("'>")
    return value


def _emit_seeded(op, operands, entry, given, attrs):
    """A random op: its seed is the recording's hidden input, and it takes its share of the counter."""
    from fulmen._arrays import Array, _current, emit

    recording = next((g.recording for g in given if isinstance(g, Array)), None) or (_current[-1] if _current else None)
    if recording is None:
        raise TypeError(f"fulmen.ops: {op} was called outside a traced function; wrap the function with fulmen.jit")
    shape = given[0].shape if given else attrs.get("shape", ())
    count = 1
    for n in shape:
        count *= n
    attrs["offset"] = recording.recorder.next_offset(count)
    at = [n for n, _ in entry["operands"]].index("seed")
    given.insert(at, Array(recording, recording.recorder.seed()))
    return emit(op, given, **attrs)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    found = _functions.get(name)
    if found is None:
        op = _catalogue_name(name)
        if op is None:
            raise AttributeError(f"fulmen.ops has no '{name}'")
        found = _functions[name] = _make(name, _entries[op])
    return found


def __dir__():
    _load()
    return sorted({*_entries, *(name for name, op in _standard.items() if op in _entries)})
