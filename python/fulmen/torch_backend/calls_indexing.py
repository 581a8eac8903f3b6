"""Adapters of indexing: x[...], x[...] = value, gather, scatter and their family."""

from __future__ import annotations

import operator

import torch

from .calls import call, ignore
from .recording import Recording, normal_dim
from .values import Traced, Unmapped


def _basic(r: Recording, x: Traced, index) -> tuple:
    """x seen through the integers, slices and Nones of an index, and the index tensors left: [(dim, tensor), ...]."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    tensors = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += x.rank - dim - _rest(items, item)
        elif item is None:
            x = r.unsqueeze(x, dim)
            dim += 1
        elif isinstance(item, bool):
            raise Unmapped("an index by a bool")
        elif isinstance(item, int):
            x = r.select(x, dim, item)
        elif isinstance(item, slice):
            if any(isinstance(bound, Traced) for bound in (item.start, item.stop, item.step)):
                raise Unmapped("a slice with a bound in a tensor")
            step = 1 if item.step is None else item.step
            if not (item.start in (None, 0) and item.stop is None and step == 1):
                x = r.slice(x, dim, item.start, item.stop, step)
            dim += 1
        else:
            if isinstance(item, (list, tuple, range)):
                item = r.constant(torch.tensor(list(item)))
            elif isinstance(item, torch.Tensor):
                item = r.constant(item)
            if not isinstance(item, Traced):
                raise Unmapped(f"an index of type {type(item).__name__}")
            tensors.append((dim, item))
            dim += item.rank if item.dtype == "bool" else 1
    return x, tensors


def _is_mask(item) -> bool:
    return isinstance(item, Traced) and item.dtype == "bool"


def _rest(items: list, ellipsis) -> int:
    """Dims that the items after the ellipsis use up."""
    after = items[next(i for i, item in enumerate(items) if item is ellipsis) + 1 :]
    return sum(item.rank if _is_mask(item) else 1 for item in after if item is not None)


@call("operator.getitem", "Tensor.__getitem__")
def _getitem(r: Recording, x, index):
    if not isinstance(x, Traced):
        return x[index]
    view, tensors = _basic(r, x, index)
    if not tensors:
        return view
    if any(_is_mask(t) for _, t in tensors):
        raise Unmapped("an index by a bool tensor gives a shape that depends on data")
    return r.emit("index", view, *(t for _, t in tensors), dims=tuple(d for d, _ in tensors))


def _fit(r: Recording, value, view: Traced, rank: int):
    """The value as a traced tensor of the view's dtype, without leading dims of size 1 that it has too many."""
    if isinstance(value, torch.Tensor):
        value = r.constant(value)
    if not isinstance(value, Traced):
        return r.full((), value, view.dtype)
    value = r.convert(value, view.dtype)
    while value.rank > rank and value.shape[0] == 1:
        value = r.reshape(value, value.shape[1:])
    return value


@call("operator.setitem", "Tensor.__setitem__")
def _setitem(r: Recording, x, index, value):
    view, tensors = _basic(r, x, index)
    if not tensors:
        r.write(view, _fit(r, value, view, view.rank))
    elif any(_is_mask(t) for _, t in tensors):
        if len(tensors) > 1:
            raise Unmapped("a write by a bool tensor beside other index tensors")
        dim, mask = tensors[0]
        value = _fit(r, value, view, 0)
        if value.count != 1:
            raise Unmapped("a write of several values by a bool tensor")
        mask = r.reshape(mask, mask.shape + (1,) * (view.rank - dim - mask.rank))
        r.write(view, r.emit("where", mask, r.reshape(value, ()), view))
    else:
        dims, indices = tuple(d for d, _ in tensors), [t for _, t in tensors]
        rank = view.rank - len(dims) + max(t.rank for t in indices)
        r.write(view, r.emit("index_put", view, _fit(r, value, view, rank), *indices, dims=dims))
    return None


@call("torch.index_put", "Tensor.index_put")
def _index_put(r: Recording, input, indices, values, accumulate: bool = False):
    if any(i is None or _is_mask(i) for i in indices):
        raise Unmapped("index_put with None or bool indices")
    values = r.convert(values, input.dtype) if isinstance(values, Traced) else values
    return r.emit("index_put", input, values, *indices, dims=tuple(range(len(indices))), accumulate=bool(accumulate))


@call("torch.gather", "Tensor.gather")
def _gather(r: Recording, input, dim, index, **kwargs):
    kwargs.pop("sparse_grad", None)
    ignore(kwargs)
    return r.emit("gather", input, index, dim=dim)


@call("torch.take_along_dim", "Tensor.take_along_dim")
def _take_along_dim(r: Recording, input, indices, dim=None):
    if dim is None:
        input, indices, dim = r.reshape(input, (-1,)), r.reshape(indices, (-1,)), 0
    dim = normal_dim(dim, input.rank)
    shape = list(torch.broadcast_shapes(*(t.shape[:dim] + (1,) + t.shape[dim + 1 :] for t in (input, indices))))
    sized = [r.expand(t, (*shape[:dim], t.shape[dim], *shape[dim + 1 :])) for t in (input, indices)]
    return r.emit("gather", *sized, dim=dim)


def _source(r: Recording, x: Traced, index: Traced, src) -> Traced:
    if not isinstance(src, Traced):
        return r.full(index.shape, src, x.dtype)
    for dim in range(index.rank):
        src = r.slice(src, dim, 0, index.shape[dim])
    return src


@call("torch.scatter", "Tensor.scatter")
def _scatter(r: Recording, input, dim, index, src=None, *, value=None, reduce=None):
    if reduce is not None:
        raise Unmapped(f"scatter with reduce={reduce}")
    return r.emit("scatter", input, index, _source(r, input, index, value if src is None else src), dim=dim)


@call("torch.scatter_add", "Tensor.scatter_add")
def _scatter_add(r: Recording, input, dim, index, src):
    return r.emit("scatter_add", input, index, _source(r, input, index, src), dim=dim)


@call("torch.index_select", "Tensor.index_select")
def _index_select(r: Recording, input, dim, index):
    if input.rank == 0:
        raise Unmapped("index_select of a 0-dim tensor")
    return r.emit("index_select", input, r.reshape(index, (index.count,)), dim=dim)


@call("torch.index_add", "Tensor.index_add")
def _index_add(r: Recording, input, dim, index, source, *, alpha=1):
    if alpha != 1:
        source = r.emit("mul", source, alpha)
    if input.rank == 0:
        raise Unmapped("index_add to a 0-dim tensor")
    return r.emit("index_add", input, r.reshape(index, (index.count,)), source, dim=dim)


@call("torch.cat", "torch.concat", "torch.concatenate")
def _cat(r: Recording, tensors, dim: int = 0, **kwargs):
    dim = kwargs.pop("axis", dim)
    ignore(kwargs)
    kept = [t for t in tensors if t.shape != (0,)] or list(tensors)[:1]
    if len(kept) == 1 and all(t.dtype == kept[0].dtype for t in tensors):
        return r.copy(kept[0])
    dropped = {t.dtype for t in tensors} - {t.dtype for t in kept}
    if dropped:
        raise Unmapped("cat with an empty tensor of another dtype")
    return r.emit("cat", *kept, dim=dim)


@call("torch.stack")
def _stack(r: Recording, tensors, dim: int = 0, **kwargs):
    ignore(kwargs)
    return r.emit("cat", *(r.unsqueeze(t, dim) for t in tensors), dim=normal_dim(dim, tensors[0].rank + 1))


@call("torch.hstack")
def _hstack(r: Recording, tensors):
    tensors = [r.reshape(t, (1,)) if t.rank == 0 else t for t in tensors]
    return _cat(r, tensors, 0 if tensors[0].rank == 1 else 1)


@call("torch.vstack")
def _vstack(r: Recording, tensors):
    return _cat(r, [r.reshape(t, (1, t.count)) if t.rank < 2 else t for t in tensors], 0)


@call("Tensor.repeat", "torch.tile", "Tensor.tile")
def _repeat(r: Recording, input, *args, **kwargs):
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = args[0]
    repeats = tuple(args) or tuple(kwargs.get("repeats", kwargs.get("dims", ())))
    repeats = (1,) * (input.rank - len(repeats)) + repeats
    shape = (1,) * (len(repeats) - input.rank) + input.shape
    spread = r.reshape(input, tuple(s for size in shape for s in (1, size)))
    spread = r.expand(spread, tuple(s for count, size in zip(repeats, shape) for s in (count, size)))
    return r.copy(r.reshape(spread, tuple(count * size for count, size in zip(repeats, shape))))


@call("torch.repeat_interleave", "Tensor.repeat_interleave")
def _repeat_interleave(r: Recording, input, repeats, dim=None, **kwargs):
    if not isinstance(repeats, int):
        raise Unmapped("repeat_interleave with counts in a tensor")
    if dim is None:
        input, dim = r.reshape(input, (-1,)), 0
    dim = normal_dim(dim, input.rank)
    spread = r.unsqueeze(input, dim + 1)
    spread = r.expand(spread, spread.shape[: dim + 1] + (repeats,) + spread.shape[dim + 2 :])
    return r.copy(r.reshape(spread, input.shape[:dim] + (input.shape[dim] * repeats,) + input.shape[dim + 1 :]))


@call("torch.roll", "Tensor.roll")
def _roll(r: Recording, input, shifts, dims=None):
    shape = input.shape
    if dims is None or dims == ():
        input, dims = r.reshape(input, (-1,)), 0
    pairs = [(shifts, dims)] if isinstance(shifts, int) else list(zip(shifts, dims if not isinstance(dims, int) else (dims,)))
    for shift, dim in pairs:
        size = input.shape[normal_dim(dim, input.rank)] if input.rank else 1
        cut = (-shift) % size if size else 0
        if cut:
            input = r.emit("cat", r.slice(input, dim, cut, None), r.slice(input, dim, 0, cut), dim=dim)
    return r.copy(r.reshape(input, shape))


@call("torch.flip", "Tensor.flip")
def _flip(r: Recording, input, *args, dims=None):
    dims = args if dims is None else dims
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return r.emit("flip", input, dims=tuple(normal_dim(d, input.rank) for d in dims)) if dims and input.rank else r.copy(input)


@call("torch.nn.functional.pad", "torch._C._nn.pad", "torch.constant_pad_nd")
def _pad(r: Recording, input, pad, mode="constant", value=None):
    if not isinstance(mode, str):
        mode, value = "constant", mode
    if mode != "constant":
        raise Unmapped(f"pad with mode {mode}")
    pads = [0] * (2 * input.rank)
    for k in range(len(pad) // 2):
        dim = input.rank - 1 - k
        low, high = pad[2 * k], pad[2 * k + 1]
        if low < 0 or high < 0:
            input = r.slice(input, dim, max(-low, 0), input.shape[dim] - max(-high, 0))
        pads[2 * dim], pads[2 * dim + 1] = max(low, 0), max(high, 0)
    if not any(pads):
        return r.copy(input)
    return r.emit("pad", input, pads=pads, value=0 if value is None else value)


def _python_only(name: str):
    @call(f"operator.{name}")
    def compute(r: Recording, *args):
        """`is` and `not` on what is known while recording."""
        return getattr(operator, name)(*args)


for _name in ("is_", "is_not", "contains"):
    _python_only(_name)
