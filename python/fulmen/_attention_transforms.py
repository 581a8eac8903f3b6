"""Attention under torch.func and forward-mode differentiation.

vmap's dim becomes a leading dim of the call, grad, vjp and jacrev run our own backward (the forward runs again for it:
its saved values don't pass through transforms). Forward mode and second derivatives have no rule here and say so.
"""

import torch
from torch.autograd import forward_ad

from fulmen._core import UnsupportedError

_tensor_count = 9
_leading = 4  # q, k, v and the mask have leading dims; other operands have one form


def transformed_attention(name, tensors, dropout_p, scale, options):
    from fulmen._attention import _with_number

    for tensor in tensors:
        if tensor is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(_no_forward_mode(name))
    if dropout_p > 0.0:
        raise UnsupportedError(
            f"{name}: dropout_p is {dropout_p} under a transform of torch.func; apply dropout outside of it, or use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        raise UnsupportedError(f"{name}: autocast is on under a transform of torch.func; convert the tensors before the call")
    tensors, scale = _with_number(name, tensors, scale)
    return _Forward.apply((name, scale, options), *tensors)


def _no_forward_mode(name):
    return f"{name}: forward-mode derivatives are not supported; use torch.nn.functional.scaled_dot_product_attention for them"


def _run(settings, tensors):
    from fulmen._attention import run_prepared

    name, scale, options = settings
    if torch._C._are_functorch_transforms_active():  # an outer transform is on
        return transformed_attention(name, tensors, 0.0, scale, options)
    return run_prepared(tensors, None, 0.0, scale, options)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(settings, *tensors):
        return _run(settings, tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.settings = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[1:]
        made = iter(_Gradients.apply(ctx.settings, needs, *ctx.saved_tensors, *grads))
        return (None, *[next(made) if need else None for need in needs])

    @staticmethod
    def vmap(info, in_dims, settings, *tensors):
        batched = _batch(settings[0], info.batch_size, in_dims[1:], tensors, expand=False)
        made = _run(settings, batched)
        return made, ((0,) * len(made) if isinstance(made, tuple) else 0)

    @staticmethod
    def jvp(ctx, *tangents):
        raise UnsupportedError(_no_forward_mode(ctx.settings[0]))


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(settings, needs, *tensors):
        wanted = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs)]
        with torch.enable_grad():
            made = _run(settings, wanted)
            outputs = made if isinstance(made, tuple) else (made,)
            return torch.autograd.grad(outputs, [t for t, need in zip(wanted, needs) if need], tensors[_tensor_count:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0][0]

    @staticmethod
    def backward(ctx, *grads):
        raise UnsupportedError(
            f"{ctx.name}: second derivatives are not supported; use torch.nn.functional.scaled_dot_product_attention for them"
        )

    @staticmethod
    def vmap(info, in_dims, settings, needs, *tensors):
        batched = _batch(settings[0], info.batch_size, in_dims[2 : 2 + _tensor_count], tensors[:_tensor_count], expand=True)
        grads = [
            g.movedim(d, 0) if d is not None else g.expand(info.batch_size, *g.shape)
            for g, d in zip(tensors[_tensor_count:], in_dims[2 + _tensor_count :])
        ]
        made = _Gradients.apply(settings, needs, *batched, *grads)
        # Leading dims of size 1 were added where a tensor had fewer dims than the others.
        shapes = [_example_shape(t, d) for t, d, need in zip(tensors, in_dims[2:], needs) if need]
        return tuple(g.reshape(info.batch_size, *shape) for g, shape in zip(made, shapes)), (0,) * len(made)

    @staticmethod
    def jvp(ctx, *tangents):
        raise UnsupportedError(_no_forward_mode(ctx.name))


def _example_shape(tensor, dim):
    return tensor.shape if dim is None else tensor.movedim(dim, 0).shape[1:]


def _batch(name, size, dims, tensors, expand):
    """The operands with the batch as their first dim, which broadcasts where it isn't `expand`ed."""
    rank = max(t.dim() - (d is not None) for t, d in zip(tensors[:_leading], dims) if t is not None)
    made = []
    for place, (tensor, dim) in enumerate(zip(tensors, dims)):
        if tensor is None or (place >= _leading and dim is None):
            made.append(tensor)
            continue
        if place >= _leading:
            raise UnsupportedError(f"{name}: only q, k, v and the mask may have the dim that torch.vmap maps over")
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        tensor = tensor.reshape(tensor.shape[0], *[1] * (rank + 1 - tensor.dim()), *tensor.shape[1:])
        made.append(tensor.expand(size, *tensor.shape[1:]) if expand else tensor)
    if not expand and all(dim is None for dim in dims[:3]):  # the mask alone is mapped over: the op doesn't broadcast to a mask
        made[0] = made[0].expand(size, *made[0].shape[1:])
    return tuple(made)
