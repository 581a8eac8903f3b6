"""The torch.compile backend: torch.compile(model, backend="fulmen").

Dynamo hands over a graph of PyTorch calls; it is recorded (record.py), cut where calls are not known (partition.py) and
compiled (specialise.py), and what comes back runs it with autograd (bridge.py). On CUDA only attention is Fulmen's.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from dataclasses import dataclass, field

import torch

from .._core import UnsupportedError
from .._executors import resolve
from .bodies import runs_in_transform
from .bridge import Runner
from .partition import partition
from .record import Fallback, Modes, RecordedGraph, record
from .specialise import Options, Part

_SDPA_NAMES = ("scaled_dot_product_attention",)


@dataclass
class Report:
    """What became of one graph; explain and last_traces read it. Programs join as they are compiled."""

    name: str
    recorded: RecordedGraph
    programs: list = field(default_factory=list)  # MadeProgram
    graph: object = None  # weak reference to Dynamo's graph

    @property
    def fallbacks(self) -> list[Fallback]:
        return self.recorded.fallbacks


_listeners: list = []
_last: Report | None = None


@contextlib.contextmanager
def listen():
    """Gives a list to which the report of every graph compiled meanwhile is appended; their stage texts are kept."""
    reports: list[Report] = []
    _listeners.append(reports)
    try:
        yield reports
    finally:
        _listeners[:] = [other for other in _listeners if other is not reports]


def last_report() -> Report | None:
    return _last


def _announce(report: Report) -> None:
    global _last
    _last = report
    # torch.compile(..., backend="fulmen") has an object of its own for each compiled function, through which Dynamo
    # calls a backend; last_traces finds the reports there.
    frame = sys._getframe(1)
    for _ in range(4):
        frame = frame and frame.f_back
        caller = frame and frame.f_locals.get("self")
        if type(caller).__name__ == "_TorchCompileWrapper":
            caller.fulmen_reports = [*getattr(caller, "fulmen_reports", []), report][-8:]
            break
    for reports in _listeners:
        reports.append(report)


def _on_cuda(example_inputs) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)


def _cuda_graph(module: torch.fx.GraphModule, report: Report):
    """On a GPU attention alone is Fulmen's: its calls become fulmen.sdpa, the rest stays as it is."""
    import fulmen

    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        report.recorded.node_count += 1
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _SDPA_NAMES:
            node.target = fulmen.sdpa
        elif node.target is torch.ops.fulmen.attention.default:
            pass  # it asks the executors itself
        else:
            text = node.format_node() or str(node)
            reason = "on a CUDA device Fulmen runs attention only"
            report.recorded.fallbacks.append(Fallback(text, str(node.target), reason))
            report.recorded.eager_nodes[node] = reason
    module.recompile()
    return module.forward


def fulmen_backend(module: torch.fx.GraphModule, example_inputs, *, mode=None, options=None, **kwargs):
    """Compiles one of Dynamo's graphs. `options`: executors, deterministic, skip_passes, keep_texts, specialisations."""
    if not isinstance(options, Options):
        options = Options(**(options or {}))
        options.executors = resolve(options.executors)
    if _listeners:
        options.keep_texts = True
    report = Report("graph", RecordedGraph())
    report.graph = weakref.ref(module)
    _announce(report)
    if _on_cuda(example_inputs):
        return _cuda_graph(module, report)
    if runs_in_transform(example_inputs):
        return _left_whole(module, report, "it is inside a torch.func transform")
    if any(isinstance(x, torch.Tensor) and x.is_neg() for x in example_inputs):  # Dynamo guards it: another tensor, another graph
        return _left_whole(module, report, "an argument is a lazy negation (torch._neg_view); resolve_neg() makes it a plain tensor")
    compiler = _Compiler(report, options)
    recorded = report.recorded = record(module, example_inputs, Modes.ambient())
    if not recorded.node_count and not recorded.eager_nodes:
        return module.forward
    if not recorded.eager_nodes:
        whole = compiler.part(module, Modes.ambient(), "program")
        try:
            whole.adopt(example_inputs, recorded)
        except UnsupportedError as error:
            if options.executors is not None:
                return _Refused(error)
            whole.leave(error)
        # With fixed sizes there is one program, and nothing to choose; one that writes to its arguments looks at them first.
        return whole if whole.only is None or isinstance(whole.only, Runner) else whole.only
    mixed = compiler.mixed(module, recorded, Modes.ambient())
    _tell(recorded)
    return mixed.forward


class _Refused:
    """Stands for a graph that the executors asked for refuse. Dynamo would wrap an error of a backend in one of its own,
    so the error waits for the call, which nothing runs before."""

    def __init__(self, error: UnsupportedError):
        self.error = error

    def __call__(self, *_):
        raise self.error.with_traceback(None)


def _left_whole(module: torch.fx.GraphModule, report: Report, reason: str):
    """The graph as PyTorch's own, every call listed."""
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            report.recorded.node_count += 1
            report.recorded.fallbacks.append(Fallback(node.format_node() or str(node), str(node.target), reason))
            report.recorded.eager_nodes[node] = reason
    return module.forward


class _Compiler:
    """Makes the parts of one graph, and of the graphs that its calls carry; all of them join one report."""

    def __init__(self, report: Report, options: Options):
        self.report = report
        self.options = options

    def part(self, graph: torch.fx.GraphModule, modes: Modes, name: str) -> Part:
        def on_left(part, reason):
            self.report.recorded.fallbacks.append(Fallback(part.name, part.name, reason))

        return Part(graph, modes, self.options, name, self.report.programs.append, on_left)

    def mixed(self, module: torch.fx.GraphModule, recorded: RecordedGraph, modes: Modes) -> torch.fx.GraphModule:
        return partition(module, recorded, modes, lambda *part: _PartModule(self.part(*part)), self.body)

    def body(self, module: torch.fx.GraphModule, modes: Modes, name: str) -> torch.fx.GraphModule:
        """A graph that a call carries (bodies.py): as one part, or cut like the outer one."""
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        examples = [node.meta.get("example_value") for node in placeholders]
        whole = self.report.recorded
        if all(example is not None for example in examples):
            recorded = record(module, examples, modes, name)
            whole.node_count += recorded.node_count
            if recorded.eager_nodes:
                mixed = self.mixed(module, recorded, modes)
                whole.fallbacks += recorded.fallbacks
                return mixed
        else:  # recorded with the tensors of its first call
            whole.node_count += sum(1 for node in module.graph.nodes if node.op.startswith("call_"))
        graph = torch.fx.Graph()
        graph.output(graph.call_module("part", tuple(graph.placeholder(node.name) for node in placeholders)))
        return torch.fx.GraphModule({"part": _PartModule(self.part(module, modes, name))}, graph)


class _PartModule(torch.nn.Module):
    """A part as a module, which FX graphs can call."""

    def __init__(self, part: Part):
        super().__init__()
        self.__dict__["part"] = part

    def forward(self, *arguments):
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in arguments):  # what PyTorch's part of the graph may give
            return self.part.module(*arguments)
        results = self.part(*arguments)
        return tuple(results) if isinstance(results, list) else results


def _tell(recorded: RecordedGraph) -> None:
    if not recorded.fallbacks:
        return
    calls: dict = {}
    for fallback in recorded.fallbacks:
        calls.setdefault((fallback.call, fallback.reason), 0)
        calls[fallback.call, fallback.reason] += 1
    listed = "; ".join(f"{call} ({reason})" + (f" x{count}" if count > 1 else "") for (call, reason), count in list(calls.items())[:8])
    more = f" and {len(calls) - 8} more" if len(calls) > 8 else ""
    warnings.warn(f"fulmen: {len(recorded.fallbacks)} of {recorded.node_count} calls stay with PyTorch: {listed}{more}", stacklevel=2)
