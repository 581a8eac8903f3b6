"""Adapters of calls that give a view of a tensor's memory, or a copy of it in another form."""

from __future__ import annotations

import torch

from .calls import call, find, ignore
from .recording import Recording, dtype_name, full_shape, normal_dim
from .values import NotTakenApart, Traced, Unmapped


def _sizes(args) -> tuple:
    """The sizes of f(x, 2, 3) and f(x, (2, 3)) alike."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return tuple(args)


@call("Tensor.view", "Tensor.reshape", "torch.reshape")
def _reshape(r: Recording, x: Traced, *args, **kwargs):
    args = _sizes(args) if args else tuple(kwargs.get("shape", kwargs.get("size", ())))
    if args and isinstance(args[0], torch.dtype):
        if dtype_name(args[0]) != x.dtype:
            raise Unmapped("a view as another dtype")
        return x
    return r.reshape(x, args)


@call("Tensor.view_as", "Tensor.reshape_as")
def _reshape_as(r: Recording, x: Traced, other: Traced):
    return r.reshape(x, other.shape)


@call("torch.flatten", "Tensor.flatten")
def _flatten(r: Recording, x: Traced, start_dim: int = 0, end_dim: int = -1):
    if x.rank == 0:
        return r.reshape(x, (1,))
    start, end = normal_dim(start_dim, x.rank), normal_dim(end_dim, x.rank)
    count = 1
    for size in x.shape[start : end + 1]:
        count *= size
    return r.reshape(x, x.shape[:start] + (count,) + x.shape[end + 1 :])


@call("torch.unflatten", "Tensor.unflatten")
def _unflatten(r: Recording, x: Traced, dim: int, sizes):
    dim = normal_dim(dim, x.rank)
    sizes = full_shape(sizes if isinstance(sizes, (tuple, list)) else (sizes,), x.shape[dim])
    return r.reshape(x, x.shape[:dim] + sizes + x.shape[dim + 1 :])


@call("torch.transpose", "Tensor.transpose", "torch.swapaxes", "Tensor.swapaxes", "torch.swapdims", "Tensor.swapdims")
def _transpose(r: Recording, x: Traced, dim0: int, dim1: int):
    return r.transpose(x, dim0, dim1)


@call("torch.t", "Tensor.t")
def _t(r: Recording, x: Traced):
    return r.transpose(x, 0, 1) if x.rank == 2 else x


@call("torch.ops.aten.mT", "torch.adjoint", "Tensor.adjoint")
def _mt(r: Recording, x: Traced):
    return r.transpose(x, -2, -1)


@call("torch.ops.aten.numpy_T")
def _reversed(r: Recording, x: Traced):
    return r.permute(x, tuple(reversed(range(x.rank))))


@call("torch.permute", "Tensor.permute")
def _permute(r: Recording, x: Traced, *args, dims=None):
    return r.permute(x, dims if dims is not None else _sizes(args))


@call("torch.movedim", "Tensor.movedim", "torch.moveaxis", "Tensor.moveaxis")
def _movedim(r: Recording, x: Traced, source, destination):
    source = [normal_dim(d, x.rank) for d in (source if isinstance(source, (tuple, list)) else (source,))]
    destination = [normal_dim(d, x.rank) for d in (destination if isinstance(destination, (tuple, list)) else (destination,))]
    order = [d for d in range(x.rank) if d not in source]
    for target, dim in sorted(zip(destination, source)):
        order.insert(target, dim)
    return r.permute(x, order)


@call("Tensor.expand", "torch.broadcast_to", "Tensor.broadcast_to")
def _expand(r: Recording, x: Traced, *args, size=None, implicit=False):
    return r.expand(x, size if size is not None else _sizes(args))


@call("Tensor.expand_as")
def _expand_as(r: Recording, x: Traced, other: Traced):
    return r.expand(x, other.shape)


@call("torch.unsqueeze", "Tensor.unsqueeze")
def _unsqueeze(r: Recording, x: Traced, dim: int):
    return r.unsqueeze(x, dim)


@call("torch.squeeze", "Tensor.squeeze")
def _squeeze(r: Recording, x: Traced, *args, dim=None):
    dims = dim if dim is not None else (_sizes(args) if args else None)
    return r.squeeze(x, dims)


@call("torch.narrow", "Tensor.narrow")
def _narrow(r: Recording, x: Traced, dim: int, start: int, length: int):
    start += x.shape[normal_dim(dim, x.rank)] if start < 0 else 0
    return r.slice(x, dim, start, start + length)


@call("torch.select", "Tensor.select")
def _select(r: Recording, x: Traced, dim: int, index: int):
    return r.select(x, dim, index)


def _cut(r: Recording, x: Traced, dim: int, sizes) -> tuple:
    parts, begin = [], 0
    for size in sizes:
        parts.append(r.slice(x, dim, begin, begin + size))
        begin += size
    return tuple(parts)


@call("torch.split", "Tensor.split", "torch.functional.split", "Tensor.split_with_sizes", "torch.split_with_sizes")
def _split(r: Recording, x: Traced, split_size_or_sections=None, dim: int = 0, **kwargs):
    sizes = split_size_or_sections
    if sizes is None:
        sizes = kwargs.get("split_size", kwargs.get("split_sizes"))
    total = x.shape[normal_dim(dim, x.rank)]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - begin) for begin in range(0, total, sizes)] if sizes else [0]
        sizes = sizes or [0]
    return _cut(r, x, dim, sizes)


@call("torch.chunk", "Tensor.chunk")
def _chunk(r: Recording, x: Traced, chunks: int, dim: int = 0):
    total = x.shape[normal_dim(dim, x.rank)]
    size = -(-total // chunks)
    if size == 0:
        return tuple(r.slice(x, dim, 0, 0) for _ in range(chunks))
    return _cut(r, x, dim, [min(size, total - begin) for begin in range(0, total, size)])


@call("torch.tensor_split", "Tensor.tensor_split")
def _tensor_split(r: Recording, x: Traced, indices_or_sections, dim: int = 0):
    total = x.shape[normal_dim(dim, x.rank)]
    if isinstance(indices_or_sections, int):
        base, extra = divmod(total, indices_or_sections)
        return _cut(r, x, dim, [base + (i < extra) for i in range(indices_or_sections)])
    if isinstance(indices_or_sections, Traced):
        raise Unmapped("split points in a tensor")
    bounds = [0, *indices_or_sections, total]
    return tuple(r.slice(x, dim, begin, end) for begin, end in zip(bounds, bounds[1:]))


@call("torch.unbind", "Tensor.unbind")
def _unbind(r: Recording, x: Traced, dim: int = 0):
    return tuple(r.select(x, dim, i) for i in range(x.shape[normal_dim(dim, x.rank)]))


@call("Tensor.contiguous", "Tensor.alias")
def _contiguous(r: Recording, x: Traced, **kwargs):
    ignore(kwargs)
    return x


@call("torch.clone", "Tensor.clone")
def _clone(r: Recording, x: Traced, **kwargs):
    ignore(kwargs)
    return r.copy(x)


@call("torch.detach", "Tensor.detach")
def _detach(r: Recording, x: Traced):
    return r.detach(x)


@call("Tensor.to", "Tensor.type", "Tensor.type_as")
def _to(r: Recording, x: Traced, *args, **kwargs):
    copy = bool(kwargs.get("copy"))
    kwargs = ignore(kwargs)
    wanted = [*args, *kwargs.values()]
    dtype = x.dtype
    for value in wanted:
        if isinstance(value, torch.dtype):
            dtype = dtype_name(value)
        elif isinstance(value, Traced):
            dtype = value.dtype
        elif isinstance(value, torch.Tensor):
            dtype = dtype_name(value.dtype)
        elif isinstance(value, (torch.device, str)):
            if torch.device(value).type != torch.device(r.device).type:
                raise Unmapped(f"a move to device {value}")
        elif value is not None and not isinstance(value, bool):
            raise Unmapped(f"a conversion by {value!r}")
    if dtype == x.dtype:
        return r.copy(x) if copy else x
    return r.convert(x, dtype)


def _converter(name: str, dtype: str):
    @call(f"Tensor.{name}")
    def convert(r: Recording, x: Traced, **kwargs):
        ignore(kwargs)
        return r.convert(x, dtype)


for _name, _dtype in (
    ("float", "f32"), ("double", "f64"), ("half", "f16"), ("bfloat16", "bf16"), ("int", "i32"), ("long", "i64"),
    ("short", "i16"), ("char", "i8"), ("byte", "u8"), ("bool", "bool"),
):
    _converter(_name, _dtype)


@call("Tensor.cpu")
def _cpu(r: Recording, x: Traced, **kwargs):
    if r.device != "cpu":
        raise Unmapped("a move to device cpu")
    return x


@call("torch.broadcast_tensors", "torch.functional.broadcast_tensors")
def _broadcast_tensors(r: Recording, *tensors):
    tensors = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(r.expand(t, shape) for t in tensors)


@call("torch.meshgrid", "torch.functional.meshgrid")
def _meshgrid(r: Recording, *tensors, indexing: str = "ij"):
    tensors = list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors)
    if indexing == "xy" and len(tensors) > 1:
        tensors[0], tensors[1] = tensors[1], tensors[0]
    shape = tuple(t.count for t in tensors)
    grids = [r.expand(r.reshape(t, (1,) * d + (t.count,) + (1,) * (len(shape) - d - 1)), shape) for d, t in enumerate(tensors)]
    if indexing == "xy" and len(grids) > 1:
        grids[0], grids[1] = grids[1], grids[0]
    return tuple(grids)


def _changes_own_shape(name: str):
    @call(f"Tensor.{name}_")
    def seen_anew(r: Recording, x: Traced, *args, **kwargs):
        if x.memory.input_index is not None:
            raise NotTakenApart("it changes the shape of a tensor that isn't the graph's own")
        view = find("call_method", name)(r, x, *args, **kwargs)
        return x.become(view) if view is not x else x


for _name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims"):
    _changes_own_shape(_name)
