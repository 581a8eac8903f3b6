"""From an FX graph to a trace: walks the nodes in order and records each call.

Nodes that Fulmen does not know are noted with the reason; partition.py leaves them to PyTorch. The result says how the
program's inputs are put together from the caller's arguments, and how the caller's results are put together from the
program's outputs: results that are views are made again by PyTorch, so they share memory as in eager mode, and inputs
that the graph writes to get their new contents after the run.
"""

from __future__ import annotations

import builtins
import operator
from dataclasses import dataclass, field

import torch
from torch.fx.node import map_arg

from .. import _core
from .bodies import has_bodies, nodes_in_transforms
from .calls import describe, find
from .expand import expand
from .overlap import overlap
from .recording import TORCH_DTYPES, Recording, dtype_name, known
from .values import NotTakenApart, Traced, Unmapped


@dataclass
class Fallback:
    """A node that stays with PyTorch."""

    node: str  # its text in the graph
    call: str
    reason: str


@dataclass
class Modes:
    """What PyTorch's modes were when the graph was compiled."""

    autocast: str | None = None  # dtype
    grad_enabled: bool = True

    @staticmethod
    def ambient(device: str = "cpu") -> "Modes":
        kind = torch.device(device).type
        dtype = dtype_name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        return Modes(dtype, torch.is_grad_enabled())


@dataclass
class Result:
    """One leaf of what the graph returns."""

    kind: str  # "output", "input", "value"
    index: int = 0  # of the trace output or the caller's argument; ~k for constant k
    steps: tuple = ()  # view steps from there
    value: object = None


@dataclass
class RecordedGraph:
    """A recorded graph. `trace` is None if `eager_nodes` has nodes: then no part of it has been compiled yet."""

    trace: object = None
    fallbacks: list[Fallback] = field(default_factory=list)
    node_count: int = 0  # calls in the graph
    tensor_arguments: list[int] = field(default_factory=list)  # places of the caller's arguments that are inputs
    constants: list[torch.Tensor] = field(default_factory=list)
    has_seed: bool = False
    results: list[Result] = field(default_factory=list)
    result_spec: object = None
    mutations: list[tuple[int, int]] = field(default_factory=list)  # (caller's argument or ~constant, trace output) to copy back
    needs_grad: bool = False  # whether some output carries a gradient
    eager_nodes: dict = field(default_factory=dict)  # fx node -> reason; what PyTorch runs, calls of bodies.py included

    @property
    def coverage(self) -> float:
        return 1.0 - len(self.fallbacks) / self.node_count if self.node_count else 1.0


def _storage(node) -> object:
    """What tells the memory of a node's example value from others; None if it is not known."""
    if not isinstance(node, torch.fx.Node):
        return None
    value = node.meta.get("example_value")
    return _storage_of(value) if isinstance(value, torch.Tensor) else None


def _storage_of(value: torch.Tensor) -> object:
    try:
        return value.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _concrete(value):
    """Numbers of PyTorch's own kinds as Python's."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if isinstance(value, torch.Size):
        return tuple(map(known, value))
    return value


_ATTRIBUTES = {
    "shape": lambda r, x: tuple(x.shape),
    "ndim": lambda r, x: x.rank,
    "dtype": lambda r, x: TORCH_DTYPES[x.dtype],
    "device": lambda r, x: torch.device(r.device),
    "is_cuda": lambda r, x: torch.device(r.device).type == "cuda",
    "requires_grad": lambda r, x: x.requires_grad,
    "T": lambda r, x: r.permute(x, tuple(reversed(range(x.rank)))),
    "mT": lambda r, x: r.transpose(x, -2, -1),
    "data": lambda r, x: r.detach(x),
}

_METHODS = {
    "size": lambda r, x, dim=None: tuple(x.shape) if dim is None else x.shape[dim],
    "dim": lambda r, x: x.rank,
    "ndimension": lambda r, x: x.rank,
    "numel": lambda r, x: x.count,
    "nelement": lambda r, x: x.count,
    "is_floating_point": lambda r, x: x.is_float,
    "is_contiguous": None,
    "get_device": None,
}

# How often a call is taken apart again (expand.py).
_DEPTH = 6

_PAIR_FIELDS = {"values": 0, "indices": 1}


class _Unreadable:
    """Stands for a tensor that no trace can hold (complex, sparse, an unknown dtype): what takes it stays with PyTorch."""

    def __init__(self, reason: str):
        self.reason = reason


class GraphRecorder:
    """Walks one graph. `arguments` are the real or fake tensors and numbers it is called with."""

    def __init__(self, module: torch.fx.GraphModule, arguments, modes: Modes, name: str = "program", probe: bool = False):
        self.module = module
        self.graph = module.graph
        self.arguments = list(arguments)
        self.recording = Recording(name)
        self.recording.device = self._device()
        self.modes = modes
        self.probe = probe  # go on after a node that is not known, to list them all
        self.recorded = RecordedGraph()
        self.env: dict = {}
        self.argument_inputs: dict[int, Traced] = {}
        self.storages: dict = {}
        self.transformed = nodes_in_transforms(self.graph)
        self._autocast_stack: list = []
        self.recording.recorder.set_autocast(modes.autocast)
        self.recording.recorder.grad_enabled = modes.grad_enabled

    def _device(self) -> str:
        for argument in self.arguments:
            if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
                return str(argument.device)
        return "cpu"

    # the walk

    def run(self) -> RecordedGraph:
        placeholders = 0
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, placeholders)
                placeholders += 1
            elif node.op == "output":
                self._output(node)
            else:
                self._step(node)
        recorded = self.recorded
        if recorded.eager_nodes:
            return recorded
        recorded.constants = self.recording.constants
        recorded.has_seed = self.recording.recorder.has_seed
        recorded.trace = self.recording.recorder.finish()
        return recorded

    def _placeholder(self, node, place: int) -> None:
        value = _concrete(self.arguments[place])
        if isinstance(value, torch.Tensor):
            try:
                traced = self.recording.input(_short(node.name), value)
            except Unmapped as error:
                if not self.probe:
                    raise
                self.env[node] = _Unreadable(str(error))
                return
            self.recorded.tensor_arguments.append(place)
            self.argument_inputs[place] = traced
            traced.memory.input_index = place
            self._note_storage(value, traced)
            value = traced
        self.env[node] = value

    def _note_storage(self, value: torch.Tensor, traced: Traced) -> None:
        """Inputs that share memory: none of them can be written to."""
        storage = _storage_of(value)
        if storage is None:
            return
        for other, memory in self.storages.setdefault(storage, []):
            if memory is not traced.memory and overlap(value, other):
                memory.shared = traced.memory.shared = True
        self.storages[storage].append((value, traced.memory))

    def _step(self, node) -> None:
        if node.op == "get_attr":
            self._attribute(node)
            return
        if self._mode_call(node):
            return
        if has_bodies(node):
            self._border(node)
            return
        self.recorded.node_count += 1
        if node in self.transformed:
            self._leave(node, Unmapped("it is inside a torch.func transform"))
            return
        for source in node.all_input_nodes:
            if isinstance(self.env.get(source), _Unreadable):
                self._leave(node, Unmapped(self.env[source].reason))
                return
        try:
            self.env[node] = self._call(node)
        except (Unmapped, _core.Error, IndexError, builtins.TypeError) as error:
            self._leave(node, error)

    def _border(self, node) -> None:
        """A call of graphs of its own, which are compiled each alone: this graph is cut here (partition.py)."""
        if not self.probe:
            raise Unmapped(f"{describe(node.target)} calls graphs of its own")
        self.recorded.eager_nodes[node] = "its graphs are compiled each alone"
        self.env[node] = self._stand_in(node)

    def _leave(self, node, error) -> None:
        reason = str(error)
        text = describe(node.target)
        if isinstance(error, builtins.TypeError) and not isinstance(error, _core.Error):
            reason = f"these arguments are not taken ({reason})"
        self.recorded.fallbacks.append(Fallback(node.format_node() or str(node), text, reason))
        self.recorded.eager_nodes[node] = reason
        if not self.probe:
            raise Unmapped(f"{text}: {reason}") from error
        self.env[node] = self._stand_in(node)

    def _stand_in(self, node):
        """Values of the example's type for the results of a node that PyTorch runs."""
        example = node.meta.get("example_value")
        names = iter(range(1 << 30))

        def stand_in(value):
            if isinstance(value, torch.Tensor):
                return self.recording.input(f"{_short(node.name)}_{next(names)}", value)
            if isinstance(value, (tuple, list)):
                return type(value)(map(stand_in, value)) if type(value) in (tuple, list) else tuple(map(stand_in, value))
            return _concrete(value)

        try:
            return stand_in(example)
        except Unmapped as error:
            return _Unreadable(str(error))

    def _attribute(self, node) -> None:
        value = self.module
        for part in node.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            example = node.meta.get("example_value")  # its memory is told from that of other nodes' examples
            tensor, value = value, self.recording.constant(value)
            self._note_storage(example if isinstance(example, torch.Tensor) else tensor, value)
        self.env[node] = value

    # one call

    def _call(self, node):
        args = map_arg(node.args, self._lookup)
        kwargs = map_arg(node.kwargs, self._lookup)
        if node.op == "call_module":
            raise Unmapped("a call of a module that was not traced into")
        result = self._special(node, args, kwargs)
        if result is NotImplemented:
            traced = _has_traced((args, kwargs))
            if not traced and node.op == "call_function" and _is_plain(node.target):
                return _concrete(node.target(*args, **kwargs))
            result = self._apply(node.op, node.target, args, kwargs, _examples(node))
        if isinstance(result, Traced):
            result = self._memory_as_in_torch(node, result, args)
        return result

    def _apply(self, op: str, target, args, kwargs, examples, depth: int = 0):
        """The results of a call: by its adapter, or by what PyTorch says it is made of."""
        handler = find(op, target)
        refusal = Unmapped("it is not in Fulmen's table of calls")
        if handler is not None:
            try:
                return handler(self.recording, *args, **kwargs)
            except NotTakenApart:
                raise
            except (Unmapped, _core.UnsupportedError) as error:
                refusal = error
        if depth == _DEPTH or isinstance(target, torch._ops.HigherOrderOperator):
            raise refusal
        try:
            module, inputs = expand(op, target, args, kwargs, examples)
        except Unmapped as error:
            raise (refusal if handler is not None else error) from error
        env = {}
        traced = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(traced)
            elif node.op == "get_attr":
                value = getattr(module, node.target)
                env[node] = self.recording.constant(value) if isinstance(value, torch.Tensor) else value
            elif node.op == "output":
                return map_arg(node.args[0], env.__getitem__)
            else:
                inner_args, inner_kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                if isinstance(node.target, type) and issubclass(node.target, tuple):  # a named tuple of results
                    env[node] = tuple(inner_args[0]) if len(inner_args) == 1 and isinstance(inner_args[0], (tuple, list)) else inner_args
                    continue
                if _is_plain(node.target) and not _has_traced((inner_args, inner_kwargs)):
                    env[node] = node.target(*inner_args, **inner_kwargs)
                    continue
                try:
                    env[node] = self._apply(node.op, node.target, inner_args, inner_kwargs, None, depth + 1)
                except (Unmapped, _core.Error) as error:
                    if handler is not None:
                        raise refusal from error
                    if isinstance(error, _PartUnmapped):
                        raise
                    raise _PartUnmapped(f"{node.target}, which it is made of: {error}") from error

    def _lookup(self, node):
        if node not in self.env:
            raise Unmapped("it needs the result of a call that stays with PyTorch")
        value = self.env[node]
        if value is None and node in self.recorded.eager_nodes:
            raise Unmapped("it needs the result of a call that stays with PyTorch")
        return value

    def _special(self, node, args, kwargs):
        """Calls about a tensor rather than on its elements."""
        target = node.target
        if target is getattr and isinstance(args[0], Traced):
            if args[1] in _ATTRIBUTES:
                return _ATTRIBUTES[args[1]](self.recording, args[0])
            raise Unmapped(f"attribute {args[1]} of a tensor")
        if target is getattr and isinstance(args[0], tuple) and args[1] in _PAIR_FIELDS:
            return args[0][_PAIR_FIELDS[args[1]]]
        if node.op == "call_method" and target in _METHODS and isinstance(args[0], Traced):
            method = _METHODS[target]
            if method is None:
                raise Unmapped("its answer depends on where the tensor lies")
            return method(self.recording, *args, **kwargs)
        return NotImplemented

    def _memory_as_in_torch(self, node, result: Traced, args) -> Traced:
        """Whether a call gives a view or a copy can depend on strides; the example values know."""
        of_result = _storage(node)
        if of_result is None:
            return result
        for argument, source in zip(args, node.args):
            if isinstance(argument, Traced) and argument.memory is result.memory and result is not argument:
                of_argument = _storage(source)
                if of_argument is not None and of_argument != of_result:
                    return self.recording.copy(result)
            elif isinstance(argument, Traced) and result is argument:
                of_argument = _storage(source)
                if of_argument is not None and of_argument != of_result:
                    return self.recording.copy(result)
        return result

    # modes

    def _mode_call(self, node) -> bool:
        if node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            self.recording.recorder.grad_enabled = bool(node.args[0])
        elif name == "_enter_autocast":
            device, dtype, enabled = (*node.args, *(None,) * 3)[:3]
            self._autocast_stack.append(self.recording.recorder.autocast)
            if torch.device(device).type == torch.device(self.recording.device).type:
                wanted = dtype_name(dtype or torch.get_autocast_dtype(device)) if enabled else None
                self.recording.recorder.set_autocast(wanted)
        elif name == "_exit_autocast":
            self.recording.recorder.set_autocast(self._autocast_stack.pop())
        else:
            return False
        return True

    # results

    def _output(self, node) -> None:
        for source in node.all_input_nodes:
            if isinstance(self.env.get(source), _Unreadable):
                self.recorded.eager_nodes[node] = self.env[source].reason
        if self.recorded.eager_nodes:
            return
        leaves, spec = torch.utils._pytree.tree_flatten(map_arg(node.args[0], self._lookup))
        outputs: list[int] = []
        places: dict = {}

        def output_of(memory) -> int:
            if memory not in places:
                places[memory] = len(outputs)
                outputs.append(memory.value)
            return places[memory]

        recorder = self.recording.recorder
        sources = dict(self.argument_inputs)
        sources.update((traced.memory.input_index, traced) for traced in self.recording.constant_inputs.values())
        for place, traced in sources.items():
            if traced.memory.version:
                self.recorded.mutations.append((place, output_of(traced.memory)))
        for value in leaves:
            if not isinstance(value, Traced):
                self.recorded.results.append(Result("value", value=value))
            elif value.memory.input_index is not None:
                self.recorded.results.append(Result("input", value.memory.input_index, value.steps))
            else:
                self.recorded.results.append(Result("output", output_of(value.memory), value.steps))
        recorder.output(outputs)
        self.recorded.needs_grad = any(recorder.type(value)[3] for value in outputs)
        self.recorded.result_spec = spec


class _PartUnmapped(Unmapped):
    """The reason names the innermost call already."""


def _examples(node) -> tuple:
    """(args, kwargs) of a node with example values for its tensors."""
    return map_arg((tuple(node.args), dict(node.kwargs)), lambda n: n.meta.get("example_value"))


def _is_plain(target) -> bool:
    """A function that works on Python's own numbers: operators, math, torch.sym_*."""
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    return module in ("_operator", "operator", "math", "builtins") or name.startswith("sym_") or target in (getattr, operator.getitem)


def _has_traced(value) -> bool:
    if isinstance(value, Traced):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_traced, value))
    if isinstance(value, dict):
        return any(map(_has_traced, value.values()))
    if isinstance(value, slice):
        return _has_traced((value.start, value.stop, value.step))
    return False


def _short(name: str) -> str:
    """Dynamo's long argument names, shortened: L_self_modules_h_0_modules_ln_parameters_weight_ -> h_0_ln_weight."""
    name = name.removeprefix("L_").removeprefix("l_").rstrip("_")
    for word in ("_modules_", "_parameters_", "_buffers_"):
        name = name.replace(word, "_")
    return name.removeprefix("self_").removeprefix("kwargs_").removeprefix("args_") or "value"


def record(module: torch.fx.GraphModule, example_inputs, modes: Modes | None = None, name: str = "program") -> RecordedGraph:
    """Records a graph for these arguments. If some calls stay with PyTorch, the result lists them and has no trace."""
    if modes is None:
        device = next((str(x.device) for x in example_inputs if isinstance(x, torch.Tensor)), "cpu")
        modes = Modes.ambient(device)
    return GraphRecorder(module, example_inputs, modes, name, probe=True).run()
