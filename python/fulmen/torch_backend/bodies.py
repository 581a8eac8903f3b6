"""Calls that carry graphs of their own (checkpoints, custom autograd functions) and regions of torch.func transforms.

Such a call stays a border between Fulmen's parts; its graphs become programs of their own, so what it promises holds: a
checkpointed body keeps nothing and runs again in the backward pass, a custom function's own backward is used.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def _checkpointed(body, *args, **kwargs):
    """The body of a checkpoint, recomputed in the backward pass."""
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=kwargs.get("preserve_rng_state", True))


# Name of a higher-order operator -> what is called in its place (None: itself), and whether gradients are wanted of its graphs.
_WITH_BODIES = {
    "tag_activation_checkpoint": (_checkpointed, True),
    "wrap": (None, True),
    "autograd_function_apply": (None, False),
}


def has_bodies(node) -> bool:
    """Whether a node calls graphs that are compiled each alone."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _WITH_BODIES


def replacement(node):
    """(what to call for such a node, whether its graphs are differentiated)."""
    function, differentiated = _WITH_BODIES[node.target.name()]
    return function or node.target, differentiated


def _of_functorch(node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return "functorch" in module or name.startswith("_saved_tensors_hooks_")


def nodes_in_transforms(graph: torch.fx.Graph) -> set:
    """The calls between a torch.func transform's begin and end, whose tensors are wrapped, and its own calls."""
    found, depth = set(), 0
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        mark = getattr(node.target, "__name__", "") if _of_functorch(node) else None
        if mark is not None and mark.endswith("increment_nesting"):
            depth += 1
        if depth or mark is not None:
            found.add(node)
        if mark is not None and mark.endswith("decrement_nesting"):
            depth -= 1
    return found


def runs_in_transform(arguments) -> bool:
    """Whether a graph is called by a torch.func transform from outside."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in arguments)
