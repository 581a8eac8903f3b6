"""Calls that have no adapter, taken apart: PyTorch itself says which smaller calls they are made of.

`expand` runs a call on fake tensors and keeps the ATen calls that it makes, as a graph; the recorder then walks that graph
in the call's place. Functions of torch.nn.functional become what their Python code calls; an ATen call that is unknown too
is opened by PyTorch's own decomposition, if it has one. Which adapter an ATen call has is looked up here as well: ATen's
names and arguments are those of torch.NAME and Tensor.NAME, the exceptions are in calls_aten.py.
"""

from __future__ import annotations

import torch

from .recording import TORCH_DTYPES, known
from .values import Traced, Unmapped

_CACHED_AT_MOST = 512
_cache: dict = {}


def _like(value: Traced, example) -> torch.Tensor:
    """A (fake) tensor of the traced one's type, with the example's strides where they are known."""
    stride = None
    if isinstance(example, torch.Tensor) and example.layout is torch.strided and example.dim() == value.rank:
        if tuple(map(known, example.shape)) == value.shape:
            stride = tuple(map(known, example.stride()))
    dtype = TORCH_DTYPES[value.dtype]
    if stride is None:
        return torch.empty(value.shape, dtype=dtype)
    return torch.empty_strided(value.shape, stride, dtype=dtype)


def _callable(op: str, target):
    return getattr(torch.Tensor, target) if op == "call_method" else target


def _is_aten(target) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def _opened(target):
    """What an ATen call that has no adapter is made of, and whether it calls what autograd sees; (None, ...) if PyTorch
    doesn't say."""
    from torch._decomp import decomposition_table

    found = decomposition_table.get(target)
    if found is None and target._can_decompose():
        return target, False  # its C++ code runs below autograd alone
    return found, True


def expand(op: str, target, args, kwargs, examples) -> tuple:
    """(graph module of ATen calls, the traced tensors that are its inputs in order). `examples`: like (args, kwargs), with
    example tensors where those are known. Unmapped where PyTorch can't run the call without its inputs' elements."""
    function, above_autograd = _callable(op, target), True
    if _is_aten(target):
        function, above_autograd = _opened(target)
        if function is None:
            raise Unmapped("it is not in Fulmen's table of calls")
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    example_leaves, example_spec = torch.utils._pytree.tree_flatten(examples)
    if example_spec != spec:
        example_leaves = [None] * len(leaves)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Traced)]
    traced = [leaves[place] for place in places]
    if not places:
        raise Unmapped("it is not in Fulmen's table of calls")

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        call_args, call_kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return function(*call_args, **call_kwargs)

    # Without autocast: the recorder follows it for each of the parts.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.autocast("cpu", enabled=False):
        inputs = [_like(leaves[place], example_leaves[place]) for place in places]
        key = _key(target, leaves, places, inputs, spec)
        if key is not None and key in _cache:
            return _cache[key], traced
        try:
            module = make_fx(run, pre_dispatch=above_autograd)(*inputs)
        except Exception as error:  # noqa: BLE001  whatever the call raises without real elements
            raise Unmapped(f"it is not in Fulmen's table of calls, and can't be taken apart ({_line(error)})") from error
    if all(node.op in ("placeholder", "output", "get_attr") or node.target is target for node in module.graph.nodes) and _is_aten(target):
        raise Unmapped("it is not in Fulmen's table of calls")
    if key is not None:
        if len(_cache) >= _CACHED_AT_MOST:
            _cache.clear()
        _cache[key] = module
    return module, traced


def _line(error) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:120]}" if text else type(error).__name__


def _key(target, leaves, places, inputs, spec):
    """What a graph depends on; None if an argument has no hash."""
    of_tensors = tuple((tuple(t.shape), tuple(t.stride()), t.dtype) for t in inputs)
    rest = tuple((type(leaf), leaf) for place, leaf in enumerate(leaves) if place not in places)
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    try:
        key = (target, of_tensors, tuple(places), rest, str(spec), torch.get_default_dtype())
        hash(key)
    except TypeError:
        return None
    return key
