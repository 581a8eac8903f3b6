"""Adapters of ATen calls whose name or arguments differ from torch.NAME's and Tensor.NAME's; expand.py makes such calls."""

from __future__ import annotations

import torch

from .calls import call
from .calls_indexing import _getitem
from .recording import Recording, dtype_name, normal_dim
from .values import Traced, Unmapped

_REDUCTIONS = ("none", "mean", "sum")


@call("torch.ops.aten.slice.Tensor")
def _slice(r: Recording, x: Traced, dim: int = 0, start=None, end=None, step: int = 1):
    return r.slice(x, dim, start, end, step)


@call("torch.ops.aten.index.Tensor", "torch.ops.aten._unsafe_index.Tensor")
def _index(r: Recording, x: Traced, indices):
    return _getitem(r, x, tuple(slice(None) if i is None else i for i in indices))


@call("torch.ops.aten._unsafe_view.default", "torch.ops.aten._reshape_alias.default")
def _view(r: Recording, x: Traced, shape, *strides):
    return r.reshape(x, shape)


@call("torch.ops.aten._to_copy.default", "torch.ops.aten.to.dtype", "torch.ops.prims.convert_element_type.default")
def _to_copy(r: Recording, x: Traced, dtype=None, *flags, **kwargs):
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != torch.device(r.device).type:
        raise Unmapped(f"a move to device {device}")
    wanted = x.dtype if dtype is None else dtype_name(dtype)
    return r.copy(x) if wanted == x.dtype else r.convert(x, wanted)


@call("torch.ops.aten.lift_fresh_copy.default", "torch.ops.aten.lift_fresh.default", "torch.ops.aten.detach_.default")
def _same(r: Recording, x: Traced):
    return x


@call("torch.ops.aten.scalar_tensor.default")
def _scalar_tensor(r: Recording, value, *, dtype=None, **kwargs):
    default = torch.bool if isinstance(value, bool) else torch.get_default_dtype()
    return r.full((), value, dtype_name(dtype or default))


@call("torch.ops.aten.cross_entropy_loss.default")
def _cross_entropy(r: Recording, input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    return r.emit_all(
        "cross_entropy", input, target, weight, reduction=_REDUCTIONS[reduction], ignore_index=ignore_index, label_smoothing=label_smoothing
    )[0]


def _pair_loss(name: str, op: str):
    @call(f"torch.ops.aten.{name}.default")
    def loss(r: Recording, input, target, reduction=1):
        shape = torch.broadcast_shapes(input.shape, target.shape)
        return r.emit(op, r.expand(input, shape), r.expand(target, shape), reduction=_REDUCTIONS[reduction])


_pair_loss("mse_loss", "mse_loss")
_pair_loss("l1_loss", "l1_loss")


@call("torch.ops.aten.batch_norm.default")
def _batch_norm(r: Recording, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    from .calls_network import _batch_norm as of_functional

    return of_functional(r, input, running_mean, running_var, weight, bias, training, momentum, eps)


@call("torch.ops.aten.prelu.default", "torch.ops.aten._prelu_kernel.default", "torch.prelu", "torch.nn.functional.prelu")
def _prelu(r: Recording, input: Traced, weight: Traced):
    if weight.count == 1:
        weight = r.reshape(weight, ())
    elif input.rank > 1 and weight.rank == 1:
        weight = r.reshape(weight, (1, weight.count) + (1,) * (input.rank - 2))
    return r.emit("where", r.emit("gt", input, 0), input, r.emit("mul", weight, input))


@call("torch.ops.aten.split_with_sizes_copy.default", "torch.ops.aten.unsafe_split_with_sizes.default")
def _unsafe_split(r: Recording, x: Traced, sizes, dim: int = 0):
    parts, begin = [], 0
    for size in sizes:
        parts.append(r.slice(x, dim, begin, begin + size))
        begin += size
    return tuple(parts)


@call("torch.ops.aten.unsafe_chunk.default")
def _unsafe_chunk(r: Recording, x: Traced, chunks: int, dim: int = 0):
    from .calls_views import _chunk

    return _chunk(r, x, chunks, dim)


@call("Tensor.exponential")
def _exponential(r: Recording, input: Traced, lambd: float = 1.0, **kwargs):
    from .calls_creation import _drawn

    drawn = _drawn(r, "uniform", input.shape, input.dtype)
    return r.emit("div", r.emit("neg", r.emit("log", r.emit("sub", 1, drawn))), lambd)


@call("torch.ops.aten.select_scatter.default", "Tensor.select_scatter", "torch.select_scatter")
def _select_scatter(r: Recording, x: Traced, src: Traced, dim: int, index: int):
    result = r.copy(x)
    r.write(r.select(result, dim, index), src)
    return result


@call("torch.ops.aten.slice_scatter.default", "Tensor.slice_scatter", "torch.slice_scatter")
def _slice_scatter(r: Recording, x: Traced, src: Traced, dim: int = 0, start=None, end=None, step: int = 1):
    result = r.copy(x)
    r.write(r.slice(result, normal_dim(dim, x.rank), start, end, step), src)
    return result


@call("torch.ops.prims.broadcast_in_dim.default")
def _broadcast_in_dim(r: Recording, x: Traced, shape, dims):
    sizes = [1] * len(shape)
    for size, dim in zip(x.shape, dims):
        sizes[dim] = size
    return r.expand(r.reshape(x, sizes), shape)


@call("torch.ops.prims.var.default")
def _prims_var(r: Recording, x: Traced, dims, correction=1, *, output_dtype=None):
    return r.emit("var", x, correction=correction, **({"dims": tuple(dims)} if dims else {}))


@call("torch.ops.prims.sum.default")
def _prims_sum(r: Recording, x: Traced, dims, *, output_dtype=None):
    return r.emit("sum", x, **({"dims": tuple(dims)} if dims else {}))


@call("torch.ops.prims.div.default")
def _prims_div(r: Recording, a, b):
    both = [x for x in (a, b) if isinstance(x, Traced)]
    return r.emit("div", a, b, **({} if any(x.is_float for x in both) else {"rounding": "trunc"}))


@call("torch.ops.prims.where.default")
def _prims_where(r: Recording, condition, a, b):
    return r.emit("where", condition, a, b)


def _ignoring_nan(op: str, pairwise: str):
    @call(f"torch.{op}", f"Tensor.{op}", f"torch.ops.prims.{op}.default")
    def extreme(r: Recording, a: Traced, b: Traced):
        """maximum or minimum, but a NaN beside a number gives the number."""
        chosen = r.emit("where", r.emit("isnan", a), b, r.emit("where", r.emit("isnan", b), a, r.emit(pairwise, a, b)))
        return chosen


_ignoring_nan("fmax", "maximum")
_ignoring_nan("fmin", "minimum")


@call("torch.ops.prims.fma.default")
def _fma(r: Recording, a, b, c):
    return r.emit("add", r.emit("mul", a, b), c)


@call("torch.var_mean", "Tensor.var_mean", "torch.functional.var_mean", "torch.ops.aten.var_mean.correction")
def _var_mean(r: Recording, input: Traced, *args, **kwargs):
    return _spread_and_mean(r, "var", input, *args, **kwargs)


def _spread_and_mean(r: Recording, spread: str, input: Traced, *args, **kwargs):
    from .calls_math import _dims

    correction = kwargs.pop("correction", None)
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    given = {**dict(zip(names, args)), **kwargs}
    if correction is None:
        correction = 0 if given.get("unbiased") is False else 1
    options = {"keepdim": bool(given.get("keepdim", False)), **_dims(given.get("dim"))}
    return r.emit(spread, input, correction=correction, **options), r.emit("mean", input, **options)


@call("torch.std_mean", "Tensor.std_mean", "torch.functional.std_mean", "torch.ops.aten.std_mean.correction")
def _std_mean(r: Recording, input: Traced, *args, **kwargs):
    return _spread_and_mean(r, "std", input, *args, **kwargs)


@call("torch.ops.aten._trilinear.default")
def _trilinear(r: Recording, a: Traced, b: Traced, c: Traced, expand1, expand2, expand3, sumdim, unroll_dim=1):
    for dims, place in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for dim in dims:
            a, b, c = (r.unsqueeze(x, dim) if k == place else x for k, x in enumerate((a, b, c)))
    product = r.emit("mul", r.emit("mul", a, b), c)
    return r.emit("sum", product, dims=tuple(sumdim))


@call("operator.lshift", "torch.bitwise_left_shift", "Tensor.bitwise_left_shift", "torch.ops.aten.__lshift__.Scalar")
def _left_shift(r: Recording, input, other):
    if not isinstance(input, Traced) and not isinstance(other, Traced):
        return input << other
    if not isinstance(input, Traced) or input.is_float or input.dtype == "bool" or not isinstance(other, int) or not 0 <= other < 31:
        raise Unmapped("a shift of other than integers by a small number")
    return r.emit("mul", input, 1 << other)


@call("operator.rshift", "torch.bitwise_right_shift", "Tensor.bitwise_right_shift", "torch.ops.aten.__rshift__.Scalar")
def _right_shift(r: Recording, input, other):
    if not isinstance(input, Traced) and not isinstance(other, Traced):
        return input >> other
    if not isinstance(input, Traced) or input.is_float or input.dtype == "bool" or not isinstance(other, int) or not 0 <= other < 31:
        raise Unmapped("a shift of other than integers by a small number")
    return r.emit("div", input, 1 << other, rounding="floor")


@call("torch.histc", "Tensor.histc", "torch.ops.aten.histc.default")
def _histc(r: Recording, input: Traced, bins: int = 100, min=0, max=0, **kwargs):
    if min == max:
        raise Unmapped("histc whose range depends on data")
    x = r.convert(r.reshape(r.detach(input), (input.count,)), "f32")
    place = r.emit("floor", r.emit("mul", r.emit("sub", x, float(min)), bins / (max - min)))
    place = r.emit("where", r.emit("eq", x, float(max)), float(bins - 1), place)
    inside = r.emit("logical_and", r.emit("ge", x, float(min)), r.emit("le", x, float(max)))
    hits = r.emit("eq", r.unsqueeze(place, 1), r.emit("arange", start=0.0, end=float(bins), step=1.0, dtype="f32"))
    hits = r.emit("logical_and", hits, r.unsqueeze(inside, 1))
    return r.convert(r.emit("sum", hits, dims=(0,)), input.dtype)
