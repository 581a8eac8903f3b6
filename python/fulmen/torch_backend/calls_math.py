"""Adapters of arithmetic, comparisons and reductions whose arguments differ from the catalogue's."""

from __future__ import annotations

import math
import operator

import torch

from .calls import call, ignore
from .recording import Recording, dtype_name, normal_dim
from .values import Traced, Unmapped


def _is_number(value) -> bool:
    return isinstance(value, (bool, int, float))


def _scaled(r: Recording, value, alpha):
    if alpha == 1:
        return value
    return value * alpha if _is_number(value) else r.emit("mul", value, alpha)


@call("torch.add", "Tensor.add", "operator.add", "Tensor.__add__", "Tensor.__radd__")
def _add(r: Recording, input, other, *, alpha=1, **kwargs):
    ignore(kwargs)
    if not isinstance(input, Traced) and not isinstance(other, Traced):
        return input + other
    return r.emit("add", input, _scaled(r, other, alpha))


@call("torch.sub", "Tensor.sub", "operator.sub", "Tensor.__sub__", "torch.subtract", "Tensor.subtract")
def _sub(r: Recording, input, other, *, alpha=1, **kwargs):
    ignore(kwargs)
    if not isinstance(input, Traced) and not isinstance(other, Traced):
        return input - other
    return r.emit("sub", input, _scaled(r, other, alpha))


@call("torch.rsub", "Tensor.__rsub__")
def _rsub(r: Recording, input, other, *, alpha=1):
    return r.emit("sub", other, _scaled(r, input, alpha))


@call("torch.div", "Tensor.div", "torch.divide", "Tensor.divide", "torch.true_divide", "Tensor.true_divide", "operator.truediv")
def _div(r: Recording, input, other, *, rounding_mode=None, **kwargs):
    ignore(kwargs)
    return r.emit("div", input, other, **({} if rounding_mode is None else {"rounding": rounding_mode}))


@call("Tensor.__rtruediv__", "Tensor.__rdiv__")
def _rdiv(r: Recording, input, other):
    return r.emit("div", other, input)


@call("torch.floor_divide", "Tensor.floor_divide", "operator.floordiv", "Tensor.__floordiv__")
def _floor_divide(r: Recording, input, other):
    return r.emit("div", input, other, rounding="floor")


@call("torch.pow", "Tensor.pow", "operator.pow", "Tensor.__pow__")
def _pow(r: Recording, input, exponent, **kwargs):
    ignore(kwargs)
    if isinstance(input, Traced) and input.dtype != "bool" and exponent == 2 and isinstance(exponent, int):
        return r.emit("square", input)
    if isinstance(input, Traced) and input.is_float and _is_number(exponent):
        if exponent == 2:
            return r.emit("square", input)
        if exponent == 3:
            return r.emit("mul", r.emit("square", input), input)
        if exponent == 1:
            return r.copy(input)
        if exponent == 0.5:
            return r.emit("sqrt", input)
        if exponent == -0.5:
            return r.emit("rsqrt", input)
        if exponent == -1:
            return r.emit("reciprocal", input)
    return r.emit("pow", input, exponent)


@call("torch.float_power", "Tensor.float_power")
def _float_power(r: Recording, input, exponent):
    """The power in f64, whatever the dtypes."""
    return _pow(r, *(r.convert(x, "f64") if isinstance(x, Traced) else x for x in (input, exponent)))


@call("torch.xlogy", "Tensor.xlogy", "torch.special.xlogy", "torch.ops.aten.xlogy.Tensor")
def _xlogy(r: Recording, input, other):
    """input log(other), and 0 where input is 0 (a NaN beside it stays): there the logarithm's gradient may be infinite."""
    is_zero = r.emit("eq", input, 0)
    without_log = r.emit("logical_and", is_zero, r.emit("le", other, 0)) if isinstance(other, Traced) or other <= 0 else None
    if without_log is not None:
        other = r.emit("where", without_log, 1.0, other)
    return r.emit("mul", input, r.emit("log", other) if isinstance(other, Traced) else math.log(other))


@call("torch.sinc", "Tensor.sinc", "torch.special.sinc", "torch.ops.aten.sinc.default")
def _sinc(r: Recording, input):
    """sin(pi x) / (pi x), 1 with gradient 0 at 0."""
    is_zero = r.emit("eq", input, 0)
    angle = r.emit("mul", r.emit("where", is_zero, 1.0, input), math.pi)
    return r.emit("where", is_zero, 1.0, r.emit("div", r.emit("sin", angle), angle))


@call("torch.logit", "Tensor.logit", "torch.special.logit", "torch.ops.aten.logit.default")
def _logit(r: Recording, input, eps=None):
    if eps is not None:
        above = r.emit("where", r.emit("gt", input, 1 - eps), 1 - eps, input)
        input = r.emit("where", r.emit("lt", input, eps), eps, above)
    return r.emit("sub", r.emit("log", input), r.emit("log1p", r.emit("neg", input)))


@call("Tensor.__rpow__")
def _rpow(r: Recording, input, other):
    return r.emit("pow", other, input)


@call("torch.addcmul", "Tensor.addcmul")
def _addcmul(r: Recording, input, tensor1, tensor2, *, value=1):
    return r.emit("add", input, _scaled(r, r.emit("mul", tensor1, tensor2), value))


@call("torch.addcdiv", "Tensor.addcdiv")
def _addcdiv(r: Recording, input, tensor1, tensor2, *, value=1):
    return r.emit("add", input, _scaled(r, r.emit("div", tensor1, tensor2), value))


@call("torch.clamp", "Tensor.clamp", "torch.clip", "Tensor.clip")
def _clamp(r: Recording, input, min=None, max=None, **kwargs):
    ignore(kwargs)
    low, high = (None if b is None else b for b in (min, max))
    if not isinstance(low, Traced) and not isinstance(high, Traced):
        if input.is_float or all(b is None or not isinstance(b, float) for b in (low, high)):
            limits = {name: bound for name, bound in (("min", low), ("max", high)) if bound is not None}
            return r.emit("clamp", input, **limits)
    if high is None:
        return r.emit("maximum", input, low)
    if low is None:
        return r.emit("minimum", input, high)
    between = r.emit("minimum", r.emit("maximum", input, low), high)
    return r.emit("where", r.emit("lt", low, high), between, _bounded(r, _bounded(r, input, low, "lt"), high, "gt"))


def _bounded(r: Recording, input, bound, outside: str):
    """`bound` where input is outside of it or the bound is NaN. At equality the gradient goes to input alone, not to both: that
    is PyTorch's rule for two bounds that meet."""
    chosen = r.emit(outside, input, bound)
    if isinstance(bound, Traced) and bound.is_float:
        chosen = r.emit("logical_or", chosen, r.emit("isnan", bound))
    return r.emit("where", chosen, bound, input)


@call("torch.clamp_min", "Tensor.clamp_min")
def _clamp_min(r: Recording, input, min):
    return _clamp(r, input, min, None)


@call("torch.clamp_max", "Tensor.clamp_max")
def _clamp_max(r: Recording, input, max):
    return _clamp(r, input, None, max)


@call("torch.where", "Tensor.where")
def _where(r: Recording, *args, **kwargs):
    ignore(kwargs)
    if len(args) != 3:
        raise Unmapped("where with a condition alone gives a shape that depends on data")
    return r.emit("where", *args)


@call("Tensor.masked_fill", "torch.masked_fill")
def _masked_fill(r: Recording, input, mask, value):
    if isinstance(value, Traced) and value.dtype != input.dtype:
        value = r.convert(value, input.dtype)
    if _is_number(value) and not input.is_float:
        value = int(value) if input.dtype != "bool" else bool(value)
    return r.convert(r.emit("where", mask, value, input), input.dtype)


@call("torch.logical_and", "Tensor.logical_and")
def _logical_and(r: Recording, input, other):
    return r.emit("logical_and", input, other)


def _dims(dim) -> dict:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return {}
    return {"dims": tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)}


def _accumulating(op: str):
    @call(f"torch.{op}", f"Tensor.{op}")
    def reduce(r: Recording, input, dim=None, keepdim: bool = False, *, dtype=None, **kwargs):
        ignore(kwargs)
        if isinstance(dim, torch.dtype):
            dim, dtype = None, dim
        attributes = _dims(dim)
        if dtype is not None:
            attributes["dtype"] = dtype_name(dtype)
        return r.emit(op, input, keepdim=bool(keepdim), **attributes)


for _op in ("sum", "mean", "prod"):
    _accumulating(_op)


def _any_all(op: str):
    @call(f"torch.{op}", f"Tensor.{op}")
    def reduce(r: Recording, input, dim=None, keepdim: bool = False, **kwargs):
        ignore(kwargs)
        return r.emit(op, input, keepdim=bool(keepdim), **_dims(dim))


for _op in ("any", "all"):
    _any_all(_op)


def _extreme(op: str, pick: str, pairwise: str, whole: str):
    @call(f"torch.{op}", f"Tensor.{op}")
    def extreme(r: Recording, input, dim=None, keepdim: bool = False, *, other=None, **kwargs):
        """max(x), max(x, other) and max(x, dim): the last gives values and positions, and its gradient goes to one of equals."""
        ignore(kwargs)
        if isinstance(dim, Traced) or other is not None:
            return r.emit(pairwise, input, other if other is not None else dim)
        if dim is None:
            return r.emit(whole, input)
        dim = normal_dim(dim, input.rank)
        positions = r.emit(pick, input, dim=dim, keepdim=True)
        values = r.emit("gather", input, positions, dim=dim)
        if not keepdim:
            values, positions = r.squeeze(values, dim), r.squeeze(positions, dim)
        return values, positions


_extreme("max", "argmax", "maximum", "amax")
_extreme("min", "argmin", "minimum", "amin")


def _spread(op: str):
    @call(f"torch.{op}", f"Tensor.{op}")
    def spread(r: Recording, input, dim=None, unbiased=None, keepdim: bool = False, *, correction=None, **kwargs):
        ignore(kwargs)
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None or unbiased else 0
        return r.emit(op, input, correction=correction, keepdim=bool(keepdim), **_dims(dim))


_spread("var")
_spread("std")


@call("torch.norm", "Tensor.norm", "torch.functional.norm", "torch.linalg.norm", "torch.ops.aten.linalg_vector_norm.default")
def _norm(r: Recording, input, p="fro", dim=None, keepdim: bool = False, dtype=None, **kwargs):
    p = kwargs.pop("ord", p)
    ignore(kwargs)
    if p in ("fro", None):
        p = 2
    if not _is_number(p):
        raise Unmapped(f"norm with p={p!r}")
    attributes = _dims(dim)
    if dtype is not None:
        attributes["dtype"] = dtype_name(dtype)
    return r.emit("norm", input, ord=p, keepdim=bool(keepdim), **attributes)


@call("torch.sort", "Tensor.sort")
def _sort(r: Recording, input, dim=-1, descending=False, *, stable=None, **kwargs):
    ignore(kwargs)
    return r.emit_all("sort", input, dim=dim, descending=bool(descending))


@call("torch.argsort", "Tensor.argsort")
def _argsort(r: Recording, input, dim=-1, descending=False, *, stable=False):
    return r.emit("argsort", input, dim=dim, descending=bool(descending))


@call("torch.cumsum", "Tensor.cumsum")
def _cumsum(r: Recording, input, dim, *, dtype=None, **kwargs):
    ignore(kwargs)
    return r.emit("cumsum", input, dim=dim, **({} if dtype is None else {"dtype": dtype_name(dtype)}))


@call("torch.einsum", "torch.functional.einsum")
def _einsum(r: Recording, equation, *operands):
    if not isinstance(equation, str):
        raise Unmapped("einsum without an equation text")
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    return r.emit("einsum", *operands, equation=equation)


@call("torch.square", "Tensor.square")
def _square(r: Recording, input):
    return r.emit("square", input)


@call("Tensor.item", "Tensor.tolist", "Tensor.__bool__")
def _to_python(r: Recording, input):
    raise Unmapped("a tensor's value is needed by Python")


_COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def _compare(op: str, python):
    @call(f"torch.{op}", f"Tensor.{op}", f"operator.{op}")
    def compare(r: Recording, input, other):
        if not isinstance(input, Traced) and not isinstance(other, Traced):
            return python(input, other)
        return r.emit(op, input, other)


for _op, _python in _COMPARISONS.items():
    _compare(_op, _python)
