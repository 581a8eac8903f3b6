"""One trace being recorded: the operations that calls (calls*.py) are written with.

Wraps `_core.Recorder`, whose values are integers, in traced tensors (values.py). Nothing here knows an FX graph; walking
one is record.py's work.
"""

from __future__ import annotations

import torch

from .. import _core
from .values import Detach, Expand, Memory, Permute, Reshape, Slice, Traced, Unmapped

DTYPES = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
FLOATS = ("f16", "bf16", "f32", "f64")


def dtype_name(dtype: torch.dtype) -> str:
    try:
        return DTYPES[dtype]
    except KeyError:
        raise Unmapped(f"dtype {dtype} is not one of Fulmen's") from None


def known(value) -> int:
    """A size as a number. A symbolic one gives the size it has now, with no guard on it."""
    return value.node.hint if isinstance(value, torch.SymInt) else int(value)


def normal_dim(dim: int, rank: int) -> int:
    """A dim that counts from the start; a 0-dim tensor has dim 0, as in PyTorch."""
    limit = max(rank, 1)
    if not -limit <= dim < limit:
        raise IndexError(f"dim is {dim}, the tensor has {rank} dims")
    return dim % limit


def full_shape(shape, count: int) -> tuple:
    """`shape` with its -1, if there is one, worked out from the element count."""
    shape = tuple(shape)
    if -1 not in shape:
        return shape
    known = 1
    for size in shape:
        if size != -1:
            known *= size
    return tuple(count // known if size == -1 and known else (0 if size == -1 else size) for size in shape)


class Recording:
    """The recorder, its inputs, and the traced tensors over them."""

    def __init__(self, name: str = "program"):
        self.recorder = _core.Recorder(name)
        self.inputs: list[Traced] = []
        self.constants: list[torch.Tensor] = []  # tensors the program holds; they stand after the caller's inputs
        self.constant_inputs: dict[int, Traced] = {}
        self.device = "cpu"

    # inputs and results

    def input(self, name: str, like: torch.Tensor) -> Traced:
        """A trace input with the layout of `like`, a real or a fake tensor."""
        if like.layout is not torch.strided or like.is_quantized or like.is_complex():
            raise Unmapped(f"input {name} is not a dense real tensor")
        value = self.recorder.input(
            name, dtype_name(like.dtype), tuple(map(known, like.shape)), tuple(map(known, like.stride())),
            str(like.device), bool(like.requires_grad), False,
        )
        traced = Traced(self.recorder, Memory(value), (), value)
        self.inputs.append(traced)
        return traced

    def constant(self, tensor: torch.Tensor) -> Traced:
        """A tensor that belongs to the graph itself. It becomes a further input of the trace."""
        known = self.constant_inputs.get(id(tensor))
        if known is None:
            known = self.input(f"constant{len(self.constants)}", tensor)
            known.memory.input_index = ~len(self.constants)
            self.constants.append(tensor)
            self.constant_inputs[id(tensor)] = known
        return known

    def wrap(self, value: int) -> Traced:
        return Traced(self.recorder, Memory(value), (), value)

    # ops

    def operand(self, value):
        if isinstance(value, Traced):
            return value.value
        if value is None:
            return None
        if isinstance(value, (bool, int, float)):
            return self.recorder.number(value)
        if isinstance(value, torch.Tensor):
            return self.constant(value).value
        raise Unmapped(f"an operand of type {type(value).__name__}")

    def emit_all(self, op: str, *operands, **attributes) -> tuple:
        """Every result of an op of the catalogue."""
        inputs = [self.operand(operand) for operand in operands]
        return tuple(self.wrap(value) for value in self.recorder.emit(op, inputs, attributes))

    def emit(self, op: str, *operands, **attributes) -> Traced:
        inputs = [self.operand(operand) for operand in operands]
        return self.wrap(self.recorder.emit(op, inputs, attributes)[0])

    def convert(self, x: Traced, dtype: str) -> Traced:
        return x if x.dtype == dtype else self.emit("convert", x, dtype=dtype)

    def full(self, shape, value, dtype: str) -> Traced:
        return self.emit("full", shape=tuple(shape), value=value, dtype=dtype)

    def copy(self, x: Traced) -> Traced:
        """The same elements in memory of their own."""
        return self.wrap(x.value)

    # views

    def reshape(self, x: Traced, shape) -> Traced:
        shape = full_shape(shape, x.count)
        return x if shape == x.shape else x.view(Reshape(x.shape, shape))

    def permute(self, x: Traced, dims) -> Traced:
        dims = tuple(normal_dim(d, x.rank) for d in dims)
        return x if dims == tuple(range(x.rank)) else x.view(Permute(dims))

    def transpose(self, x: Traced, a: int, b: int) -> Traced:
        if x.rank == 0:
            return x
        dims = list(range(x.rank))
        a, b = normal_dim(a, x.rank), normal_dim(b, x.rank)
        dims[a], dims[b] = dims[b], dims[a]
        return self.permute(x, dims)

    def slice(self, x: Traced, dim: int, begin, end, step: int = 1) -> Traced:
        dim = normal_dim(dim, x.rank)
        begin, end, step = slice(begin, end, step).indices(x.shape[dim])
        if step <= 0:
            raise Unmapped(f"a slice with step {step}")
        end = max(begin, end)
        if begin == 0 and end == x.shape[dim] and step == 1:
            return x
        return x.view(Slice(dim, begin, end, step))

    def select(self, x: Traced, dim: int, index: int) -> Traced:
        dim = normal_dim(dim, x.rank)
        index += x.shape[dim] if index < 0 else 0
        if not 0 <= index < x.shape[dim]:
            raise IndexError(f"index {index} is out of bounds for dim {dim} with size {x.shape[dim]}")
        part = self.slice(x, dim, index, index + 1)
        return self.reshape(part, part.shape[:dim] + part.shape[dim + 1 :])

    def unsqueeze(self, x: Traced, dim: int) -> Traced:
        dim = normal_dim(dim, x.rank + 1)
        return self.reshape(x, x.shape[:dim] + (1,) + x.shape[dim:])

    def squeeze(self, x: Traced, dims=None) -> Traced:
        if dims is None:
            dims = range(x.rank)
        elif isinstance(dims, int):
            dims = (dims,)
        dims = {normal_dim(d, x.rank) for d in dims}
        return self.reshape(x, tuple(s for d, s in enumerate(x.shape) if not (d in dims and s == 1)))

    def expand(self, x: Traced, shape) -> Traced:
        shape = tuple(shape)
        added = len(shape) - x.rank
        shape = tuple(x.shape[d - added] if size == -1 and d >= added else size for d, size in enumerate(shape))
        return x if shape == x.shape else x.view(Expand(shape))

    def detach(self, x: Traced) -> Traced:
        return x.view(Detach())

    # writes

    def write(self, x: Traced, value) -> Traced:
        """x.copy_(value): broadcast to x's shape, converted to its dtype."""
        if not isinstance(value, Traced):
            value = self.full(x.shape, value, x.dtype) if not isinstance(value, torch.Tensor) else self.constant(value)
        value = self.convert(value, x.dtype)
        if value.shape != x.shape:
            value = self.emit("broadcast_to", value, shape=x.shape)
        x.write(value.value)
        return x
