"""Adapters of the layers of networks: products, norms, losses, dropout, embedding, convolution, attention."""

from __future__ import annotations

import torch

from .calls import call, ignore
from .recording import FLOATS, Recording, dtype_name
from .values import NotTakenApart, Traced, Unmapped


@call("torch.nn.functional.linear", "torch._C._nn.linear")
def _linear(r: Recording, input, weight, bias=None):
    return r.emit("linear", input, weight, bias)


@call("torch.nn.functional.layer_norm", "torch.layer_norm")
def _layer_norm(r: Recording, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return r.emit("layer_norm", input, weight, bias, normalized_ndim=len(tuple(normalized_shape)), eps=eps)


@call("torch.nn.functional.rms_norm", "torch.rms_norm")
def _rms_norm(r: Recording, input, normalized_shape, weight=None, eps=None):
    attributes = {} if eps is None else {"eps": eps}
    return r.emit("rms_norm", input, weight, normalized_ndim=len(tuple(normalized_shape)), **attributes)


@call("torch.nn.functional.group_norm", "torch.group_norm")
def _group_norm(r: Recording, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    return r.emit("group_norm", input, weight, bias, groups=num_groups, eps=eps)


@call("torch.nn.functional.batch_norm")
def _batch_norm(r: Recording, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    result, mean, var = r.emit_all(
        "batch_norm", input, weight, bias, running_mean, running_var,
        training=bool(training), momentum=0.0 if momentum is None else momentum, eps=eps,
    )
    if training:
        for buffer, new in ((running_mean, mean), (running_var, var)):
            if buffer is not None:
                r.write(buffer, r.detach(new))
    return result


@call("torch.nn.functional.softmax", "torch.softmax", "Tensor.softmax", "torch.special.softmax")
def _softmax(r: Recording, input, dim=None, _stacklevel=3, dtype=None):
    return _soft(r, "softmax", input, dim, _stacklevel, dtype)


@call("torch.nn.functional.log_softmax", "torch.log_softmax", "Tensor.log_softmax", "torch.special.log_softmax")
def _log_softmax(r: Recording, input, dim=None, _stacklevel=3, dtype=None):
    return _soft(r, "log_softmax", input, dim, _stacklevel, dtype)


def _soft(r: Recording, op: str, input, dim, third, dtype):
    if isinstance(third, torch.dtype):  # torch.softmax(x, dim, dtype)
        dtype = third
    if dim is None:
        dim = 0 if input.rank in (0, 1, 3) else 1
    return r.emit(op, input, dim=dim, **({} if dtype is None else {"dtype": dtype_name(dtype)}))


@call("torch.nn.functional.softmin")
def _softmin(r: Recording, input, dim=None, _stacklevel=3, dtype=None):
    return _soft(r, "softmax", r.emit("neg", input), dim, _stacklevel, dtype)


def _drop(r: Recording, input: Traced, p: float) -> Traced:
    if p == 0 or input.count == 0:
        return r.copy(input)
    offset = r.recorder.next_offset(input.count)
    return r.wrap(r.recorder.emit("dropout", [input.value, r.recorder.seed()], {"p": p, "offset": offset})[0])


@call("torch.nn.functional.dropout")
def _dropout(r: Recording, input, p=0.5, training=True, inplace=False):
    if not training:
        return input
    result = _drop(r, input, p)
    return r.write(input, result) if inplace else result


@call("torch.dropout")
def _torch_dropout(r: Recording, input, p, train):
    return _dropout(r, input, p, train)


@call("torch.nn.functional.dropout1d", "torch.nn.functional.dropout2d", "torch.nn.functional.dropout3d")
def _channel_dropout(r: Recording, input, p=0.5, training=True, inplace=False):
    if not training or p == 0:
        return input
    if input.rank < 3:
        raise Unmapped("channel dropout of a tensor with fewer than 3 dims")
    ones = r.full(input.shape[:2] + (1,) * (input.rank - 2), 1, input.dtype)
    result = r.emit("mul", input, _drop(r, ones, p))
    return r.write(input, result) if inplace else result


@call("torch.nn.functional.embedding")
def _embedding(r: Recording, input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if max_norm is not None:
        raise NotTakenApart("embedding with max_norm changes its weights")
    if scale_grad_by_freq or sparse:
        raise NotTakenApart("embedding with scale_grad_by_freq or sparse gradients")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    attributes = {} if padding_idx is None else {"padding_idx": padding_idx}
    return r.emit("embedding", weight, input, **attributes)


@call("torch.embedding")
def _torch_embedding(r: Recording, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return _embedding(r, indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)


def _reduction(kwargs: dict, size_average, reduce, reduction: str) -> str:
    if size_average is not None or reduce is not None:
        raise Unmapped("the old arguments size_average and reduce")
    ignore(kwargs)
    return reduction


@call("torch.nn.functional.cross_entropy")
def _cross_entropy(
    r: Recording, input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, **kwargs,
):
    reduction = _reduction(kwargs, size_average, reduce, reduction)
    return r.emit_all(
        "cross_entropy", input, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )[0]


@call("torch.nn.functional.nll_loss")
def _nll_loss(r: Recording, input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    reduction = _reduction({}, size_average, reduce, reduction)
    return r.emit("nll_loss", input, target, weight, reduction=reduction, ignore_index=ignore_index)


def _pair_loss(op: str, *extra: tuple):
    names = [name for name, _ in extra]

    @call(f"torch.nn.functional.{op}")
    def loss(r: Recording, input, target, size_average=None, reduce=None, reduction="mean", *args, **kwargs):
        attributes = dict(extra)
        attributes.update(zip(names, args))
        attributes.update((name, kwargs.pop(name)) for name in names if name in kwargs)
        if kwargs.pop("weight", None) is not None:
            raise Unmapped(f"{op} with weight")
        reduction = _reduction(kwargs, size_average, reduce, reduction)
        input, target = _broadcast_pair(r, input, target)
        return r.emit(op, input, target, reduction=reduction, **attributes)


def _broadcast_pair(r: Recording, input: Traced, target: Traced) -> tuple:
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return r.expand(input, shape), r.expand(target, shape)


_pair_loss("mse_loss")
_pair_loss("l1_loss")
_pair_loss("kl_div", ("log_target", False))


@call("torch.nn.functional.smooth_l1_loss")
def _smooth_l1(r: Recording, input, target, size_average=None, reduce=None, reduction="mean", beta=1.0):
    return r.emit("smooth_l1_loss", *_broadcast_pair(r, input, target), reduction=_reduction({}, size_average, reduce, reduction), beta=beta)


@call("torch.nn.functional.huber_loss")
def _huber(r: Recording, input, target, reduction="mean", delta=1.0, weight=None):
    if weight is not None:
        raise Unmapped("huber_loss with weight")
    return r.emit("huber_loss", *_broadcast_pair(r, input, target), reduction=reduction, delta=delta)


@call("torch.nn.functional.binary_cross_entropy_with_logits")
def _bce_with_logits(r: Recording, input, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None):
    reduction = _reduction({}, size_average, reduce, reduction)
    return r.emit("binary_cross_entropy_with_logits", input, target, weight, pos_weight, reduction=reduction)


@call("torch.nn.functional.binary_cross_entropy", "torch._C._nn.binary_cross_entropy")
def _bce(r: Recording, input, target, weight=None, size_average=None, reduce=None, reduction="mean"):
    return r.emit("binary_cross_entropy", input, target, weight, reduction=_reduction({}, size_average, reduce, reduction))


def _adaptive_max_pool(rank: int, *names: str):
    @call(f"torch.nn.functional.adaptive_max_pool{rank}d", *names)
    def pool(r: Recording, input: Traced, output_size, return_indices=False):
        """Windows of one size, of which the first largest element gets the gradient."""
        sizes = input.shape[-rank:]
        wanted = [output_size] * rank if isinstance(output_size, int) else list(output_size)
        wanted = [size if want is None else want for want, size in zip(wanted, sizes)]
        if return_indices:
            raise NotTakenApart("adaptive_max_pool with return_indices")
        if input.rank not in (rank + 1, rank + 2) or not all(want and size % want == 0 for want, size in zip(wanted, sizes)):
            raise Unmapped("adaptive_max_pool with windows of several sizes")
        windows = [size // want for want, size in zip(wanted, sizes)]
        if rank == 2:
            return r.emit("max_pool2d", input, kernel=tuple(windows))
        return r.squeeze(r.emit("max_pool2d", r.unsqueeze(input, -2), kernel=(1, *windows)), -2)


_adaptive_max_pool(1)
_adaptive_max_pool(2)


@call("torch.nn.functional.glu", "torch._C._nn.glu")
def _glu(r: Recording, input, dim=-1):
    half = input.shape[dim] // 2
    return r.emit("mul", r.slice(input, dim, 0, half), r.emit("sigmoid", r.slice(input, dim, half, None)))


@call("torch.nn.functional.hardtanh", "torch._C._nn.hardtanh")
def _hardtanh(r: Recording, input, min_val=-1.0, max_val=1.0, inplace=False):
    result = r.emit("hardtanh" if input.is_float else "clamp", input, **_named(input, min_val, max_val))
    return r.write(input, result) if inplace else result


def _named(input: Traced, low, high) -> dict:
    return {"min_val": low, "max_val": high} if input.is_float else {"min": low, "max": high}


def _activation(op: str, *names: str):
    """An activation whose last argument may ask to write its result to its input."""

    @call(f"torch.nn.functional.{op}", *names)
    def activation(r: Recording, input, inplace=False):
        result = r.emit(op, input)
        return r.write(input, result) if inplace else result


_activation("relu", "torch.relu", "Tensor.relu")
_activation("relu6", "torch._C._nn.relu6")
_activation("silu", "torch._C._nn.silu")


@call("torch.nn.functional.tanhshrink")
def _tanhshrink(r: Recording, input):
    return r.emit("sub", input, r.emit("tanh", input))


def _per_axis(value, count: int) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * count


def _convolution(axes: int, *names: str):
    @call(*names)
    def conv(r: Recording, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        stride, dilation = _per_axis(stride, axes), _per_axis(dilation, axes)
        if input.rank == axes + 1:
            result = conv(r, r.unsqueeze(input, 0), weight, bias, stride, padding, dilation, groups)
            return r.squeeze(result, 0)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
            padding = tuple(t // 2 for t in total)
            if any(t % 2 for t in total):
                input = r.emit("pad", input, pads=[0] * 4 + [side for t in total for side in (0, t % 2)])
        elif padding == "valid":
            padding = 0
        return r.emit(
            "convolution", input, weight, bias,
            stride=stride, padding=_per_axis(padding, axes), dilation=dilation, groups=groups,
        )


_convolution(1, "torch.conv1d", "torch.nn.functional.conv1d")
_convolution(2, "torch.conv2d", "torch.nn.functional.conv2d")
_convolution(3, "torch.conv3d", "torch.nn.functional.conv3d")


@call("torch.nn.functional.scaled_dot_product_attention", "torch._C._nn.scaled_dot_product_attention")
def _attention(r: Recording, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if isinstance(scale, Traced):
        raise Unmapped("attention with its scale in a tensor")
    if attn_mask is not None and is_causal:
        raise Unmapped("attention with a mask and is_causal")
    operands = [query, key, value]
    if (len({x.dtype for x in operands}) != 1 and r.recorder.autocast is None) or operands[0].dtype not in FLOATS:
        raise Unmapped(f"attention over {', '.join(x.dtype for x in operands)}")
    attributes = {"is_causal": bool(is_causal), "enable_gqa": bool(enable_gqa)}
    if scale is not None:
        attributes["scale"] = float(scale)
    seed = None
    if dropout_p > 0:
        attributes["dropout_p"] = float(dropout_p)
        seed = _own_seed(r, key.shape[-2])
    mask = None if attn_mask is None else attn_mask.value
    inputs = [query.value, key.value, value.value, mask, *[None] * 5, seed]
    return r.wrap(r.recorder.emit("sdpa", inputs, attributes)[0])


@call("torch.ops.fulmen.attention.default")
def _fulmen_attention(
    r: Recording, q, k, v, mask, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, key_lengths, dropout_p, scale, is_causal, lower_right,
    enable_gqa, window_left, window_right, softcap, return_lse,
):
    operands = [q, k, v, mask, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, key_lengths]
    autocast = r.recorder.autocast
    if autocast is not None:  # as in eager mode: sink and slopes keep their dtype
        operands[:4] = [r.convert(x, autocast) if x is not None and x.dtype in ("f16", "bf16", "f32") else x for x in operands[:4]]
    attributes = {
        "is_causal": is_causal, "lower_right": lower_right, "enable_gqa": enable_gqa, "window_left": window_left,
        "window_right": window_right, "softcap": softcap, "return_lse": return_lse,
    }  # fmt: skip
    if scale is not None:
        attributes["scale"] = scale
    seed = None
    if dropout_p > 0:
        attributes["dropout_p"] = dropout_p
        seed = _own_seed(r, k.shape[-2])
    r.recorder.set_autocast(None)
    try:
        results = r.recorder.emit("sdpa", [*(None if x is None else x.value for x in operands), seed], attributes)
    finally:
        r.recorder.set_autocast(autocast)
    return tuple(r.wrap(value) for value in results)


def _own_seed(r: Recording, draws: int) -> int:
    """The program's seed moved to counters of its own: attention has no offset attribute."""
    offset = r.recorder.next_offset(draws)
    seed = r.recorder.seed()
    if offset == 0:
        return seed
    step = r.recorder.emit("arange", [], {"start": 0, "end": offset + 1, "step": offset, "dtype": "i64"})[0]
    return r.recorder.emit("add", [seed, step], {})[0]


@call("torch._C._log_api_usage_once")
def _nothing(r: Recording, *args):
    return None


@call("torch.baddbmm", "Tensor.baddbmm")
def _baddbmm(r: Recording, input, batch1, batch2, *, beta=1, alpha=1):
    return r.emit("baddbmm", input, batch1, batch2, beta=beta, alpha=alpha)
