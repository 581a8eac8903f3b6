"""`fulmen.attention` as one operator of PyTorch's dispatcher, torch.ops.fulmen.attention.

torch.compile sees one call in the graph: the backend "fulmen" records it as one `sdpa` node
(torch_backend/calls_network.py), which an executor claims whole; other backends see it come apart into PyTorch's own
operations (_attention_composed.py). Run as it is, it is the eager call.
"""

import torch

from fulmen._core import ShapeError

_library = torch.library.Library("fulmen", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sink, Tensor? alibi_slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? key_lengths, float dropout_p, float? scale, bool is_causal, bool lower_right, "
    "bool enable_gqa, int window_left, int window_right, float softcap, bool return_lse) -> Tensor[]"
)


def _run(*arguments):
    from fulmen import _attention

    tensors = arguments[:9]
    dropout_p, scale, is_causal, lower_right, enable_gqa, left, right, softcap, return_lse = arguments[9:]
    options = _attention._Options(is_causal, lower_right, enable_gqa, left, right, softcap, return_lse)
    result = _attention._call("attention", tensors, dropout_p, scale, options)
    return list(result) if return_lse else [result]


# Made of other operators as far as PyTorch is concerned: autograd, fake tensors and functionalisation see those.
_library.impl("attention", _run, "CompositeImplicitAutograd")
_operator = torch.ops.fulmen.attention.default


def attention_node(tensors, dropout_p, scale, options):
    """The call inside torch.compile; operands and options as in fulmen._attention."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ShapeError(f"attention: scale has shape {list(scale.shape)}; a number or a tensor with one element is needed")
        tensors = (tensors[0] * scale.to(tensors[0].dtype).reshape(()), *tensors[1:])
        scale = 1.0
    results = _operator(
        *tensors, float(dropout_p), None if scale is None else float(scale), options.causal, options.lower_right, options.gqa,
        options.left, options.right, options.softcap, options.lse,
    )  # fmt: skip
    return (results[0], results[1]) if options.lse else results[0]
