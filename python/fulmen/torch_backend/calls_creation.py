"""Adapters of calls that make tensors from numbers, from constants and from the random generator."""

from __future__ import annotations

from math import prod

import torch

from .calls import call, ignore
from .recording import Recording, TORCH_DTYPES, dtype_name
from .values import Traced, Unmapped


def _made(r: Recording, kwargs: dict, default: str) -> str:
    """The dtype that a creation call asks for; only on the program's own device."""
    kwargs = ignore(dict(kwargs))
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    kwargs.pop("requires_grad", None)
    if kwargs:
        raise Unmapped(f"argument {next(iter(kwargs))}")
    if device is not None and torch.device(device).type != torch.device(r.device).type:
        raise Unmapped(f"a tensor made on device {device}")
    return default if dtype is None else dtype_name(dtype)


def _default_float() -> str:
    return dtype_name(torch.get_default_dtype())


def _sizes(args, kwargs: dict) -> tuple:
    if "size" in kwargs:
        size = kwargs.pop("size")
        return tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return tuple(args)


def _number_dtype(value) -> str:
    return "bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else _default_float()


def _constant_maker(name: str, value):
    @call(f"torch.{name}")
    def make(r: Recording, *args, **kwargs):
        shape = _sizes(args, kwargs)
        return r.full(shape, value, _made(r, kwargs, _default_float()))

    @call(f"torch.{name}_like")
    def make_like(r: Recording, input: Traced, **kwargs):
        return r.full(input.shape, value, _made(r, kwargs, input.dtype))

    @call(f"Tensor.new_{name}")
    def make_new(r: Recording, input: Traced, *args, **kwargs):
        shape = _sizes(args, kwargs)
        return r.full(shape, value, _made(r, kwargs, input.dtype))


_constant_maker("zeros", 0)
_constant_maker("ones", 1)
_constant_maker("empty", 0)


def _filled(r: Recording, shape, value, dtype: str):
    if isinstance(value, Traced):
        return r.emit("broadcast_to", r.convert(value, dtype), shape=tuple(shape))
    return r.full(shape, value, dtype)


@call("torch.full")
def _full(r: Recording, size, fill_value, **kwargs):
    default = fill_value.dtype if isinstance(fill_value, Traced) else _number_dtype(fill_value)
    return _filled(r, size, fill_value, _made(r, kwargs, default))


@call("torch.full_like")
def _full_like(r: Recording, input: Traced, fill_value, **kwargs):
    return _filled(r, input.shape, fill_value, _made(r, kwargs, input.dtype))


@call("Tensor.new_full")
def _new_full(r: Recording, input: Traced, size, fill_value, **kwargs):
    return _filled(r, size, fill_value, _made(r, kwargs, input.dtype))


@call("Tensor.fill")
def _fill(r: Recording, input: Traced, value):
    return _filled(r, input.shape, value, input.dtype)


@call("Tensor.zero", "torch.zero")
def _zero(r: Recording, input: Traced):
    return r.full(input.shape, 0, input.dtype)


@call("Tensor.copy")
def _copy(r: Recording, input: Traced, src, non_blocking: bool = False):
    return src if isinstance(src, Traced) else r.constant(src)


@call("torch.arange")
def _arange(r: Recording, *args, **kwargs):
    names = ("start", "end", "step")
    given = {name: kwargs.pop(name) for name in names if name in kwargs}
    if len(args) == 1 and "end" not in given:
        given["end"] = args[0]
    else:
        given.update(zip(names, args))
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    if any(isinstance(v, Traced) for v in (start, end, step)):
        raise Unmapped("arange with bounds in tensors gives a shape that depends on data")
    default = _default_float() if any(isinstance(v, float) for v in (start, end, step)) else "i64"
    return r.emit("arange", start=start, end=end, step=step, dtype=_made(r, kwargs, default))


@call("torch.linspace")
def _linspace(r: Recording, start, end, steps, **kwargs):
    dtype = _made(r, kwargs, _default_float())
    return r.copy(r.constant(torch.linspace(start, end, steps, dtype=TORCH_DTYPES[dtype])))  # a copy: it may be written to


@call("torch.eye")
def _eye(r: Recording, n, m=None, **kwargs):
    return r.emit("eye", n=n, dtype=_made(r, kwargs, _default_float()), **({} if m is None else {"m": m}))


@call("torch.tensor", "torch.as_tensor", "torch.scalar_tensor", "torch.asarray")
def _tensor(r: Recording, data, **kwargs):
    if isinstance(data, Traced):
        return r.copy(r.convert(data, _made(r, kwargs, data.dtype)))
    if isinstance(data, (bool, int, float)):
        return r.full((), data, _made(r, kwargs, _number_dtype(data)))

    def has_traced(value) -> bool:
        return isinstance(value, Traced) or (isinstance(value, (tuple, list)) and any(map(has_traced, value)))

    if has_traced(data):
        raise Unmapped("a tensor made from values of other tensors")
    made = torch.tensor(data)
    dtype = _made(r, kwargs, dtype_name(made.dtype))
    if made.numel() == 0:
        return r.full(made.shape, 0, dtype)
    return r.copy(r.constant(made.to(TORCH_DTYPES[dtype])))


# random numbers: Philox, seeded by PyTorch's default generator once a call of the program


def _drawn(r: Recording, op: str, shape, dtype: str, **attributes) -> Traced:
    offset = r.recorder.next_offset(prod(shape))
    seed = r.recorder.seed()
    value = r.recorder.emit(op, [seed], {"shape": tuple(shape), "dtype": dtype, "offset": offset, **attributes})[0]
    return r.wrap(value)


def _random_maker(name: str, op: str):
    @call(f"torch.{name}")
    def make(r: Recording, *args, **kwargs):
        shape = _sizes(args, kwargs)
        return _drawn(r, op, shape, _made(r, kwargs, _default_float()))

    @call(f"torch.{name}_like")
    def make_like(r: Recording, input: Traced, **kwargs):
        return _drawn(r, op, input.shape, _made(r, kwargs, input.dtype))


_random_maker("rand", "uniform")
_random_maker("randn", "normal")


@call("Tensor.uniform")
def _uniform(r: Recording, input: Traced, *args, **kwargs):
    low, high = (*args, *kwargs.values(), *(0.0, 1.0)[len(args) + len(kwargs) :])
    drawn = _drawn(r, "uniform", input.shape, input.dtype)
    return r.emit("add", r.emit("mul", drawn, high - low), low)


@call("Tensor.normal")
def _normal(r: Recording, input: Traced, mean: float = 0.0, std: float = 1.0):
    return r.emit("add", r.emit("mul", _drawn(r, "normal", input.shape, input.dtype), std), mean)


@call("torch.bernoulli", "Tensor.bernoulli")
def _bernoulli(r: Recording, input: Traced, p=None, **kwargs):
    ignore(kwargs)
    if isinstance(p, (int, float)):
        probability = r.full(input.shape, p, "f32")
    else:
        probability = input if p is None else p
    offset = r.recorder.next_offset(input.count)
    value = r.recorder.emit("bernoulli", [probability.value, r.recorder.seed()], {"offset": offset})[0]
    return r.convert(r.wrap(value), input.dtype)
