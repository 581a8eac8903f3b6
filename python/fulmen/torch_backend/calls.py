"""Which Fulmen op a torch call means.

`find(node)` gives the handler of an FX node: a function of (recording, *args, **kwargs) that returns traced tensors. Calls
whose arguments are an op's operands and then its attributes are bound from the catalogue itself (its `torch` names); the
others have an adapter, in one of the calls_*.py files, made with `@call(names)`. In-place forms are derived from the
plain ones.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import torch

from .. import _core
from .recording import Recording, dtype_name
from .values import Traced, Unmapped

_adapters: dict[str, object] = {}

_INPLACE_OPERATORS = {
    operator.iadd: "operator.add",
    operator.isub: "operator.sub",
    operator.imul: "operator.mul",
    operator.itruediv: "operator.truediv",
    operator.ifloordiv: "operator.floordiv",
    operator.imod: "operator.mod",
    operator.ipow: "operator.pow",
    operator.iand: "operator.and_",
    operator.ior: "operator.or_",
    operator.ixor: "operator.xor",
    operator.imatmul: "operator.matmul",
}

# Arguments that say nothing about the elements, and the values with which they may be given.
_IGNORED = {
    "out": (None,),
    "generator": (None,),
    "layout": (None, torch.strided),
    "pin_memory": (None, False),
    "requires_grad": (None, False),
    "memory_format": (None, torch.contiguous_format, torch.preserve_format, torch.channels_last),
    "_stacklevel": (3, 5, None),
    "inplace": (False,),
    "non_blocking": (False, True),
    "copy": (False, True),
    "sparse": (False,),
    "return_indices": (False,),
    "divisor_override": (None,),
}

# Tensor methods whose arguments are not those of the ATen call of their name.
_NOT_ATENS = ("size", "type", "to", "index", "new", "normal", "uniform")

_FIRST_OPERAND = ("input", "self")
_SECOND_OPERAND = ("other", "exponent", "mat2", "vec2", "tensor2")


def call(*names: str):
    """Makes the decorated function the adapter of these torch callables ("torch.cat", "Tensor.view", "operator.add")."""

    def register(handler):
        for name in names:
            _adapters[name] = handler
        return handler

    return register


def _resolve(name: str):
    """A call_function target, or the name of a call_method target; None if this PyTorch has no such callable."""
    root, _, rest = name.partition(".")
    if root == "Tensor":
        return rest
    found = {"torch": torch, "operator": operator}.get(root)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found


def ignore(kwargs: dict) -> dict:
    """kwargs without those that say nothing of the elements; an odd value of one of them is an Unmapped call."""
    kept = {}
    for name, value in kwargs.items():
        allowed = _IGNORED.get(name)
        if allowed is None:
            kept[name] = value
        elif value not in allowed:
            raise Unmapped(f"{name}={value}")
    return kept


class Generic:
    """Binds a call by an op's signature: operands, then attributes."""

    def __init__(self, op: str, operands: list, attributes: list):
        self.op = op
        self.variadic = bool(operands) and operands[-1][1] == "variadic"
        self.operands = [name for name, _ in operands]
        self.attributes = {name: kind for name, kind, _ in attributes}
        self.order = self.operands + list(self.attributes)

    def _slot(self, name: str) -> str:
        if name in self.order:
            return name
        if name in _FIRST_OPERAND and self.operands:
            return self.operands[0]
        if name in _SECOND_OPERAND and len(self.operands) > 1:
            return self.operands[1]
        if name in ("dim", "axis"):
            for attribute in ("dims", "dim"):
                if attribute in self.attributes:
                    return attribute
        raise Unmapped(f"argument {name} is not one that op {self.op} takes")

    def __call__(self, recording: Recording, *args, **kwargs):
        if len(args) > len(self.order):
            raise Unmapped(f"{len(args)} positional arguments, op {self.op} takes {len(self.order)}")
        bound = dict(zip(self.order, args))
        for name, value in ignore(kwargs).items():
            bound[self._slot(name)] = value
        operands = []
        for name in self.operands:
            value = bound.get(name)
            if self.variadic and name == self.operands[-1]:
                operands.extend(value if isinstance(value, (list, tuple)) else [value])
            else:
                operands.append(value)
        attributes = {}
        for name, kind in self.attributes.items():
            value = bound.get(name)
            if value is not None:
                attributes[name] = _attribute(name, kind, value)
        results = recording.emit_all(self.op, *operands, **attributes)
        return results[0] if len(results) == 1 else results


def _attribute(name: str, kind: str, value):
    if kind == "dtype" and isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Traced):
        raise Unmapped(f"argument {name} is a tensor, a number is needed")
    if kind == "dims" and isinstance(value, (list, tuple)):
        return tuple(int(v) for v in value)
    if isinstance(value, (bool, int, float, str, tuple, list)):
        return value
    raise Unmapped(f"argument {name} has type {type(value).__name__}")


class InPlace:
    """x.f_(...): computes f and writes the result to x."""

    def __init__(self, plain):
        self.plain = plain

    def __call__(self, recording: Recording, x, *args, **kwargs):
        if not isinstance(x, Traced):
            raise Unmapped("an in-place call on what is no tensor of the graph")
        return recording.write(x, self.plain(recording, x, *args, **kwargs))


@lru_cache(maxsize=1)
def _table() -> dict:
    from . import calls_aten, calls_creation, calls_indexing, calls_math, calls_network, calls_views  # noqa: F401  they register

    table: dict = {}
    for op, operands, attributes, names in _core.op_signatures():
        handler = Generic(op, operands, attributes)
        for name in names:
            if not name.endswith("_") or name.endswith("__") or name in ("operator.and_", "operator.or_"):
                table.setdefault(_resolve(name), handler)
    for name, handler in _adapters.items():
        table[_resolve(name)] = handler
    table.pop(None, None)
    for target, plain in _INPLACE_OPERATORS.items():
        handler = table.get(_resolve(plain))
        if handler is not None:
            table.setdefault(target, InPlace(handler))
    return table


def describe(target) -> str:
    """The call as a reader knows it: torch.topk, Tensor.sort."""
    if isinstance(target, str):
        return f"Tensor.{target}"
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", str(target))
    return f"{module.lstrip('_')}.{name}" if module else name


def find(op: str, target):
    """The handler of a call_function or call_method node, or None."""
    table = _table()
    handler = table.get(target)
    if handler is not None:
        return handler
    name = target if op == "call_method" else getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        plain = name[:-1]
        handler = table.get(plain) if op == "call_method" else table.get(getattr(torch, plain, None))
        if handler is not None:
            handler = table[target] = InPlace(handler)
            return handler
    if op == "call_function" and getattr(target, "__objclass__", None) is torch._C.TensorBase:
        return table.get(name)
    if isinstance(target, torch._ops.OpOverload):
        return _find_aten(table, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = (find(op, getattr(target, overload)) for overload in target.overloads())
        return next((handler for handler in overloads if handler is not None), None)
    return None


def _find_aten(table: dict, target):
    """The handler of an ATen call: that of torch.NAME or Tensor.NAME, whose arguments are ATen's."""
    space, _, name = target._schema.name.partition("::")
    if space not in ("aten", "prims") or name.startswith("upsample"):
        return None
    for root in (torch, torch._C._nn, getattr(torch, "special", None)):
        handler = table.get(getattr(root, name, None))
        if handler is not None:
            return handler
    handler = find("call_method", name)
    return handler if name not in _NOT_ATENS else None
