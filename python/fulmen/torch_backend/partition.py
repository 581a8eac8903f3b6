"""Graphs that Fulmen does not know wholly: runs of known calls become Fulmen parts, the rest stays with PyTorch.

The calls keep their order, so random numbers, writes and modes mean what they meant. Each part is a graph of its own with
its own programs (specialise.py) and its own autograd Function; gradients flow across the borders by autograd.
"""

from __future__ import annotations

import operator

import torch

from .record import Modes, RecordedGraph

_MODE_CALLS = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")

# Parts with fewer calls than this that cost time are left to PyTorch: crossing the border costs more than they save.
_WORTH = 1


def _is_mode(node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _MODE_CALLS


def _has_tensor(node) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)


def _groups(module: torch.fx.GraphModule, recorded: RecordedGraph) -> list[tuple[bool, list]]:
    """Runs of nodes in graph order, each with whether Fulmen takes it."""
    groups: list[tuple[bool, list]] = []
    taken: dict = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        known = node not in recorded.eager_nodes and not _is_mode(node)
        if known and node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            known = taken.get(node.args[0], not isinstance(node.args[0].meta.get("example_value"), (tuple, list)))
        taken[node] = known
        if groups and groups[-1][0] == known:
            groups[-1][1].append(node)
        else:
            groups.append((known, [node]))
    return groups


def _part_module(module: torch.fx.GraphModule, nodes: list, inputs: list, outputs: list) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    env: dict = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in env and source.op == "get_attr":
                env[source] = graph.node_copy(source, lambda n: env[n])
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in outputs))
    return torch.fx.GraphModule(module, graph)


def partition(module: torch.fx.GraphModule, recorded: RecordedGraph, modes: Modes, make_part) -> torch.fx.GraphModule:
    """The graph with each Fulmen part as one call. make_part(module, modes, name) gives the callable."""
    graph = torch.fx.Graph()
    env: dict = {}
    names = 0
    autocast_stack: list = []
    state = Modes(modes.autocast, modes.grad_enabled)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            env[node] = graph.node_copy(node, lambda n: env[n])
    result = torch.fx.GraphModule(module, torch.fx.Graph())
    for known, nodes in _groups(module, recorded):
        worth = known and sum(1 for node in nodes if _has_tensor(node) and node.target is not operator.getitem) >= _WORTH
        if not worth:
            for node in nodes:
                _follow(node, state, autocast_stack)
                env[node] = graph.node_copy(node, lambda n: env[n])
            continue
        inside = set(nodes)
        inputs: list = []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in inputs and source.op != "get_attr":
                    inputs.append(source)
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        part = make_part(_part_module(module, nodes, inputs, outputs), Modes(state.autocast, state.grad_enabled), f"part{names}")
        name = f"fulmen_part{names}"
        names += 1
        result.add_module(name, part)
        called = graph.call_module(name, tuple(env[node] for node in inputs))
        for place, node in enumerate(outputs):
            env[node] = graph.call_function(operator.getitem, (called, place))
            env[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], lambda n: env[n]))
    result.graph = graph
    result.recompile()
    return result


def _follow(node, state: Modes, autocast_stack: list) -> None:
    """Keeps `state` at what the modes are after an eager mode call."""
    if not _is_mode(node):
        return
    name = node.target.__name__
    if name == "_set_grad_enabled":
        state.grad_enabled = bool(node.args[0])
    elif name == "_enter_autocast":
        from .recording import dtype_name

        device, dtype, enabled = (*node.args, *(None,) * 3)[:3]
        autocast_stack.append(state.autocast)
        state.autocast = dtype_name(dtype or torch.get_autocast_dtype(device)) if enabled else None
    else:
        state.autocast = autocast_stack.pop()
