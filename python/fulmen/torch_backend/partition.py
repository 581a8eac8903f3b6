"""Graphs that Fulmen does not know wholly: runs of known calls become Fulmen parts, the rest stays with PyTorch.

The calls keep their order, so random numbers, writes and modes mean what they meant. Each part is a graph of its own with
its own programs (specialise.py) and its own autograd Function; gradients flow across the borders by autograd.
"""

from __future__ import annotations

import operator

import torch

from .bodies import has_bodies, replacement
from .record import GraphRecorder, Modes, RecordedGraph

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


def _attribute(module, target: str):
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _graph_module(graph: torch.fx.Graph, module, parts: dict) -> torch.fx.GraphModule:
    """The graph with what it names: `parts` first, the rest from `module`."""
    names = {node.target for node in graph.nodes if node.op in ("get_attr", "call_module")}
    return torch.fx.GraphModule({name: parts[name] if name in parts else _attribute(module, name) for name in names}, graph)


class _Group:
    """A run of known calls as a graph of its own."""

    def __init__(self, module: torch.fx.GraphModule, nodes: list):
        inside = set(nodes)
        self.inputs: list = []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in self.inputs and source.op != "get_attr":
                    self.inputs.append(source)
        self.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        graph = torch.fx.Graph()
        env: dict = {}
        self.original: dict = {}
        for node in self.inputs:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in env and source.op == "get_attr":
                    env[source] = graph.node_copy(source, lambda n: env[n])
            env[node] = graph.node_copy(node, lambda n: env[n])
            self.original[env[node]] = node
        graph.output(tuple(env[node] for node in self.outputs))
        self.module = _graph_module(graph, module, {})


def _leave_what_parts_cannot(module, recorded: RecordedGraph, modes: Modes) -> None:
    """Finds calls that are known in the whole graph and not in a part of it, as a write to a view whose base lies outside,
    and lists them, until every part can be recorded."""
    while True:
        state, stack, found = Modes(modes.autocast, modes.grad_enabled), [], False
        for known, nodes in _groups(module, recorded):
            if not known:
                for node in nodes:
                    _follow(node, state, stack)
                continue
            group = _Group(module, nodes)
            examples = [node.meta.get("example_value") for node in group.inputs]
            if any(value is None for value in examples):
                continue
            probe = GraphRecorder(group.module, examples, Modes(state.autocast, state.grad_enabled), probe=True).run()
            texts = {group.original[node]: reason for node, reason in probe.eager_nodes.items()}
            for (node, reason), fallback in zip(texts.items(), probe.fallbacks):
                recorded.eager_nodes[node] = reason
                recorded.fallbacks.append(fallback)
                found = True
        if not found:
            return


def partition(module: torch.fx.GraphModule, recorded: RecordedGraph, modes: Modes, make_part, make_body) -> torch.fx.GraphModule:
    """The graph with each Fulmen part as one call. make_part(module, modes, name) gives the part as a module;
    make_body(module, modes, name) gives a graph with the same inputs and outputs for one that a call carries (bodies.py)."""
    _leave_what_parts_cannot(module, recorded, modes)
    graph = torch.fx.Graph()
    env: dict = {}
    parts: dict = {}
    bodies: dict = {}
    autocast_stack: list = []
    state = Modes(modes.autocast, modes.grad_enabled)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            env[node] = graph.node_copy(node, lambda n: env[n])
    for known, nodes in _groups(module, recorded):
        worth = known and sum(1 for node in nodes if _has_tensor(node) and node.target is not operator.getitem) >= _WORTH
        if not worth:
            for node in nodes:
                _follow(node, state, autocast_stack)
                env[node] = graph.node_copy(node, lambda n: env[n])
                if has_bodies(node):
                    env[node].target, differentiated = replacement(node)
                    bodies.update(
                        (source.target, Modes(state.autocast, state.grad_enabled and differentiated))
                        for source in node.args if isinstance(source, torch.fx.Node) and source.op == "get_attr"
                    )
            continue
        group = _Group(module, nodes)
        name = f"fulmen_part{len(parts)}"
        parts[name] = make_part(group.module, Modes(state.autocast, state.grad_enabled), name.removeprefix("fulmen_"))
        called = graph.call_module(name, tuple(env[node] for node in group.inputs))
        for place, node in enumerate(group.outputs):
            env[node] = graph.call_function(operator.getitem, (called, place))
            env[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], lambda n: env[n]))
    for target, body_modes in bodies.items():
        body = _attribute(module, target)
        if isinstance(body, torch.fx.GraphModule):
            parts[target] = make_body(body, body_modes, target)
    return _graph_module(graph, module, parts)


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
