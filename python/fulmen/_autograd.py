"""Autograd for what C++ runs: a torch.autograd.Function whose two directions are C functions (bindings/autograd.cpp).

A class made here is called from C++ only. Its contexts have the slot `state` for what the forward leaves; `watched` marks
gradients made with create_graph=True. Derivatives of derivatives don't exist: using the gradients as numbers is fine,
differentiating them again is an error that says so.
"""

import torch

from fulmen import _core
from fulmen._core import UnsupportedError


class _SecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, message, count, *tensors):
        ctx.message = message
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise UnsupportedError(ctx.message)


def mark_second_derivatives(message, made, watched):
    """The gradients `made` as a tuple; differentiating them again raises UnsupportedError(message)."""
    tensors = [t for t in watched if t is not None and t.requires_grad]
    return _SecondDerivative.apply(message, len(made), *made, *tensors)


def make_function(name, second_derivative):
    """A torch.autograd.Function for C++ to call; `second_derivative` is the text of the error for one."""

    class Compiled(torch.autograd.Function):
        forward = staticmethod(_core.autograd_forward)

        @staticmethod
        def backward(ctx, *grads):  # what autograd calls is `apply` of the context; others may look for this one
            return ctx.apply(*grads)

        @staticmethod
        def jvp(ctx, *tangents):
            raise UnsupportedError(f"{name}: forward-mode derivatives are not supported; use PyTorch's own operations for them")

    def watched(self, made, saved, incoming):
        return mark_second_derivatives(second_derivative, made, (*saved, *incoming))

    context = type(Compiled._backward_cls)(
        f"{name}Backward", (Compiled._backward_cls,), {"__slots__": ("state",), "watched": watched}
    )
    _core.use_autograd_backward(context)
    Compiled._backward_cls = context
    Compiled.__name__ = Compiled.__qualname__ = name
    return Compiled
