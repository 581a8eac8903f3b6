"""Attention called by itself: `fulmen.sdpa` with PyTorch's semantics, `fulmen.attention` with everything the op has.

A call is compiled once for each kind (dtypes, shapes, strides, options) and kept in C++; this file adds what belongs to
PyTorch: autocast, the random seed, and what is no plain tensor. Gradients are recorded in C++ (bindings/autograd.h). The meaning of every option stands in src/ops/sdpa_call.h.
"""

import warnings

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fulmen import _core
from fulmen._arguments import read_corner, read_flag, read_number, read_probability, read_window
from fulmen._attention_node import attention_node
from fulmen._autograd import make_function
from fulmen._core import Error, ShapeError, TypeError, UnsupportedError
from fulmen._executors import resolve

_torch_sdpa = F.scaled_dot_product_attention
_plain = _core.sdpa_plain
_run = _core.sdpa_call
_core.sdpa_use_torch(
    make_function("Sdpa", "fulmen.sdpa: second derivatives are not supported; use torch.nn.functional.scaled_dot_product_attention for them")
)
_core.rescan_openmp_runtime()
_plain_types = (torch.Tensor, torch.nn.Parameter)
_names = ("q", "k", "v", "attn_mask", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "key_lengths")


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """softmax(q k^T * scale + mask) v, as torch.nn.functional.scaled_dot_product_attention defines it.

    Shapes: q (..., heads, query_len, head_dim), k and v (..., key_heads, key_len, ...); leading dims broadcast, with
    `enable_gqa` heads may be a multiple of key_heads. `attn_mask` is bool (true: open) or float (added). A row with no
    open key gives zeros and zero gradients. Raises ShapeError or TypeError before any executor is asked.
    """
    if is_compiling():
        if isinstance(scale, torch.Tensor):
            q, scale = q * scale.to(q.dtype).reshape(()), 1.0
        return _torch_sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if type(dropout_p) in _numbers and dropout_p == 0.0:
        try:
            out = _plain(q, k, v, attn_mask, is_causal, scale, enable_gqa)
        except UnsupportedError:  # a claim that was revoked when it ran
            out = NotImplemented
        if out is not NotImplemented:
            return out
    options = _Options(read_flag("sdpa", "is_causal", is_causal), enable_gqa=read_flag("sdpa", "enable_gqa", enable_gqa))
    return _call("sdpa", (q, k, v, attn_mask, None, None, None, None, None), dropout_p, scale, options)


def attention(
    q,
    k,
    v,
    mask=None,
    *,
    is_causal=False,
    dropout_p=0.0,
    scale=None,
    enable_gqa=False,
    window=None,
    causal_corner="upper_left",
    softcap=0.0,
    sink=None,
    alibi_slopes=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    return_lse=False,
    deterministic=None,
    executors=None,
):
    """Attention with everything the op has, gradients included.

    window: (left, right), how many keys each side of the diagonal are open; None or a negative number is no limit.
    causal_corner: "upper_left" (the diagonal starts at the first key) or "lower_right" (it ends at the last key); the
    window's diagonal is the same. softcap: scores become softcap * tanh(scores / softcap). sink: (heads,) float32,
    a logit that takes part in the softmax and has no value. alibi_slopes: (heads,) float32, the score loses
    slope * distance to the diagonal. cu_seqlens_q, cu_seqlens_k: int32 (count + 1), cumulative lengths of sequences
    packed along the length of a batch of 1; tokens of different sequences don't see each other. key_lengths: int32
    (batch,), keys from there on are closed. return_lse: also give the log-sum-exp of each row, (..., heads, query_len)
    float32, as a second result. deterministic: None follows torch.use_deterministic_algorithms.
    """
    lower_right = read_corner("attention", causal_corner)
    left, right = _no_window if window is None else read_window("attention", window)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, absent = ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_k is None else ("cu_seqlens_k", "cu_seqlens_q")
        raise TypeError(f"attention: {given} is given and {absent} is not; packed sequences need both")
    handles = None if executors is None or is_compiling() else resolve(executors)  # a compiled program has a list of its own
    if type(dropout_p) in _numbers and dropout_p == 0.0 and not is_compiling():
        out = _run(
            q, k, v, mask, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, key_lengths, None, is_causal, lower_right, enable_gqa, left,
            right, 0.0, scale, softcap, return_lse, deterministic, handles, False,
        )  # fmt: skip
        if out is not NotImplemented:
            return out
    tensors = (q, k, v, mask, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, key_lengths)
    options = _Options(
        read_flag("attention", "is_causal", is_causal), lower_right, read_flag("attention", "enable_gqa", enable_gqa), left, right,
        read_number("attention", "softcap", softcap), read_flag("attention", "return_lse", return_lse),
        None if deterministic is None else read_flag("attention", "deterministic", deterministic), handles,
    )  # fmt: skip
    if is_compiling():
        return attention_node(tensors, dropout_p, scale, options)
    return _call("attention", tensors, dropout_p, scale, options)


_no_window = (-1, -1)
_numbers = frozenset((float, int))


class _Options:
    """The options of a call that are no tensors, but for dropout and scale."""

    __slots__ = ("causal", "lower_right", "gqa", "left", "right", "softcap", "lse", "deterministic", "executors")

    def __init__(self, causal, lower_right=False, enable_gqa=False, left=-1, right=-1, softcap=0.0, lse=False, deterministic=None, executors=None):
        self.causal, self.lower_right, self.gqa = causal, lower_right, enable_gqa
        self.left, self.right, self.softcap, self.lse = left, right, softcap, lse
        self.deterministic, self.executors = deterministic, executors


def _call(name, tensors, dropout_p, scale, options):
    q = tensors[0]
    foreign = None  # of a subclass, which has operations of its own
    for tensor, argument in zip(tensors, _names):
        if tensor is None and argument not in ("q", "k", "v"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {argument} is a {type(tensor).__name__}; a torch.Tensor is needed")
        if tensor.is_nested:
            raise UnsupportedError(f"{name}: {argument} is a nested tensor; pack the sequences and give their cumulative lengths to fulmen.attention")
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"{name}: {argument} has layout {tensor.layout}; a strided tensor is needed")
        if (tensor.device.type == "meta") != (q.device.type == "meta"):
            raise TypeError(f"{name}: {argument} is on {tensor.device}, q is on {q.device}; all must be on one device")
        if foreign is None and type(tensor) not in _plain_types:
            foreign = argument, type(tensor)
    dropout_p = read_probability(name, "dropout_p", dropout_p)
    if foreign is not None:
        argument, kind = foreign
        if not kind.__module__.startswith("torch._subclasses"):  # PyTorch's own stand-ins for tensors run nothing
            _say(f"{name}: PyTorch runs this call: {argument} is a {kind.__name__}, a subclass of torch.Tensor with operations of its own")
        return _with_torch(name, tensors, dropout_p, scale, options)
    if q.device.type == "meta":  # nothing to run: only the type of the result is wanted
        _check_types(name, tensors, options)
        return _with_torch(name, tensors, dropout_p, scale, options)
    device = q.device
    try:
        if transforms_active():
            from fulmen._attention_transforms import transformed_attention

            return transformed_attention(name, tensors, dropout_p, scale, options)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            # As PyTorch's autocast: float operands of 32 bits and fewer take the low dtype, the mask too.
            tensors = tuple(
                t.to(dtype) if i < 4 and t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t
                for i, t in enumerate(tensors)
            )
        tensors, scale = _with_number(name, tensors, scale)
        seed = _draw_seed(device) if dropout_p > 0.0 else None
        return run_prepared(tensors, seed, dropout_p, scale, options)
    except UnsupportedError as error:
        if device.type == "cpu" or options.executors is not None:  # asked for by name
            raise
        # No executor of ours takes everything on a GPU: PyTorch runs what nobody claims.
        _say(f"{name}: PyTorch runs this call, since no executor of Fulmen claims it: {error}")
        return _with_torch(name, tensors, dropout_p, scale, options)


def _check_types(name, tensors, options):
    """The errors of the op's own rule, for tensors without memory."""
    from fulmen._claims import claims

    try:
        claims(
            "sdpa", *tensors[:4], sink=tensors[4], alibi_slopes=tensors[5], cu_seqlens_q=tensors[6], cu_seqlens_k=tensors[7],
            key_lengths=tensors[8], is_causal=options.causal, enable_gqa=options.gqa, softcap=options.softcap, executors=[],
        )  # fmt: skip
    except Error as error:
        raise type(error)(str(error).replace("claims: ", f"{name}: ", 1)) from None


def transforms_active():
    """Whether a transform of torch.func, or forward-mode differentiation, watches what is called."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def run_prepared(tensors, seed, dropout_p, scale, options):
    """Runs, and records for autograd, a call whose tensors are as the op takes them and whose scale is a number or None."""
    return _run(
        *tensors, seed, options.causal, options.lower_right, options.gqa, options.left, options.right, float(dropout_p), scale,
        options.softcap, options.lse, options.deterministic, options.executors, True,
    )  # fmt: skip


def _with_number(name, tensors, scale):
    """A scale that is a tensor goes into the query, so that it gets its gradient."""
    if scale is None or type(scale) is float:
        return tensors, scale
    if not isinstance(scale, torch.Tensor):
        return tensors, read_number(name, "scale", scale)
    query = tensors[0]
    if scale.layout is not torch.strided or scale.is_complex() or scale.is_quantized:
        raise TypeError(f"{name}: scale has layout {scale.layout} and dtype {scale.dtype}; a number or a plain real tensor is needed")
    if scale.numel() != 1:
        raise ShapeError(f"{name}: scale has shape {list(scale.shape)}; a number or a tensor with one element is needed")
    if scale.device.type not in (query.device.type, "cpu"):
        raise TypeError(f"{name}: scale is on {scale.device}, q is on {query.device}; all must be on one device")
    return (query * scale.to(query.dtype).reshape(()), *tensors[1:]), 1.0


_said = set()


def _say(message):
    """A warning for each reason, once a process."""
    if message not in _said and len(_said) < 1000:
        _said.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _draw_seed(device):
    """Philox key and counter, int64 (2,), from the device's default generator: torch.manual_seed decides it."""
    return torch.empty(2, dtype=torch.int64, device=device).random_(0, 2**32)


def backward_with_torch(operands, grads, needs, attributes, why):
    """The gradients of a call on a GPU whose backward failed and that no other executor takes: PyTorch runs both directions.

    `operands` in the op's order, `grads` one an output, `needs` one an operand; called from C++.
    """
    given = attributes.get
    if given("dropout_p", 0.0) > 0.0:
        raise UnsupportedError(f"{why}; the dropout of the forward that ran can't be repeated by another")
    _say(f"sdpa: PyTorch runs this backward: {why}")
    lse = len(grads) > 1
    options = _Options(
        given("is_causal", False), given("lower_right", False), given("enable_gqa", False), given("window_left", -1), given("window_right", -1),
        given("softcap", 0.0), lse,
    )
    with torch.enable_grad():
        tensors = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(operands, needs)]
        plain = options.softcap == 0.0 and not lse and options.left < 0 and options.right < 0 and not options.lower_right
        plain = plain and not any(t is not None for t in tensors[4:])
        outputs = _with_torch("sdpa" if plain else "attention", tensors[:9], 0.0, given("scale"), options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [t for t, need in zip(tensors, needs) if need]
        pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None]
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if need else None for need in needs)


def _with_torch(name, tensors, dropout_p, scale, options):
    if name == "sdpa":
        return _torch_sdpa(*tensors[:4], dropout_p, options.causal, scale=scale, enable_gqa=options.gqa)
    from fulmen._attention_composed import composed_attention

    return composed_attention(*tensors, dropout_p, scale, options)
